"""`QueuedRank`: data-parallel ranks whose experts lie on the GPUs of all, each of them a pipeline.

As vLLM 0.33's `DPEngineCoreProc` with a queue of batches: at each turn of its loop a rank schedules a batch, waits for
its oldest one if the queue is full, and where it had none to schedule computes a dummy batch on every stage. A stage of
one rank meets the same stage of all others at every layer with experts: so the batches of a turn, dummies among them,
pass the stages together, and each stage takes what the slowest rank takes there. A dummy that waits for an older batch
keeps all others waiting.

Simplified: all loops turn at once, when the last is ready. In vLLM they may be as far apart as the queue is long; what
was scheduled earlier would have waited on the GPU.
"""

from collections.abc import Sequence
from typing import cast

from sim.clock.batch_queue import BatchQueue
from sim.clock.lockstep import Lockstep, Rank
from sim.clock.pipeline import Stages
from sim.cost.lanes import Lane
from sim.cost.spread_experts import SpreadExpertsCost
from sim.engine.plan import IterationPlan


class QueuedLockstep(Lockstep):
    """The stages of all ranks, which batches pass together."""

    def __init__(self, cost: SpreadExpertsCost, stages: int) -> None:
        super().__init__(cost)
        self._stages = Stages([Lane(f"stage {number}") for number in range(stages)])

    @property
    def queued(self) -> "list[QueuedRank]":
        """The ranks."""
        return cast("list[QueuedRank]", self.ranks)

    def _begin(self, plans: list[IterationPlan | None]) -> None:
        ranks, now_s = self.queued, self.end_s
        if all(plan is None for plan in plans) and not any(rank.is_busy for rank in ranks):
            self.end_s = self.wakes_s
            return
        computed_s, frees_s = self._prices(plans, now_s)
        stages_s = [computed_s / parts for parts in ranks[0].parts]
        most_tokens = max(1 if plan is None else plan.num_tokens for plan in plans)
        hand_over_s = ranks[0].hand_over_s_per_token * most_tokens
        ahead = ranks[0].schedules_ahead
        began_s, end_s = self._stages.take_in(max(frees_s), stages_s, hand_over_s, "together", ahead=ahead)
        turns_s = [now_s]
        for rank, plan, free_s in zip(ranks, plans, frees_s, strict=True):
            if plan is not None:
                rank.join_in(plan, began_s, stages_s[0], end_s)
                free_s = rank.next_s(free_s)
            turns_s.append(free_s)
        self.end_s = max(turns_s)

    def _prices(self, plans: Sequence[IterationPlan | None], now_s: float) -> tuple[float, list[float]]:
        """What all stages take for the slowest, s, and when each rank's host has launched its batch, s."""
        cost, computed, frees_s = self.cost, [], []
        for rank, plan, others_s in zip(self.queued, plans, cost.set_together(plans), strict=True):
            if plan is None:
                frees_s.append(rank.next_s(now_s))
                continue
            cost.others_s = others_s
            computed_s, free_s = rank.prices(plan, now_s)
            computed.append(computed_s)
            frees_s.append(free_s)
        cost.others_s = 0.0
        return max(computed) if computed else self.dummy_s(), frees_s

    def dummy_s(self) -> float:
        """What all stages take for a dummy batch, a decode without context, s."""
        dummy = IterationPlan()
        dummy.num_decodes = 1
        return self.cost.iteration_s(dummy) - self.cost.prelude_s(dummy)


class QueuedRank(Rank, BatchQueue):
    """A rank with a pipeline and a queue of batches of its own."""

    lockstep: QueuedLockstep

    @property
    def is_busy(self) -> bool:
        """Whether batches of its own are in flight."""
        return bool(self._queue)

    @property
    def is_under_way(self) -> bool:
        return any(rank.is_busy for rank in self.lockstep.queued)

    def decide(self) -> None:
        self._settled = False
        now_s, plan = self.end_s, None
        self._take_events(now_s)
        if self.engine.has_unfinished:
            plan = self._schedule(now_s)
            if plan is None:
                self._add_empty(now_s)
        self.lockstep.propose(plan)

    def join_in(self, plan: IterationPlan, began_s: float, stage_s: float, end_s: float) -> None:
        """The plan is in flight, from then until then; the first stage takes `stage_s`."""
        self.lanes.compute.reserve(began_s, stage_s, plan.kind)
        self._fly(plan, began_s, end_s)
