"""`RequestLevel`: a batch of requests runs to its end before the next one starts (FasterTransformer)."""

from sim.engine.plan import IterationPlan
from sim.parts.batching.prefill_first import PrefillFirst


class RequestLevel(PrefillFirst):
    """Prompts are admitted, all in one step, only when nobody is running."""

    def fill(self, plan: IterationPlan, now_s: float, *, may_start: bool = True) -> None:
        super().fill(plan, now_s, may_start=may_start and not self.scheduler.num_running)
        if plan.num_decodes and not plan.chunks:
            # Nobody is looked at before the batch has ended.
            plan.cut_on_arrival = False
