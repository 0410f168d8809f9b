"""`tune`: searches end where a threshold was planted, what was planted binds; runs sure to miss the SLOs end early."""

import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

import kvtwin
from sim.study import knobs as drawing
from sim.study.draws import like_traffic
from sim.study.intervals import geometric_mean
from sim.study.limits import BINDS, binding
from sim.study.plan import bracket
from sim.study.points import Most, Outcome
from sim.study.search import PRECISION, Ran, Reached, Slo, most_load, runs
from sim.study.sweep import Means, Store
from sim.study.tune import Candidate, Tuned, offered_per_s, ranked, read_tune, tune
from sim.study.tune_report import _by_default, on_front

SLOS = (Slo("p99_ttft_ms", 100.0),)


def driven(search, ttft_ms, gpus=lambda options: 1, result=lambda options: {}):
    """The answer of a search whose runs have the TTFT that a function of their options gives, and how many it made."""
    count, ran = 0, None
    while True:
        try:
            options = next(search) if ran is None else search.send(ran)
        except StopIteration as end:
            return end.value, count
        count += 1
        measured = {"p99_ttft_ms": ttft_ms(options), "completed": 10, "num_prompts": 10}
        ran = Ran(options, gpus(options), Outcome("k", measured | {"completed": 40} | result(options)))


@given(st.floats(0.01, 1000.0), st.floats(0.1, 10.0))
def test_the_most_load_is_found_to_the_precision(threshold, usual):
    def ttft_ms(options):
        return 50.0 if options["rate_scale"] <= threshold * usual else 150.0

    reached, count = driven(most_load({"rate_scale": usual}, SLOS), ttft_ms)
    assert threshold / (1 + PRECISION) * 0.999999 <= reached.most <= threshold * 1.000001
    assert reached.least_failing >= threshold * 0.999999
    assert count <= 18


@given(st.floats(0.01, 100.0), st.floats(0.05, 20.0))
def test_from_near_the_most_load_is_found_in_two_runs_and_from_afar_to_the_precision_as_well(threshold, off):
    """What a raised limit does not change is told by one run that meets the SLOs and one that does not."""

    def ttft_ms(options):
        return 50.0 if options["rate_scale"] <= threshold * 1.001 else 150.0

    near = driven(most_load({}, SLOS, start=threshold, step=1 + PRECISION, is_near=True), ttft_ms)
    assert near == (near[0], 2) and near[0].most == threshold
    reached, count = driven(most_load({}, SLOS, start=threshold * off, step=1 + PRECISION, is_near=True), ttft_ms)
    assert threshold / (1 + PRECISION) <= reached.most <= threshold * 1.001 and count <= 16


@given(st.floats(0.5, 5.0), st.floats(0.9, 1.1), st.floats(0.0, 400.0))
def test_what_changes_nothing_gains_nothing_though_p99_goes_up_and_down_with_load(threshold, off, waves):
    """Beyond the load that failed another passed: searched by steps of its own, all that bought nothing brought 2 %."""

    def ttft_ms(options):
        load = options["rate_scale"]
        return 100.0 * load / threshold + 5.0 * math.sin(waves * load)

    first, _ = driven(most_load({}, SLOS, start=threshold * off, step=1.06, is_near=True), ttft_ms)
    start, step = bracket(first, threshold, 1.0)
    assert driven(most_load({}, SLOS, start=start, step=step, is_near=True), ttft_ms)[0].most == first.most


def test_a_bound_that_is_just_reached_is_kept():
    for slo, missed in ((Slo("p99_ttft_ms", 100.0), 100.001), (Slo("goodput_attainment", 0.9), 0.8999)):
        assert [slo.met({slo.metric: value}) for value in (slo.bound, missed, None)] == [True, False, False]


@pytest.mark.parametrize(("precision", "most", "runs"), [(1.0, 1.0, 2), (0.99, 2.0**0.5, 3), (0.25, 2.0**0.5, 4)])
def test_a_search_ends_once_its_ends_are_as_near_as_asked(precision, most, runs):
    """1.5 is sustained, 2 is not: 2 over 1 is within 100 %, over the square root of 2 within 99 %."""
    search = most_load({}, SLOS, precision)
    reached, count = driven(search, lambda options: 50.0 if options["rate_scale"] <= 1.5 else 150.0)
    assert (reached.most, count) == (most, runs)


def test_a_load_that_is_never_sustained_and_one_that_always_is():
    reached, _ = driven(most_load({}, SLOS), lambda options: 150.0)
    assert reached.most == 0.0 and reached.ran is None and reached.failing is not None
    reached, _ = driven(most_load({}, SLOS), lambda options: 50.0)
    assert reached.most == 4096.0 and reached.least_failing is None
    assert reached.unknown == "no load up to 4,096 times the traffic fails"


def test_a_load_whose_arrivals_end_before_a_queue_shows_is_not_sustained():
    """40 requests of 2 s within 8 s: beyond 0.8 times the traffic they arrive within 5 stays, which proves nothing."""

    def result(options):
        return {"arrival_span_s": 8.0 / options["rate_scale"], "mean_e2el_ms": 2000.0, "num_prompts": 40}

    reached, _ = driven(most_load({}, SLOS), lambda options: 50.0, result=result)
    assert 0.8 / (1 + PRECISION) <= reached.most <= 0.8 and reached.least_failing is None
    assert reached.unknown.startswith("at more load 40 requests arrive within 9.93 s, where each stays 2 s: too few")
    at_once, count = driven(
        most_load({}, SLOS), lambda options: 50.0, result=lambda o: result(o) | {"arrival_span_s": 0.0}
    )
    assert (at_once.ran, count) == (None, 1) and "arrive at once" in at_once.unknown


def test_what_is_refused_as_it_is_is_not_tried_with_less_or_more():
    search = most_load({}, SLOS)
    refused = Ran(next(search), 7, Outcome("k", None, "no such GPU"))
    with pytest.raises(StopIteration) as end:
        search.send(refused)
    assert end.value.value == Reached(0.0, None, 1.0, refused)


@pytest.mark.parametrize("ttft_ms", [50.0, 150.0])
def test_what_is_refused_at_some_load_does_not_meet_slos(ttft_ms):
    """The search goes on between it and what was sustained, or below it."""
    search = most_load({}, SLOS)
    first = Ran(next(search), 1, Outcome("k", {"p99_ttft_ms": ttft_ms, "completed": 10, "num_prompts": 10}))
    second = search.send(first)
    factor = second["rate_scale"]
    assert factor == (2.0 if ttft_ms == 50.0 else 0.5)
    third = search.send(Ran(second, 1, Outcome("k", None, "too many requests")))
    assert third["rate_scale"] == pytest.approx(2.0**0.5 if ttft_ms == 50.0 else 0.25)


def test_what_is_given_up_does_not_meet_slos():
    search = most_load({}, SLOS)
    options = next(search)
    lost = Ran(options, 1, Outcome("k", {"p99_ttft_ms": 1.0, "completed": 98, "num_prompts": 100}))
    assert search.send(lost)["rate_scale"] < options["rate_scale"]


def test_the_front_is_what_nothing_beats():
    values = np.array([[1.0, 3.0], [2.0, 2.0], [2.0, 3.0], [3.0, 1.0], [1.0, 3.0], [np.nan, 0.0]])
    assert on_front(values).tolist() == [True, True, False, True, True, False]


@pytest.mark.parametrize(
    ("gains", "limit"),
    [
        ({"seats": 0.4, "KV memory": 0.1, "compute": 0.5}, "seats"),
        ({"KV memory": 0.07, "seats": 0.0, "compute": 0.51}, "compute"),
        ({"seats": BINDS / 2, "compute": 0.0}, "compute"),
        ({"compute": 0.0}, "compute"),
    ],
)
def test_compute_binds_where_nothing_else_does(gains, limit):
    assert binding(gains) == limit


# -- planted cases ---------------------------------------------------------------------------------------------------

FIXED = {"workload": "fixed", "num-prompts": 40, "request-rate": 4, "gpu": "l20", "input-len": 200, "output-len": 60}
LONG = FIXED | {"input-len": 1000, "output-len": 2, "max-num-seqs": 16}
FROM_HOST = FIXED | {"num-prompts": 24, "input-len": 400, "policy": "kvpr"}
POOLS = FIXED | {"num-prompts": 24, "policy": "distserve", "prefill-replicas": 1, "decode-replicas": 1}
TTFT = ["p99_ttft_ms:2000"]
PLANTED = {
    "seats": (FIXED, TTFT, {"max-num-seqs": [1, 2]}, {"max_num_seqs": 2}),
    "KV memory": (FIXED, TTFT, {"num-gpu-blocks-override": [40, 70]}, {"num_gpu_blocks_override": 70}),
    "token budget": (LONG, TTFT, {"max-num-batched-tokens": [32, 64]}, {"max_num_batched_tokens": 64}),
    "compute": (FIXED | {"input-len": 3000, "output-len": 2}, TTFT, {"gpu": ["t4", "l20"]}, {"gpu": "l20"}),
    "PCIe": (FROM_HOST, ["p99_tpot_ms:300"], {"profile-pcie-bytes-per-s": [3e9, 6e9]},
             {"profile_pcie_bytes_per_s": 6e9}),
    "link": (POOLS, ["p99_e2el_ms:6000"], {"link-gbps": [0.25, 0.5]}, {"link_gbps": 0.5}),
}  # fmt: skip
"""A deployment that lacks one thing, knobs of which one gives more of it, and the knobs' best values."""


@pytest.mark.parametrize("limit", PLANTED)
def test_the_planted_limit_binds_and_its_knob_is_turned(limit, tmp_path):
    scenario, slo, knobs, best = PLANTED[limit]
    if "gpu" in knobs:
        scenario = {key: value for key, value in scenario.items() if key != "gpu"}
    found = kvtwin.tune(scenario | {"tune": {"slo": slo, "grid": knobs}}, tmp_path, jobs=1).tuned
    assert found.best is not None and found.best.point.items() >= best.items()
    assert found.binds == limit
    assert found.low < found.best.value < found.high


def test_the_load_found_is_the_one_that_a_scan_finds(tmp_path):
    scenario = FIXED | {"max-num-seqs": 2}
    answer = kvtwin.tune(scenario | {"tune": {"slo": TTFT, "repeats": 1}}, tmp_path / "t", jobs=1)
    found = answer.tuned
    factors = [round(0.3 + 0.01 * i, 2) for i in range(15)]
    scan = kvtwin.sweep(scenario | {"sweep": {"grid": {"rate-scale": factors}}}, tmp_path / "s", jobs=1).table
    most = scan.loc[scan["p99_ttft_ms"] <= 2000, "rate_scale"].max()
    assert found.best.reached[0].most == pytest.approx(most, rel=0.04)
    assert f"; with {found.best.reached[0].least_failing:.3g} times the traffic p99_ttft_ms " in answer.text


def test_the_most_goodput_at_the_load_as_it_is(tmp_path):
    study = FIXED | {"goodput": ["ttft:500"], "request-rate": 2}
    study |= {"tune": {"goal": "goodput", "repeats": 2, "grid": {"max-num-seqs": [1, 4]}}}
    found = kvtwin.tune(study, tmp_path, jobs=1)
    assert found.tuned.best.point == {"max_num_seqs": 4}
    assert found.table["value"].is_monotonic_decreasing
    assert "within the SLOs" in found.text and "of like traffic with 95 %, by 2 draws" in found.text
    left, middle, right = found.figure().axes
    assert [text.get_text() for text in left.get_yticklabels()] == ["1. max-num-seqs 4", "2. max-num-seqs 1"]
    numbers = {number for text in middle.texts for number in text.get_text().split(", ")}
    assert numbers == {"1", "2"}
    legend = right.get_legend()
    assert legend is not None
    kinds = [patch.get_facecolor() for patch in legend.get_patches()]
    assert kinds == [*dict.fromkeys(bar.get_facecolor() for bar in right.patches)]


def test_that_nothing_meets_the_slos_is_said(tmp_path):
    found = kvtwin.tune(FIXED | {"tune": {"slo": ["p99_ttft_ms:0.001"]}}, tmp_path, jobs=1)
    assert found.tuned.best is None and found.tuned.gains == []
    assert found.text.startswith("No candidate meets p99_ttft_ms <= 0.001")


def test_the_best_is_first_and_of_equals_the_one_furthest_from_its_slos():
    """What reaches nothing is behind what reaches little, and before what never met the SLOs; TTFT at most 100 ms."""
    asked = read_tune(FIXED | {"goodput": ["ttft:100"], "tune": {"goal": "goodput", "slo": ["p99_ttft_ms:100"]}}, "t")

    def candidate(value, ttft_ms):
        ran = None if value is None else Ran({}, 1, Outcome("k", {"p99_ttft_ms": ttft_ms}))
        return Candidate({}, (Reached(1.0, ran, None, None),), (value,), "goodput")

    given = [candidate(*it) for it in ((0.0, 50.0), (0.5, 60.0), (None, 0.0), (0.75, 90.0), (0.5, 40.0))]
    assert [given.index(c) for c in ranked(asked, given)] == [3, 4, 1, 0, 2]


def test_a_least_counts_beside_a_most_in_how_near_a_candidate_comes():
    """By its bound over what is reached: with no share at all nothing is further."""
    words = ["p99_ttft_ms:100", "goodput_attainment:0.5"]
    asked = read_tune(FIXED | {"goodput": ["ttft:100"], "tune": {"goal": "goodput", "slo": words}}, "t")
    reached = ((50.0, 0.5), (60.0, 1.0), (90.0, 1.0), (40.0, 0.8), (10.0, 0.0))
    given = [
        Candidate({"place": place}, (Reached(1.0, Ran({}, 1, Outcome("k", result)), None, None),), (0.5,), "goodput")
        for place, (ttft_ms, share) in enumerate(reached)
        for result in [{"p99_ttft_ms": ttft_ms, "goodput_attainment": share}]
    ]
    assert [c.point["place"] for c in ranked(asked, given)] == [1, 3, 2, 0, 4]


def test_load_is_counted_over_the_arrivals_or_the_duration_where_they_are_not_kept():
    """Of requests that all come at once too; in no time at all there is none."""
    spans = ((4.0, 9.0, 2.5), (0.0, 5.0, 2.0), (None, 5.0, 2.0), (None, 0.0, 0.0))
    for span_s, duration_s, per_s in spans:
        assert offered_per_s({"arrival_span_s": span_s, "duration": duration_s, "num_prompts": 10}) == per_s


def test_what_never_meets_the_slos_is_the_worst_of_all_trials(tmp_path):
    """Optuna is told so of each: the least of all loads."""
    optuna = pytest.importorskip("optuna")
    url = f"sqlite:///{tmp_path / 'trials.db'}"
    study = FIXED | {"goodput": ["ttft:300"], "tune": {"slo": TTFT, "grid": {"max-num-seqs": [1, 2]}}}
    asked = structs.replace(read_tune(study, "x"), trials=9, storage=url)
    reached, _ = driven(most_load({}, SLOS), lambda options: 150.0)

    def reach(points):
        return [
            Candidate(point, (reached,), (None if point["max_num_seqs"] == 2 else 7.5,), "load") for point in points
        ]

    found = {candidate.point["max_num_seqs"]: candidate.value for candidate in
             drawing.by_trials(asked, tmp_path, reach, None)}  # fmt: skip
    assert found == {1: 7.5, 2: None}
    (name,) = optuna.get_all_study_names(url)
    trials = optuna.load_study(study_name=name, storage=url).trials
    assert {(json.loads(trial.user_attrs["point"])["max_num_seqs"], trial.value) for trial in trials} == {
        (1, 7.5), (2, 0.0)
    }  # fmt: skip


def test_trials_are_drawn_kept_and_not_made_again(tmp_path):
    """By the journal beside the points as by a data base."""
    optuna = pytest.importorskip("optuna", reason="optuna is not installed")
    knobs = {"max-num-seqs": [1, 2, 4, 8], "block-size": [16, 32], "policy": ["vllm-v1", "vllm-recompute"]}
    study = FIXED | {"num-prompts": 12, "tune": {"slo": TTFT, "trials": 4, "grid": knobs}}
    first = kvtwin.tune(study, tmp_path, jobs=1)
    assert 1 <= len(first.table) <= 4
    runs = set((tmp_path / "points").iterdir())
    again = kvtwin.tune(study, tmp_path, jobs=1)
    assert again.table.equals(first.table) and set((tmp_path / "points").iterdir()) == runs
    url = f"sqlite:///{tmp_path / 'trials.db'}"
    stored = kvtwin.tune(study | {"tune": {**study["tune"], "storage": url}}, tmp_path, jobs=1)
    assert stored.table.equals(first.table)
    (name,) = optuna.get_all_study_names(url)
    assert len(optuna.load_study(study_name=name, storage=url).trials) == 4 and re.fullmatch("[0-9a-f]{16}", name)


@pytest.mark.parametrize(
    ("storage", "reason"),
    [
        ("nonsense", "Could not parse SQLAlchemy URL from given URL string"),
        ("sqlite:////nowhere/to/be/found.db", "(sqlite3.OperationalError) unable to open database file"),
    ],
)
def test_a_storage_that_is_none_is_one_line(tmp_path, storage, reason):
    pytest.importorskip("optuna", reason="optuna is not installed")
    asked = read_tune(FIXED | {"tune": {"slo": TTFT, "trials": 1, "storage": storage}}, "s.toml")
    with pytest.raises(kvtwin.UserError) as caught:
        drawing.by_trials(asked, tmp_path, lambda points: [], None)
    assert str(caught.value) == f"s.toml: tune.storage = {storage!r}: {reason}"


def test_trials_without_optuna_say_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    asked = read_tune(FIXED | {"tune": {"slo": TTFT, "trials": 1}}, "s.toml")
    with pytest.raises(kvtwin.UserError) as caught:
        drawing.by_trials(asked, tmp_path, lambda points: [], None)
    halted = "import of optuna halted; None in sys.modules"
    assert str(caught.value) == f"s.toml: tune.trials: {halted}; install kvtwin[optuna], or leave it out"


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"slo": ["p99:3"]}, "'p99:3' is not METRIC:BOUND"),
        ({"slo": ["goodput_attainment:99"]}, "99 % is goodput_attainment:0.99"),
        ({"slo": ["goodput_attainment:0.9"]}, "counts requests within goodput = ['ttft:3000', ...]; give it"),
        ({"slo": [*TTFT, "p99_ttft_ms:90"]}, "p99_ttft_ms <= 2000 and p99_ttft_ms <= 90 bound one metric"),
        ({"slo": TTFT, "trial": 3}, "unknown key tune.trial"),
    ],
)
def test_a_wrong_table_is_told_in_one_line(own, words):
    """Others are pinned (`pinned_setups.py`)."""
    with pytest.raises(kvtwin.UserError) as caught:
        read_tune(FIXED | {"tune": own}, "s.toml")
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_every_candidate_refused_is_told(tmp_path):
    with pytest.raises(kvtwin.UserError, match="every candidate is refused: --block-size"):
        kvtwin.tune(FIXED | {"tune": {"slo": TTFT, "grid": {"block-size": [0]}}}, tmp_path, jobs=1)


def test_what_could_not_run_is_told_apart_from_what_missed_the_slos(tmp_path):
    study = FIXED | {"tune": {"slo": TTFT, "zip": {"tp": [1, 3]}}}
    text = kvtwin.tune(study, tmp_path, jobs=1).text
    assert "never meet" not in text
    assert re.search(r"1 could not be tried \(vllm-v1, tp 3\): .*heads", text)


def planted(monkeypatch, sustains):
    """Runs sustain what a function of their options says of the load; else the TTFT is 3 s."""

    def perform(planned, store, *_):
        for place in planned:
            factor = place.options.get("rate_scale", 1.0)
            ttft_ms = 1000.0 if factor <= sustains(place.options) else 3000.0
            result = {"p99_ttft_ms": ttft_ms, "completed": 40, "num_prompts": 40, "arrival_span_s": 1e6 / factor,
                      "mean_e2el_ms": 1.0, "duration": 10.0, "policy": "vllm-v1", "profile": {}}  # fmt: skip
            store.put(Outcome(place.outcome.key, result))

    monkeypatch.setattr("sim.study.search.perform_missing", perform)


def test_draws_make_the_loads_interval_and_those_that_cross_a_tie(monkeypatch, tmp_path):
    """By hand: loads of 2, 2.2 and 2.42 have a mean of 2.2, and a spread of 10 %: Student's t of 2 is 4.303."""

    def sustains(options):
        seed, seats = options.get("seed", 0), options["max_num_seqs"]
        loads = {256: (2.0, 2.2, 2.42), 128: (2.1, 2.0, 2.6), 64: (1.8, 1.8, 2.2), 32: (1.0, 9.0, 9.0)}
        return loads.get(seats, (2.0, 2.0, 2.0))[seed]

    planted(monkeypatch, sustains)
    study = FIXED | {"tune": {"slo": TTFT, "repeats": 3, "grid": {"max-num-seqs": [256, 128, 64, 32]}}}
    found = tune(read_tune(study, "t"), tmp_path, Means())
    by_seats = {c.point["max_num_seqs"]: c for c in found.candidates}
    assert [len(by_seats[seats].values) for seats in (256, 128, 64, 32)] == [3, 3, 3, 1]
    assert geometric_mean([one.most for one in by_seats[256].reached]) == pytest.approx(2.2, rel=PRECISION)
    low, high = (end / by_seats[256].value for end in by_seats[256].interval)
    half = 4.303 * np.log(1.1) * (4 / 3) ** 0.5
    assert np.log([low, high]) == pytest.approx([-half, half], rel=0.1)
    tied = {c.point["max_num_seqs"] for c in found.tied}
    assert {found.best.point["max_num_seqs"]} | tied == {256, 128}, "64 is behind on every draw, 32 on the first by far"


def test_that_pools_against_like_engines_hang_on_a_budget_not_named_is_said():
    asked = read_tune(FIXED | {"tune": {"slo": TTFT}}, "t")

    def told(points):
        budget = {"scenario": {"max_num_batched_tokens": 2048}}
        runs = [Ran(point, 1, Outcome("k", budget)) for point in points]
        found = [Candidate(ran.options, (Reached(1.0, ran, None, None),), (None,), "load") for ran in runs]
        return list(_by_default(Tuned(asked.study, "load", SLOS, found, [], None, None, 0.1)))

    (said,) = told([{"prefill_replicas": 1}, {}])
    assert said.startswith("Not searched: max-num-batched-tokens (2,048 by default)")
    assert told([{}, {}]) == told([{"prefill_replicas": 1, "max_num_batched_tokens": 2048}, {}]) == []


def test_long_traffic_and_what_cannot_be_resampled_is_one_draw_and_why_is_said(tmp_path):
    def like(**options):
        return like_traffic(options, options.pop("repeats", None), tmp_path)

    trace = tmp_path / "t.csv"
    rows = [f"{i * 0.1:.1f},{10 + i % 7},5\n" for i in range(400)]
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(rows))
    found = like(trace=str(trace), num_prompts=300, clip=12, seed=3)
    assert len(found.options) == 5 and found.alone == "" and found.options[0]["num_prompts"] == 300
    for place, options in enumerate(found.options[1:], 1):
        lines = Path(options["trace"]).read_text().splitlines()[1:]
        assert len(lines) == 300 and options["seed"] == 3 + place
        assert all(sum(map(int, line.split(",")[1:3])) <= 12 for line in lines), "clipped once"
    assert [options["seed"] for options in like(workload="fixed", seed=3, repeats=2).options] == [3, 4]
    alone = {
        "repeats = 1": {"workload": "fixed", "repeats": 1},
        "it has more than 20,000 requests": {"workload": "fixed", "num_prompts": 20_001},
        "turns of sessions": {"trace": str(trace), "closed_sessions": True},
        "arrive at one moment": {"trace": str(trace), "request_rate": math.inf},
        "no such file": {"trace": str(tmp_path / "none.csv")},
    }
    for why, options in alone.items():
        found = like(**options)
        assert len(found.options) == 1 and why in found.alone


def test_candidates_within_the_noise_are_a_tie_and_their_axis_makes_no_difference():
    """Of 1,000 requests of which 96 % are good, 12 more or less (two standard errors) are chance."""
    asked = read_tune(FIXED | {"goodput": ["ttft:100"], "tune": {"goal": "goodput"}}, "t")

    def candidate(cached, value):
        result = {"num_prompts": 1000, "goodput_attainment": 0.96, "duration": 100.0}
        ran = Ran({}, 1, Outcome("k", result))
        return Candidate({"enable_prefix_caching": cached}, (Reached(value, ran, None, None),), (value,), "goodput")

    def tuned(second):
        found = [candidate(True, 9.60), candidate(False, second)]
        return Tuned(asked.study, "goodput", asked.slos, found, [], None, None, 0.1)

    assert [len(tuned(value).tied) for value in (9.60 - 0.12, 9.60 - 0.13)] == [1, 0]
    assert tuned(9.59).indifferent == ["enable_prefix_caching"] and tuned(9.4).indifferent == []


@pytest.mark.parametrize("metric", ["p99_ttft_ms", "p90_tpot_ms", "median_e2el_ms"])
@pytest.mark.parametrize("engines", [{}, {"replicas": 2, "router": "least-loaded"}])
def test_a_run_ended_early_would_have_missed_its_bound_and_one_that_is_not_is_the_same(metric, engines, tmp_path):
    """At bounds on both sides of what the whole run has; a run cut short is none that another command finds."""
    traffic = {"workload": "uniform", "num_prompts": 120, "request_rate": 20.0, "input_len": 300, "range_ratio": 0.5}
    options = {**traffic, "output_len": 60, "gpu": "l20", **engines}
    store, means = Store(tmp_path), Means(jobs=1)
    (whole,) = runs([options], store, means)
    assert whole.result is not None
    for factor in (0.3, 0.99, 1.0, 1.01):
        slo = Slo(metric, whole.result[metric] * factor)
        (ran,) = runs([options], store, means, until=[slo])
        if ran.result is None:
            assert factor < 1 and ran.outcome.error is None and 0 < ran.outcome.missed_s < whole.result["duration"]
        else:
            assert ran.result == whole.result
        assert factor != 0.3 or ran.result is None, "far beyond the bound there is much to save"


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=200), st.sampled_from([50.0, 90.0, 99.0]), st.data())
def test_so_many_beyond_a_bound_put_the_percentile_beyond_it_also_of_fewer_requests(values, percent, data):
    bound = data.draw(st.sampled_from(values))
    count = len(values) + data.draw(st.integers(0, 3))
    if sum(value > bound for value in values) >= Most("ttft_s", percent, bound).misses(count):
        assert np.percentile(values, percent) > bound
