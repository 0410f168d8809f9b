"""What every system must keep to, whatever its parts. Run it over a preset: `check(MyPolicy())`.

On random workloads made to be contended and out of order: every request ends once, no block is lost, pools say what a
recount says, Eq. 5 balances, lanes never overlap themselves, no status is entered from where it may not be, jumping
changes nothing, gap statistics equal those of single tokens, and those that ended are forgotten.
`kvtwin.testing.live` has the other clock's half.
"""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from random import Random
from types import CodeType, FunctionType, ModuleType

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kvtwin.testing.engines import Machine, Outcome, limits, linear_machine, requests, simulate
from sim.cost.host import Host
from sim.engine.limits import Limits
from sim.engine.sequence import Sequence, Status
from sim.errors import UserError
from sim.parts.catalogue import BATCHINGS, STAGES
from sim.systems.base import Asked, Policy
from traces.request import Request, ToolCall

TOLERANCE_S = 1e-7
"""How far times of one run may be from another's that differs in rounding alone, s."""
MOST_HELD = 3
"""Sequences that may be held after they ended, the last plan's among them, beside one for each block in a cache."""

gaps = st.sampled_from([0.0, 0.0, 0.001, 0.02, 0.3, 2.0])
rows = st.lists(st.tuples(gaps, st.integers(1, 150), st.integers(1, 60)), min_size=1, max_size=25)
# A burst of long requests and one of short ones behind it: where an order lets the short overtake, it shows.
bursts = st.tuples(
    st.lists(st.tuples(st.just(0.0), st.integers(60, 150), st.integers(20, 60)), min_size=3, max_size=10),
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.05, 0.3]), st.integers(1, 20), st.integers(1, 9)), min_size=3, max_size=12
    ),
).map(lambda parts: parts[0] + parts[1])
# Iterations that grow fast with the context, slowly, and not at all.
DECODES = ((0.02, 2e-5, 6e-7), (0.02, 2e-5, 2e-5), (1 / 64, 0.0, 0.0))
# The engine's own time: none, added to every iteration, hidden behind the one before: shorter or longer than that.
HOSTS = (None, None, Host(0.004, 1e-4, False), Host(0.004, 1e-4, True), Host(0.0205, 1e-5, True))


def hosts_of(policy: Policy) -> list[Host | None]:
    """Those of `HOSTS` that go with a policy: scheduling ahead hides host time."""
    return [host for host in HOSTS if host is None or host.hidden or not policy.schedules_ahead]


@dataclass(frozen=True, repr=False)
class Workload:
    """Requests, limits as the policy sets them, and a machine."""

    arrivals: list[Request]
    limits: Limits
    machine: Machine

    def __repr__(self) -> str:
        rows = [
            tuple(request[1:4]) + tuple(request[5:8]) * bool(request.hash_ids) + request.calls
            for request in self.arrivals
        ]
        return f"{rows} on {self.limits} and {self.machine}"


def draw_workload(draw: st.DrawFn, policy: Policy) -> Workload:
    """Small workloads in tiny pools, within what the policy's limits allow."""
    block_size = draw(st.sampled_from([1, 4, 16]))
    length = draw(st.sampled_from([64, 256]))
    seqs = draw(st.sampled_from([1, 3, 8, 256]))
    limit = limits(
        gpu=draw(st.integers(2, 40)) * 16 // block_size,
        host=draw(st.sampled_from([0, 3, 20, 1000])) * 16 // block_size,
        block_size=block_size,
        max_model_len=length,
    )
    limit = limits_of(policy, limit, seqs, draw(st.sampled_from([None, max(seqs, 16), max(seqs, 64)])))
    now_s, found = 0.0, []
    for gap_s, prompt, output in draw(st.one_of(rows, rows, bursts)):
        now_s += gap_s
        found.append((now_s, prompt, output))
    machine = linear_machine(
        limit.block_bytes, decode=draw(st.sampled_from(DECODES)), host=draw(st.sampled_from(hosts_of(policy)))
    )
    arrivals = requests(*found)
    if policy.can_cache_prefixes and draw(st.booleans()):
        limit = replace(limit, enable_prefix_caching=True)
        named = draw(st.sampled_from([block_size, 16, 8]))
        arrivals = [with_prefix(request, named, draw) for request in arrivals]
    return Workload(calling(policy, arrivals), limit, machine)


def calling(policy: Policy, arrivals: list[Request], speed: float = 1.0) -> list[Request]:
    """The requests, with calls of tools if the policy's stage takes any; tools are so many times as fast."""
    if not STAGES[policy.names["stage"]].takes_calls:
        return arrivals
    rng = Random(len(arrivals))
    return [_with_calls(request, rng, speed) for request in arrivals]


def _with_calls(request: Request, rng: Random, speed: float) -> Request:
    """Up to three calls: some take no time, some return nothing."""
    most = request.output_tokens - 1
    places = sorted(rng.sample(range(1, most + 1), min(rng.choice((0, 1, 2, 3)), most)))
    calls = (ToolCall(place, rng.choice((0.0, 0.01, 0.2, 2.0)) / speed, rng.choice((0, 1, 5, 30))) for place in places)
    return request._replace(calls=tuple(calls))


workloads = st.composite(draw_workload)


def with_prefix(request: Request, named: int, draw: st.DrawFn) -> Request:
    """The request as one of a few that begin alike; what it generates may be in a later prompt, too."""
    kind, parts_at = draw(st.integers(0, 2)), draw(st.sampled_from([0, 1, 3, 1000]))
    begin = (request.request_id + 1) * 1000
    num_ids = -(-request.prompt_tokens // named)
    last = -(-(request.prompt_tokens + request.output_tokens) // named) if draw(st.booleans()) else num_ids
    ids = tuple(kind * 100 + i if i < parts_at else begin + i for i in range(last))
    if not kind:
        return request
    return request._replace(hash_ids=ids[:num_ids], hash_block_tokens=named, output_hash_ids=ids[num_ids:])


def limits_of(policy: Policy, limit: Limits, seqs: int, chunk: int | None) -> Limits:
    """`limit` with the policy's own seats and budget: in chunks of `chunk` tokens if it can, else whole prompts."""
    if chunk is not None and BATCHINGS[policy.names["batching"]].chunks_are_blocks:
        chunk = -(-chunk // limit.block_size) * limit.block_size
    for asked in (
        Asked(limit.max_model_len, seqs, chunk, chunk is not None),
        Asked(limit.max_model_len, seqs),
        Asked(limit.max_model_len, seqs, max(seqs, 16)),
        Asked(limit.max_model_len, seqs, max(seqs, limit.max_model_len)),
    ):
        try:
            engine = policy.engine_limits(asked)
        except UserError:
            continue
        return replace(
            limit,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            enable_chunked_prefill=engine.enable_chunked_prefill,
            stops_at_max_model_len=BATCHINGS[policy.names["batching"]].stops_at_max_model_len,
        )
    raise AssertionError(f"{policy.name} takes none of the usual limits")


def run(
    policy: Policy, workload: Workload, *, jump: bool = True, checked: bool = True, record: bool = False
) -> Outcome:
    """One simulated run; AssertionError if it takes more plans than every token computed again ten times would."""
    tokens = sum(request.prompt_tokens + request.output_tokens for request in workload.arrivals)
    return simulate(
        policy, workload.arrivals, workload.limits, machine=workload.machine, jump=jump, checked=checked,
        record=record, most_plans=1000 + 10 * tokens,
    )  # fmt: skip


def check_ends(outcome: Outcome, workload: Workload) -> None:
    """Every request ended once, everything is given back, and no lane did two things at a time."""
    assert sorted(seq.request.request_id for seq in outcome.ended) == [r.request_id for r in workload.arrivals]
    assert not outcome.scheduler.has_unfinished
    assert outcome.scheduler.num_running == outcome.scheduler.num_swapped == outcome.scheduler.num_waiting == 0
    for pool in (outcome.scheduler.gpu, outcome.scheduler.host):
        assert pool.free == pool.num_blocks
    for seq in outcome.ended:
        assert not seq.num_blocks, f"{seq} ended with blocks"
        if seq.status is Status.FINISHED:
            # Some engines end a sequence at the longest context, or where the pool would.
            most = max(1, outcome.scheduler.batching.max_new_tokens(seq))
            assert seq.num_generated in (seq.request.output_tokens, most)
            assert seq.request.arrival_s - 1e-9 <= seq.first_scheduled_s <= seq.first_token_s <= seq.finish_s
        else:
            assert seq.status is Status.IGNORED
    for lane in (outcome.lanes.compute, outcome.lanes.d2h, outcome.lanes.h2d):
        assert lane.intervals is not None
        for before, after in pairwise(lane.intervals):
            assert after.start_s >= before.end_s - 1e-9


def check_jumps(policy: Policy, workload: Workload, jumped: Outcome | None = None) -> None:
    """One event for many iterations is what the iterations are one by one; `jumped` is such a run, if there is one."""
    jumped = jumped or run(policy, workload, jump=True, checked=False)
    stepped = run(policy, workload, jump=False, checked=False)
    one, other = jumped.by_id(), stepped.by_id()
    for key, seq in one.items():
        assert seq.status is other[key].status, (seq, other[key])
        assert abs(seq.first_token_s - other[key].first_token_s) < TOLERANCE_S, seq
        assert abs(seq.finish_s - other[key].finish_s) < TOLERANCE_S, seq
    assert jumped.instance.iterations == stepped.instance.iterations
    assert jumped.scheduler.counters == stepped.scheduler.counters


def check_gaps(outcome: Outcome) -> None:
    """Statistics over runs of gaps equal those over single tokens; `outcome` must have recorded them."""
    for seq in outcome.ended:
        if seq.status is Status.FINISHED:
            times = outcome.tokens[seq.request.request_id]
            assert len(times) == seq.num_generated
            assert times[0] == seq.first_token_s
            assert abs(times[-1] - seq.finish_s) < 1e-9
    gaps_s = [gap_s for seq in outcome.ended for gap_s in _gaps_of(seq.request, outcome.tokens)]
    found = outcome.gaps.statistics((50.0, 99.0))
    if not gaps_s:
        assert found is None
        return
    assert found is not None and found.exact
    assert found.count == len(gaps_s)
    np.testing.assert_allclose(found.mean, np.mean(gaps_s), rtol=1e-9)
    np.testing.assert_allclose(found.std, np.std(gaps_s), rtol=1e-6, atol=1e-8)
    for percentile, value in found.percentiles.items():
        np.testing.assert_allclose(value, np.percentile(gaps_s, percentile), rtol=1e-9, atol=1e-9)


def _gaps_of(request: Request, tokens: Mapping[int, list[float]]) -> list[float]:
    """Between the tokens of a request, without what tools took, s."""
    gaps_s = [b - a for a, b in pairwise(tokens.get(request.request_id, ()))]
    for call in request.calls:
        if call.after_tokens <= len(gaps_s):
            gaps_s[call.after_tokens - 1] -= call.duration_s
    return gaps_s


def check_forgotten(policy: Policy) -> None:
    """The parts hold few of the sequences that ended, beside those with cached blocks: a server runs for months."""
    draw = Random(0)
    rows = [(draw.choice((0.0, 0.0, 0.02, 0.3)), draw.randint(1, 150), draw.randint(1, 60)) for _ in range(80)]
    times_s = accumulate(gap_s for gap_s, *_ in rows)
    arrivals = requests(*((now_s, prompt, output) for now_s, (_, prompt, output) in zip(times_s, rows, strict=True)))
    limit = limits_of(policy, limits(gpu=24, host=20, block_size=16, max_model_len=256), 8, 64)
    if policy.can_cache_prefixes:
        limit = replace(limit, enable_prefix_caching=True)
        texts = [tuple(range(100 * kind, 100 * kind + 10)) for kind in range(3)]
        cut = [texts[request.request_id % 3][: -(-request.prompt_tokens // 16)] for request in arrivals]
        arrivals = [r._replace(hash_ids=ids, hash_block_tokens=16) for r, ids in zip(arrivals, cut, strict=True)]
    workload = Workload(calling(policy, arrivals), limit, linear_machine(limit.block_bytes))
    outcome = run(policy, workload, checked=False)
    num_held = len(reachable(outcome.scheduler).intersection(outcome.ended))
    pool = outcome.scheduler.gpu
    # A chunk of a conversation knows which turn had it last.
    num_cached = outcome.scheduler.memory.num_cached_on_host
    num_cached += pool.index.num_idle if pool.index is not None else 0
    assert num_held <= MOST_HELD + num_cached, f"{num_held} of {len(rows)} sequences that ended are still held"


def reachable(root: object) -> set[Sequence]:
    """Sequences that an object leads to."""
    known, waiting, found = {id(root)}, [root], set()
    for held in waiting:
        if isinstance(held, Sequence):
            found.add(held)
        elif not isinstance(held, type | ModuleType | CodeType):
            # Of functions what they close over: their module knows all of them.
            parts = gc.get_referents(held) if not isinstance(held, FunctionType) else held.__closure__ or ()
            new = [part for part in parts if id(part) not in known]
            known.update(map(id, new))
            waiting += new
    return found


def check(
    policy: Policy,
    *,
    examples: int = 40,
    shrink: bool = True,
    among: st.SearchStrategy[Workload] | None = None,
    memory: type | None = None,
) -> None:
    """All of it, on `examples` random workloads. AssertionError where it fails, with the smallest workload if `shrink`.

    `among` are other workloads than `workloads` draws; `memory` is what the scheduler's is to be.
    """

    def one(workload: Workload) -> None:
        outcome = check_one(policy, workload)
        assert memory is None or isinstance(outcome.scheduler.memory, memory)

    over_workloads(policy, one, examples=examples, shrink=shrink, among=among)
    if among is None:
        check_forgotten(policy)


def check_one(policy: Policy, workload: Workload) -> Outcome:
    """On one: conservation (recounted after every step, statuses by their table), jumps, and gap statistics."""
    outcome = run(policy, workload, record=True)
    check_ends(outcome, workload)
    check_gaps(outcome)
    check_jumps(policy, workload, outcome)
    return outcome


def over_workloads(
    policy: Policy,
    body: Callable[[Workload], None],
    *,
    examples: int = 40,
    shrink: bool = True,
    among: st.SearchStrategy[Workload] | None = None,
) -> None:
    """Hold `body` to random workloads of a policy, or to those `among`."""
    phases = tuple(Phase.__members__.values()) if shrink else (Phase.generate,)

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=phases,
        suppress_health_check=(HealthCheck.too_slow,),
    )
    @given(workload=workloads(policy) if among is None else among)
    def over(workload: Workload) -> None:
        body(workload)

    over()
