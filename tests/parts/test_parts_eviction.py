"""`Swap` and `Park` at their bounds: what is given up, how far a jump may go; FastSwitch's kept copies."""

import pytest

from kvtwin.testing import conformance, limits, linear_machine, requests, simulate
from kvtwin.testing.engines import build_engine
from sim.engine.changes import Move
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence, Status
from sim.options.policies import parse_policy
from sim.parts.eviction.swap import Swap
from sim.systems.vllm055 import VllmSwap


@pytest.mark.parametrize(
    ("prefilling", "rest", "again"),
    [(True, 32, False), (True, 33, True), (False, 33, False)],
    ids=["fits the budget", "exceeds it", "decodes"],
)
def test_what_is_out_for_ever_is_given_up_unless_its_prompt_no_longer_fits_a_step(prefilling, rest, again):
    """A budget of 32 tokens, and 64 tokens whose KV is on the host."""
    scheduler = build_engine(
        VllmSwap(), limits(tokens=32, seqs=32, chunked=True), linear_machine(), lambda seq: None
    ).scheduler
    swap = scheduler.eviction
    assert isinstance(swap, Swap)
    seq = Sequence(requests((0.0, 64 + rest, 5))[0])
    seq.num_computed, seq.num_blocks, seq.prefilling, seq.status = 64, 4, prefilling, Status.SWAPPED
    scheduler.host.allocate(4)
    swap.swapped.append(seq)
    assert swap.unblock()
    assert not swap.swapped and scheduler.host.free == scheduler.host.num_blocks
    assert seq.status is (Status.WAITING if again else Status.IGNORED)
    assert list(scheduler.order) == [seq] * again
    assert (seq.num_computed, scheduler.counters.preemptions) == ((0, 1) if again else (64, 0))


@pytest.mark.parametrize(
    ("prefilling", "budget", "num_seqs", "comes"),
    [(True, 32, 0, True), (True, 31, 0, False), (False, 1, 0, True), (False, 0, 0, False), (False, 9, 1, True),
     (False, 9, 2, False)],
)  # fmt: skip
def test_what_is_out_comes_back_where_budget_and_seats_just_last(prefilling, budget, num_seqs, comes):
    """Of 96 tokens 64 have KV on the host: 32 are to compute, or one decodes. Two seats."""
    limit = limits(tokens=128, seqs=2, chunked=True)
    scheduler = build_engine(VllmSwap(), limit, linear_machine(), lambda seq: None).scheduler
    swap, plan = scheduler.eviction, IterationPlan()
    assert isinstance(swap, Swap)
    seq = Sequence(requests((0.0, 96, 5))[0])
    seq.num_computed, seq.num_blocks, seq.prefilling, seq.status = 64, 6, prefilling, Status.SWAPPED
    scheduler.host.allocate(6)
    swap.swapped.append(seq)
    swap.bring_back(plan, budget, num_seqs)
    assert list(swap.swapped) == [seq] * (not comes)
    assert [chunk.num_new for chunk in plan.chunks] == [32] * (comes and prefilling)
    assert plan.num_decodes == (comes and not prefilling)


def swaps(memory: str, *rows: tuple[float, int, int], host: int = 20) -> list[tuple[int, int, int]]:
    """Request, first and last token of each copy to the host: seven blocks of 16 tokens on the GPU."""
    moves: list[Move] = []
    policy = parse_policy(f"vllm-swap:memory={memory}", {})[1]
    simulate(
        policy, requests(*rows), limits(gpu=7, host=host),
        machine=linear_machine(prefill=(0.0, 1e-3, 0.0), decode=(1e-3, 0.0, 0.0)),
        observe=lambda scheduler: lambda plan, start_s, times: moves.extend(
            move for move in plan.changes if isinstance(move, Move)
        ),
    )  # fmt: skip
    return [(move.seq.request.request_id, move.first_token, move.end_token) for move in moves]


TWICE = (0.0, 16, 56), (0.0, 32, 8), (0.0, 16, 56)


def test_only_what_was_filled_since_is_copied_again():
    """2 leaves with a full block and a begun one. When it leaves again the host still has the full one."""
    assert swaps("paged", *TWICE) == [(2, 0, 32), (2, 0, 48)]
    assert swaps("kept-copies", *TWICE) == [(2, 0, 32), (2, 16, 48)]


def test_copies_of_those_that_run_give_way():
    """1 leaves with three blocks while 2 runs, of which the host has two. It has room for four: those two go."""
    rows = (0.0, 32, 56), (0.0, 16, 40), (0.0, 32, 56)
    assert swaps("kept-copies", *rows, host=4) == [(2, 0, 32), (2, 32, 48), (1, 0, 48)]


@pytest.mark.parametrize("text", ["vllm-swap:memory=kept-copies", "sarathi:memory=kept-copies,eviction=swap"])
def test_it_keeps_to_what_every_memory_must(text):
    conformance.check(parse_policy(text, {})[1], examples=25)
