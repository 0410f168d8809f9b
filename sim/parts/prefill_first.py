"""`PrefillFirst`: a step is all prefill or all decode, prefill first (vLLM 0.5.5's `_schedule_default`)."""

from collections import deque

from sim.engine.plan import IterationPlan
from sim.parts.base import Batching


class PrefillFirst(Batching):
    """Whole prompts if any can start (and nothing is swapped out), else one decode step of everybody."""

    def fill(self, plan: IterationPlan, now_s: float) -> None:
        batch, waiting, eviction = self.batch, len(self.order), self.eviction
        if waiting and not eviction.num_out:
            self.admit(plan, now_s, self.budget, len(batch.members))
            if plan.chunks:
                return
            waiting = len(self.order)
        # While somebody is swapped out, no prompt is looked at.
        plan.cut_on_arrival = not eviction.num_out and not (waiting and self.order.sticky)
        if batch.members:
            if self.memory.has_room(batch):
                self.decode_all(plan)
            else:
                self.decode_exactly(plan)
        if not eviction.settle():
            if eviction.num_out:
                eviction.bring_back(plan, self.budget - plan.num_decodes, plan.num_decodes)
            self.scheduler.allow_jump(plan)

    def decode_exactly(self, plan: IterationPlan) -> None:
        """Visit the batch from the left as vLLM does; whoever finds no free block preempts from the right."""
        batch, memory = self.batch, self.memory
        order = deque(batch.members)
        while order:
            seq = order.popleft()
            while not memory.can_append():
                victim = order.pop() if order else seq
                self.preempt(victim, plan)
                if victim is seq:
                    break
            else:
                plan.num_decodes += 1
                plan.decode_context_tokens += batch.num_tokens_of(seq)
                memory.append(seq)
        plan.decodes = batch.members
