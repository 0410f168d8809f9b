"""`UnifiedSpeculative`: vLLM v1's `schedule()` where tokens are drafted (`num_tokens_with_spec`, lookahead slots).

A sequence that decodes computes its last token and those drafted behind it, as far as the budget and the longest
context allow; blocks are taken for all of them, and ahead of them for what the drafting model writes. Slots of rejected
tokens are used again by the next step: blocks stay with the sequence. Drafts of a sequence that a step leaves out wait.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sim.engine.plan import ADMITTED, CONTINUED, IterationPlan, PrefillChunk, StepTimes
from sim.engine.sequence import Sequence
from sim.errors import InvariantError
from sim.parts.batching.base import NEVER_FITS
from sim.parts.batching.unified import Unified
from sim.parts.stage.speculative import Speculative

if TYPE_CHECKING:
    from sim.engine.drafting_batch import DraftingBatch
    from sim.engine.scheduler import Scheduler


class UnifiedSpeculative(Unified):
    """One budget for prompts, last tokens and drafted ones."""

    speculation: Speculative
    drafting: "DraftingBatch"

    def bind(self, scheduler: "Scheduler") -> None:
        super().bind(scheduler)
        if not isinstance(scheduler.stage, Speculative):
            raise InvariantError(f"{scheduler.stage.name} drafts nothing")
        self.speculation, self.drafting = scheduler.stage, scheduler.drafting
        memory = scheduler.memory
        self._most_slots = min(self.max_model_len, memory.gpu.num_blocks * memory.block_size)
        self._drafted: dict[Sequence, int] = {}
        """Of sequences that run, tokens drafted for their next step."""
        self._scheduled: dict[Sequence, int] = {}
        """Tokens of this step, drafted ones included."""
        self._padded: set[Sequence] = set()
        """Of those, the sequences whose drafts are there to make rows alike."""
        self._input_left = 0
        self._unnamed = int(self.speculation.reads_next_token)
        """Of the tokens that are known, the last ones that no cached block may end with."""

    # -- a step ------------------------------------------------------------------------------------------------------

    def fill(self, plan: IterationPlan, now_s: float) -> None:
        plan.drafts, self._scheduled = {}, {}
        self._padded.clear()
        super().fill(plan, now_s)
        batch, drafts = self.batch, plan.drafts or {}
        plan.taken = taken = {}
        for seq in plan.decodes:
            drafted = 0 if seq in self._padded else drafts.get(seq, 0)
            generated = batch.num_generated_of(seq)
            accepted = self.speculation.num_accepted(seq, generated, drafted)
            taken[seq] = min(1 + accepted, seq.output_tokens - generated)

    def _run_running(self, plan: IterationPlan) -> int:
        """vLLM's loop over `running`."""
        budget, longest, slots = self.budget, self._longest_chunk(), self.speculation.input_slots
        self._input_left = self.budget
        if not self.running:
            return budget
        running, drafted, memory = self.running, self._drafted, self.paged
        done = self._scheduled
        preempted: list[Sequence] = []
        for seq in [seq for seq in running if seq in self.partials]:
            self._join_if_decode(seq)
        # Victims leave the dictionary: a copy says which is next.
        for seq in list(running):
            if budget <= 0 or self._input_left <= slots:
                break
            if seq not in running:
                continue
            known, computed = self._progress(seq)
            num_new = min(known + drafted.get(seq, 0) - computed, longest, budget, self._input_left - slots)
            # At least the last token: where it finds no room, the sequence is preempted.
            num_new = min(num_new, max(self._most_new(computed), known - computed))
            while not (taken := self._take_slots(seq, computed, num_new)):
                victim = self._victim()
                if victim in done:
                    given_back = done.pop(victim)
                    budget += given_back
                    self._input_left += given_back + slots
                    self._preempt(victim, plan, given_back)
                else:
                    self._preempt(victim, plan, 0)
                preempted.append(victim)
                if victim is seq:
                    break
            if not taken:
                if self.by_priority and seq not in running:
                    continue
                break
            memory.publish(seq, min(computed + num_new, known - self._unnamed))
            done[seq] = num_new
            budget -= num_new
            self._input_left -= num_new + slots
            drafted.pop(seq, None)
        self._plan(plan, done)
        if self.record is not None and preempted:
            self._note(plan, preempted)
        return budget

    def _most_new(self, computed: int) -> int:
        """Tokens that a step may compute of a sequence: one sampled token still fits the longest context."""
        return min(self.max_model_len - 1, self._most_slots) - computed

    def _progress(self, seq: Sequence) -> tuple[int, int]:
        """Tokens known and computed of a sequence that runs."""
        if seq in self.partials:
            return seq.num_tokens, seq.num_computed
        known = self.batch.num_tokens_of(seq)
        return known, known - 1

    def _slots(self, num_tokens: int) -> int:
        """Slots of so many tokens of a sequence, with those ahead."""
        return max(num_tokens, min(num_tokens + self.speculation.lookahead, self._most_slots))

    def _take_slots(self, seq: Sequence, computed: int, num_new: int) -> bool:
        """Blocks for the next `num_new` tokens of one that runs, and ahead; False where there are too few."""
        memory, slots = self.paged, self._slots(computed + num_new)
        if seq in self.partials:
            if memory.blocks_missing(seq, slots) > memory.gpu.free:
                return False
            memory.take_chunk(seq, slots)
            return True
        blocks = self.drafting.blocks
        wanted = memory.blocks_holding(slots) - blocks[seq]
        if wanted > memory.gpu.free:
            return False
        if wanted > 0:
            memory.gpu.allocate(wanted)
            blocks[seq] += wanted
        return True

    def _leave_batch(self, victim: Sequence, scheduled: int) -> int:
        self.batch.remove(victim)
        # The last token, if it was in this step and the next need not be known; nothing that was only drafted.
        return int(scheduled > 0 and not self._unnamed)

    def _plan(self, plan: IterationPlan, done: dict[Sequence, int]) -> None:
        partials, drafts = self.partials, plan.drafts
        plan.decodes = decodes = [seq for seq in done if seq not in partials]
        plan.num_decodes = len(decodes)
        plan.decode_context_tokens = sum(map(self.batch.num_tokens_of, decodes))
        for seq, num_new in done.items():
            if seq in partials:
                self._add_chunk(plan, seq, num_new, CONTINUED)
            elif num_new > 1 and isinstance(drafts, dict):
                drafts[seq] = num_new - 1

    # -- requests that wait ------------------------------------------------------------------------------------------

    def _admit(self, plan: IterationPlan, now_s: float, budget: int) -> None:
        order, memory, limits, spec = self.order, self.paged, self.limits, self.speculation
        longest = self._longest_chunk()
        has_ran, has_prefilled = bool(self._scheduled), bool(plan.chunks)
        while budget > 0 and order.waiting and len(self.running) < limits.max_num_seqs:
            if self._input_left <= spec.input_slots:
                return
            seq = order.head()
            if self._passes_over(seq):
                continue
            cached = 0
            if self._caches:
                memory.look_up(seq)
                cached = memory.cached_tokens(seq)
            room = min(budget, self._input_left - spec.input_slots)
            padding = 0
            is_one = seq.num_tokens - cached == 1 and not has_prefilled and (has_ran or cached > 0)
            if is_one and self._most_new(cached) >= 1 + spec.num_tokens:
                # Rows of a batch that decodes are alike, or nothing is scheduled.
                padding = spec.num_tokens
                if 1 + padding > room:
                    return
            num_new = min(seq.num_tokens - cached, longest, room)
            if not memory.ever_fits(seq, 0):
                self.scheduler.ignore(order.pop(), NEVER_FITS)
                continue
            keep_free = self.watermark_blocks if self.running else 0
            slots = self._slots(cached + num_new + padding)
            if not (self._finds_room(seq, cached + num_new, keep_free) and self._has_slots(seq, slots, keep_free)):
                return
            order.pop()
            budget -= num_new + padding
            self._input_left -= num_new + padding + spec.input_slots
            decodes = seq.num_tokens - cached == 1 and cached >= seq.request.prompt_tokens
            memory.place(seq, slots)
            self._run(plan, seq, num_new, now_s, decodes=decodes)
            self._scheduled[seq] = num_new + padding
            if padding and isinstance(plan.drafts, dict):
                plan.drafts[seq] = padding
                self._padded.add(seq)

    def _has_slots(self, seq: Sequence, slots: int, keep_free: int) -> bool:
        return self.paged.blocks_wanted(seq, slots) + keep_free <= self.paged.gpu.free

    def _run(self, plan: IterationPlan, seq: Sequence, chunk: int, now_s: float, *, decodes: bool) -> None:
        scheduler, batch = self.scheduler, self.batch
        self._seat(seq)
        if seq.most_tokens >= self.max_model_len:
            self._stop_at_longest(seq)
        scheduler.start(seq, now_s, placed=True)
        if not decodes:
            self._add_chunk(plan, seq, chunk, ADMITTED)
            self.paged.publish(seq, min(seq.num_computed + chunk, seq.num_tokens - self._unnamed))
            return
        self._join(seq)
        self.paged.publish(seq, batch.num_tokens_of(seq) - self._unnamed)
        plan.num_decodes += 1
        plan.decode_context_tokens += batch.num_tokens_of(seq)
        plan.decodes = [*plan.decodes, seq]

    # -- afterwards --------------------------------------------------------------------------------------------------

    def accepted(self, plan: IterationPlan) -> None:
        batch, memory, told = self.batch, self.paged, plan.taken or {}
        # A client may have left since: nothing comes behind the last token.
        taken = {seq: min(count, seq.output_tokens - batch.num_generated_of(seq)) for seq, count in told.items()}
        if plan.taken is not None:
            plan.taken = taken
        # The next step may hit what this one has filled, sequence by sequence.
        whole = {chunk.seq for chunk in plan.chunks if chunk.num_cached + chunk.num_new == chunk.seq.num_tokens}
        for seq in self._scheduled:
            if seq in taken:
                memory.publish(seq, batch.num_tokens_of(seq) + taken[seq] - 1)
            elif seq in whole:
                memory.publish(seq, seq.num_tokens)

    def commit_chunks(self, plan: IterationPlan, end_s: float, chunks: Iterable[PrefillChunk] | None = None) -> None:
        if not plan.num_decodes:
            self.accepted(plan)
        super().commit_chunks(plan, end_s, chunks)

    def left(self, seq: Sequence) -> None:
        super().left(seq)
        self._drafted.pop(seq, None)

    def committed(self, plan: IterationPlan, times: StepTimes) -> None:
        members, drafted, num_tokens = self.batch.members, self._drafted, self.speculation.num_tokens
        for seq in self._scheduled:
            if seq in members:
                drafted[seq] = num_tokens

    def _tokens_of(self, plan: IterationPlan) -> dict[Sequence, int]:
        return self._scheduled
