"""`StallFree`: no decode ever waits for a prompt (Sarathi-Serve, OSDI 2024; DeepSpeed-FastGen's Dynamic SplitFuse).

Every iteration first takes one token of each sequence that decodes, then goes on with the half-done prompt, then admits
new ones in chunks, up to the token budget. Blocks for the whole prompt are taken at admission, as in Sarathi's public
code.
"""

from typing import ClassVar

from sim.engine.plan import SWAPPED_IN, IterationPlan
from sim.parts.batching.base import Batching


class StallFree(Batching):
    """Decodes, the half-done prompt, new prompts; in this order, in one iteration."""

    name: ClassVar[str] = "sarathi"
    splits_prompts: ClassVar[bool] = True
    resumes: ClassVar[bool] = True
    prefills_per_step: ClassVar[int] = 1
    """Prompts that share an iteration at most."""

    def fill(self, plan: IterationPlan, now_s: float) -> None:
        eviction = self.eviction
        self.decode_or_preempt(plan)
        budget = self.continue_partials(plan, self.budget - plan.num_decodes)
        any_victims, returned = eviction.requeue_victims(), 0
        if not any_victims and eviction.num_out:
            before = plan.num_decodes + plan.prefill_tokens
            eviction.bring_back(plan, budget, plan.num_decodes + len(self.partials))
            budget -= plan.num_decodes + plan.prefill_tokens - before
            # Half-done prompts that came back have seats, and are no partials before the step has ended.
            returned = sum(chunk.origin is SWAPPED_IN for chunk in plan.chunks)
        if self.order.waiting and budget > 0 and not eviction.num_out and not self._has_unfed_partial(plan):
            num_seqs = len(self.batch.members) + len(self.partials) + returned
            self.admit(plan, now_s, budget, num_seqs, max(0, self.prefills_per_step - len(plan.chunks)))
        plan.cut_on_arrival = not eviction.num_out and not (self.order.waiting and self.order.sticky)
        if not plan.chunks and not self.partials and not any_victims:
            self.scheduler.allow_jump(plan)

    def _has_unfed_partial(self, plan: IterationPlan) -> bool:
        """Whether a half-done prompt got nothing: none behind it may."""
        return len(self.partials) > len(plan.chunks)


class FastGen(StallFree):
    """Any number of prompts fills the budget."""

    name: ClassVar[str] = "fastgen"
    default_budget: ClassVar[int | None] = 768
    prefills_per_step: ClassVar[int] = 1 << 60
