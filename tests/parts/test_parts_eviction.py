"""`Swap` and `Park` at their bounds: who is given up, and how far a jump may go."""

from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from kvtwin.testing import limits, linear_machine, requests
from kvtwin.testing.engines import build_engine
from sim.engine.batch import DecodeBatch
from sim.engine.itl import GapCollector
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence, Status
from sim.parts.eviction.park import HORIZON, Park
from sim.parts.eviction.recompute import Recompute
from sim.parts.eviction.swap import Swap
from sim.parts.order.prospects import AWAY, GENERATED, NUM_COLUMNS, Prospects
from sim.systems.vllm055 import VllmSwap


@pytest.mark.parametrize(
    ("prefilling", "rest", "again"),
    [(True, 32, False), (True, 33, True), (False, 33, False)],
    ids=["fits the budget", "exceeds it", "decodes"],
)
def test_who_is_out_for_ever_is_given_up_unless_its_prompt_no_longer_fits_a_step(prefilling, rest, again):
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
def test_who_is_out_comes_back_where_budget_and_seats_just_last(prefilling, budget, num_seqs, comes):
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


class Choosing(Park):
    """Three prospects of one kind; those of the batch that may leave are asked for."""

    def __init__(self, members, movable):
        super().__init__()
        rows = np.arange(3)
        judged = np.zeros(3), np.array([1.0, 3.0, 2.0]), np.zeros(3), None, rows
        self.prospects = SimpleNamespace(judged=lambda _: judged, rows=lambda _: rows, seqs="abc")
        self.batch, self._movable = SimpleNamespace(members=members), movable

    def _may_leave(self, seq):
        return seq in self._movable


@pytest.mark.parametrize(
    ("members", "movable", "victim"),
    [("abc", "abc", "b"), ("ac", "abc", "c"), ("abc", "ac", "c"), ("ab", "a", "a"), ("a", "bc", None)],
)
def test_the_dearest_of_the_batch_that_may_leave_does(members, movable, victim):
    assert Choosing(members, movable)._victim(0.1) == victim


def test_a_jump_goes_as_far_as_free_and_coming_blocks_go_but_for_the_horizon():
    """Two members begin blocks in the first and second iteration, and every 16 later: the tenth block in the 66th."""
    batch = DecodeBatch(16, GapCollector())
    for request in requests((0.0, 17, 1000), (0.0, 16, 1000)):
        batch.add(Sequence(request))
    park = Park()
    park.batch, park.gpu, park.paged = batch, SimpleNamespace(free=5), SimpleNamespace(releasing=3)
    assert park.holds(None, 1000) == 65 - HORIZON
    assert park.holds(None, 10) == 10


def test_as_many_iterations_are_kept_free_as_a_copy_takes():
    """Contexts of 50 tokens on average are four blocks of 1 MiB: 0.4 s at 10 MiB/s, 40 iterations of 10 ms."""
    batch = DecodeBatch(16, GapCollector())
    for request in requests((0.0, 59, 1000), (0.0, 39, 1000)):
        batch.add(Sequence(request))
    park = Park()
    park.batch, park.paged = batch, SimpleNamespace(block_size=16)
    park.cost = SimpleNamespace(decode_steps=lambda members, tokens, windowed, longest: (0.01, 0.0))
    for bytes_per_s, iterations in ((10 << 20, 40), (1 << 30, HORIZON)):
        park.order = SimpleNamespace(iteration_s=lambda: 0.01)
        park.mechanism = SimpleNamespace(
            copy_s=lambda blocks, way, rate=bytes_per_s: blocks * (1 << 20) / rate, recomputes=lambda *words: False
        )
        assert park._copy_iterations() == iterations
    park.mechanism.recomputes = lambda *words: words == (49, 4, 0, 0.01)
    park.mechanism.copy_s = lambda blocks, way: 1e3
    assert park._copy_iterations() == HORIZON


class Left(Park):
    """Notes what becomes of victims; copies of those below 9 take longer than computing them again."""

    def __init__(self):
        super().__init__()
        self.noted = []
        self.paged = SimpleNamespace(
            swap_out=lambda seq, plan: self.noted.append(("out", seq)), held_blocks=lambda seq: seq.num_tokens + 1
        )
        self.mechanism = SimpleNamespace(recomputes_late=lambda tokens, blocks: tokens < 9 and blocks == tokens + 1)
        self.scheduler = SimpleNamespace(park=lambda seq: self.noted.append(("parked", seq)))
        self.prospects = SimpleNamespace(stands=lambda seq, where: self.noted.append((where, seq)))
        self.tally = {"late_swap_outs": 0}

    def _may_leave(self, seq):
        return seq.may_leave


@pytest.mark.parametrize(
    ("prefilling", "may_leave", "num_tokens", "leaves"),
    [(False, True, 9, True), (True, True, 9, False), (False, False, 9, False), (False, True, 8, False)],
)
def test_late_victims_are_parked_or_computed_again(monkeypatch, prefilling, may_leave, num_tokens, leaves):
    again, left = [], Left()
    monkeypatch.setattr(Recompute, "evict", lambda self, seq, plan: again.append(seq))
    seq = Mock(prefilling=prefilling, may_leave=may_leave, num_tokens=num_tokens, num_preemptions=2)
    left.evict(seq, IterationPlan())
    if not leaves:
        assert (again, left.noted, dict(left.away), left.tally) == ([seq], [], {}, {"late_swap_outs": 0})
        return
    assert (again, left.noted) == ([], [("out", seq), (AWAY, seq), ("parked", seq)])
    assert (left.away, seq.num_preemptions, left.tally) == ({seq: None}, 3, {"late_swap_outs": 1})


def test_a_token_beyond_the_batchs_step_counts_once():
    columns, seq = np.zeros((NUM_COLUMNS, 3)), Mock()
    Prospects.moved(SimpleNamespace(columns=columns, row={seq: 1}), seq)
    assert columns[GENERATED].tolist() == [0.0, 1.0, 0.0] and columns.sum() == 1.0
