"""`Unified`: one token budget for all, no phases (vLLM v1's scheduler, 0.33).

Every step raises what is computed of each sequence towards what is known of it: first for those that run, in order of
admission, then for those that wait. Blocks are taken for what a step computes, not for a whole prompt. A sequence
that finds none preempts the last of those that run, or the least urgent; a step that preempted admits no request.
"""

from typing import TYPE_CHECKING, ClassVar

from sim.engine.plan import ADMITTED, IterationPlan
from sim.engine.sequence import Sequence
from sim.errors import UserError
from sim.parts.base import Wait
from sim.parts.batching.base import NEVER_FITS
from sim.parts.batching.running import Running
from sim.parts.batching.unified_options import VllmV1Options
from sim.parts.catalogue import STAGES, class_at

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler
    from sim.systems.builder import Builder

PROMPT_TOO_LONG = "prompt of max_model_len tokens or more"


class Unified(Running):
    """vLLM v1's `schedule()`."""

    name: ClassVar[str] = "unified"
    options: ClassVar[type | None] = VllmV1Options
    is_unified = True
    queues_batches = True
    stops_at_max_model_len = True
    resumes = True
    verifies = True
    memoized: ClassVar[tuple[str, ...]] = ("_loras", "_seen")

    @classmethod
    def build(cls, b: "Builder") -> "Unified":
        kind, options = cls, b.options(VllmV1Options)
        if STAGES[b.names["stage"]].drafts:
            b.refuse_beside_drafts()
            kind = class_at("sim.parts.batching.unified_speculative:UnifiedSpeculative")
        elif b.offloading.offloads:
            kind = class_at("sim.parts.batching.unified_offloading:UnifiedOffloading")
        elif b.limits.stages > 1:
            kind = class_at("sim.parts.batching.unified_pipelined:UnifiedPipelined")
        if options.enable_lora:
            b.refuse_beside_adapters()
        if options.max_tokens_per_image is not None:
            if kind is not cls or options.enable_lora:
                raise UserError(
                    "max-tokens-per-image: not simulated beside drafts, --enable-lora and --kv-offloading-size; leave "
                    "one of them out"
                )
            options.check_images(b.limits.max_num_batched_tokens)
            kind = class_at("sim.parts.batching.unified_images:UnifiedImages")
        return kind(options, schedules_ahead=b.policy.schedules_ahead)

    def bind(self, scheduler: "Scheduler") -> None:
        super().bind(scheduler)
        self._passed: list[Sequence] = []
        """Requests that cannot start in this step, though those behind them may, in order."""
        self._loras: set[str] = set()
        """Adapters in use when so many sequences had been seated and so many of them ran (`_seen`)."""
        self._seen = (0, 0)
        self._pulls = scheduler.stage.pulls_within_steps
        self._may_pass = self.max_loras is not None or scheduler.limits.stages > 1

    def refusal(self, seq: Sequence) -> str | None:
        return PROMPT_TOO_LONG if seq.num_tokens >= self.max_model_len else None

    # -- a step ------------------------------------------------------------------------------------------------------

    def fill(self, plan: IterationPlan, now_s: float) -> None:
        waiting = self.order.waiting
        budget = self._run_running(plan)
        preempted = self.eviction.requeue_victims()
        if not preempted:
            if self._pulls:
                self._admit_beside_pulls(plan, now_s, budget)
            elif waiting:
                self._admit(plan, now_s, budget)
            if self._passed:
                self._put_back()
        plan.cut_on_arrival = not (waiting and self._is_sticky) or self._arrivals_help
        if self.record is not None and not preempted:
            self._note(plan, ())
        if not plan.chunks and not self.partials and not preempted and not self.scheduler.last_in_flight:
            self.scheduler.allow_jump(plan)

    def _admit_beside_pulls(self, plan: IterationPlan, now_s: float, budget: int) -> None:
        """Sequences whose KV came from another engine, then requests that wait, then pulls: vLLM's order."""
        memory, stage = self.paged, self.scheduler.stage
        while budget > 0 and stage.landed:
            if (self.running and self.watermark_blocks > memory.gpu.free) or self.resume(stage.landed[0]) is not None:
                break
            seq = stage.landed.popleft()
            # The last token's KV came, too, and is computed again.
            seq.num_computed = seq.num_tokens - 1
            self._continue(plan, seq, 1)
            budget -= 1
        if self.order.waiting:
            self._admit(plan, now_s, budget)
        if len(self.running) < self.max_num_seqs and plan.prefill_tokens + plan.num_decodes < self.budget:
            keep_free = self.watermark_blocks if self.running else 0
            # Half-done prompts are to find room for what is left of them.
            prompts = {*self.partials, *(chunk.seq for chunk in plan.chunks)}
            stage.pull(keep_free + sum(memory.blocks_missing(seq, seq.num_tokens) for seq in prompts))

    def _admit(self, plan: IterationPlan, now_s: float, budget: int) -> None:
        """Requests that wait, in order, until one of them finds no room."""
        if budget <= 0 or len(self.running) >= self.max_num_seqs:
            return
        order, memory = self.order, self.paged
        longest, may_pass = self._longest_chunk(), self._may_pass
        while budget > 0 and order.waiting and len(self.running) < self.max_num_seqs:
            seq = order.head()
            if may_pass and self._passes_over(seq):
                continue
            cached = 0
            if self._caches:
                memory.look_up(seq)
                cached = memory.cached_tokens(seq)
            chunk = self._cut_chunk(seq, cached, min(seq.num_tokens - cached, min(longest, budget)))
            if not chunk:
                if self._passes_over(seq):
                    continue
                return
            keep_free = self.watermark_blocks if self.running else 0
            if not memory.ever_fits(seq, 0):
                self.scheduler.ignore(order.pop(), NEVER_FITS)
                continue
            if not self._finds_room(seq, cached + chunk, keep_free):
                return
            order.pop()
            budget -= chunk
            self._start(plan, seq, cached, chunk, now_s)

    def _passes_over(self, seq: Sequence) -> bool:
        """Whether the head cannot start in this step and those behind it may: it is passed over."""
        passes = self._must_wait(seq)
        if passes:
            self._pass_over()
        return passes

    def _pass_over(self) -> None:
        """The head is taken out until the step ends."""
        self._passed.append(self.order.pop())

    def _must_wait(self, seq: Sequence) -> bool:
        """Whether its adapter has no slot beside those of all that run."""
        lora = seq.request.lora
        if not lora or self.max_loras is None:
            return False
        seen = self._num_seated, len(self.running)
        if seen != self._seen:
            self._seen = seen
            self._loras = {each.request.lora for each in self.running if each.request.lora}
        return len(self._loras) >= self.max_loras and lora not in self._loras

    def _put_back(self) -> None:
        """What this step has passed over is in its place again."""
        self.order.put_back(self._passed[::-1])
        self._passed = []

    def _finds_room(self, seq: Sequence, num_tokens: int, keep_free: int) -> bool:
        """Look at the head: whether it can start with so many tokens computed."""
        wanted = self.paged.blocks_to_admit(seq, num_tokens, whole=self.reserve_whole_prompt)
        return wanted + keep_free <= self.paged.gpu.free

    def _start(self, plan: IterationPlan, seq: Sequence, cached: int, chunk: int, now_s: float) -> None:
        decodes = seq.num_tokens - cached == 1 and cached >= seq.request.prompt_tokens
        self.paged.place(seq, cached if decodes else cached + chunk)
        self._run(plan, seq, chunk, now_s, decodes=decodes)

    def _run(self, plan: IterationPlan, seq: Sequence, chunk: int, now_s: float, *, decodes: bool) -> None:
        """`seq`, which has the blocks for it, computes its next `chunk` tokens."""
        scheduler, memory, batch = self.scheduler, self.paged, self.batch
        self._seat(seq)
        if seq.output_tokens >= self.max_new_tokens(seq):
            self._stop_at_longest(seq)
        scheduler.start(seq, now_s, placed=True)
        if decodes:
            self._join(seq)
            memory.append(seq)
            memory.publish(seq, batch.num_tokens_of(seq))
            plan.num_decodes += 1
            plan.decode_context_tokens += batch.num_tokens_of(seq)
            # Some of those that run may find no room and preempt none.
            plan.decodes = batch.members if plan.num_decodes == len(batch.members) else [*plan.decodes, seq]
            return
        self._add_chunk(plan, seq, chunk, ADMITTED)
        if self._caches:
            memory.publish(seq, seq.num_computed + chunk)

    def _stop_at_longest(self, seq: Sequence) -> None:
        """It ends when it is as long as any may be, and calls no tool then."""
        seq.output_tokens = self.max_new_tokens(seq)
        seq.drop_calls()

    def resume(self, seq: Sequence) -> Wait | None:
        # Blocks are taken chunk by chunk.
        if len(self.running) >= self.max_num_seqs:
            return "seat"
        if seq.most_tokens >= self.max_model_len:
            self._stop_at_longest(seq)
        self._seat(seq)
        self._go_on(seq)
        return None

    # -- afterwards --------------------------------------------------------------------------------------------------

    def joined(self, seq: Sequence) -> None:
        # Another engine may have prefilled it.
        if seq not in self.running:
            self._seat(seq)

    def parked(self, seq: Sequence) -> None:
        self.running.pop(seq, None)

    def left(self, seq: Sequence) -> None:
        if seq in self.running:
            del self.running[seq]

    def in_order(self, seqs: list[Sequence]) -> list[Sequence]:
        return sorted(seqs, key=self.running.__getitem__)

    def record_repeats(self, count: int) -> None:
        if self.record is not None:
            for _ in range(count):
                self.record(self._line)
