"""Whatever the workload: every request ends once, no block is lost, Eq. 5 balances, lanes never overlap themselves."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.testing import Outcome, limits, requests, simulate
from sim.engine.limits import Limits
from sim.engine.sequence import Status
from sim.systems.base import Policy
from sim.systems.layerkv import LayerKV
from sim.systems.vllm055 import VllmRecompute, VllmSwap
from traces.request import Request

POLICIES = [
    VllmRecompute(),
    VllmSwap(),
    LayerKV(),
    LayerKV(slo_aware=False),
    LayerKV(decode="stream"),
    LayerKV(decode="stream", slo_aware=False),
    LayerKV(equations="paper", predictor="bucket"),
    LayerKV(predictor="none", drop_irrecoverable=False, tpot_slo_ms=40.0),
    LayerKV(horizon_steps=40, threshold=0.2),
]
IDS = [
    "recompute", "swap", "layerkv", "no-slo", "stream", "stream-no-slo", "paper", "no-predictor", "far-forecast",
]  # fmt: skip

gaps = st.sampled_from([0.0, 0.0, 0.001, 0.02, 0.3, 2.0])
rows = st.lists(st.tuples(gaps, st.integers(1, 150), st.integers(1, 60)), min_size=1, max_size=25)


@st.composite
def workloads(draw: st.DrawFn) -> tuple[list[Request], Limits]:
    block_size = draw(st.sampled_from([1, 4, 16]))
    chunked = draw(st.booleans())
    seqs = draw(st.sampled_from([1, 3, 8, 256]))
    now, found = 0.0, []
    for gap, prompt, output in draw(rows):
        now += gap
        found.append((now, prompt, output))
    return requests(*found), limits(
        gpu=draw(st.integers(2, 40)) * 16 // block_size,
        host=draw(st.sampled_from([0, 3, 20, 1000])) * 16 // block_size,
        block_size=block_size,
        max_model_len=draw(st.sampled_from([64, 256])),
        seqs=seqs,
        tokens=draw(st.sampled_from([max(seqs, 16), max(seqs, 64)])) if chunked else None,
        chunked=chunked,
    )


def check(outcome: Outcome, arrivals: list[Request]) -> None:
    assert sorted(seq.request.request_id for seq in outcome.ended) == [r.request_id for r in arrivals]
    assert not outcome.scheduler.has_unfinished
    for pool in (outcome.scheduler.gpu, outcome.scheduler.host):
        assert pool.free == pool.num_blocks
    for seq in outcome.ended:
        if seq.status is Status.FINISHED:
            assert seq.num_generated == seq.request.output_tokens
            assert seq.request.arrival_s - 1e-9 <= seq.first_scheduled_s <= seq.first_token_s <= seq.finish_s
        else:
            assert seq.status is Status.IGNORED
    for lane in (outcome.lanes.compute, outcome.lanes.d2h, outcome.lanes.h2d):
        assert lane.intervals is not None
        for before, after in pairwise(lane.intervals):
            assert after.start_s >= before.end_s - 1e-9


@pytest.mark.parametrize("policy", POLICIES, ids=IDS)
@settings(max_examples=60, deadline=None)
@given(workload=workloads())
def test_every_request_ends_once_and_blocks_balance(policy: Policy, workload: tuple[list[Request], Limits]) -> None:
    arrivals, limit = workload
    check(simulate(policy, arrivals, limit), arrivals)


@pytest.mark.parametrize("policy", POLICIES, ids=IDS)
@settings(max_examples=40, deadline=None)
@given(workload=workloads())
def test_jumping_and_stepping_agree(policy: Policy, workload: tuple[list[Request], Limits]) -> None:
    arrivals, limit = workload
    jumped = simulate(policy, arrivals, limit, checked=False)
    stepped = simulate(policy, arrivals, limit, jump=False, checked=False)
    assert jumped.instance.iterations == stepped.instance.iterations
    assert jumped.scheduler.counters == stepped.scheduler.counters
    one, other = jumped.by_id(), stepped.by_id()
    for key, seq in one.items():
        assert seq.status is other[key].status
        assert seq.first_token_s == pytest.approx(other[key].first_token_s, abs=1e-7)
        assert seq.finish_s == pytest.approx(other[key].finish_s, abs=1e-7)


@pytest.mark.parametrize("policy", POLICIES, ids=IDS)
@settings(max_examples=25, deadline=None)
@given(workload=workloads())
def test_gap_statistics_equal_those_of_single_tokens(policy: Policy, workload: tuple[list[Request], Limits]) -> None:
    arrivals, limit = workload
    outcome = simulate(policy, arrivals, limit, checked=False, record=True)
    completed = [seq for seq in outcome.ended if seq.status is Status.FINISHED]
    for seq in completed:
        times = outcome.tokens[seq.request.request_id]
        assert len(times) == seq.request.output_tokens
        assert times[0] == seq.first_token_s
        assert times[-1] == pytest.approx(seq.finish_s, abs=1e-9)
    gaps_s = [b - a for times in outcome.tokens.values() for a, b in pairwise(times)]
    found = outcome.gaps.statistics((50.0, 99.0))
    if not gaps_s:
        assert found is None
        return
    assert found is not None and found.exact
    assert found.count == len(gaps_s)
    assert found.mean == pytest.approx(np.mean(gaps_s), rel=1e-9)
    assert found.std == pytest.approx(np.std(gaps_s), rel=1e-6, abs=1e-8)
    for percentile, value in found.percentiles.items():
        assert value == pytest.approx(np.percentile(gaps_s, percentile), rel=1e-9, abs=1e-9)
