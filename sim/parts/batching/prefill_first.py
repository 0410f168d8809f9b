"""`PrefillFirst`: a step is all prefill or all decode, prefill first (vLLM 0.5.5's `_schedule_default`)."""

from typing import TYPE_CHECKING, ClassVar

from sim.engine.plan import IterationPlan
from sim.parts.batching.base import Batching
from sim.parts.catalogue import class_at

if TYPE_CHECKING:
    from sim.systems.builder import Builder


class PrefillFirst(Batching):
    """Whole prompts if any can start (and nothing is swapped out), else one decode step of the whole batch."""

    name: ClassVar[str] = "vllm"
    has_choice: ClassVar[bool] = True

    @classmethod
    def build(cls, b: "Builder") -> Batching:
        if cls.has_choice and b.limits.enable_chunked_prefill:
            return class_at("sim.parts.batching.vllm055_chunked:Vllm055Chunked").build(b)
        return cls()

    def fill(self, plan: IterationPlan, now_s: float, *, may_start: bool = True) -> None:
        waiting, eviction = self.order.waiting, self.eviction
        num_out = eviction.num_out if self.counts_out else 0
        if waiting and not num_out and may_start:
            self.admit(plan, now_s, self.budget, len(self.batch.members))
            if plan.chunks:
                return
        # While a sequence is swapped out, no prompt is looked at.
        plan.cut_on_arrival = not num_out and not (waiting and self.order.sticky)
        self.decode_or_preempt(plan)
        if not eviction.requeue_victims():
            if num_out:
                eviction.bring_back(plan, self.budget - plan.num_decodes, plan.num_decodes)
            self.scheduler.allow_jump(plan)
