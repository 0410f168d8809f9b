"""FastServe: by hand, and what it never does.

Every iteration takes 20 ms and 1 ms a computed token; the first level's quantum is 50 ms unless a test says otherwise.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from systems_steps import by_hand, machine, steps_of, token_times, work

from kvtwin.testing import Outcome, limits, linear_machine, requests, simulate
from kvtwin.testing.conformance import Workload, check_jumps, workloads
from sim.engine.changes import Move, Tier
from sim.engine.limits import WindowLimits
from sim.engine.plan import IterationPlan, StepTimes
from sim.engine.scheduler import Scheduler
from sim.engine.sequence import Sequence
from sim.options.policies import parse_policy
from sim.systems.fastserve.mlfq import Mlfq
from sim.systems.fastserve.preset import FastServe
from sim.systems.fastserve.proactive_swap import ProactiveSwap
from sim.systems.fastserve.quanta import Quanta

ONE_SEAT = limits(seqs=1, max_model_len=128)
FIFTY = FastServe(quantum_ms=50.0)
"""Quanta of 50, 100, 200, 400 ms and so on."""
some = settings(max_examples=20, deadline=None, suppress_health_check=(HealthCheck.too_slow,))
WORKLOADS = workloads(FastServe())


def watched(
    policy: FastServe,
    workload: Workload,
    look: Callable[[Scheduler, IterationPlan, float], None],
    *,
    jump: bool = False,
) -> Outcome:
    """A run in which `look` sees every plan before it is carried out."""
    return simulate(
        policy, workload.arrivals, workload.limits, machine=workload.machine, jump=jump, most_plans=100_000,
        observe=lambda scheduler: lambda plan, start_s, times: look(scheduler, plan, start_s),
    )  # fmt: skip


def parts_of(scheduler: Scheduler) -> tuple[Mlfq, Quanta, ProactiveSwap]:
    order, batching, eviction = scheduler.order, scheduler.batching, scheduler.eviction
    assert isinstance(order, Mlfq) and isinstance(batching, Quanta) and isinstance(eviction, ProactiveSwap)
    return order, batching, eviction


# -- by hand -------------------------------------------------------------------------------------------------------


def test_by_hand() -> None:
    """One seat. Prefills of 90, 30, 80 and 25 ms join levels 1 (100 ms), 0 (50), 1 and 0.

    | from | to | computes | |
    |---|---|---|---|
    | 0 | 90 | 0: 70 tokens | |
    | 90 | 111 | 0 | has run 111 of 100 ms: to level 2 (200 ms). 1 came at 100 |
    | 111 | 141 | 1: 10 tokens | level 0 before level 2: 0 pauses |
    | 141 | 162 | 1 ends | |
    | 162 | 183 | 0 | |
    | 183 | 204 | 0 | 2 came at 190 |
    | 204 | 284 | 2: 60 tokens | level 1 before level 2; 0 has run 42 of 200 ms |
    | 284 | 305 | 2 | has run 101 of 100 ms: to the tail of level 2. 3 came at 290 |
    | 305 | 330 | 3: 5 tokens, ends | |
    | 330 | 351 | 0 | first in level 2 |
    | 351 | 372 | 0 ends | |
    | 372 | 393 | 2 ends | |
    """
    rows = ((0.0, 70, 6), (0.1, 10, 2), (0.19, 60, 3), (0.29, 5, 1))
    steps, outcome = by_hand(FIFTY, rows, ONE_SEAT)
    assert work(steps) == [
        ((), {0: 70}), ((0,), {}), ((), {1: 10}), ((1,), {}), ((0,), {}), ((0,), {}), ((), {2: 60}), ((2,), {}),
        ((), {3: 5}), ((0,), {}), ((0,), {}), ((2,), {}),
    ]  # fmt: skip
    assert [step.end_s for step in steps] == pytest.approx(
        [0.090, 0.111, 0.141, 0.162, 0.183, 0.204, 0.284, 0.305, 0.330, 0.351, 0.372, 0.393], abs=1e-9
    )
    times = token_times(outcome)
    assert times["first"] == pytest.approx([0.090, 0.141, 0.284, 0.330], abs=1e-9)
    assert times["finish"] == pytest.approx([0.372, 0.162, 0.393, 0.330], abs=1e-9)
    assert outcome.scheduler.counters.policy["paused"] == 3
    assert outcome.scheduler.counters.preemptions == 0


def test_two_seats_by_hand() -> None:
    """Prompts are computed beside decodes; the iteration's whole duration counts for all in it.

    | from | to | decodes | prompts | |
    |---|---|---|---|---|
    | 0 | 65 | | 0: 30, 1: 15 | 50 and 35 ms alone: both level 0; both have run 65 ms: level 1, 0 first |
    | 65 | 96 | 0 | 2: 10 | 2, of level 0, came at 10, and takes the seat of 1 |
    | 96 | 118 | 2 (ends), 0 | | 2 has run 53 ms, but ends: 0 has run 53 of 100 ms |
    | 118 | 140 | 0 (ends), 1 (ends) | | |
    """
    steps, outcome = by_hand(FIFTY, ((0.0, 30, 4), (0.0, 15, 2), (0.01, 10, 2)), limits(seqs=2, max_model_len=128))
    assert [(set(step.decodes), step.chunks) for step in steps] == [
        (set(), {0: 30, 1: 15}), ({0}, {2: 10}), ({0, 2}, {}), ({0, 1}, {}),
    ]  # fmt: skip
    times = token_times(outcome)
    assert times["first"] == pytest.approx([0.065, 0.065, 0.096], abs=1e-9)
    assert times["finish"] == pytest.approx([0.140, 0.140, 0.118], abs=1e-9)


@pytest.mark.parametrize("jump", [False, True])
@pytest.mark.parametrize(("prompt", "iterations"), [(30, 1), (9, 2)])
def test_a_quantum_that_ends_with_an_iteration_is_used_up(prompt: int, iterations: int, jump: bool) -> None:
    """50 ms in one iteration (20 + 30) or two (29 + 21), of a quantum of 50: request 0 steps down, 1 runs 50 to 80."""
    outcome = simulate(
        FIFTY, requests((0.0, prompt, 6), (0.01, 10, 1)), ONE_SEAT, machine=machine(), jump=jump, record=True
    )
    assert outcome.by_id()[1].first_scheduled_s == pytest.approx(0.050, abs=1e-9)
    assert outcome.by_id()[1].finish_s == pytest.approx(0.080, abs=1e-9)
    last = [0.080 + 0.021 * i for i in range(1, 7 - iterations)]
    assert outcome.tokens[0][iterations:] == pytest.approx(last, abs=1e-9)


def test_a_long_prompt_joins_a_lower_level_at_once() -> None:
    """While request 0 (30 ms: level 0) computes, a prompt of 120 ms comes (level 2 of 50, 100, 200 ms), then one of 30:
    the later one goes first. In a plain feedback queue, or first come first served, it would not."""
    steps, _ = by_hand(FIFTY, ((0.0, 10, 1), (0.005, 100, 1), (0.010, 10, 1)), ONE_SEAT)
    assert work(steps) == [((), {0: 10}), ((), {2: 10}), ((), {1: 100})]


def test_proactive_swap_by_hand() -> None:
    """One seat, 8 blocks of 16 of which 4 shall be free, 1 ms a copied block.

    | from | to | computes | |
    |---|---|---|---|
    | 0 | 90 | 0: 70 tokens | 5 blocks; 3 are free, but none pauses that could leave |
    | 90 | 111 | 0 | to level 2; 1 came at 100 |
    | 111 | 141 | 1: 10 tokens | 1 block; 0 pauses on the GPU |
    | 141 | 162 | 1 ends | 2 blocks are free, 0 is last in the queue: its 5 leave meanwhile, 141 to 146 |
    | 162 | 167 | nothing | 0 needs 5 blocks and one more to grow; 4 shall stay free, but no other is there |
    | 167 | 251 | 0 | 4 tokens of 21 ms |
    """
    policy = FastServe(quantum_ms=50.0, min_free_blocks=4)
    limit = limits(gpu=8, seqs=1, max_model_len=128)
    moves: list[tuple[float, Move]] = []

    def look(scheduler: Scheduler, plan: IterationPlan, start_s: float) -> None:
        moves.extend((start_s, move) for move in plan.beside)

    outcome = watched(policy, Workload(requests((0.0, 70, 6), (0.1, 10, 2)), limit, machine()), look)
    assert [(move.seq.request.request_id, move.target, move.num_blocks) for _, move in moves] == [
        (0, Tier.HOST, 5), (0, Tier.GPU, 5),
    ]  # fmt: skip
    assert [start_s for start_s, _ in moves] == pytest.approx([0.141, 0.162], abs=1e-9)
    times = token_times(outcome)
    assert times["first"] == pytest.approx([0.090, 0.141], abs=1e-9)
    assert times["finish"] == pytest.approx([0.251, 0.162], abs=1e-9)
    counters = outcome.scheduler.counters
    assert counters.swap_out_blocks == counters.swap_in_blocks == 5
    assert counters.policy["proactive_swap_outs"] == 1
    assert counters.preemptions == counters.policy["late_swap_outs"] == 0


SHORT_EVERY_30_MS = ((0.0, 70, 3), *((0.03 * k, 10, 1) for k in range(10)))
"""A prompt of 90 ms (level 1) and ten of 30 ms (level 0), which keep the one seat busy until 300 ms."""


def test_what_waits_for_long_comes_first_by_hand() -> None:
    """Looks after every second iteration for what has waited 100 ms.

    | from | to | computes | |
    |---|---|---|---|
    | 0 | 120 | 1, 2, 3, 4 | after 60 ms (2 iterations) 0 has waited too short, after 120 ms (4) it goes to level 0 |
    | 120 | 150 | 5 | which came at 120, before 0 got there |
    | 150 | 240 | 0: 70 tokens | before 6, which came at 150; it has run 90 of 50 ms: to level 1 |
    | 240 | 360 | 6, 7, 8, 9 | all came in the meantime; after 8 iterations 0 has waited 60 ms, after 10 120 ms |
    | 360 | 390 | 10 | came at 270 |
    | 390 | 432 | 0 ends | two tokens |
    """
    policy = FastServe(quantum_ms=50.0, starvation_s=0.1, starvation_check=2)
    steps, outcome = by_hand(policy, SHORT_EVERY_30_MS, ONE_SEAT)
    computed = [(*step.decodes, *step.chunks) for step in steps]
    assert computed == [(1,), (2,), (3,), (4,), (5,), (0,), (6,), (7,), (8,), (9,), (10,), (0,), (0,)]
    assert outcome.by_id()[0].first_token_s == pytest.approx(0.240, abs=1e-9)
    assert outcome.by_id()[0].finish_s == pytest.approx(0.432, abs=1e-9)
    assert outcome.scheduler.counters.policy["starvation_promotions"] == 2


# -- what it never does --------------------------------------------------------------------------------------------


class Seen(NamedTuple):
    level: int
    place: int


def places(order: Mlfq) -> dict[object, Seen]:
    """Level and place of all that hold KV."""
    return {seq: Seen(order.level_of(seq), i) for i, seq in enumerate(order.in_order())}


@some
@given(workload=WORKLOADS, num_levels=st.sampled_from([1, 2, 12]), min_free_blocks=st.sampled_from([0, 5]))
def test_what_runs_starts_and_leaves_keeps_the_queue_s_order(
    workload: Workload, num_levels: int, min_free_blocks: int
) -> None:
    """What pauses and what is swapped for room stand behind all that run, so never does the last level overtake.
    Prompts start in order, and none while less than a tenth of the host is free. What is copied is not computed."""

    def look(scheduler: Scheduler, plan: IterationPlan, start_s: float) -> None:
        order, batching, eviction = parts_of(scheduler)
        found = places(order)
        running = [*plan.decodes, *(chunk.seq for chunk in plan.chunks)]
        behind = [*batching.paused, *swapped_before(plan)]
        if running and behind:
            assert max(found[seq].place for seq in running) < min(found[seq].place for seq in behind)
        assert len(running) <= workload.limits.max_num_seqs
        assert plan.prefill_tokens <= workload.limits.max_num_batched_tokens
        assert not {*running} & {*eviction.away, *(move.seq for move in plan.beside)}
        if plan.chunks:
            if scheduler.num_waiting:
                assert max(order.level_of(chunk.seq) for chunk in plan.chunks) <= order.level_of(order.head())
            # What this plan's own preemptions took of the host came after its choice.
            assert scheduler.host.free + plan.swapped_out_blocks >= scheduler.host.num_blocks // 10

    watched(FastServe(num_levels=num_levels, min_free_blocks=min_free_blocks), workload, look)


@some
@given(workload=WORKLOADS)
def test_nothing_waits_in_a_lower_level_beyond_the_bound(workload: Workload) -> None:
    """With a look after every iteration: what has waited so long is in level 0 (waits for copies are none)."""
    policy = FastServe(starvation_s=0.1, starvation_check=1)
    end_s = -1.0

    def observe(scheduler: Scheduler):
        def note(plan: IterationPlan, start_s: float, times: StepTimes) -> None:
            nonlocal end_s
            order, _, _ = parts_of(scheduler)
            if start_s == end_s:
                for seq, since_s in order.idle_since_s.items():
                    assert order.level_of(seq) == 0 or start_s - since_s < 0.1
            end_s = times.end_s

        return note

    simulate(policy, workload.arrivals, workload.limits, machine=workload.machine, jump=False, observe=observe)


@some
@given(workload=WORKLOADS)
def test_nothing_runs_longer_at_a_stretch_than_its_quantum_and_one_iteration(workload: Workload) -> None:
    """And levels only go down without starvation, and the last has no end."""
    policy = FastServe(quantum_ms=30.0, num_levels=4, starvation_s=1e6)
    ran: dict[tuple[object, int], float] = {}
    levels: dict[object, int] = {}

    def look(scheduler: Scheduler, plan: IterationPlan, start_s: float) -> None:
        order, _, _ = parts_of(scheduler)
        for seq in [*plan.decodes, *(chunk.seq for chunk in plan.chunks)]:
            level = order.level_of(seq)
            assert levels.get(seq, 0) <= level
            levels[seq] = level
            if level < 3 and seq.num_preemptions == 0:
                # What it had run at this level before this iteration is less than the quantum.
                assert ran.get((seq, level), 0.0) < 0.030 * 2**level
                ran[seq, level] = ran.get((seq, level), 0.0) + workload.machine.cost.iteration_s(plan)

    watched(policy, workload, look)


# -- memory follows the queue --------------------------------------------------------------------------------------


def test_a_short_prompt_takes_the_blocks_of_what_stands_behind_it() -> None:
    """One seat, 8 blocks, 1 ms a copied block. Request 0 wants twenty tokens.

    | from | to | computes | |
    |---|---|---|---|
    | 0 | 90 | 0: 70 tokens | 5 blocks |
    | 90 | 111 | 0 | has run 111 of 100 ms: to level 2. 1 came at 100 (80 ms: level 1) and needs 4 blocks; 3 are free |
    | 111 | 196 | 1: 60 tokens | after 5 ms, in which 0 goes out |
    | 196 | 217 | 1 ends | |
    | 217 | 222 | nothing | 0 returns |
    | 222 | 600 | 0 | 18 tokens |
    """
    steps, outcome = by_hand(FIFTY, ((0.0, 70, 20), (0.1, 60, 2)), limits(gpu=8, seqs=1, max_model_len=128))
    assert work(steps)[:6] == [((), {0: 70}), ((0,), {}), ((), {1: 60}), ((1,), {}), ((), {}), ((0,), {})]
    times = token_times(outcome)
    assert times["first"] == pytest.approx([0.090, 0.196], abs=1e-9)
    assert times["finish"] == pytest.approx([0.600, 0.217], abs=1e-9)
    counters = outcome.scheduler.counters
    assert counters.preemptions == counters.policy["late_swap_outs"] == 1
    assert counters.swap_out_blocks == counters.swap_in_blocks == 5


def test_what_is_first_in_the_queue_comes_back_though_others_run() -> None:
    """As in the worked swap, but request 1 goes on: 30 ms to 141, then 21 each. At 162 it goes to level 1, at 267 (5
    more, 105 of 100 ms) to the tail of level 2, behind 0: 0 wants 4 tokens, 1 has 23 to go.

    | from | to | computes | |
    |---|---|---|---|
    | 267 | 288 | 1 | 7 blocks are free: 0's 5 return meanwhile, though fewer than 4 stay free |
    | 288 | 309 | 0 | 1 pauses |
    | 309 | 372 | 0 ends | three tokens; 1 block is free, so that 1's 2 leave meanwhile |
    | 372 | 374 | nothing | 1 returns |
    | 374 | 836 | 1 ends | 22 tokens |
    """
    policy = FastServe(quantum_ms=50.0, min_free_blocks=4)
    _, outcome = by_hand(policy, ((0.0, 70, 6), (0.1, 10, 30)), limits(gpu=8, seqs=1, max_model_len=128))
    assert outcome.tokens[0][2:] == pytest.approx([0.309, 0.330, 0.351, 0.372], abs=1e-9)
    assert outcome.tokens[1][6:9] == pytest.approx([0.267, 0.288, 0.395], abs=1e-9)
    assert outcome.by_id()[1].finish_s == pytest.approx(0.836, abs=1e-9)
    assert outcome.scheduler.counters.preemptions == 0
    assert outcome.scheduler.counters.policy["proactive_swap_outs"] == 2


def test_what_stands_before_the_prompt_keeps_its_blocks_and_runs_with_it() -> None:
    """Three seats, 7 blocks, of which 0 and 1 have 3 each and run 100 of 100 ms: both to level 2. 2 came at 100, for
    level 0, and needs 2 blocks: 1, the last, goes out in 3 ms, and 0 runs with 2 (41 ms). 1 returns when 2 has ended
    (166), beside an iteration of 0, and runs from 187 on."""
    rows = ((0.0, 40, 8), (0.0, 40, 8), (0.1, 20, 2))
    steps, outcome = by_hand(FIFTY, rows, limits(gpu=7, seqs=3, max_model_len=128))
    assert work(steps)[:5] == [((), {0: 40, 1: 40}), ((0,), {2: 20}), ((0, 2), {}), ((0,), {}), ((0, 1), {})]
    assert [step.end_s for step in steps[:5]] == pytest.approx([0.100, 0.144, 0.166, 0.187, 0.209], abs=1e-9)
    assert token_times(outcome)["finish"] == pytest.approx([0.275, 0.338, 0.166], abs=1e-9)


def test_nothing_is_taken_where_it_is_not_enough() -> None:
    """Quanta of 100 ms and so on; 11 blocks. From 164 prompt 2 (120 ms: level 1) waits for 7 blocks behind 0, which has
    5. At 230 1 comes to level 1 as well, behind 2, but its block and the 5 free ones are 6: it runs on. 0 ends at 252,
    2 has its blocks from no other."""
    policy = FastServe(quantum_ms=100.0)
    rows = ((0.0, 70, 8), (0.1, 10, 12), (0.15, 100, 2))
    steps, outcome = by_hand(policy, rows, limits(gpu=11, seqs=3, max_model_len=128))
    assert [set(step.decodes) for step in steps if 0.229 < step.start_s < 0.253] == [{0, 1}, {1}]
    assert token_times(outcome)["finish"] == pytest.approx([0.252, 0.479, 0.395], abs=1e-9)
    assert outcome.scheduler.counters.preemptions == 0


def test_a_prompt_waits_for_blocks_that_are_on_their_way_out() -> None:
    """10 ms a block. As in the worked swap, 0 leaves from 141 on, now to 191. At 162 1 ends, and prompt 2 needs 4
    blocks where 3 are free: nothing runs until 191."""
    policy = FastServe(quantum_ms=50.0, min_free_blocks=4)
    rows = requests((0.0, 70, 4), (0.1, 10, 2), (0.15, 60, 2))
    _, outcome = steps_of(policy, rows, limits(gpu=8, seqs=1, max_model_len=128), machine(0.010))
    assert outcome.by_id()[2].first_scheduled_s == pytest.approx(0.191, abs=1e-9)
    assert token_times(outcome)["finish"] == pytest.approx([0.384, 0.162, 0.292], abs=1e-9)
    assert outcome.scheduler.counters.preemptions == 0


def test_where_the_host_has_no_room_nothing_is_taken() -> None:
    """As in the first example with 5 or 4 blocks on the host: 0's 5 go out, or 1 waits until 0 ends at 489."""
    for host, first_s in ((5, 0.196), (4, 0.489 + 0.080)):
        limit = limits(gpu=8, host=host, seqs=1, max_model_len=128)
        _, outcome = by_hand(FIFTY, ((0.0, 70, 20), (0.1, 60, 2)), limit)
        assert outcome.by_id()[1].first_token_s == pytest.approx(first_s, abs=1e-9)


def test_without_swapping_what_stands_behind_is_computed_again() -> None:
    """Request 0 loses 71 tokens of KV at 111 and computes 72 from 212 to 304, then two more tokens."""
    _, policy = parse_policy("fastserve:eviction=recompute,quantum-ms=50", {})
    _, outcome = by_hand(policy, ((0.0, 70, 5), (0.1, 60, 2)), limits(gpu=8, seqs=1, max_model_len=128))
    assert outcome.tokens[0] == pytest.approx([0.090, 0.111, 0.304, 0.325, 0.346], abs=1e-9)
    assert outcome.by_id()[1].finish_s == pytest.approx(0.212, abs=1e-9)


def test_nothing_takes_what_is_left_of_the_blocks_of_one_before_it() -> None:
    """11 blocks, three seats. At 140 prompt 1 (level 1) needs 4 blocks and 0 (level 2) gives up its 8. 2 (105 ms: level
    2, 6 blocks) would fit as well now, but stands behind 0, which comes next: 121 tokens from 241 to 382."""
    _, policy = parse_policy("fastserve:eviction=recompute,quantum-ms=50", {})
    rows = ((0.0, 120, 2), (0.1, 60, 2), (0.12, 85, 1))
    steps, outcome = by_hand(policy, rows, limits(gpu=11, seqs=3, max_model_len=128))
    assert work(steps) == [((), {0: 120}), ((), {1: 60}), ((1,), {}), ((), {0: 121}), ((), {2: 85})]
    assert token_times(outcome)["finish"] == pytest.approx([0.382, 0.241, 0.487], abs=1e-9)


def swapped_before(plan: IterationPlan) -> set[object]:
    """Sequences that go out before the step."""
    return {c.seq for c in plan.changes if isinstance(c, Move) and c.target is Tier.HOST}


@some
@given(workload=WORKLOADS)
def test_what_stands_before_all_that_are_on_the_gpu_waits_for_copies_or_the_host_alone(workload: Workload) -> None:
    """What holds blocks there is behind, and gives them up: a prompt starts, one on the host returns. None gives up
    more than the host has room for, nor all blocks of the GPU, to where it could not return."""

    def look(scheduler: Scheduler, plan: IterationPlan, start_s: float) -> None:
        order, batching, eviction = parts_of(scheduler)
        here = {*scheduler.batch.members, *batching.paused, *(chunk.seq for chunk in plan.chunks)}
        # Where this step preempted, that may have come after its choice.
        if scheduler.changed or scheduler.memory.copies_of or not here:
            return
        memory, host_free = scheduler.memory, scheduler.host.free
        if sum(map(memory.held_blocks, here)) > host_free or any(map(memory.outgrew_gpu, here)):
            return
        first = min(map(order.place_of, here))
        if order and host_free >= -(-scheduler.host.num_blocks // 10):
            assert order.place_of(order.head()) > first
        assert all(order.place_of(seq) > first for seq in eviction.away)

    watched(FIFTY, workload, look)


@some
@given(workload=WORKLOADS)
def test_what_loses_its_blocks_has_waited_as_long_as_before(workload: Workload) -> None:
    waits: dict[Sequence, float] = {}

    def look(scheduler: Scheduler, plan: IterationPlan, start_s: float) -> None:
        order, _, _ = parts_of(scheduler)
        for seq, since_s in order.idle_since_s.items():
            assert waits.get(seq, since_s) == since_s
        waits.clear()
        waits.update(order.idle_since_s)

    watched(FIFTY, workload, look)


def test_a_prompt_beyond_the_token_budget_starts_in_the_next_iteration() -> None:
    """128 tokens an iteration, two seats: two prompts of 70 are computed from 0 to 90 and (with a decode) from 90 to
    181."""
    limit = limits(seqs=2, max_model_len=128, tokens=128)
    steps, _ = by_hand(FastServe(quantum_ms=500.0), ((0.0, 70, 10), (0.0, 70, 10)), limit)
    assert work(steps)[:2] == [((), {0: 70}), ((0,), {1: 70})]
    assert steps[1].end_s == pytest.approx(0.181, abs=1e-9)


def test_no_prompt_takes_the_blocks_that_a_decode_before_it_needs() -> None:
    """Two seats, 4 blocks. Request 0 (36 ms: level 0) fills one block with its 16 tokens and needs a second at 36. 1
    (68 ms: level 1) wants 3 of the 3 that are free: it has to wait for 21 ms, until 0 has ended."""
    limit = limits(gpu=4, seqs=2, max_model_len=128)
    _, outcome = by_hand(FIFTY, ((0.0, 16, 2), (0.01, 48, 2)), limit)
    assert outcome.by_id()[0].finish_s == pytest.approx(0.057, abs=1e-9)
    assert outcome.by_id()[1].first_token_s == pytest.approx(0.057 + 0.068, abs=1e-9)
    assert outcome.scheduler.counters.preemptions == 0


def test_what_is_promoted_has_the_first_level_s_quantum() -> None:
    """Quanta of 50, 200, 800 ms. Request 0 (120 ms: level 1) goes to level 2 after 204 ms, runs 21 ms of 800, and waits
    from 225 for short ones that come every 30 ms. At 345 it has waited 100 ms and goes to level 0, behind the one that
    came at 330, which runs to 375. Then it has 50 ms: three iterations, to 438, and is behind what came by then."""
    policy = FastServe(quantum_ms=50.0, quantum_factor=4.0, starvation_s=0.1, starvation_check=1)
    rows = ((0.0, 100, 30), *((0.21 + 0.03 * k, 10, 1) for k in range(8)))
    _, outcome = by_hand(policy, rows, limits(seqs=1, max_model_len=128))
    assert outcome.tokens[0][:6] == pytest.approx([0.120, 0.141, 0.162, 0.183, 0.204, 0.225], abs=1e-9)
    assert outcome.by_id()[5].finish_s == pytest.approx(0.375, abs=1e-9)
    assert outcome.tokens[0][6:9] == pytest.approx([0.396, 0.417, 0.438], abs=1e-9)
    assert outcome.by_id()[6].first_scheduled_s == pytest.approx(0.438, abs=1e-9)


def test_a_tenth_of_a_small_host_is_rounded_up() -> None:
    """Of 15 blocks 1.5 shall be free. Request 0's 14 blocks (of one token) have left at 1: one is free, less than a
    tenth, so 2 waits until 0 is back."""
    limit = limits(gpu=24, host=15, block_size=1, seqs=1, max_model_len=64)
    policy = FastServe(quantum_ms=30.0, min_free_blocks=8)
    seen: list[float] = []

    def look(scheduler: Scheduler, plan: IterationPlan, start_s: float) -> None:
        if plan.chunks:
            seen.append(scheduler.host.free / scheduler.host.num_blocks)

    arrivals = requests((0.0, 13, 6), (0.05, 6, 4), (0.1, 1, 1))
    watched(policy, Workload(arrivals, limit, machine()), look)
    assert min(seen) >= 0.1


# -- jumps ---------------------------------------------------------------------------------------------------------


def test_a_jump_stops_for_what_returns_since_another_was_demoted() -> None:
    """Stepped, a demotion lets another return at the next boundary; jumped, at the end of the jump."""
    policy = FastServe(starvation_s=0.05, starvation_check=3)
    rows = ((0.0, 60, 20), (0.0, 60, 50), (0.0, 60, 42), *(((0.0, 1, 1),) * 4))
    limit = limits(gpu=208, host=320, block_size=1, max_model_len=64, seqs=1)
    check_jumps(policy, Workload(requests(*rows), limit, linear_machine(decode=(1 / 64, 0.0, 0.0))))


def test_a_jump_stops_for_what_has_to_leave() -> None:
    """Blocks of one token, 116 of 200 shall be free. Request 0 pauses from 111 ms with 71; 1 has 10 from 141 and
    one more with each decode: 118, 117, 116, 115 are free at 162, 183, 204 and 225, when 0 leaves."""
    policy = FastServe(quantum_ms=50.0, min_free_blocks=116)
    limit = limits(gpu=200, block_size=1, seqs=1, max_model_len=128)
    workload = Workload(requests((0.0, 70, 50), (0.1, 10, 60)), limit, machine())
    left: dict[bool, list[float]] = {False: [], True: []}
    for jump in left:

        def look(scheduler: Scheduler, plan: IterationPlan, start_s: float, left_at: list[float] = left[jump]) -> None:
            left_at.extend(start_s for move in plan.beside if move.target is Tier.HOST)

        watched(policy, workload, look, jump=jump)
    assert left[False][0] == pytest.approx(0.225, abs=1e-9)
    assert left[True] == pytest.approx(left[False], abs=1e-9)


def test_a_jump_that_ends_at_a_look_for_what_starves_looks() -> None:
    """A look after every iteration, none shall wait at all. Request 1 (90 ms: level 1) comes in the middle of a jump
    of request 0 in level 1 and goes to level 0 at once."""
    policy = FastServe(quantum_ms=50.0, starvation_s=0.0, starvation_check=1)
    check_jumps(policy, Workload(requests((0.0, 10, 30), (0.1, 70, 2)), ONE_SEAT, machine()))


def test_quanta_that_end_together_end_in_the_queue_s_order() -> None:
    """Sums of floats, which a jump rounds otherwise, once decided which of three went first to the next level."""
    rows = ((0.0, 60, 20), (0.0, 64, 20), (0.0, 64, 20), (0.0, 1, 1), (0.0, 11, 6), (0.0, 14, 6))
    limit = limits(gpu=192, host=0, block_size=1, max_model_len=64, seqs=3)
    check_jumps(FastServe(), Workload(requests(*rows), limit, linear_machine()))


# -- what never comes back -----------------------------------------------------------------------------------------


def test_what_holds_all_blocks_is_not_swapped_for_another() -> None:
    """8 blocks. Request 0 has 113 tokens in all of them and could not return with one to spare, as vLLM asks: it keeps
    them until it ends at 217 (133 ms and four times 21). Prompt 1 of level 0 came at 140 and takes 30 ms from then on.
    """
    rows = ((0.0, 113, 5), (0.14, 10, 1))
    _, outcome = by_hand(FIFTY, rows, limits(gpu=8, seqs=1, max_model_len=128))
    assert token_times(outcome)["finish"] == pytest.approx([0.217, 0.247], abs=1e-9)
    assert outcome.scheduler.counters.preemptions == 0


def test_what_outgrows_the_gpu_is_given_up_at_once() -> None:
    """8 blocks of 16 tokens. Request 0 has 121 tokens at 140, of which the last is fed next, and 129 at 308 (eight more
    iterations): that has no block. Prompt 1 starts at once."""
    rows = ((0.0, 120, 20), (0.2, 10, 1))
    _, outcome = by_hand(FIFTY, rows, limits(gpu=8, seqs=1, max_model_len=256))
    assert outcome.by_id()[0].error == "ignored: swapped sequence outgrew the GPU blocks"
    assert outcome.scheduler.counters.swap_out_blocks == 0
    assert outcome.tokens[0][-1] == pytest.approx(0.308, abs=1e-9)
    assert outcome.by_id()[1].first_scheduled_s == pytest.approx(0.308, abs=1e-9)


@pytest.mark.parametrize("system", ["vllm-swap", "fastserve"])
def test_what_is_given_up_holds_back_nothing(system: str) -> None:
    """Two blocks, of which 0 outgrows both: 1 is admitted all the same, since 0 counts no longer as decoding."""
    _, policy = parse_policy(f"{system}:admission=slack,tpot-slo-ms=30", {})
    rows = ((0.0, 30, 21), (0.2, 24, 8))
    outcome = simulate(policy, requests(*rows), limits(gpu=2, max_model_len=256), machine=linear_machine())
    assert outcome.by_id()[0].error == "ignored: swapped sequence outgrew the GPU blocks"
    assert outcome.by_id()[1].first_token_s > 0.2


def test_nothing_is_sent_out_and_called_back_for_ever() -> None:
    """7 blocks, and 20 shall be free: had three that need all of them been swapped, the first of the others would have
    been called back as one of the first three, and sent out again since it is not."""
    policy = FastServe(quantum_ms=1e-3, starvation_s=0.05, starvation_check=3, min_free_blocks=20)
    rows = (
        (0.0, 117, 31), (0.02, 85, 47), (2.02, 32, 44), (2.021, 61, 43), (2.022, 137, 31), (2.042, 86, 20),
        (2.043, 29, 56), (2.044, 72, 25), (2.044, 49, 44), (2.064, 62, 27), (2.084, 118, 27), (2.085, 64, 55),
    )  # fmt: skip
    limit = limits(gpu=7, seqs=3, max_model_len=256)
    outcome = simulate(policy, requests(*rows), limit, machine=linear_machine(), most_plans=5000)
    assert len(outcome.ended) == len(rows)


def test_blocks_taken_from_others_are_counted_in_groups() -> None:
    """Two groups of layers, 14 pool blocks: what others give up is less than as many whole blocks."""
    limit = limits(gpu=7, host=100, seqs=2, max_model_len=256, window=WindowLimits(33, 1, 1, 3))
    rows = ((0.0, 35, 9), (0.02, 47, 19), (0.02, 86, 8))
    outcome = simulate(FastServe(), requests(*rows), limit, machine=linear_machine())
    assert all(not seq.error for seq in outcome.by_id().values()) and len(outcome.ended) == 3
