"""Two clocks, one decision: the engine on SimPy and on the real clock's driver with a device that only pretends."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_pretended import PretendedDevice

from gpu_runtime.driver import LiveInstance
from kvtwin.testing import CheckedEngine, limits, requests, simulate, tiny_model
from sim.clock.arrivals import Arrivals
from sim.cost.forms import LinearCost, build_cost
from sim.cost.pricing import Lanes
from sim.cost.profile import load_profile
from sim.engine.itl import GapCollector
from sim.engine.limits import Deployment
from sim.engine.plan import IterationPlan, StepTimes
from sim.scenario import parse_policy
from sim.specs.hardware import load_hardware
from sim.systems import POLICIES
from sim.systems.base import Policy


def shown(plan: IterationPlan, start_s: float, times: StepTimes):
    """A decision in full, with its times: who computes what, and what moves."""
    chunks = [(seq.request.request_id, new, cached, origin) for seq, new, cached, origin in plan.chunks]
    moves = [
        (t.seq.request.request_id, t.direction, t.layers, t.num_blocks, t.num_bytes, t.num_copies)
        for t in (*plan.background, *plan.pipelined_d2h)
    ]
    sums = (
        plan.num_decodes, plan.decode_context_tokens, plan.decodes_first, plan.swapped_out_blocks,
        plan.swapped_in_blocks, plan.streamed_bytes, plan.pipelined_layers, plan.pipelined_bytes,
    )  # fmt: skip
    return (chunks, moves, sums), (start_s, times.end_s)


def live(policy: Policy, arrivals, limit, cost, model):
    """The same run on the real clock's driver."""
    gaps = GapCollector()
    scheduler = policy.scheduler(limit, gaps, Deployment(model, load_hardware("a100-80g"), 1, cost))
    ended, plans = [], []
    engine = CheckedEngine(scheduler, policy.length_predictor(0), ended.append)
    device = PretendedDevice(cost, Lanes(), model.num_layers)
    LiveInstance(engine, device, Arrivals(arrivals), observer=lambda *facts: plans.append(shown(*facts))).serve()
    return plans, ended


VARIANTS = [
    *POLICIES,
    "layerkv:slo-aware=false",
    "layerkv:decode=stream",
    "layerkv:decode=stream,slo-aware=false",
    "layerkv:equations=paper",
    "layerkv:drop-irrecoverable=false",
]
WORKLOADS = st.lists(
    st.tuples(
        st.one_of(st.just(0.0), st.floats(0.0, 3.0), st.sampled_from([0.5, 1.0, 1.5])),
        st.integers(1, 200),
        st.integers(1, 60),
    ),
    min_size=1,
    max_size=25,
).map(lambda rows: sorted(rows, key=lambda row: row[0]))


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=25, deadline=None)
@given(rows=WORKLOADS, gpu=st.integers(20, 60), host=st.integers(0, 200), chunked=st.booleans(), priced=st.booleans())
def test_both_clocks_take_the_same_decisions_at_the_same_times(variant, rows, gpu, host, chunked, priced):
    policy = parse_policy(variant, {})[1]
    model = tiny_model()
    limit = limits(gpu, host, max_model_len=512, seqs=8, chunked=chunked, tokens=64 if chunked else None)
    if priced:
        hardware = load_hardware("a100-80g")
        cost = build_cost(model, hardware, load_profile(None, hardware), 1, limit.block_bytes)
    else:
        cost = LinearCost((0.005, 4e-5, 2e-9), (0.02, 2e-5, 6e-7), 3e-4, limit.block_bytes, 1 / 64)
    simulated = simulate(policy, requests(*rows), limit, cost=cost, model=model, jump=False)
    plans, ended = live(policy, requests(*rows), limit, cost, model)
    there = [shown(*facts) for facts in simulated.plans]
    assert [decision for decision, _ in plans] == [decision for decision, _ in there]
    for (_, here_s), (_, there_s) in zip(plans, there, strict=True):
        assert here_s == pytest.approx(there_s, abs=1e-7)
    assert [(s.request.request_id, s.status, s.error) for s in ended] == [
        (s.request.request_id, s.status, s.error) for s in simulated.ended
    ]
    for here, there in zip(ended, simulated.ended, strict=True):
        assert here.first_token_s == pytest.approx(there.first_token_s, abs=1e-7)
        assert here.finish_s == pytest.approx(there.finish_s, abs=1e-7)


@pytest.mark.parametrize("variant", VARIANTS)
def test_jumping_on_the_virtual_clock_changes_no_request(variant):
    rows = [(0.05 * i, 20 + 13 * i % 150, 5 + 7 * i % 50) for i in range(40)]
    policy = parse_policy(variant, {})[1]
    limit, model = limits(40, 200, max_model_len=512, seqs=8), tiny_model()
    cost = LinearCost((0.005, 4e-5, 2e-9), (0.02, 2e-5, 6e-7), 3e-4, limit.block_bytes, 1 / 64)
    simulated = simulate(policy, requests(*rows), limit, cost=cost, model=model, jump=True)
    _, ended = live(policy, requests(*rows), limit, cost, model)
    assert len(ended) == len(rows)
    there = simulated.by_id()
    for seq in ended:
        assert seq.finish_s == pytest.approx(there[seq.request.request_id].finish_s, abs=1e-6)
