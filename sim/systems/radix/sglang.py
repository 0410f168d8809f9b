"""`Sglang`: prompts before decodes, admitted by what those that run are expected to grow (SGLang 0.3's scheduler).

A step computes prompts, in chunks of the token budget at most, if any can go on or start, else a token of each decode.
The head starts if it and its whole answer fit beside what runs:

    prompt - hits + new tokens  <=  unused + idle - idle hits - ratio * (tokens that what runs has yet to generate)

`ratio` is 0.7 when the engine was idle, falls by 0.001 a decode step down to 0.1 and is estimated anew whenever decodes
run out of blocks: then those with the fewest tokens are computed again later, until 20 tokens are free for each that
stays. Constants and rules are those of its code (`PolicyScheduler`, `PrefillAdder`, `retract_decode`).
"""

from typing import TYPE_CHECKING, ClassVar

from sim.engine.plan import ADMITTED, CONTINUED, IterationPlan, StepTimes
from sim.engine.sequence import Sequence
from sim.parts.batching.base import NEVER_FITS, TOO_LONG, TOO_LONG_AGAIN, Batching
from sim.parts.needs import Need
from sim.systems.radix.cache_aware import CacheAware
from sim.systems.radix.preset import RadixOptions

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler
    from sim.systems.builder import Builder

FIRST_RATIO = 0.7
LEAST_RATIO = 0.1
RATIO_DECAY = 0.001
CLIP_NEW_TOKENS = 4096
"""What one request counts at most for what it will generate."""
RETRACT_STEPS = 20
"""Decode steps for which room is made where there was none."""


class Sglang(Batching):
    """All prompts or all decodes, prompts first. A request asks for `max_new_tokens`, or what it generates if more."""

    name: ClassVar[str] = "sglang"
    options: ClassVar[type | None] = RadixOptions
    needs: ClassVar[tuple[Need, ...]] = (
        Need("memory", "takes blocks chunk by chunk", offers="takes_chunks"),
        Need("memory", "expects sequences to take blocks as they grow", lacks="reserves"),
        Need("eviction", "computes victims again", lacks="moves_whole"),
        Need("stage", "computes victims again", lacks="brings_layers_back"),
        Need("admission", "admits by a rule of its own", offers="by_memory_alone"),
    )
    splits_prompts: ClassVar[bool] = True
    default_budget: ClassVar[int | None] = 8192

    @classmethod
    def build(cls, b: "Builder") -> "Sglang":
        return cls(b.options(RadixOptions))

    def __init__(self, options: RadixOptions) -> None:
        self._least_ratio = min(LEAST_RATIO * options.schedule_conservativeness, 1.0)
        self._max_new_tokens = options.max_new_tokens
        self._began_ratio = max(FIRST_RATIO, self._least_ratio)
        self._num_decays = 0
        # Prompt and asked-for tokens of those that decode, and which of them may count less.
        self._asked: dict[Sequence, int] = {}
        self._asked_tokens = 0
        self._long: dict[Sequence, None] = {}
        self._refused: int | None = None
        """Tokens of room that the head wants, where it found none."""

    def bind(self, scheduler: "Scheduler") -> None:
        super().bind(scheduler)
        memory = scheduler.memory
        self.paged = memory
        self.block_size = memory.block_size
        self.pool_tokens = memory.gpu.num_blocks * self.block_size
        self._kept_tokens = scheduler.admission.keep_free * memory.unit * self.block_size
        """What admissions beside others leave free."""

    # -- what requests ask for -----------------------------------------------------------------------------------------

    def _new_tokens(self, seq: Sequence) -> int:
        """What a request asks for at most: no more than the pool could hold."""
        room = self.pool_tokens - 1 - seq.request.prompt_tokens
        return max(seq.output_tokens, min(self._max_new_tokens, room))

    def joined(self, seq: Sequence) -> None:
        new_tokens = self._new_tokens(seq)
        asked = self._asked[seq] = seq.request.prompt_tokens + new_tokens
        self._asked_tokens += asked
        if new_tokens > CLIP_NEW_TOKENS:
            self._long[seq] = None

    def left(self, seq: Sequence) -> None:
        self._asked_tokens -= self._asked.pop(seq, 0)
        self._long.pop(seq, None)

    def _to_come(self, steps: int = 0) -> int:
        """Tokens that those that decode are expected to generate yet, `steps` iterations from now."""
        batch = self.batch
        tokens = self._asked_tokens - batch.context_tokens - steps * len(batch.members)
        for seq in self._long:
            tokens -= max(0, self._asked[seq] - batch.num_tokens_of(seq) - steps - CLIP_NEW_TOKENS)
        return tokens

    def _ratio(self, steps: int = 0) -> float:
        return max(self._began_ratio - RATIO_DECAY * (self._num_decays + steps), self._least_ratio)

    def _set_ratio(self, ratio: float) -> None:
        self._began_ratio, self._num_decays = max(ratio, self._least_ratio), 0

    # -- a step --------------------------------------------------------------------------------------------------------

    def fill(self, plan: IterationPlan, now_s: float) -> None:
        order, members = self.order, self.batch.members
        self._refused = None
        if (order.waiting or self.partials) and len(members) < self.limits.max_num_seqs:
            self._extend(plan, now_s)
            if plan.chunks:
                return
        if not members:
            self._set_ratio(FIRST_RATIO)
            return
        needed = self.paged.decode_blocks()
        if self.paged.gpu.free < needed:
            self._retract(plan)
        self.paged.grow(self.batch, 0)
        self.decode_all(plan)
        plan.cut_on_arrival = not (order.waiting and order.sticky)
        if not self.eviction.requeue_victims():
            self.scheduler.allow_jump(plan)

    def _extend(self, plan: IterationPlan, now_s: float) -> None:
        """The half-done prompt goes on, then others start in order, until one of them finds no room."""
        order, scheduler, size = self.order, self.scheduler, self.block_size
        members = self.batch.members
        budget, seats = self.budget, self.limits.max_num_seqs - len(members)
        room = self.paged.gpu.free * size - self._ratio() * self._to_come()
        if members or self.partials:
            room -= self._kept_tokens
        for seq in list(self.partials):
            chunk = min(seq.num_tokens - seq.num_computed, budget)
            room -= self._continue(plan, seq, chunk)
            budget -= chunk
            seats -= 1
        while order.waiting and budget > 0 and seats > 0 and (room > 0 or not plan.chunks):
            seq = order.head()
            new_tokens = self._new_tokens(seq)
            if seq.num_tokens > self.prompt_limit:
                scheduler.ignore(order.pop(), TOO_LONG_AGAIN if seq.num_generated else TOO_LONG)
                continue
            if self._tokens(seq.request.prompt_tokens + new_tokens) >= self.pool_tokens:
                scheduler.ignore(order.pop(), NEVER_FITS)
                continue
            if self._caches and not self._looked_up_by_order:
                self.memory.look_up(seq)
            cached = self.memory.cached_tokens(seq)
            # Idle hits are free until they are taken.
            idle = self.paged.blocks_wanted(seq, seq.num_tokens) * size + cached - self._tokens(seq.num_tokens)
            new_tokens = min(new_tokens - seq.num_generated, CLIP_NEW_TOKENS)
            wanted = self._tokens(seq.num_tokens + new_tokens) - cached
            if wanted >= room or wanted > room - idle:
                self._refused = wanted + idle
                return
            order.pop()
            chunk = min(seq.num_tokens - cached, budget)
            self.paged.place(seq, cached + chunk)
            scheduler.start(seq, now_s, placed=True)
            plan.add_chunk(seq, chunk, ADMITTED)
            is_whole = cached + chunk == seq.num_tokens
            room -= idle + (wanted if is_whole else self._tokens(cached + chunk) - cached)
            budget -= chunk
            seats -= 1

    def _tokens(self, num_tokens: int) -> int:
        """Whole blocks, as tokens."""
        return self.paged.blocks_holding(num_tokens) * self.block_size

    @property
    def _looked_up_by_order(self) -> bool:
        """Whether the order has looked up all that wait."""
        return isinstance(self.order, CacheAware) and self.order.has_looked_up

    def _continue(self, plan: IterationPlan, seq: Sequence, chunk: int) -> int:
        """The next chunk of a half-done prompt; returns the tokens of room that it takes."""
        tokens = seq.num_computed + chunk
        taken = self.paged.blocks_missing(seq, tokens) * self.block_size
        self.paged.take_chunk(seq, tokens)
        plan.add_chunk(seq, chunk, CONTINUED)
        if tokens < seq.num_tokens:
            return taken
        return taken + min(self._new_tokens(seq) - seq.num_generated, CLIP_NEW_TOKENS)

    def _retract(self, plan: IterationPlan) -> None:
        """Take blocks from those with the fewest tokens, of them the longest prompts, the last first."""
        batch, gpu = self.batch, self.paged.gpu
        running = sorted(
            batch.members,
            key=lambda seq: (batch.num_generated_of(seq), -seq.request.prompt_tokens),
            reverse=True,
        )
        while len(running) > 1 and gpu.free * self.block_size < len(running) * RETRACT_STEPS:
            self.preempt(running.pop(), plan)
        generated = sum(map(batch.num_generated_of, running))
        asked = sum(map(self._new_tokens, running))
        # This step counts as one that decays.
        self._set_ratio(min(1.0, (generated + RETRACT_STEPS * len(running)) / asked))
        self._num_decays = -1

    def repeats(self, plan: IterationPlan, steps: int) -> int:
        """A refused head may start as the ratio falls: not beyond the first step at which it could."""
        if self._refused is None:
            return steps
        batch, size = self.batch, self.block_size
        free, taken = self.paged.gpu.free, batch.blocks_needed(1)
        # From when the ratio stays, a whole block each is more than any gives back.
        falling = int((self._began_ratio - self._least_ratio) / RATIO_DECAY) - self._num_decays + 1
        for step in range(1, min(steps, max(0, falling) + size) + 1):
            room = (free - batch.blocks_needed(step) + taken) * size - self._ratio(step) * self._to_come(step)
            if room - self._kept_tokens >= self._refused:
                return step
        return steps

    def committed(self, plan: IterationPlan, times: StepTimes) -> None:
        if plan.num_decodes:
            self._num_decays += times.iterations
