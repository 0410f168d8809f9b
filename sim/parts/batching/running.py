"""`Running`: what a step of `Unified` does for sequences that run, before it looks at those that wait.

All in order of admission: at the common step by counts alone, else one by one, as in vLLM's loop over `running`.
"""

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, ClassVar

from sim.engine.plan import CONTINUED, IterationPlan, Origin
from sim.engine.sequence import Sequence
from sim.kv.memory import Memory
from sim.parts.base import overrides
from sim.parts.batching.base import Batching
from sim.parts.batching.unified_options import VllmV1Options
from sim.parts.needs import Need
from sim.parts.order.priority import Priority, urgency

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler


class Running(Batching):
    """One budget for prompts and decodes that run, and the choice of their victims.

    Args:
        options: the longest chunk, what stays free, adapters; whether a prompt has to fit whole.
        schedules_ahead: schedule a step while the one before it runs.
    """

    __slots__ = (
        "_arrivals_help", "_cut_chunk", "_is_sticky", "_line", "_num_seated", "_takes_whole_blocks", "_watermark",
        "adaptive", "by_priority", "max_loras", "paged", "record", "reserve_whole_prompt", "running", "threshold",
        "watermark_blocks",
    )  # fmt: skip
    needs: ClassVar[tuple[Need, ...]] = (
        Need("memory", "takes blocks chunk by chunk", offers="takes_chunks"),
        Need("eviction", "computes victims again", lacks="moves_whole"),
        Need("stage", "computes victims again", lacks="brings_layers_back"),
        Need("admission", "admits by a rule of its own", offers="by_memory_alone"),
    )
    splits_prompts: ClassVar[bool] = True
    default_budget: ClassVar[int | None] = 8192
    frees_in_order = True
    records_decisions = True
    stages = 1
    """Of the pipeline whose batches it makes."""

    def __init__(self, options: VllmV1Options, *, schedules_ahead: bool) -> None:
        self.schedules_ahead = schedules_ahead
        self.max_loras: int | None = options.max_loras if options.enable_lora else None
        self.threshold = options.long_prefill_token_threshold
        self.adaptive = options.long_prefill_token_threshold_adaptive
        self._watermark, self.reserve_whole_prompt = options.watermark, options.scheduler_reserve_full_isl
        # An arrival shortens the first chunk of the head, which may fit then.
        self._arrivals_help = self.adaptive and self.threshold > 0 and not self.reserve_whole_prompt
        self.running: dict[Sequence, int] = {}
        """In order of admission, which numbers say: half-done prompts and decodes."""
        self._num_seated = 0
        self.record = None
        self._line = ""

    def bind(self, scheduler: "Scheduler") -> None:
        super().bind(scheduler)
        self.paged = memory = scheduler.memory
        # What else has a say in where chunks end takes its place.
        self._cut_chunk: Callable[[Sequence, int, int], int] = memory.cut_chunk
        # vLLM counts its null block.
        own = int(self._watermark * (memory.gpu.num_blocks + 1))
        self.watermark_blocks = max(own, scheduler.admission.keep_free * memory.unit)
        hooks = ("drop_unread", "decode_blocks_of", "take_next")
        # Whether a decode that neither begins a block nor fills one takes nothing.
        self._takes_whole_blocks = not any(overrides(memory, hook, Memory) for hook in hooks)
        self.by_priority = isinstance(scheduler.order, Priority)
        # One that arrives may have an adapter with a slot, and those before it not.
        self._is_sticky = scheduler.order.sticky and self.max_loras is None

    def _seat(self, seq: Sequence) -> None:
        """`seq` runs, behind all that do."""
        self._num_seated += 1
        self.running[seq] = self._num_seated

    def _is_last(self, seq: Sequence) -> bool:
        """Whether `seq` is the last of those that run."""
        return self.running[seq] == self._num_seated or next(reversed(self.running)) is seq

    def _longest_chunk(self) -> int:
        """Most tokens of one prompt in this step."""
        if not self.threshold:
            return self.budget
        requests = len(self.running) + len(self.order) + self.num_paused + self.scheduler.stage.num_pulling
        if requests <= 1:
            return self.budget
        return max(self.threshold, self.budget // requests) if self.adaptive else self.threshold

    def _run_running(self, plan: IterationPlan) -> int:
        """All that run, as the budget lasts; returns what is left of it."""
        if not self.running:
            return self.budget
        batch, memory = self.batch, self.paged
        # At the common step all decode, but perhaps for one prompt, the last to be admitted.
        partial = None
        for seq in self.partials:
            partial = seq
            break
        if not self.threshold and (partial is None or (len(self.partials) == 1 and self._is_last(partial))):
            if partial is not None and self._join_if_decode(partial):
                partial = None
            budget = self.budget - len(batch.members)
            chunk = wanted = 0
            if partial is not None:
                computed = partial.num_computed
                chunk = memory.cut_chunk(partial, computed, min(partial.num_tokens - computed, budget))
                wanted = memory.blocks_missing(partial, computed + chunk)
            needed = memory.decode_blocks() if batch.members else 0
            if needed + wanted <= memory.gpu.free:
                if batch.members:
                    memory.take_decodes(needed)
                    self.decode_all(plan)
                if partial is not None and chunk > 0:
                    self._continue(plan, partial, chunk)
                return budget - chunk
        return self._run_one_by_one(plan)

    def _join_if_decode(self, seq: Sequence) -> bool:
        """Whether `seq` is a decode from now on: a prompt of which one generated token is left to be computed again."""
        if seq.num_tokens - seq.num_computed != 1 or seq.num_computed < seq.request.prompt_tokens:
            return False
        del self.partials[seq]
        self._join(seq)
        return True

    def _join(self, seq: Sequence) -> None:
        """`seq` decodes, and sampled nothing in the step before."""
        seq.prefilling = False
        self.scheduler.join_known(seq)

    def _continue(self, plan: IterationPlan, seq: Sequence, chunk: int) -> None:
        tokens = seq.num_computed + chunk
        self.paged.take_chunk(seq, tokens)
        self._add_chunk(plan, seq, chunk, CONTINUED)
        if self._caches:
            self.memory.publish(seq, tokens)

    def _add_chunk(self, plan: IterationPlan, seq: Sequence, chunk: int, origin: Origin) -> None:
        computed = seq.num_computed
        if chunk == 1 and seq.request.prompt_tokens <= computed < seq.num_tokens - 1:
            plan.add_single_chunk(seq, origin)
        else:
            plan.add_chunk(seq, chunk, origin)

    def _run_one_by_one(self, plan: IterationPlan) -> int:
        """vLLM's loop over `running`: a sequence that finds no block preempts, and tries again."""
        budget, longest, batch = self.budget, self._longest_chunk(), self.batch
        self.paged.catch_up()
        resting, running, partials = self._resting(), self.running, self.partials
        step, size, takes_whole_blocks = batch.step, batch.block_size, self._takes_whole_blocks
        done: dict[Sequence, int] = {}
        preempted: list[Sequence] = []
        for seq in [seq for seq in running if seq in partials]:
            self._join_if_decode(seq)
        # Victims leave the dictionary: a copy says which is next.
        for seq in list(running):
            if budget <= 0:
                break
            if (preempted and seq not in running) or (resting and seq in resting):
                continue
            chunk = 1
            if seq in partials:
                chunk = min(seq.num_tokens - seq.num_computed, min(longest, budget))
                chunk = self._cut_chunk(seq, seq.num_computed, chunk)
                if not chunk:
                    continue
            elif takes_whole_blocks and (seq.batch_offset + step) % size > 1:
                done[seq] = 1
                budget -= 1
                continue
            while not (taken := self._take(seq, chunk)):
                victim = self._victim()
                if not self._may_preempt(victim):
                    break
                scheduled = done.pop(victim, 0)
                budget += scheduled
                preempted.append(victim)
                self._preempt(victim, plan, scheduled)
                if victim is seq:
                    break
            if not taken:
                if self.by_priority and seq not in running:
                    continue
                break
            done[seq] = chunk
            budget -= chunk
        self._plan(plan, done)
        if self.record is not None and preempted:
            self._note(plan, preempted)
        if plan.num_decodes == len(batch.members):
            plan.decodes = batch.members
        return budget

    def _resting(self) -> Collection[Sequence]:
        """Sequences that run and compute nothing in this step: those whose last tokens are in flight."""
        return self.scheduler.last_in_flight

    def _take(self, seq: Sequence, chunk: int) -> bool:
        """Blocks for the next `chunk` tokens of one that runs; False where there are too few."""
        memory = self.paged
        memory.drop_unread(seq)
        if seq in self.partials:
            tokens = seq.num_computed + chunk
            if memory.blocks_missing(seq, tokens) > memory.gpu.free:
                return False
            memory.take_chunk(seq, tokens)
            memory.publish(seq, tokens)
            return True
        if not memory.take_next(seq):
            return False
        # What is not known yet is not hashed.
        tokens = self.batch.num_tokens_of(seq) - self.scheduler.num_unknown(seq)
        if tokens % memory.block_size == 0:
            memory.publish(seq, tokens)
        return True

    def _victim(self) -> Sequence:
        return max(self.running, key=lambda seq: urgency(seq)[:2]) if self.by_priority else next(reversed(self.running))

    def _may_preempt(self, victim: Sequence) -> bool:
        """Whether a victim's blocks are free at once; else none is preempted."""
        return True

    def preempt(self, seq: Sequence, plan: IterationPlan) -> None:
        self._preempt(seq, plan, 0)

    def _preempt(self, victim: Sequence, plan: IterationPlan, scheduled: int) -> None:
        """Take a running sequence out. `scheduled` of its tokens were in this step: vLLM has hashed them."""
        self.scheduler.counters.preemptions += 1
        self.scheduler.changed = True
        hashed = 0
        if victim in self.partials:
            del self.partials[victim]
            victim.num_computed += scheduled
        else:
            hashed = self._leave_batch(victim, scheduled)
        victim.num_tokens += hashed
        self.eviction.evict(victim, plan)
        victim.num_tokens -= hashed

    def _leave_batch(self, victim: Sequence, scheduled: int) -> int:
        """Take one that decodes out of the batch; tokens that vLLM has hashed beyond those of `num_tokens`."""
        scheduler, batch = self.scheduler, self.batch
        if victim in scheduler.last_in_flight:
            del scheduler.last_in_flight[victim]
            return -scheduler.num_unknown(victim)
        grown = int(scheduled and batch.needs_block(victim))
        batch.remove(victim)
        victim.num_blocks += grown
        return scheduled - scheduler.num_unknown(victim)

    def _plan(self, plan: IterationPlan, done: dict[Sequence, int]) -> None:
        """Put what was decided into the plan, in the order of `running`."""
        batch, partials = self.batch, self.partials
        plan.decodes = decodes = [seq for seq in done if seq not in partials]
        plan.num_decodes = len(decodes)
        if len(decodes) < len(done):
            for seq, chunk in done.items():
                if seq in partials:
                    self._add_chunk(plan, seq, chunk, CONTINUED)
        if len(decodes) == len(batch.members):
            plan.decode_context_tokens += batch.context_tokens
        else:
            plan.decode_context_tokens += sum(map(batch.num_tokens_of, decodes))

    def _tokens_of(self, plan: IterationPlan) -> dict[Sequence, int]:
        """How many tokens of each sequence a step computes."""
        return {chunk.seq: chunk.num_new for chunk in plan.chunks} | dict.fromkeys(plan.decodes, 1)

    def _note(self, plan: IterationPlan, preempted: list[Sequence] | tuple[()]) -> None:
        tokens = self._tokens_of(plan)
        self._line = " ".join(f"{seq.request.request_id}:{tokens[seq]}" for seq in self.running if seq in tokens)
        if preempted:
            self._line += " preempt " + " ".join(str(seq.request.request_id) for seq in preempted)
        if self._line and self.record is not None:
            self.record(self._line)
