"""The skip-join queue as a plain order: levels, which is first in them, and which starves. By hand."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.engine.limits import Counters
from sim.engine.plan import IterationPlan, StepTimes
from sim.engine.sequence import Sequence
from sim.systems.fastserve.mlfq import Mlfq
from sim.systems.fastserve.preset import MlfqOptions
from traces.request import Request


def sequence(request_id: int, prompt: int, arrival_s: float = 0.0) -> Sequence:
    return Sequence(Request(request_id, arrival_s, prompt, 5))


def queue(num_levels: int = 4, starvation_s: float = 1.0, check_every: int = 3) -> Mlfq:
    """Quanta of 10, 20, 40 ms and no end; a prompt takes 1 ms a token. Bound to nothing but a clock and counters."""
    options = MlfqOptions(10.0, 2.0, num_levels, starvation_s, check_every)
    order = Mlfq(lambda tokens: tokens / 1000, options)
    order.scheduler = SimpleNamespace(now_s=0.0, counters=Counters())  # type: ignore[assignment]
    return order


def ids(order: Mlfq) -> list[int]:
    return [seq.request.request_id for seq in order]


def iterate(order: Mlfq, times: int) -> None:
    for _ in range(times):
        order.committed(IterationPlan(), StepTimes(1, 0.0, 0.0, 0.0, 0.0, 1))


@pytest.mark.parametrize(
    ("prompt", "level"), [(1, 0), (10, 0), (11, 1), (20, 1), (21, 2), (40, 2), (41, 3), (80, 3), (81, 3), (10_000, 3)]
)
def test_a_request_joins_the_first_level_whose_quantum_covers_its_prefill(prompt: int, level: int) -> None:
    order = queue()
    seq = sequence(0, prompt)
    order.add(seq)
    assert order.level_of(seq) == level


def test_what_is_put_back_comes_first_in_its_level_the_last_preempted_first() -> None:
    order = queue()
    seqs = [sequence(i, prompt) for i, prompt in enumerate((5, 30, 5, 30))]
    for seq in seqs:
        order.add(seq)
    started = [order.pop() for _ in range(3)]
    assert [seq.request.request_id for seq in started] == [0, 2, 1]
    order.add(sequence(4, 5))
    assert ids(order) == [4, 3]
    order.put_back([seqs[0], seqs[1], seqs[2]])
    assert ids(order) == [2, 0, 4, 1, 3]
    # A prompt that has grown keeps its level.
    seqs[2].num_tokens = 1000
    assert order.pop() is seqs[2]
    order.put_back([seqs[2]])
    assert ids(order) == [2, 0, 4, 1, 3]


def test_what_has_waited_for_the_bound_goes_to_the_tail_of_the_first_level_at_every_third_iteration() -> None:
    order = queue()
    early, late, short = sequence(0, 100, 0.5), sequence(1, 30, 0.9), sequence(2, 5, 1.0)
    for seq in (early, late, short):
        order.add(seq)
    order.prepare(1.5)
    iterate(order, 2)
    order.prepare(1.5)
    assert ids(order) == [2, 1, 0]
    iterate(order, 1)
    order.prepare(1.5)  # has waited 1.0, 0.6 and 0.5 s
    assert ids(order) == [2, 0, 1]
    assert order.level_of(early) == 0
    iterate(order, 1)
    order.prepare(3.0)  # no look now
    assert ids(order) == [2, 0, 1]
    iterate(order, 2)
    order.prepare(3.0)
    assert ids(order) == [2, 0, 1]
    assert order.level_of(late) == 0
    assert order.scheduler.counters.policy["starvation_promotions"] == 2


commands = st.lists(st.tuples(st.sampled_from(["add", "pop", "put_back", "remove"]), st.integers(0, 90)), max_size=60)


@given(commands)
def test_it_is_a_list_for_each_level(commands: list[tuple[str, int]]) -> None:
    order = queue()
    levels: list[list[Sequence]] = [[], [], [], []]
    out: list[Sequence] = []
    count = 0
    for command, value in commands:
        waiting = [seq for level in levels for seq in level]
        if command == "add":
            seq = sequence(count, value + 1)
            count += 1
            order.add(seq)
            levels[sum(value + 1 > quantum for quantum in (10, 20, 40))].append(seq)
        elif command == "pop" and waiting:
            seq = order.pop()
            assert seq is waiting[0]
            levels[order.level_of(seq)].remove(seq)
            out.append(seq)
        elif command == "put_back":
            seqs, out = out[: value % 4], out[value % 4 :]
            order.put_back(seqs)
            for seq in seqs:
                levels[order.level_of(seq)].insert(0, seq)
        elif command == "remove" and waiting:
            seq = waiting[value % len(waiting)]
            assert order.remove(seq)
            levels[order.level_of(seq)].remove(seq)
        assert list(order) == [seq for level in levels for seq in level]
        assert len(order) == len(list(order))
