"""`IterationLevel`: every iteration decodes all and prefills, whole, the prompts that could join (Orca, OSDI 2022)."""

from typing import ClassVar

from sim.engine.plan import IterationPlan
from sim.parts.batching.base import Batching


class IterationLevel(Batching):
    """Decodes and newly admitted prompts share an iteration; the token budget bounds the prompts alone."""

    name: ClassVar[str] = "iteration-level"

    def fill(self, plan: IterationPlan, now_s: float) -> None:
        eviction = self.eviction
        self.decode_or_preempt(plan)
        any_victims = eviction.requeue_victims()
        if not any_victims and eviction.num_out:
            eviction.bring_back(plan, self.budget, plan.num_decodes)
        if self.order.waiting and not eviction.num_out:
            self.admit(plan, now_s, self.budget, len(self.batch.members))
        plan.cut_on_arrival = not eviction.num_out and not (self.order.waiting and self.order.sticky)
        if not plan.chunks and not any_victims:
            self.scheduler.allow_jump(plan)
