"""`Paced`: vLLM v1's batches with prompts in chunks as large as first tokens need, and no larger.

Every sequence that decodes takes a token first. Of the token budget, prompts get

    max(1.25 x kept prompt tokens a second, tokens ahead of a waiting prompt / time to half its TTFT) x iteration,

at least `LEAST_CHUNK`: larger chunks would only lengthen the iterations of all. A deferred prompt (`Triage`) starts
when none that is kept waits or is parked and no prompt is half done, in chunks `DEFERRED_AHEAD` times those in which
prompts spread evenly over the decodes, or as large as its first token needs. A hopeless one also leaves half of the
blocks, the seats and the decodes' time free for those to come. A prompt takes all its blocks when it starts. None that
is kept starts whose first token would be late, behind the iteration under way and other chunks.

Prompts never take more than the pace of the decodes leaves them (`pace`): those that would be late for it do not start.

Where decodes cost more beside a chunk than after it (kernels that compute tiles of rows), the chunk goes alone; not
where time is left for so few of its tokens that they cost less beside them.
"""

from math import ceil, inf
from typing import TYPE_CHECKING, ClassVar, Final

from sim.engine.plan import IterationPlan, Origin
from sim.engine.sequence import Sequence
from sim.parts.batching.unified import Unified
from sim.parts.batching.unified_options import VllmV1Options
from sim.parts.needs import Need
from sim.systems.adaptive.park import Park
from sim.systems.adaptive.triage import FIRST_ITERATIONS, PREFILL_MARGIN, Triage
from traces.request import Request

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler
    from sim.systems.builder import Builder

LEAST_CHUNK: Final = 128
DEFERRED_AHEAD: Final = 1.5
LEAST_DEFERRED_CHUNK: Final = 256
AHEAD: Final = 1.25
"""Of the rate at which kept prompts arrive, what is computed of them."""
HOPELESS_FREE: Final = 0.5
"""Share of the blocks, the seats and the time of decodes that stays free for arrivals when a hopeless prompt starts."""
ROUNDING: Final = 1e-6
CHUNKS: Final = (16, 32, 64, 128, 256, 384, 512, 768, 1024)
NEAR: Final = 1.05
ATTENDING: Final = 1.05
"""Times what is estimated of iterations by their tokens alone; chosen by trials."""
LOOK_AHEAD: Final = 64
"""Prompts that wait, at most, whose deadlines set the pace."""


class Paced(Unified):
    """Unified batches at the pace of first tokens."""

    name: ClassVar[str] = "paced"
    queues_batches = False
    resumes = False
    verifies = False
    options: ClassVar[type | None] = None
    memoized = ("_plans", "_seconds")
    needs: ClassVar[tuple[Need, ...]] = (
        Need("order", "asks for classes and deadlines", offers=Triage),
        Need("eviction", "asks what is parked", offers=Park),
        Need("admission", "keeps room for decodes by a rule of its own", names=("memory",)),
        *Unified.needs,
    )

    @classmethod
    def build(cls, b: "Builder") -> "Paced":
        return cls(VllmV1Options(), schedules_ahead=b.policy.schedules_ahead)

    def bind(self, scheduler: "Scheduler") -> None:
        super().bind(scheduler)
        order, eviction = scheduler.order, scheduler.eviction
        assert isinstance(order, Triage)
        assert isinstance(eviction, Park)
        self.triage, self.park = order, eviction
        self.limit = self.budget
        self._looked_at: Sequence | None = None
        """The head that was looked at last, where it is deferred or hopeless."""
        self._worth, self._num_price_limits = 1, 0
        # Of chunks by their tokens, which are few and come again: a plan to put decodes beside, and seconds alone.
        self._plans: dict[int, IterationPlan] = {}
        self._seconds: dict[int, float] = {}
        # Whether this step has started a request.
        self._started = False
        # Whether prompts are computed by themselves in this step, and whether there was no time for some.
        self._alone = self._held = False
        # Of the last iteration that was scheduled.
        self._prompt_tokens = 0

    def fill(self, plan: IterationPlan, now_s: float) -> None:
        self._started = self._alone = self._held = False
        self.park.make_room(plan)
        if self.triage.waiting or self.partials:
            members = len(self.batch.members)
            self.budget = self.limit
            if members:
                wanted = min(self._chunk(now_s), self.limit)
                alone = self._is_cheaper_alone(wanted)
                chunk = self._in_time(wanted, alone=alone)
                if alone and 0 < chunk < wanted and not self._is_cheaper_alone(chunk):
                    alone, chunk = False, self._in_time(wanted, alone=False)
                self._alone, self._held = alone and chunk > 0, chunk < wanted
                self.budget = chunk if self._alone else min(self.limit, members + chunk)
                while late := self._late(self.budget if self._alone else self.budget - members, now_s):
                    for seq in late:
                        self.triage.give_up(seq)
        super().fill(plan, now_s)
        self._prompt_tokens = plan.prefill_tokens

    def _run_running(self, plan: IterationPlan) -> int:
        """Decodes first, unless prompts go alone; then half-done prompts, oldest first."""
        batch, memory, budget = self.batch, self.paged, self.budget
        for seq in [seq for seq in self.partials if seq.num_tokens - seq.num_computed == 1]:
            self._join_if_decode(seq)
        if batch.members and not self._alone:
            needed = memory.decode_blocks()
            if needed > memory.gpu.free:
                return self._run_one_by_one(plan)
            memory.take_decodes(needed)
            self.decode_all(plan)
            budget -= len(batch.members)
        for seq in self.partials:
            chunk = memory.cut_chunk(seq, seq.num_computed, min(seq.num_tokens - seq.num_computed, budget))
            if chunk <= 0 or memory.blocks_missing(seq, seq.num_computed + chunk) > memory.gpu.free:
                break
            self._continue(plan, seq, chunk)
            budget -= chunk
        return budget

    def _admit(self, plan: IterationPlan, now_s: float, budget: int) -> None:
        super()._admit(plan, now_s, budget)
        if self._alone and not plan.chunks:
            # No prompt found room: the decodes need not wait.
            self._alone = False
            super()._run_running(plan)

    def _chunk(self, now_s: float) -> int:
        """Prompt tokens of this iteration."""
        order, pending = self.triage, self.pending()
        if not pending:
            seq = next(iter(self.partials), None) or order.head()
            # What `Triage.laxity_s` counts on.
            left_s = order.first_due_s(seq) - now_s - FIRST_ITERATIONS * order.iteration_s()
            rate = PREFILL_MARGIN * (seq.num_tokens - seq.num_computed) / left_s if left_s > 0.0 else 0.0
            even = ceil(DEFERRED_AHEAD * order.tokens_per_iteration)
            return max(self._worth, LEAST_DEFERRED_CHUNK, even, self._chunk_at(rate))
        self.find_worth()
        if not self.is_due(pending):
            return 0
        rate, tokens, worth = AHEAD * order.kept_tokens_per_s, 0, self._worth
        for seq in pending:
            tokens += seq.num_tokens - seq.num_computed
            left_s = seq.request.arrival_s + order.ttft_of(seq.request) / 2 - now_s
            if left_s <= 0.0:
                return self.limit
            if tokens / left_s > rate:
                rate = tokens / left_s
        least = tokens if tokens <= 2 * worth else max(worth, LEAST_CHUNK)
        return max(least, self._chunk_at(rate))

    def _chunk_at(self, tokens_per_s: float) -> int:
        """Tokens of each chunk beside the decodes that make so many a second."""
        order = self.triage
        busy = tokens_per_s * order.price.token_s
        if busy >= 1.0:
            return self.limit
        return ceil(tokens_per_s * order.decodes_s() / (1.0 - busy) - ROUNDING)

    def _in_time(self, chunk: int, *, alone: bool) -> int:
        """Of so many prompt tokens, those that there is time for beside the decodes; 0 rather than too few to pay."""
        order, pace = self.triage, self.triage.pace
        left_s = pace.saved_s if alone else pace.saved_s + pace.iteration_s - order.decodes_s()
        if left_s <= 0.0:
            return 0
        if left_s >= chunk * order.price.token_s:
            return chunk
        return min(chunk, max(self._worth, LEAST_CHUNK, int(left_s / order.price.token_s + ROUNDING)))

    def repeats(self, plan: IterationPlan, steps: int) -> int:
        """What decodes leave of the pace is for prompts that wait for it."""
        return 1 if self._held else steps

    def _starting(self, num_tokens: int) -> list[tuple[Sequence, int]]:
        """Those that are kept and have room now, first come first served, and the tokens of each: so many in all."""
        free, seats = self.paged.gpu.free - self.park.headroom(), self.park.seats(alone=True)
        found: list[tuple[Sequence, int]] = []
        for seq in self.triage.kept():
            self.paged.look_up(seq, is_next=False)
            free -= self.paged.blocks_wanted(seq, seq.num_tokens)
            if free < 0 or len(found) >= seats or num_tokens <= 0:
                break
            self.paged.look_up(seq)
            tokens = seq.num_tokens - self.paged.cached_tokens(seq)
            found.append((seq, tokens))
            num_tokens -= tokens
        return found

    def _late(self, chunk: int, now_s: float) -> list[Sequence]:
        """Those that would start in this iteration, of so many prompt tokens, and have their first token too late."""
        order, price = self.triage, self.triage.price
        if not order.num_kept:
            return []
        # Of the iterations to come.
        most = max(1, self.limit - len(self.batch.members))
        ahead = sum(seq.num_tokens - seq.num_computed for seq in self.partials)
        starting = self._starting(chunk + most - ahead) if ahead < chunk else []
        if not starting:
            return []
        decode_s = ATTENDING * order.decodes_s()
        token_s, square_s = ATTENDING * price.token_s, ATTENDING * price.square_s
        begin_s = now_s + decode_s
        if self.scheduler.in_flight:
            begin_s += decode_s + self._prompt_tokens * token_s
        total = ahead + sum(tokens for _, tokens in starting)
        late: list[Sequence] = []
        for seq, tokens in starting:
            if ahead >= chunk:
                break
            more = max(0, ceil((ahead + tokens - chunk) / most))
            end_s = begin_s + more * decode_s + min(total, chunk + more * most) * token_s + tokens**2 * square_s
            if end_s > order.first_due_s(seq):
                late.append(seq)
                total -= tokens
            else:
                ahead += tokens
        return late

    def pending(self) -> list[Sequence]:
        """Prompts that are kept, half done or waiting, as far as it looks ahead."""
        found = self.triage.first_kept(LOOK_AHEAD + 1)
        for place, seq in enumerate(self.partials):
            found.insert(place, seq)
        if self._looked_at is not None and self._looked_at in found:
            found.remove(self._looked_at)
        return found if len(found) <= LOOK_AHEAD else found[:LOOK_AHEAD]

    def find_worth(self) -> None:
        """Find the least chunk whose tokens cost about as little as any chunk's beside the decodes.

        Only where the price limit is new, and before `is_due`, which is asked in the middle of a step: the decodes are
        those of then.
        """
        order = self.triage
        if self._num_price_limits == order.num_price_limits or not self.batch.members or self._is_due_anyway:
            return
        self._num_price_limits = order.num_price_limits
        prices = [max(0.0, min(self._added_s(tokens), self._alone_s(tokens))) / tokens for tokens in CHUNKS]
        self._worth = next(t for t, s in zip(CHUNKS, prices, strict=True) if s <= NEAR * min(prices))

    @property
    def _is_due_anyway(self) -> bool:
        return self.triage.price_limit_s == inf or self.triage.is_urgent

    def is_due(self, pending: list[Sequence] | None = None) -> bool:
        """Whether it is time for a chunk of the `pending`: there is enough for one, or one of them has waited."""
        if self._is_due_anyway:
            return True
        tokens = 0
        for seq in self.pending() if pending is None else pending:
            tokens += seq.num_tokens - seq.num_computed
            if tokens >= self._worth:
                return True
        return False

    def _is_cheaper_alone(self, tokens: int) -> bool:
        """Whether a chunk takes less in an iteration of its own than beside this batch."""
        return tokens > 0 and self._added_s(tokens) > self._alone_s(tokens)

    def _added_s(self, tokens: int) -> float:
        """By how much a chunk lengthens an iteration of this batch."""
        batch, cost, plan = self.batch, self.triage.cost, self._plans.get(tokens)
        if plan is None:
            plan = self._plans[tokens] = self._plan_of(tokens)
        members, context_tokens = len(batch.members), batch.context_tokens
        windowed, longest = batch.windowed, batch.longest_tokens
        plan.num_decodes, plan.decode_context_tokens = members, context_tokens
        plan.decode_window, plan.decode_longest_tokens = windowed, longest
        return cost.iteration_s(plan) - cost.decode_run(members, context_tokens, windowed, longest)[0]

    def _alone_s(self, tokens: int) -> float:
        """What an iteration of a chunk alone takes."""
        seconds = self._seconds.get(tokens)
        if seconds is None:
            seconds = self._seconds[tokens] = self.triage.cost.iteration_s(self._plan_of(tokens))
        return seconds

    @staticmethod
    def _plan_of(tokens: int) -> IterationPlan:
        plan = IterationPlan()
        plan.add_chunk(Sequence(Request(-1, 0.0, tokens, 1)), tokens, Origin.ADMITTED)
        return plan

    def _finds_room(self, seq: Sequence, num_tokens: int, keep_free: int) -> bool:
        """Whether the head has a seat and blocks, for itself and for those that decode while they last."""
        order, park, gpu = self.triage, self.park, self.paged.gpu
        kept = order.is_kept(seq)
        free_share = HOPELESS_FREE if order.is_hopeless(seq) and not order.is_quiet else 0.0
        if park.seats(alone=kept, free_share=free_share) <= 0:
            return False
        self._looked_at = None if kept else seq
        wanted = self.paged.blocks_wanted(seq, seq.num_tokens)
        if not self.running and not park.promoting:
            return wanted <= gpu.free
        # This iteration's decodes have their blocks, unless prompts go alone: what is left falls from step to step.
        headroom = park.headroom() - (0 if self._alone else self.batch.blocks_needed(1))
        if kept:
            return wanted + headroom <= gpu.free
        if self._started or self.partials or park.num_kept:
            return False
        return wanted + max(headroom, int(free_share * gpu.num_blocks)) <= gpu.free

    def _start(self, plan: IterationPlan, seq: Sequence, cached: int, chunk: int, now_s: float) -> None:
        self._started = True
        decodes = seq.num_tokens - cached == 1 and cached >= seq.request.prompt_tokens
        # The last of generated tokens may be left for a decode, which takes its block itself.
        whole = seq.num_tokens - 1 if seq.num_generated else seq.num_tokens
        self.paged.place(seq, cached if decodes else max(whole, cached + chunk))
        self._run(plan, seq, chunk, now_s, decodes=decodes)
