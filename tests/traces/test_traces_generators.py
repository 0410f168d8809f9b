"""Workloads have the statistics that they promise; the same seed gives the same requests; streams stay small."""

import tracemalloc
import warnings
from itertools import islice, pairwise
from math import inf, isfinite, nan
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traces.errors import TraceError
from traces.generators import WORKLOADS, generate
from traces.lengths import fit, length_model, load_model
from traces.readers import open_trace
from traces.request import Request
from traces.summary import summarize

AZURE = Path(__file__).resolve().parents[3] / "shared" / "traces" / "azure2023_conv.csv"
RATE = 5.0


def many(name, count=40_000, **options):
    return summarize(generate(name, num_prompts=count, **options))


def compare(targets, summary, tolerance):
    """Print target and model side by side, and check each within a relative tolerance."""
    print(f"\n{'statistic':28} {'target':>10} {'model':>10}")
    for name, target in targets.items():
        value = summary
        for part in name.split("."):
            value = getattr(value, part)
        print(f"{name:28} {target:10.4g} {value:10.4g}")
        assert value == pytest.approx(target, rel=tolerance, abs=0.02), name


# The table of the trace: measured on the published file (19,366 rows), rounded.
AZURE_2023 = {
    "prompt_tokens.mean": 1155, "prompt_tokens.p50": 1020, "prompt_tokens.p90": 2735, "prompt_tokens.p99": 4142,
    "output_tokens.mean": 211, "output_tokens.p50": 129, "output_tokens.p90": 424, "output_tokens.p99": 601,
    "correlation": -0.112, "interval_mean_s": 0.1808, "interval_cv": 1.09,
}  # fmt: skip


def test_azure_model_has_the_published_statistics():
    compare(AZURE_2023, many("azure-conv-2023", 100_000), 0.02)


@pytest.mark.skipif(not AZURE.exists(), reason="needs the Azure 2023 trace in ../shared (not shipped)")
def test_azure_model_has_the_traces_own_statistics():
    real = summarize(open_trace(AZURE))
    targets = {name: getattr(real, name) for name in ("interval_mean_s", "interval_cv", "correlation")}
    for column in ("prompt_tokens", "output_tokens"):
        for name in ("mean", "std", "p50", "p90", "p99"):
            targets[f"{column}.{name}"] = getattr(getattr(real, column), name)
    compare(targets, many("azure-conv-2023", 100_000), 0.03)


@pytest.mark.skipif(not AZURE.exists(), reason="needs the Azure 2023 trace in ../shared (not shipped)")
def test_the_shipped_model_is_the_fit_of_the_trace():
    fitted = fit(open_trace(AZURE))
    model = load_model("azure-conv-2023")
    assert np.exp(model.lengths.log_prompts) == pytest.approx(fitted["prompt_tokens"])
    assert np.exp(model.lengths.log_outputs) == pytest.approx(fitted["output_tokens"])
    assert model.lengths.correlation == pytest.approx(fitted["copula_correlation"], abs=1e-3)


def test_sharegpt_model_has_the_stated_means_and_bounds():
    summary = many("sharegpt", 100_000, request_rate=RATE)
    # 161 and 338: vLLM's paper; the medians follow from the shapes that the model file states as assumed.
    targets = {
        "prompt_tokens.mean": 161,
        "output_tokens.mean": 338,
        "correlation": 0.0,
        "interval_mean_s": 1 / RATE,
        "interval_cv": 1.0,
    }
    compare(targets, summary, 0.02)
    for length in (summary.prompt_tokens, summary.output_tokens):
        assert length.min >= 4
        assert length.p99 > 3 * length.p50  # heavy-tailed
    assert summary.prompt_tokens.max + summary.output_tokens.max <= 2300


def test_fit_recovers_a_model_from_its_own_sample():
    fitted = fit(generate("azure-conv-2023", num_prompts=30_000, seed=5))
    model = load_model("azure-conv-2023")
    middle = slice(5, -5)
    assert np.log(fitted["prompt_tokens"])[middle] == pytest.approx(model.lengths.log_prompts[middle], abs=0.15)
    assert fitted["arrivals"]["cv"] == pytest.approx(model.burstiness**-0.5, rel=0.03)
    with pytest.raises(TraceError, match="too few"):
        fit(generate("fixed", num_prompts=99))


@pytest.mark.parametrize("correlation", [-0.8, 0.95])
def test_fit_recovers_how_lengths_go_together(correlation):
    """Of scores from which the lengths were made; a log-normal's tokens go together less than their logarithms do."""
    model = length_model((0.001, 0.5, 0.999), (5, 100, 2000), (10, 200, 4000), correlation)
    prompts, outputs = model.sample(np.random.default_rng(3), 4000)
    requests = [
        Request(i, float(i), *lengths) for i, lengths in enumerate(zip(prompts.tolist(), outputs.tolist(), strict=True))
    ]
    assert fit(requests)["copula_correlation"] == pytest.approx(correlation, abs=0.03)


def test_fixed_is_fixed_and_infinity_is_at_once():
    requests = list(generate("fixed", num_prompts=3, request_rate=inf, input_len=7, output_len=8))
    assert [r[:4] for r in requests] == [(0, 0.0, 7, 8), (1, 0.0, 7, 8), (2, 0.0, 7, 8)]


@pytest.mark.parametrize(("ratio", "longest"), [(0.0, 100 + 128 + 256), (0.5, 100 + 192 + 384)])
def test_a_first_turn_has_room(ratio, longest):
    options = {"num_prompts": 1, "shared_prefix": 100, "range_ratio": ratio}
    assert len(list(generate("sessions", max_context=longest, **options))) == 1
    with pytest.raises(TraceError, match=f"max_context {longest - 1} is too small; a .* up to {longest} tokens"):
        generate("sessions", max_context=longest - 1, **options)


def test_uniform_fills_its_range():
    summary = many("uniform", request_rate=1, input_len=100, output_len=10, range_ratio=0.2)
    assert (summary.prompt_tokens.min, summary.prompt_tokens.max) == (80, 120)
    assert (summary.output_tokens.min, summary.output_tokens.max) == (8, 12)


@pytest.mark.parametrize(("burstiness", "cv"), [(1.0, 1.0), (0.25, 2.0), (16.0, 0.25)])
def test_burstiness_sets_the_intervals_spread_and_not_their_mean(burstiness, cv):
    summary = many("fixed", request_rate=RATE, burstiness=burstiness)
    assert summary.interval_cv == pytest.approx(cv, rel=0.03)
    assert summary.interval_mean_s == pytest.approx(1 / RATE, rel=0.03)


def counts_between(requests, *edges):
    times = np.array([r.arrival_s for r in requests])
    return [int(((times >= a) & (times < b)).sum()) for a, b in pairwise(edges)]


def test_ramp_rises_in_a_straight_line():
    # 4000 requests from 2/s to 6/s take 1000 s; half way in time, (2 + 4)/2 * 500 = 1500 of them have come.
    requests = list(generate("ramp", num_prompts=4000, request_rate=2, end_rate=6, burstiness=1000))
    assert requests[-1].arrival_s == pytest.approx(1000, rel=0.01)
    assert counts_between(requests, 0, 500)[0] == pytest.approx(1500, rel=0.01)
    down = list(generate("ramp", num_prompts=4000, request_rate=6, end_rate=2, burstiness=1000))
    assert counts_between(down, 0, 500)[0] == pytest.approx(2500, rel=0.01)


def test_bursts_come_at_the_end_of_each_period():
    # 2/s for 8 s, then 20/s for 2 s: 16 + 40 requests every 10 s.
    options = {"burst_factor": 10, "burst_period": 10, "burst_duration": 2}
    requests = list(generate("burst", num_prompts=560, request_rate=2, burstiness=1e6, **options))
    assert counts_between(requests, 0, 8, 10, 18, 20) == pytest.approx([16, 40, 16, 40], abs=1)


shapes = st.fixed_dictionaries(
    {
        "turns": st.integers(2, 6),
        "shared_prefix": st.integers(0, 60),
        "prefix_groups": st.integers(1, 3),
        "input_len": st.integers(1, 60),
        "output_len": st.integers(1, 60),
        "range_ratio": st.sampled_from((0.0, 0.7)),
        "hash_block_tokens": st.integers(1, 40),
        "seed": st.integers(0, 10**6),
    }
)


@given(shapes)
@settings(deadline=None)
def test_a_turns_prompt_names_the_blocks_of_all_that_was_said(options):
    block, shared = options["hash_block_tokens"], options["shared_prefix"]
    said, owners = {}, {}
    for request in generate("sessions", num_prompts=60, think_time=2, **options):
        prompt, output = request.prompt_tokens, request.output_tokens
        ids = request.hash_ids + request.output_hash_ids
        assert request.hash_block_tokens == block
        assert len(request.hash_ids) == -(-prompt // block)
        assert len(ids) == len(set(ids)) == -(-(prompt + output) // block)
        before, full = said.get(request.session_id, ((), 0))
        assert request.hash_ids[:full] == before[:full]
        assert set(before[full:]).isdisjoint(ids)
        for ident in ids[shared // block :]:
            assert owners.setdefault(ident, request.session_id) == request.session_id
        said[request.session_id] = ids, (prompt + output) // block
    starts = {ids[: shared // block] for ids, _ in said.values()}
    assert len(starts) <= options["prefix_groups"]


def test_sessions_keep_their_rate_groups_and_context():
    requests = list(generate("sessions", num_prompts=30_000, request_rate=10, prefix_groups=4, max_context=2048))
    late = [r for r in requests if r.arrival_s > 300]
    span = late[-1].arrival_s - late[0].arrival_s
    # Contexts cut short make a session's turns fewer than asked for, so the rate is bounded above only.
    assert 5 < len(late) / span < 10.5
    assert max(r.prompt_tokens + r.output_tokens for r in requests) <= 2048
    assert {r.hash_ids[0] for r in requests} == {0, 32, 64, 96}
    steady = list(generate("sessions", num_prompts=30_000, request_rate=10, max_context=10**6))
    late = [r for r in steady if r.arrival_s > 300]
    assert len(late) / (late[-1].arrival_s - late[0].arrival_s) == pytest.approx(10, rel=0.05)


def test_documents_are_different_passages_named_by_content_and_a_question():
    """Three of 20 passages of 64 tokens; the first is drawn far more often than the last, and not always first."""
    requests = list(
        generate(
            "documents", num_prompts=400, input_len=40, documents=3, document_len=64, corpus=20, hash_block_tokens=32
        )
    )
    drawn, own = [], []
    for request in requests:
        assert request.hash_block_tokens == 32 and len(request.hash_ids) == request.prompt_tokens // 32
        passages = [tuple(request.hash_ids[i : i + 2]) for i in (0, 2, 4)]
        assert all(a % 2 == 0 and b == a + 1 and b < 40 for a, b in passages) and len(set(passages)) == 3
        drawn.append([a // 2 for a, _ in passages])
        own += request.hash_ids[6:]
        assert 192 + 20 <= request.prompt_tokens <= 192 + 60
    assert len(own) == len(set(own)) and min(own) == 40
    often = [sum(passage in passages for passages in drawn) for passage in range(20)]
    assert often[0] > 4 * often[19] > 0
    assert {passages.index(0) for passages in drawn if 0 in passages} == {0, 1, 2}


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_is_a_stream(name):
    first = list(generate(name, num_prompts=5000, request_rate=3, seed=1))
    assert len(first) == 5000
    assert first[0].arrival_s == 0.0
    assert [r.request_id for r in first] == list(range(5000))
    assert first == list(generate(name, num_prompts=5000, request_rate=3, seed=1))
    assert first != list(generate(name, num_prompts=5000, request_rate=3, seed=2))
    if name != "ramp":  # a ramp's rate depends on how many requests it is to last
        assert first[:4500] == list(generate(name, num_prompts=4500, request_rate=3, seed=1))
    types = {tuple(map(type, r[:4])) for r in first}
    assert types == {(int, float, int, int)}


def test_five_million_requests_are_not_held():
    stream = generate("azure-conv-2023", num_prompts=5_000_000)
    next(stream)
    tracemalloc.start()
    assert sum(1 for _ in islice(stream, 100_000)) == 100_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4_000_000


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("sharegtp", {}, "did you mean 'sharegpt'"),
        ("fixed", {"num_prompts": 0}, "num_prompts 0 is too small"),
        ("sessions", {"output_len": 2**63}, "output_len 9223372036854775808 is not between"),
        ("fixed", {"seed": -1}, "seed -1 is negative; give 0 or more"),
        ("fixed", {"turns": 3}, "has no option 'turns'; it takes none"),
        ("ramp", {"end_rat": 3}, "did you mean 'end_rate'"),
        ("burst", {"burst_duration": 60}, "0 < burst duration < period"),
        ("uniform", {"range_ratio": 2}, "range ratio 2"),
        ("sessions", {"turns": 0.5}, "turns 0.5"),
        ("sessions", {"max_context": 100}, "max_context 100"),
        ("sessions", {"request_rate": inf}, "request rate inf"),
        ("documents", {"documents": 1001}, "documents 1001 is more than a corpus of 1000"),
        ("documents", {"document_len": 100}, "document_len 100 is not whole blocks of hash_block_tokens 16"),
        ("documents", {"skew": 9.0}, "skew 9.0 is not between 0 and 5"),
    ],
)
def test_wrong_workloads_are_refused_at_once(name, options, match):
    with pytest.raises(TraceError, match=match):
        generate(name, **{"num_prompts": 10, **options})


NUMBERS = [
    ("fixed", "request_rate"), ("ramp", "request_rate"), ("ramp", "end_rate"), ("burst", "request_rate"),
    ("burst", "burst_factor"), ("burst", "burst_period"), ("burst", "burst_duration"), ("sessions", "request_rate"),
    ("sessions", "think_time"), ("sessions", "turns"), ("azure-conv-2023", "burstiness"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "option"), NUMBERS)
def test_a_number_that_no_traffic_has_is_refused_at_once(name, option):
    for value in (0.0, nan, 1e-300, 1e300):
        with pytest.raises(TraceError, match=r"(is not positive|is not between .*|in a period of .*); "):
            generate(name, num_prompts=10, **{option: value})


REFUSED = (("turns", 1e-9), ("burst_duration", 1e9), ("burst_period", 1e-9))


@pytest.mark.parametrize("burstiness", [1e-4, 1e9])
@pytest.mark.parametrize(
    ("name", "option", "value"),
    [(name, option, value) for name, option in NUMBERS for value in (1e-9, 1e9)
     if option != "burstiness" and (option, value) not in REFUSED],
)  # fmt: skip
def test_whatever_is_accepted_makes_times_in_order(name, option, value, burstiness):
    with np.errstate(all="raise", under="ignore"), warnings.catch_warnings():
        warnings.simplefilter("error")
        times = [r.arrival_s for r in generate(name, num_prompts=50, burstiness=burstiness, **{option: value})]
    assert all(map(isfinite, times))
    assert times == sorted(times) and times[0] >= 0.0
