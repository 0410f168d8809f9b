"""vLLM 0.5.5's scheduler, decision for decision (`vllm/core/scheduler.py`, `block_manager_v1.py`).

Two loops, as in vLLM: the default (a step is all prefill or all decode, prefill first) and chunked prefill (decodes
first, then prompts in chunks, one token budget). Preemption recomputes or swaps. The order of `running` is vLLM's,
quirks included: under chunked prefill new prompts come before the decodes at the next step and may eat their budget.

Fast path: while memory suffices, every member of the batch decodes and only counts change. The walk over single
sequences (`_run_exactly`) is taken only when a free block may be missing.
"""

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from sim.engine.itl import GapCollector
from sim.engine.plan import IterationPlan, Origin, StepTimes
from sim.engine.sequence import Sequence, Status
from sim.policies.base import Deployment, Limits, Policy, Scheduler

TOO_LONG = "prompt longer than max_model_len or max_num_batched_tokens"
TOO_LONG_AGAIN = (
    "prompt and generated tokens, to be computed again, longer than max_model_len or max_num_batched_tokens"
)
WATERMARK = 0.01
"""Share of the GPU blocks kept free at admission (vLLM's BlockSpaceManagerV1)."""


class VllmScheduler(Scheduler):
    """State of vLLM 0.5.5's scheduler: waiting, running (`batch` and at most one half-done prompt), swapped."""

    def __init__(self, limits: Limits, gaps: GapCollector, *, swap: bool, layer_group: int = 1) -> None:
        super().__init__(limits, gaps, layer_group=layer_group)
        self.swap = swap
        self.chunking = limits.enable_chunked_prefill
        self.watermark_blocks = int(WATERMARK * limits.num_gpu_blocks)
        self.prompt_limit = (
            limits.max_model_len if self.chunking else min(limits.max_model_len, limits.max_num_batched_tokens)
        )
        # The half-done prompt, and how many batch members stand before it in `running` (None: all of them).
        self.partial: Sequence | None = None
        self.partial_front: int | None = None
        self._swapped_in: list[Sequence] = []
        self._preempted: list[Sequence] = []
        self._swapped_out: list[Sequence] = []
        self._stuck: set[Sequence] = set()

    @property
    def num_running(self) -> int:
        return len(self.batch.members) + (self.partial is not None)

    # -- deciding ------------------------------------------------------------------------------------------------

    def schedule(self, now_s: float) -> IterationPlan | None:
        while True:
            self._changed = False
            self._before_step(now_s)
            plan = IterationPlan()
            if self.chunking:
                self._schedule_chunked(plan, now_s)
            else:
                self._schedule_default(plan, now_s)
            if plan.chunks or plan.num_decodes or plan.swapped_out_blocks:
                self._after_step(plan)
                return plan
            # Like vLLM's engine loop: an empty step that changed the queues is followed by another at once.
            if not self._changed and not self._unblock_swapped():
                return self._idle_plan()

    def _before_step(self, now_s: float) -> None:
        """For policies built on this one: what happens before the queues are looked at."""

    def _after_step(self, plan: IterationPlan) -> None:
        """For policies built on this one: complete a plan that is not empty."""

    def _idle_plan(self) -> IterationPlan | None:
        """For policies built on this one: what to do when there is nothing to compute."""
        return None

    def _schedule_default(self, plan: IterationPlan, now_s: float) -> None:
        """Prefills alone if any can start (and nothing is swapped out), else one decode step of everything."""
        limits, batch = self.limits, self.batch
        if self.waiting and not self.swapped:
            self._schedule_prefills(plan, now_s, limits.max_num_batched_tokens, len(batch.members))
            if plan.chunks:
                return
        plan.cut_on_arrival = not self.waiting and not self.swapped
        if not self._run_all(plan, limits.max_num_batched_tokens):
            self._run_exactly(plan, limits.max_num_batched_tokens)
        if not self._requeue_preempted():
            self._schedule_swapped(plan, limits.max_num_batched_tokens - plan.num_decodes, plan.num_decodes)
            self._allow_jump(plan)

    def _schedule_chunked(self, plan: IterationPlan, now_s: float) -> None:
        """Decodes, then the half-done prompt, then swapped sequences, then new prompts, within one token budget."""
        budget = self.limits.max_num_batched_tokens
        if not self._run_all(plan, budget):
            self._run_exactly(plan, budget)
        budget -= plan.num_decodes + plan.prefill_tokens
        num_seqs = plan.num_decodes + len(plan.chunks)
        if self.swapped and not self._preempted and not self._swapped_out:
            before = plan.num_decodes + plan.prefill_tokens
            self._schedule_swapped(plan, budget, num_seqs)
            budget -= plan.num_decodes + plan.prefill_tokens - before
            num_seqs = plan.num_decodes + len(plan.chunks)
        if self.waiting and budget:
            self._schedule_prefills(plan, now_s, budget, num_seqs)
        plan.cut_on_arrival = not self.waiting
        if not self._requeue_preempted() and not plan.chunks:
            self._allow_jump(plan)

    def _allow_jump(self, plan: IterationPlan) -> None:
        """Let decode iterations that repeat themselves be one event, as far as memory and completions allow."""
        if (
            plan.decodes_first
            or plan.has_swaps
            or plan.num_decodes != len(self.batch.members)
            or not self.batch.members
        ):
            return
        batch = self.batch
        steps = batch.steps_to_finish()
        if steps > 1:
            # One block must stay free: vLLM wants one for each sequence it visits, needed or not. The first
            # iteration's blocks are taken already.
            spare = self.gpu.free // self.unit + batch.blocks_needed(1) - 1
            if spare // len(batch.members) * batch.block_size < steps:
                steps = max(1, min(steps, batch.steps_within(spare)))
        plan.max_steps = steps

    def _take_out(self, seq: Sequence) -> None:
        """Take `seq` out of the batch between steps; the half-done prompt keeps its place among the others."""
        if self.partial_front and seq in islice(self.batch.members, self.partial_front):
            self.partial_front -= 1
        self.batch.remove(seq)

    # -- running sequences ---------------------------------------------------------------------------------------

    def _run_all(self, plan: IterationPlan, budget: int) -> bool:
        """Schedule `running` by counts alone; False if blocks may run out on the way."""
        batch, partial = self.batch, self.partial
        size = len(batch.members)
        needed = batch.blocks_needed(1)
        if size and self.gpu.free // self.unit <= needed:
            return False
        if partial is None:
            decodes = size
        elif self.gpu.free < self.unit:
            return False
        elif self.partial_front is None:
            decodes = size
            chunk = min(partial.num_tokens - partial.num_computed, budget - size)
            if chunk:
                plan.add_chunk(partial, chunk, Origin.CONTINUED)
            else:
                self.partial_front = 0
        else:
            front = self.partial_front
            chunk = min(partial.num_tokens - partial.num_computed, budget - front)
            plan.add_chunk(partial, chunk, Origin.CONTINUED)
            decodes = min(size, budget - chunk)
            self.partial_front = None
        if decodes < size:
            self._take_first(plan, decodes)
        elif size:
            plan.num_decodes = size
            plan.decode_context_tokens = batch.context_tokens
            self.gpu.allocate(needed * self.unit)
        return True

    def _take_first(self, plan: IterationPlan, count: int) -> None:
        """Only the first `count` members fit the token budget."""
        batch = self.batch
        chosen = list(islice(batch.members, count))
        plan.decodes_first = True
        plan.num_decodes = count
        plan.decode_context_tokens = sum(map(batch.num_tokens_of, chosen))
        self.gpu.allocate(sum(map(batch.needs_block, chosen)) * self.unit)

    def _run_exactly(self, plan: IterationPlan, budget: int) -> None:
        """Visit `running` from the left as vLLM does; whoever finds no free block preempts from the right."""
        batch, pool = self.batch, self.gpu
        order = deque(batch.members)
        if self.partial is not None:
            order.insert(len(order) if self.partial_front is None else self.partial_front, self.partial)
        decoded = 0
        while order:
            seq = order[0]
            num_new = min(seq.num_tokens - seq.num_computed, budget) if seq is self.partial else min(1, budget)
            if num_new == 0:
                break
            order.popleft()
            while pool.free < self.unit:
                victim = order.pop() if order else seq
                if victim is seq and self._is_stuck(seq):
                    self.partial = None
                    self._free(seq)
                    self.ignore(seq, "prompt leaves no block free to continue its chunks")
                else:
                    self._preempt(victim, plan)
                if victim is seq:
                    break
            else:
                budget -= num_new
                if seq is self.partial:
                    plan.add_chunk(seq, num_new, Origin.CONTINUED)
                    self.partial_front = None
                    continue
                decoded += 1
                plan.decode_context_tokens += batch.num_tokens_of(seq)
                if batch.needs_block(seq):
                    pool.allocate(self.unit)
        plan.num_decodes = decoded
        plan.decodes_first = decoded < len(batch.members)
        if self.partial in order:
            self.partial_front = order.index(self.partial)

    # -- preempting ----------------------------------------------------------------------------------------------

    def _is_stuck(self, seq: Sequence) -> bool:
        """A half-done prompt that preempts itself for the second time while nobody got a token in between.

        vLLM would go on for ever: its prompt takes every block, but a continued chunk wants one block free.
        """
        if seq is not self.partial:
            return False
        if seq in self._stuck:
            return True
        self._stuck.add(seq)
        return False

    def _preempt(self, seq: Sequence, plan: IterationPlan) -> None:
        """Take the blocks of `seq`: to the host if swapping and there is room, else to be computed again."""
        self.counters.preemptions += 1
        self._changed = True
        if seq is self.partial:
            self.partial = None
        else:
            self.batch.remove(seq)
        if self.swap:
            if seq.num_blocks <= self.host.free:
                self._swap_out(seq, plan)
                return
            self.counters.swap_space_exhausted += 1
        self._free(seq)
        seq.reset_for_recompute()
        self._preempted.append(seq)

    def _swap_out(self, seq: Sequence, plan: IterationPlan) -> None:
        self.gpu.release(seq.num_blocks)
        self.host.allocate(seq.num_blocks)
        self.counters.swap_out_blocks += seq.num_blocks
        plan.swapped_out_blocks += seq.num_blocks
        seq.status = Status.SWAPPED
        seq.num_preemptions += 1
        self._swapped_out.append(seq)

    def _requeue_preempted(self) -> bool:
        """Put this step's victims in their queues; whether there were any."""
        any_preempted = bool(self._preempted or self._swapped_out)
        if any_preempted:
            self.waiting.extendleft(self._preempted)
            self.swapped.extend(self._swapped_out)
            self._preempted.clear()
            self._swapped_out.clear()
        return any_preempted

    def _schedule_swapped(self, plan: IterationPlan, budget: int, num_seqs: int) -> None:
        """Bring swapped sequences back in order, as long as blocks and budget last."""
        batch, pool = self.batch, self.gpu
        while self.swapped:
            seq = self.swapped[0]
            required = seq.num_blocks + 1
            if pool.num_blocks < required:
                self._ignore_swapped()
                continue
            if pool.free - required < self.watermark_blocks:
                return
            # Not chunked, even under chunked prefill: the rest of a half-done prompt must fit the budget whole.
            num_new = seq.num_tokens - seq.num_computed if seq.prefilling else 1
            if num_new > budget or num_seqs >= self.limits.max_num_seqs:
                return
            self.swapped.popleft()
            self.host.release(seq.num_blocks)
            pool.allocate(seq.num_blocks)
            self.counters.swap_in_blocks += seq.num_blocks
            plan.swapped_in_blocks += seq.num_blocks
            budget -= num_new
            num_seqs += 1
            seq.status = Status.RUNNING
            if seq.prefilling:
                plan.add_chunk(seq, num_new, Origin.SWAPPED_IN)
                continue
            batch.add(seq)
            if batch.needs_block(seq):
                pool.allocate(1)
            plan.num_decodes += 1
            plan.decode_context_tokens += seq.num_tokens
            self._swapped_in.append(seq)

    def _ignore_swapped(self) -> None:
        seq = self.swapped.popleft()
        self.host.release(seq.num_blocks)
        self.ignore(seq, "swapped sequence outgrew the GPU blocks")

    def _unblock_swapped(self) -> bool:
        """Nothing runs, the GPU is empty, and the head of `swapped` is still refused: vLLM would wait for ever.

        A half-done prompt whose rest exceeds the token budget is computed anew; what the watermark refuses is given up.
        """
        if not self.swapped or self.num_running or self.gpu.free < self.gpu.num_blocks:
            return False
        seq = self.swapped[0]
        if seq.prefilling and seq.num_tokens - seq.num_computed > self.limits.max_num_batched_tokens:
            self.swapped.popleft()
            self.host.release(seq.num_blocks)
            seq.reset_for_recompute()
            self.counters.preemptions += 1
            self.waiting.appendleft(seq)
        else:
            self._ignore_swapped()
        return True

    # -- admitting -----------------------------------------------------------------------------------------------

    def _schedule_prefills(self, plan: IterationPlan, now_s: float, budget: int, num_seqs: int) -> None:
        """Admit prompts from the head of `waiting`; the first that cannot start stops all behind it."""
        waiting, max_num_seqs, block_size = self.waiting, self.limits.max_num_seqs, self.limits.block_size
        while waiting:
            seq = waiting[0]
            num_new = min(seq.num_tokens, budget) if self.chunking else seq.num_tokens
            if num_new > self.prompt_limit:
                self.ignore(waiting.popleft(), TOO_LONG_AGAIN if seq.num_generated else TOO_LONG)
                continue
            blocks = -(-seq.num_tokens // block_size)
            if self._never_fits(blocks):
                self.ignore(waiting.popleft(), "prompt needs more KV blocks than the GPU has")
                continue
            if num_new == 0 or num_new > budget or num_seqs >= max_num_seqs or not self._fits_now(seq, blocks):
                return
            waiting.popleft()
            seq.num_blocks = blocks
            self._allocate(seq)
            seq.status = Status.RUNNING
            if seq.first_scheduled_s < 0.0:
                seq.first_scheduled_s = now_s
            plan.add_chunk(seq, num_new, Origin.ADMITTED)
            budget -= num_new
            num_seqs += 1

    def _never_fits(self, blocks: int) -> bool:
        """Whether a prompt of so many blocks is refused even by an empty GPU (the watermark counts)."""
        return self.limits.num_gpu_blocks - blocks < self.watermark_blocks

    def _fits_now(self, seq: Sequence, blocks: int) -> bool:
        """Whether the whole prompt has blocks now, above the watermark."""
        return self.gpu.free - blocks >= self.watermark_blocks

    def _allocate(self, seq: Sequence) -> None:
        """Take blocks for the whole prompt, even if only a chunk of it is computed now."""
        self.gpu.allocate(seq.num_blocks)

    # -- committing ----------------------------------------------------------------------------------------------

    def commit(self, plan: IterationPlan, times: StepTimes) -> None:
        batch = self.batch
        ended: list[Sequence] = []
        if plan.decodes_first:
            ended = batch.advance_first(plan.num_decodes, times.end_s)
        elif plan.num_decodes:
            if times.steps > 1:
                self.gpu.allocate((batch.blocks_needed(times.steps) - batch.blocks_needed(1)) * self.unit)
            ended = batch.advance(times)
        if plan.chunks:
            self._commit_chunks(plan, times.end_s)
        if self._stuck and (plan.num_decodes or plan.num_sampled_prefills):
            self._stuck.clear()
        self._swapped_in.clear()
        for seq in ended:
            self._end(seq, times.end_s)

    def _commit_chunks(self, plan: IterationPlan, end_s: float) -> None:
        """Count the computed prompt tokens; complete prompts yield a token and join the batch.

        Order under chunked prefill: new prompts to the left of the decodes; to their right the continued prompt, then
        swapped-in decodes, then swapped-in prompts.
        """
        fresh: list[Sequence] = []
        returned: list[Sequence] = []
        for seq, num_new, _, origin in plan.chunks:
            seq.num_computed += num_new
            if seq.num_computed < seq.num_tokens:
                self.partial = seq
                self.partial_front = 0 if origin is Origin.ADMITTED else None
                continue
            if seq is self.partial:
                self.partial = None
            if not self._emit_token(seq, end_s):
                continue
            if origin is Origin.SWAPPED_IN:
                returned.append(seq)
            elif self.chunking and origin is Origin.ADMITTED:
                fresh.append(seq)
            else:
                self._join(seq)
        for seq in reversed(fresh):
            self._join(seq, first=True)
            if self.partial_front is not None and seq in self.batch.members:
                self.partial_front += 1
        for seq in self._swapped_in:
            if seq in self.batch.members:
                self.batch.members.move_to_end(seq)
        for seq in returned:
            self._join(seq)

    def _emit_token(self, seq: Sequence, end_s: float) -> bool:
        """The token a complete prefill samples; False if it was the last."""
        if seq.first_token_s < 0.0:
            seq.first_token_s = end_s
        else:
            self.gaps.add((end_s - seq.last_token_s, 0.0, 1, 1))
        if self.batch.token_log is not None:
            self.batch.token_log.setdefault(seq.request.request_id, []).append(end_s)
        seq.last_token_s = end_s
        seq.prefilling = False
        seq.num_generated += 1
        seq.num_tokens += 1
        if seq.num_generated < seq.output_tokens:
            return True
        self._end(seq, end_s)
        return False

    def _join(self, seq: Sequence, *, first: bool = False) -> None:
        """A prefilled sequence starts to decode."""
        self.batch.add(seq, first=first)

    def _free(self, seq: Sequence) -> None:
        """Give back the blocks of `seq`, which is not in the batch."""
        self.gpu.release(seq.num_blocks * self.unit)
        seq.num_blocks = 0

    def _end(self, seq: Sequence, end_s: float) -> None:
        """A sequence has all its tokens: its blocks are free for the next step."""
        self._free(seq)
        seq.status = Status.FINISHED
        seq.finish_s = end_s
        self.finished.append(seq)


@dataclass(frozen=True)
class VllmRecompute(Policy):
    """vLLM 0.5.5 as it comes: whole-request blocks, preemption frees them and computes the sequence again."""

    name: ClassVar[str] = "vllm-recompute"
    summary: ClassVar[str] = "vLLM 0.5.5, preemption by recomputation (its default)"

    def scheduler(self, limits: Limits, gaps: GapCollector, deployment: Deployment) -> Scheduler:
        return VllmScheduler(limits, gaps, swap=False)


@dataclass(frozen=True)
class VllmSwap(Policy):
    """vLLM 0.5.5 with `--preemption-mode swap`: preempted blocks go to host memory, copied before the step computes."""

    name: ClassVar[str] = "vllm-swap"
    summary: ClassVar[str] = "vLLM 0.5.5, preemption by swapping to host memory"

    def scheduler(self, limits: Limits, gaps: GapCollector, deployment: Deployment) -> Scheduler:
        return VllmScheduler(limits, gaps, swap=True)
