"""`UnifiedImages`: vLLM v1's `schedule()` where prompts have images (`_try_schedule_encoder_inputs`).

A chunk that reaches into an image needs the encoder's output for all of it: there already, or computed in this step.
Where the step's encoder budget or the encoder cache has no room, the chunk ends before the image; a request that could
compute nothing then is passed by those behind it.
"""

from collections import deque
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from sim.engine.plan import IterationPlan, StepTimes
from sim.engine.sequence import FINISHED, Sequence
from sim.kv.encoder_cache import Encoded, EncoderCache, encoded
from sim.parts.batching.unified import Unified
from sim.parts.batching.unified_options import VllmV1Options

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler

TOO_LARGE = "image of more tokens than max-tokens-per-image and max_num_batched_tokens"
NEVER_WHOLE = "image of more tokens than a step may compute of a prompt, with --disable-chunked-mm-input"


class Encoding(NamedTuple):
    """What a sequence needs of the encoder for its next chunk: places of its images."""

    seq: Sequence
    new: list[int]
    again: list[int]
    """Those that are among `new` as well."""
    left: int
    """Tokens that are left of the step's budget then."""


class UnifiedImages(Unified):
    """One budget for prompts and decodes, and one for images."""

    unexecutable = "max-tokens-per-image: no device computes an encoder; leave it out (images are text), or simulate"

    def __init__(self, options: VllmV1Options, *, schedules_ahead: bool) -> None:
        super().__init__(options, schedules_ahead=schedules_ahead)
        self._largest, self._whole = options.max_tokens_per_image or 0, options.disable_chunked_mm_input
        self._tokens_per_s = options.encoder_tokens_per_s or inf

    def bind(self, scheduler: "Scheduler") -> None:
        super().bind(scheduler)
        self._most_tokens = max(self.budget, self._largest)
        """Of images in a step and in the cache (vLLM's `compute_mm_encoder_budget`)."""
        self.cache = EncoderCache(self._most_tokens)
        self._cut_chunk = self._cut_before_images
        self._budget_left = self._most_tokens
        self._wanted: Encoding | None = None
        self._encoding: dict[Sequence, int] = {}
        """Tokens that the encoder computes in this step."""
        # Whether a request that waits may need other images in the next step, though nothing seems to happen.
        self._unsure = False
        self._referring: list[tuple[Sequence, bool]] = []
        """Of this step's sequences, in order, those that may refer to images; whether it computes of their prompts."""
        self._in_flight: deque[list[tuple[Sequence, bool]]] = deque()
        """The same of steps that were scheduled ahead."""

    def refusal(self, seq: Sequence) -> str | None:
        largest = max([image.num_tokens for image in seq.request.images], default=0)
        if largest > self._most_tokens:
            return TOO_LARGE
        if self._whole and largest > min(self.budget, self.threshold or self.budget):
            return NEVER_WHOLE
        return super().refusal(seq)

    # -- a step ------------------------------------------------------------------------------------------------------

    def fill(self, plan: IterationPlan, now_s: float) -> None:
        self._budget_left, self._wanted, self._encoding = self._most_tokens, None, {}
        self._unsure = False
        super().fill(plan, now_s)
        held, prompts = self.cache.held, {chunk.seq for chunk in plan.chunks if chunk.seq.request.images}
        self._referring = []
        if held or prompts:
            scheduled = [seq for seq in self.running if seq in prompts or (seq in held and seq in plan.decodes)]
            self._referring = [(seq, seq in prompts) for seq in scheduled]

    def _run_running(self, plan: IterationPlan) -> int:
        # What is looked up in the cache must be looked up once, and after the preemptions before it.
        if any(seq.request.images for seq in self.partials):
            return self._run_one_by_one(plan)
        return super()._run_running(plan)

    def _cut_before_images(self, seq: Sequence, num_computed: int, num_new: int) -> int:
        """How many of the next `num_new` tokens can be computed; what that needs of the encoder is `_wanted`."""
        num_new = self.paged.cut_chunk(seq, num_computed, num_new)
        self._wanted = None
        if not num_new or not seq.request.images or not self.paged.ever_fits(seq, 0):
            return num_new
        cache, end = self.cache, num_computed + num_new
        places: dict[Encoded, None] = {}
        new: list[int] = []
        again: list[int] = []
        wanted = 0
        for place, (offset, num_tokens, _) in enumerate(seq.request.images):
            if offset + num_tokens <= num_computed:
                continue
            if offset >= end:
                break
            image = encoded(seq, place)
            if self._whole and num_computed <= offset and end < offset + num_tokens:
                num_new = offset - num_computed
                break
            if image in places:
                again.append(place)
                continue
            if cache.refer(seq, place):
                continue
            if num_tokens > self._budget_left - wanted or not cache.make_room(wanted + num_tokens):
                num_new = max(0, offset - num_computed)
                break
            wanted += num_tokens
            places[image] = None
            new.append(place)
        self._wanted = Encoding(seq, new, again, self._budget_left - wanted)
        return num_new

    def _encode(self, seq: Sequence) -> None:
        """`seq` has the blocks of its chunk: what that needs is computed in this step."""
        wanted, cache = self._wanted, self.cache
        if wanted is None or wanted.seq is not seq or not wanted.new:
            return
        for place in wanted.new:
            cache.add(seq, place)
        for place in wanted.again:
            cache.refer(seq, place)
        self._encoding[seq] = self._budget_left - wanted.left
        # Not with what a victim of this sequence has given back: vLLM forgets that, too.
        self._budget_left = wanted.left

    def _take(self, seq: Sequence, chunk: int) -> bool:
        taken = super()._take(seq, chunk)
        if taken:
            self._encode(seq)
        return taken

    def _preempt(self, victim: Sequence, plan: IterationPlan, scheduled: int) -> None:
        self.cache.forget(victim)
        self._budget_left += self._encoding.pop(victim, 0)
        super()._preempt(victim, plan, scheduled)

    # -- requests that wait ------------------------------------------------------------------------------------------

    def _admit(self, plan: IterationPlan, now_s: float, budget: int) -> None:
        super()._admit(plan, now_s, budget)
        self._unsure |= bool(self._passed)

    def _must_wait(self, seq: Sequence) -> bool:
        return self._wanted is not None

    def _finds_room(self, seq: Sequence, num_tokens: int, keep_free: int) -> bool:
        found = super()._finds_room(seq, num_tokens, keep_free)
        if not found:
            self.cache.forget(seq)
            # What it would hit may be evicted: it would begin at an earlier image.
            self._unsure |= bool(seq.request.images) and self.paged.cached_tokens(seq) > 0
        return found

    def _start(self, plan: IterationPlan, seq: Sequence, cached: int, chunk: int, now_s: float) -> None:
        super()._start(plan, seq, cached, chunk, now_s)
        self._encode(seq)

    # -- afterwards --------------------------------------------------------------------------------------------------

    def complete(self, plan: IterationPlan) -> None:
        if self._encoding:
            tokens = sum(self._encoding.values())
            self.scheduler.counters.policy["encoder_tokens"] += tokens
            plan.added_s += tokens / self._tokens_per_s

    def repeats(self, plan: IterationPlan, steps: int) -> int:
        return 1 if self.cache.held or self._unsure else steps

    def committed(self, plan: IterationPlan, times: StepTimes) -> None:
        step, self._referring = self._referring, []
        if self.schedules_ahead:
            self._in_flight.append(step)
        else:
            self._let_go(step)

    def delivered(self) -> None:
        self._let_go(self._in_flight.popleft())

    def _let_go(self, step: list[tuple[Sequence, bool]]) -> None:
        """A step is done: the images whose tokens are computed are no longer referred to, in the order of the step."""
        for seq, computes_prompt in step:
            if seq.status is FINISHED or not computes_prompt:
                self.cache.forget(seq)
            else:
                # vLLM counts tokens in flight, but for the last of a prompt while the token behind it is.
                behind = 1 if self.schedules_ahead and not seq.prefilling else 0
                self.cache.let_go(seq, seq.num_computed - behind)

    def left(self, seq: Sequence) -> None:
        super().left(seq)
        steps = (self._referring, *self._in_flight)
        if not any(seq is other for step in steps for other, _ in step):
            self.cache.forget(seq)
