"""`StallFree`: no decode ever waits for a prompt (Sarathi-Serve, OSDI 2024; DeepSpeed-FastGen's Dynamic SplitFuse).

Every iteration first takes one token of everybody who decodes, then goes on with the half-done prompt, then admits new
ones in chunks, up to the token budget. Blocks for the whole prompt are taken at admission. As in Sarathi's public code.
"""

from sim.engine.plan import IterationPlan
from sim.parts.batching.base import Batching

ANY_NUMBER = 1 << 60


class StallFree(Batching):
    """Decodes, the half-done prompt, new prompts; in this order, in one iteration."""

    splits_prompts = True

    def __init__(self, prefills_per_step: int = ANY_NUMBER) -> None:
        """`prefills_per_step` prompts share an iteration at most: 1 for Sarathi, any number fills FastGen's budget."""
        self._prefills = prefills_per_step

    def fill(self, plan: IterationPlan, now_s: float) -> None:
        eviction = self.eviction
        self.decode_or_preempt(plan)
        budget = self.continue_partials(plan, self.budget - plan.num_decodes)
        any_victims = eviction.settle()
        if not any_victims and eviction.num_out:
            before = plan.num_decodes + plan.prefill_tokens
            eviction.bring_back(plan, budget, plan.num_decodes + len(self.partials))
            budget -= plan.num_decodes + plan.prefill_tokens - before
        if self.order.waiting and budget > 0 and not eviction.num_out and not self._has_unfed_partial(plan):
            num_seqs = len(self.batch.members) + len(self.partials)
            self.admit(plan, now_s, budget, num_seqs, max(0, self._prefills - len(plan.chunks)))
        plan.cut_on_arrival = not eviction.num_out and not (self.order.waiting and self.order.sticky)
        if not plan.chunks and not self.partials and not any_victims:
            self.scheduler.allow_jump(plan)

    def _has_unfed_partial(self, plan: IterationPlan) -> bool:
        """Whether a half-done prompt got nothing: nobody behind it may."""
        return len(self.partials) > len(plan.chunks)
