"""`Swap` and `Park` at their bounds: what is given up, and how far a jump may go."""

import pytest

from kvtwin.testing import limits, linear_machine, requests
from kvtwin.testing.engines import build_engine
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence, Status
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
