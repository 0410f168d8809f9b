"""`Vllm055Chunked`: vLLM 0.5.5's chunked prefill (`_schedule_chunked_prefill`), quirks included.

Decodes first, then the half-done prompt, swapped sequences and new prompts in chunks, within one token budget. New
prompts come to the left of the decodes in `running`, so a half-done one precedes them at the next step and may eat
their budget: then only the first decodes take a token and the others come first next time.
"""

from collections.abc import Iterable
from itertools import islice
from typing import ClassVar

from sim.engine.changes import Restore
from sim.engine.plan import ADMITTED, CONTINUED, SWAPPED_IN, IterationPlan, PrefillChunk, StepTimes
from sim.engine.sequence import Sequence
from sim.parts.batching.base import Batching


class Vllm055Chunked(Batching):
    """At most one prompt is half done; `_front` members of the batch stand before it in `running` (None: all)."""

    name: ClassVar[str] = "vllm"
    splits_prompts: ClassVar[bool] = True
    has_choice: ClassVar[bool] = True

    def __init__(self) -> None:
        self.partial: Sequence | None = None
        self._front: int | None = None
        # Half-done prompts that have preempted themselves since a sequence got a token.
        self._stuck: set[Sequence] = set()

    def fill(self, plan: IterationPlan, now_s: float) -> None:
        eviction, budget = self.eviction, self.budget
        if not self._run_all(plan, budget):
            self._run_exactly(plan, budget)
        budget -= plan.num_decodes + plan.prefill_tokens
        if self.counts_out and eviction.num_out and not eviction.has_victims:
            before = plan.num_decodes + plan.prefill_tokens
            eviction.bring_back(plan, budget, plan.num_decodes + len(plan.chunks))
            budget -= plan.num_decodes + plan.prefill_tokens - before
        if self.order.waiting and budget:
            # Victims do not stop prompts; they are put in the queue afterwards.
            self.admit(plan, now_s, budget, plan.num_decodes + len(plan.chunks))
        plan.cut_on_arrival = not (self.order.waiting and self.order.sticky)
        if not eviction.requeue_victims() and not plan.chunks:
            self.scheduler.allow_jump(plan)

    # -- running sequences ---------------------------------------------------------------------------------------

    def _run_all(self, plan: IterationPlan, budget: int) -> bool:
        """Schedule `running` by counts alone; False if blocks or the budget may run out on the way."""
        size, partial, chunk = len(self.batch.members), self.partial, 0
        if partial is not None:
            if not self.memory.can_append():
                return False
            left = partial.num_tokens - partial.num_computed
            chunk = min(left, budget - (size if self._front is None else self._front))
            if chunk == budget and self._front == 0:
                # It takes all of it, before any decode.
                size = 0
            if chunk <= 0 or chunk + size > budget:
                return False
        if size:
            if not self.memory.grow(self.batch):
                return False
            self.decode_all(plan)
        if partial is not None:
            plan.add_chunk(partial, chunk, CONTINUED)
            self._front = None
        return True

    def _run_exactly(self, plan: IterationPlan, budget: int) -> None:
        """Visit `running` from the left as vLLM does; one that finds no free block preempts from the right."""
        batch, memory = self.batch, self.memory
        # Those that are left stand from `place` on; victims leave at the end.
        order, place = list(batch.members), 0
        place_of_partial = len(order) if self._front is None else min(self._front, len(order))
        if self.partial is not None:
            order.insert(place_of_partial, self.partial)
        decoded: list[Sequence] = []
        while place < len(order):
            seq = order[place]
            num_new = min(seq.num_tokens - seq.num_computed, budget) if seq is self.partial else min(1, budget)
            if num_new == 0:
                break
            place += 1
            while not memory.can_append():
                victim = order.pop() if place < len(order) else seq
                preempts_itself = victim is seq is self.partial
                if preempts_itself and seq in self._stuck:
                    # vLLM would go on for ever: its prompt takes every block, but a continued chunk wants one free.
                    self.drop_partial(seq)
                    self.scheduler.release(seq)
                    self.scheduler.ignore(seq, "prompt leaves no block free to continue its chunks")
                else:
                    if preempts_itself:
                        self._stuck.add(seq)
                    self.preempt(victim, plan)
                if victim is seq:
                    break
            else:
                budget -= num_new
                if seq is self.partial:
                    plan.add_chunk(seq, num_new, CONTINUED)
                    self._front = None
                    continue
                decoded.append(seq)
                plan.decode_context_tokens += batch.num_tokens_of(seq)
                memory.append(seq)
        plan.num_decodes = len(decoded)
        plan.decodes = decoded if len(decoded) < len(batch.members) else batch.members
        if self.partial is not None and place <= place_of_partial < len(order):
            self._front = place_of_partial - place

    def drop_partial(self, seq: Sequence) -> None:
        super().drop_partial(seq)
        self.partial = None

    def leaving(self, seq: Sequence) -> None:
        # The half-done prompt keeps its place among the others.
        if self._front and seq in islice(self.batch.members, self._front):
            self._front -= 1

    def committed(self, plan: IterationPlan, times: StepTimes) -> None:
        if self._stuck and (plan.num_decodes or plan.num_sampled_prefills):
            self._stuck.clear()

    # -- committing ----------------------------------------------------------------------------------------------

    def commit_chunks(self, plan: IterationPlan, end_s: float, chunks: Iterable[PrefillChunk] | None = None) -> None:
        """As in vLLM's `running`: new prompts to the left of the decodes; to their right the continued prompt, then
        swapped-in decodes, then swapped-in prompts."""
        scheduler, stage, members = self.scheduler, self.stage, self.batch.members
        fresh: list[Sequence] = []
        returned: list[Sequence] = []
        for chunk in plan.chunks if chunks is None else chunks:
            seq, origin = chunk.seq, chunk.origin
            seq.num_computed += chunk.num_new
            if seq.num_computed < seq.num_tokens:
                self.partials[seq] = None
                self.partial = seq
                self._front = 0 if origin is ADMITTED else None
                continue
            if seq is self.partial:
                self.drop_partial(seq)
            if not scheduler.emit_token(seq, end_s):
                continue
            if origin is SWAPPED_IN:
                returned.append(seq)
            elif origin is ADMITTED:
                fresh.append(seq)
            else:
                stage.enter(seq)
        for seq in reversed(fresh):
            stage.enter(seq, first=True)
            if self._front is not None and seq in members:
                self._front += 1
        if plan.swapped_in_blocks or plan.mixed_restores:
            for change in plan.changes:
                if isinstance(change, Restore) and change.seq in members:
                    members.move_to_end(change.seq)
        for seq in returned:
            stage.enter(seq)
