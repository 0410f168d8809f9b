"""`kvtwin reproduce`: setups that ship can be run, claims are worked out by hand, the page keeps what others wrote."""

import re

import msgspec
import pytest

import kvtwin
from sim.errors import UserError
from sim.study.points import setup_of
from sim.study.reproduce import NOT, PARTLY, REPRODUCED, Found, _verdict, digits, rows_of, run_setups, table
from sim.study.setup_files import SETUPS as SETUPS_FOLDER
from sim.study.setup_files import Claim, PaperSetup, chosen, read_setups, value_of
from sim.study.sweep import Means

SETUPS = read_setups()


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: f"{setup.name}-{setup.figure}")
def test_every_setup_resolves_and_its_claims_name_what_it_runs(setup: PaperSetup):
    points = setup.points()
    assert len({(case, x, label) for case, x, label, _ in points}) == len(points)
    for case, _, _, options in (points[0], points[-1]):
        assert setup_of(options).label
        assert case in (setup.cases or {""})
    for claim in setup.claims:
        assert claim.of in setup.policies
        assert claim.over is None or claim.over in setup.policies
        assert claim.case is None or claim.case in setup.cases
        assert claim.at is None or claim.at in setup.values


def test_options_that_no_run_has_are_refused(tmp_path):
    text = (SETUPS_FOLDER / "kvpr-1.toml").read_text()
    (tmp_path / "one.toml").write_text(text.replace("[scenario]", "[scenario]\nrate_ratio = 0.3"))
    with pytest.raises(UserError, match="unknown key 'rate_ratio'"):
        read_setups(tmp_path)


def test_papers_and_figures_are_found_by_name():
    assert {setup.name for setup in SETUPS} == {"layerkv", "ellm", "hcache", "kvpr", "sarathi"}
    assert [setup.figure for setup in chosen(SETUPS, "layerkv", "7")] == ["6-7"]
    with pytest.raises(UserError, match="known: ellm, hcache, kvpr, layerkv, sarathi"):
        chosen(SETUPS, "elm", None)
    known = [", ".join(s.figure for s in SETUPS if s.name in names) for names in (("ellm",), {s.name for s in SETUPS})]
    for paper, figures in zip(("ellm", None), known, strict=True):
        with pytest.raises(UserError, match=f"no setup of figure 99; known: {re.escape(figures)}$"):
            chosen(SETUPS, paper, "99")


def test_options_have_no_x_where_there_is_none():
    """Nor where it has no values."""
    plain = {"model": "qwen3-8b", "policy": "ellm"}
    for x, values in (("tp", []), (None, [2.0])):
        setup = PaperSetup("Paper", "1", "", [], {"a": "ellm"}, {"model": "qwen3-8b"}, [], x, values)
        assert setup.points() == [("", values[0] if values else None, "a", plain)]
    setup = PaperSetup("Paper", "1", "", [], {"a": "ellm"}, {"model": "qwen3-8b"}, [], "tp", [2])
    assert setup.points() == [("", 2, "a", {**plain, "tp": 2})]


def found(claim: Claim, values: dict[tuple[str, float], float], metric: str = "mean_ttft_ms") -> Found:
    """Results of two policies at some points."""
    setup = PaperSetup("Paper", "1", "", [metric], {"a": "vllm-swap", "b": "ellm"}, {}, [claim], "tp", [1, 2])
    results = {
        ("", x, label): {metric: value, "median_queue_ms": 0.0, "counters": {}} for (label, x), value in values.items()
    }
    return Found(setup, results, {})


TWO = {("a", 1): 300.0, ("b", 1): 100.0, ("a", 2): 50.0, ("b", 2): 100.0}


@pytest.mark.parametrize(
    ("more", "ours", "verdict"),
    [
        ({"paper": 2.5}, 3.0, REPRODUCED),
        ({"paper": 30.0}, 3.0, PARTLY),
        ({"paper": 2.5, "at": 2}, 0.5, NOT),
        ({"paper": 1.4, "of": "b", "over": "a", "pick": "min"}, 1 / 3, NOT),
        ({"paper": 1.0, "kind": "least", "pick": "min"}, 0.5, NOT),
        ({"paper": 4.0, "kind": "most"}, 3.0, REPRODUCED),
        ({"paper": 2.9, "kind": "most"}, 3.0, NOT),
        ({"paper": 150.0, "kind": "difference"}, 200.0, REPRODUCED),
        ({"paper": 0.4, "kind": "difference", "pick": "min", "at": 1, "of": "b", "over": "b"}, 0.0, NOT),
        ({"paper": 2.0, "kind": "capacity", "limit": 60.0}, None, "no result"),
        ({"paper": 2.0, "kind": "capacity", "limit": 100.0}, None, "no result"),
    ],
)
def test_claims_by_hand(more, ours, verdict):
    claim = msgspec.convert({"says": "s", "metric": "mean_ttft_ms", "of": "a", "over": "b", **more}, Claim)
    if more.get("kind") == "capacity" and more["limit"] == 100.0:
        ours, verdict = 1.0, NOT
    (row,) = rows_of((one := found(claim, TWO)).setup, one.results)
    assert row.ours == (pytest.approx(ours) if ours is not None else None)
    assert row.verdict == verdict


@pytest.mark.parametrize(
    ("more", "ours", "verdict"),
    [
        ({"paper": 3.0}, 4.5, REPRODUCED),
        ({"paper": 3.0}, 4.51, PARTLY),
        ({"paper": 1.25}, 1.0, NOT),
        ({"paper": 1.0}, 1.25, NOT),
        ({"paper": 1.05}, 1.0625, REPRODUCED),
        ({"paper": 1.05}, 1.04, NOT),
        ({"paper": 0.75}, 0.9375, REPRODUCED),
        ({"paper": 0.75}, 0.97, NOT),
        ({"paper": 0.75, "over": None}, -0.5, NOT),
        ({"paper": 100.0, "kind": "difference"}, 5.0, PARTLY),
        ({"paper": 100.0, "kind": "difference"}, 4.9, NOT),
        ({"paper": -100.0, "kind": "difference"}, -4.9, NOT),
        ({"paper": -100.0, "kind": "difference"}, 100.0, NOT),
        ({"paper": 1.25, "kind": "difference"}, 1.0, REPRODUCED),
    ],
)
def test_verdicts_at_their_edges(more, ours, verdict):
    """Half as much again either way is reproduced; less than 5 % of the whole is no difference, nor is its reverse."""
    claim = msgspec.convert({"says": "s", "metric": "m", "of": "a", "over": "b", **more}, Claim)
    assert _verdict(claim, ours) == verdict


def test_a_capacity_is_the_most_within_its_limit_that_hardly_queues():
    """TTFT of at most 100 ms, and queueing of at most 2 s."""
    claim = Claim("more", 2.0, "mean_ttft_ms", "a", "b", kind="capacity", limit=100.0)
    one = found(claim, dict.fromkeys([(label, x) for label in "ab" for x in (1, 2, 4, 8)], 100.0))
    one.results["", 4, "b"]["mean_ttft_ms"] = 100.5
    one.results["", 8, "b"]["mean_ttft_ms"] = 200.0
    one.results["", 4, "a"]["median_queue_ms"] = 2000.0
    one.results["", 8, "a"]["median_queue_ms"] = 2000.5
    assert [row.ours for row in rows_of(one.setup, one.results)] == [4.0 / 2.0]


def test_of_nothing_there_is_no_share_but_a_difference():
    """Nor of what was not run."""
    ratio, difference, reduced = (
        msgspec.convert({"says": "s", "paper": 2.0, "metric": "m", "of": "a", "over": "b", **more}, Claim)
        for more in ({}, {"kind": "difference"}, {"reduce": "difference", "kind": "least"})
    )
    alone = Claim("s", 0.0, "m", "a")
    for values, wanted in (
        ({("a", 1): 3.0, ("b", 1): 0.0}, [None, 3.0, 3.0, 3.0]),
        ({("a", 1): 3.0, ("b", 1): 2.0}, [1.5, 1.0, 1.0, 3.0]),
        ({("a", 1): 3.0}, [None, None, None, 3.0]),
        ({("b", 1): 3.0}, [None] * 4),
    ):
        one = found(ratio, values, "m")
        setup = msgspec.structs.replace(one.setup, claims=[ratio, difference, reduced, alone])
        assert [row.ours for row in rows_of(setup, one.results)] == wanted


def test_three_digits_and_no_exponent():
    values = {0.0: "0", 0.001: "0.001", 0.12345: "0.123", -2.5: "-2.5", 999.4: "999", 999.7: "1,000", 1234.5: "1,234"}
    assert {value: digits(value) for value in values} == values


def test_numbers_made_of_several():
    result = {
        "mean_queue_ms": 30.0, "mean_ttft_ms": 40.0, "goodput_attainment": 0.9, "scenario": {"block_size": 16},
        "counters": {"held_block_layers": 10, "filled_token_layers": 120, "rebuilt_tokens": 5, "context_tokens": 20},
    }  # fmt: skip
    assert value_of(result, "queueing") == 0.75
    assert value_of(result, "violations") == pytest.approx(10.0)
    assert value_of(result, "fragmentation") == 0.25
    assert value_of(result, "uncached") == 0.25


def test_numbers_of_what_a_run_has_not_are_nothing():
    """Without context every rebuilt token counts whole."""
    none = {"counters": {}, "scenario": {"block_size": 16}, "p99_tpot_ms": None, "goodput_attainment": 0.25}
    values = {"uncached": 0.0, "fragmentation": 0.0, "p99_tpot_ms": 0.0, "attainment": 0.25, "violations": 75.0}
    assert {metric: value_of(none, metric) for metric in values} == values
    assert value_of({"counters": {"rebuilt_tokens": 3}}, "uncached") == 3.0
    assert value_of({"counters": {"rebuilt_tokens": 3, "context_tokens": 1}}, "uncached") == 3.0


def test_the_engines_of_the_time_and_todays_have_a_verdict_each():
    claim = Claim("less", 2.5, "mean_ttft_ms", "a", "b")
    one = found(claim, TWO)
    # On today's engine "b" has half of the time: "a" takes six times as long.
    faster = {**one.results["", 1, "b"], "mean_ttft_ms": 50.0}
    one = msgspec.structs.replace(one, todays={**one.results, ("", 1, "b"): faster})
    assert "| 1 | less | 2.5 | 3 | reproduced | 6 | partly |" in table([one])


def test_a_figure_is_run_printed_drawn_and_kept(tmp_path, capsys):
    arguments = ["reproduce", "kvpr", "--out", str(tmp_path), "--jobs", "1"]
    assert kvtwin.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "| throughput | decode throughput, most | 1.46 |" in printed
    assert (tmp_path / "figures" / "kvpr-throughput.png").stat().st_size > 5_000
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "points").iterdir()}
    assert kvtwin.main(arguments) == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "points").iterdir()} == kept
    assert capsys.readouterr().out == printed


def test_a_point_that_is_refused_is_told_and_the_others_are_run(tmp_path):
    plain = {"gpu": "l20", "workload": "fixed", "num_prompts": 3, "input_len": 40, "output_len": 4, "request_rate": 1.0}
    setup = PaperSetup("Paper", "1", "", [], {"a": "vllm-v1"}, plain, [], "tp", [1, 3])
    (one,) = run_setups([setup], tmp_path, Means(jobs=1))
    assert [*one.results] == [("", 1, "a")] and one.results["", 1, "a"]["completed"] == 3
    assert [*one.todays] == [("", 1, "a")]
    assert [*one.errors] == [("", 3, "a")] and "3" in one.errors["", 3, "a"]


def test_a_setup_that_is_none_is_one_line(tmp_path):
    (tmp_path / "one.toml").write_text('paper = "x"')
    with pytest.raises(UserError, match=r"one\.toml: Object missing required field `figure`; see the setups that ship"):
        read_setups(tmp_path)
