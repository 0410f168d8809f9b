"""Maps: the winner of every place is the one with the best value there; to lead by little is not to win."""

import math

import pandas as pd
import pytest

import kvtwin
from sim.study.regimes import NO_POLICY, cells, draw, lines, read_map

FIXED = {"workload": "fixed", "num-prompts": 30, "output-len": 20, "request-rate": 2, "gpu": "l20"}
STUDY = FIXED | {"policy": ["vllm-v1", "vllm-recompute"]}
GRID = {"input-len": [100, 800], "max-num-seqs": [1, 16]}


def regimes(metric="mean_ttft_ms", grid=None):
    return read_map(STUDY | {"map": {"metric": metric, "grid": grid or GRID}}, "m")


def means_of(rows, metric):
    columns = ["policy", "input_len", "max_num_seqs", metric]
    return pd.DataFrame([dict(zip(columns, row, strict=True)) for row in rows])


def test_the_best_wins_by_its_lead_over_the_second():
    found = cells(
        regimes(),
        means_of(
            [("a", 1, 1, 10.0), ("b", 1, 1, 30.0), ("c", 1, 1, 20.0), ("a", 1, 2, 10.05), ("b", 1, 2, 10.0),
             ("a", 2, 1, math.nan), ("b", 2, 1, math.nan), ("a", 2, 2, math.nan), ("b", 2, 2, 5.0)],
            "mean_ttft_ms",
        ),
    )  # fmt: skip
    assert (found[1, 1].winner, found[1, 1].ratio) == ("a", 2.0)
    assert found[1, 2].winner == NO_POLICY and found[2, 1].winner == NO_POLICY
    assert (found[2, 2].winner, found[2, 2].ratio) == ("b", math.inf)


def test_of_goodput_more_is_better_and_nothing_beats_nothing():
    asked = read_map(STUDY | {"goodput": ["ttft:9"], "map": {"grid": GRID}}, "m")
    rows = [("a", 1, 1, 2.0), ("b", 1, 1, 4.0), ("a", 1, 2, 0.0), ("b", 1, 2, 0.0), ("a", 2, 1, 0.0), ("b", 2, 1, 1.0)]
    found = cells(asked, means_of(rows, "request_goodput"))
    assert (found[1, 1].winner, found[1, 1].ratio) == ("b", 2.0)
    assert found[1, 2].winner == NO_POLICY
    assert (found[2, 1].winner, found[2, 1].ratio) == ("b", math.inf)
    assert draw(asked, found).axes


def test_a_winner_is_told_with_its_largest_lead():
    """a leads twice, once by 3; b leads once, where a has no run; one place is even."""
    rows = [
        ("a", 100, 1, 10.0), ("b", 100, 1, 30.0), ("a", 100, 16, 10.0), ("b", 100, 16, 12.0),
        ("a", 800, 1, math.nan), ("b", 800, 1, 10.0), ("a", 800, 16, 10.0), ("b", 800, 16, 10.0),
    ]  # fmt: skip
    assert list(lines(regimes(), cells(regimes(), means_of(rows, "mean_ttft_ms")))) == [
        "Mean TTFT (ms) over 4 places:",
        "  a: 2, at most 3 times the second (input len 100, max num seqs 1)",
        "  b: 1, where no other has any (input len 800, max num seqs 1)",
        "  no policy ahead by more than 1%: 1",
    ]


def test_a_map_is_that_of_its_sweep(tmp_path, capsys):
    found = kvtwin.regime_map(STUDY | {"map": {"metric": "mean_ttft_ms", "grid": GRID}}, tmp_path / "a", jobs=1)
    table = found.sweep.table
    for (x, y), cell in cells(found.regimes, found.sweep.means).items():
        here = table[(table["input_len"] == x) & (table["max_num_seqs"] == y)].set_index("policy")["mean_ttft_ms"]
        assert cell.values == here.to_dict()
        if cell.winner:
            assert cell.winner == here.idxmin() and cell.ratio == pytest.approx(here.max() / here.min())
    path = tmp_path / "m.toml"
    path.write_text(
        'workload = "fixed"\nnum-prompts = 30\noutput-len = 20\nrequest-rate = 2\ngpu = "l20"\n'
        'policy = ["vllm-v1", "vllm-recompute"]\n[map]\nmetric = "mean_ttft_ms"\n[map.grid]\n'
        "input-len = [100, 800]\nmax-num-seqs = [1, 16]\nseed = [0, 1]\n"
    )
    assert kvtwin.main(["map", str(path), "--out", str(tmp_path / "b"), "--jobs", "1"]) == 0
    assert "Mean TTFT (ms) over 8 places" in capsys.readouterr().out
    assert len(pd.read_csv(tmp_path / "b" / "map.csv")) == 8
    assert (tmp_path / "b" / "map.png").stat().st_size > 5000
    assert found.text.startswith("Mean TTFT (ms) over 4 places") and found.figure().axes
    assert repr(found) == "<MapResult: Mean TTFT (ms) over 4 places:>" and found.text in found._repr_html_()


@pytest.mark.parametrize(
    ("study", "words"),
    [
        (STUDY | {"map": {}}, "goodput needs SLOs"),
        (STUDY | {"map": {"metric": "speed"}}, "map.metric = 'speed' is not one of completed"),
        (STUDY | {"map": {"metric": "mean_ttft_ms", "grid": {"tp": [1, 2]}}}, "two axes in [map.grid]"),
        (FIXED | {"map": {"metric": "mean_ttft_ms", "grid": GRID}}, "two or more policies"),
        (STUDY | {"sweep": {"grid": GRID}}, "in [map.grid] in place of [sweep.grid]"),
        (STUDY | {"map": {"metric": "mean_ttft_ms", "grids": GRID}}, "unknown key map.grids"),
    ],
)
def test_a_wrong_map_is_told_in_one_line(study, words):
    with pytest.raises(kvtwin.UserError) as caught:
        read_map(study, "m.toml")
    assert words in str(caught.value) and "\n" not in str(caught.value)
