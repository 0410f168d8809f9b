"""Two clocks, one decision: the engine on SimPy and on the real clock's driver with a device that only pretends."""

import sys
from heapq import heappop, heappush
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent.parent / "sim"))

from small import CheckedEngine, limits, requests, simulate, tiny_model  # noqa: E402

from gpu_runtime.driver import LiveInstance  # noqa: E402
from sim.arrivals import TIE_S, Arrivals  # noqa: E402
from sim.cost import LinearCost, build_cost  # noqa: E402
from sim.itl import GapCollector  # noqa: E402
from sim.plan import IterationPlan, StepTimes, Transfer  # noqa: E402
from sim.policies import POLICIES  # noqa: E402
from sim.policies.base import Deployment, Policy  # noqa: E402
from sim.pricing import Lanes, Pricer  # noqa: E402
from sim.profile import load_profile  # noqa: E402
from sim.scenario import parse_policy  # noqa: E402
from sim.specs.hardware import load_hardware  # noqa: E402


class PretendedDevice:
    """A device with a clock of its own that takes for everything what the cost model says."""

    def __init__(self, cost, lanes, layers):
        self.clock_s = 0.0
        self.pending: list[tuple[float, int, Transfer]] = []
        self.count = 0
        self.pricer = Pricer(cost, lanes, self.finish_at, layers=layers)

    def finish_at(self, end_s: float, transfer: Transfer) -> None:
        self.count += 1
        heappush(self.pending, (end_s, self.count, transfer))

    def now_s(self) -> float:
        return self.clock_s

    def execute(self, plan: IterationPlan) -> StepTimes:
        times = self.pricer.step(plan, self.clock_s)
        self.clock_s = times.end_s
        return times

    def ended_transfers(self) -> list[Transfer]:
        ended = []
        while self.pending and self.pending[0][0] <= self.clock_s + TIE_S:
            ended.append(heappop(self.pending)[2])
        return ended

    @property
    def copies_pending(self) -> bool:
        return bool(self.pending)

    def wait(self, until_s: float) -> None:
        self.clock_s = min(until_s, self.pending[0][0]) if self.pending else until_s


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
    return round(start_s, 9), round(times.end_s, 9), chunks, moves, sums


def live(policy: Policy, arrivals, limit, cost, model):
    """The same run on the real clock's driver."""
    gaps = GapCollector()
    scheduler = policy.scheduler(limit, gaps, Deployment(model, load_hardware("a100-80g"), 1, cost))
    ended, plans = [], []
    engine = CheckedEngine(scheduler, policy.length_predictor(0), ended.append)
    device = PretendedDevice(cost, Lanes(), model.num_layers)
    instance = LiveInstance(
        engine, device, Arrivals(arrivals), observer=lambda plan, start_s, times: plans.append(shown(plan, start_s, times))
    )  # fmt: skip
    instance.serve()
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
    assert plans == [shown(*facts) for facts in simulated.plans]
    assert [(s.request.request_id, s.status, s.error) for s in ended] == [
        (s.request.request_id, s.status, s.error) for s in simulated.ended
    ]
    for here, there in zip(ended, simulated.ended, strict=True):
        assert here.first_token_s == pytest.approx(there.first_token_s, abs=1e-9)
        assert here.finish_s == pytest.approx(there.finish_s, abs=1e-9)


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
