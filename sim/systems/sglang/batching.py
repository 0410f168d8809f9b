"""`ExtendFirst`: prompts before decodes, admitted by what those that run may generate (SGLang 0.5's scheduler).

A step computes prompts, in chunks of the budget, if any can go on or start, else a token of each decode; with
`--sglang-enable-mixed-chunk` decodes ride along. A refusal for lack of memory is sticky: no request is tried until one
has left those that run. Scheduled ahead (the default), a step is decided while the one before it runs. What
that one ends by length is left out; what it ends by a stop token is not known yet and is fed once more, for nothing.
Source: sglang 0.5.23, `managers/scheduler.py` (`get_next_batch_to_run`), `schedule_batch.py` (`retract_decode`).
"""

from collections import deque
from typing import TYPE_CHECKING, ClassVar

from sim.engine.changes import Move
from sim.engine.plan import ADMITTED, CONTINUED, IterationPlan, PrefillChunk, StepTimes
from sim.engine.sequence import FINISHED, Sequence, Status
from sim.errors import UserError
from sim.parts.batching.base import Batching
from sim.parts.needs import Need
from sim.systems.sglang.memory import TreeMemory
from sim.systems.sglang.options import SglangOptions
from sim.systems.sglang.prefill_pass import PrefillPass, Verdict
from sim.systems.sglang.queue import SglangQueue
from sim.systems.sglang.window_memory import WindowTreeMemory

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler
    from sim.systems.builder import Builder

FIRST_RATIO = 0.7
LEAST_RATIO_SHARE = 0.14
RATIO_STEPS = 600
"""The ratio begins at `FIRST_RATIO` times the conservativeness, and falls to that share of it in so many steps."""
RANK_CONSERVATIVENESS = 0.3
"""What the conservativeness of ranks that share experts is multiplied by."""
RETRACT_STEPS = 20
"""Decode steps for which a retraction makes room."""
SPARE_PROMPT_TOKENS = 5
PREFILL_WEIGHT = 1000
"""Steps that one which prefilled counts for until the scheduler next looks at what has arrived."""
PROMPT_TOO_LONG = "prompt longer than SGLang takes: at most max_model_len or the pool, less 7 tokens"
NO_ROOM_ALONE = "no room for it, though nothing else runs; SGLang waits for ever"
OUT_OF_MEMORY = "out of memory even after retracting all other requests"


class ExtendFirst(Batching):
    """SGLang's `get_next_batch_to_run`."""

    name: ClassVar[str] = "extend-first"
    options: ClassVar[type | None] = SglangOptions
    needs: ClassVar[tuple[Need, ...]] = (
        Need("memory", "asks SGLang's tree for pages", names=("sglang-tree",)),
        Need("order", "sorts the queue as SGLang does", names=("sglang-queue",)),
        Need("eviction", "computes victims again", names=("recompute",)),
        Need("stage", "decodes what it has prefilled", names=("direct",)),
        Need("admission", "keeps room for decodes by a rule of its own", names=("memory",)),
    )
    splits_prompts: ClassVar[bool] = True
    chunks_are_blocks: ClassVar[bool] = True
    default_budget: ClassVar[int | None] = 8192
    idle_tokens: ClassVar[int] = 0
    frees_in_order = True
    records_decisions = True

    @classmethod
    def build(cls, b: "Builder") -> "ExtendFirst":
        is_rank = b.deployment.ranks > 1
        return cls(b.options(SglangOptions), schedules_ahead=b.policy.schedules_ahead, is_rank=is_rank)

    def __init__(self, options: SglangOptions, *, schedules_ahead: bool = False, is_rank: bool = False) -> None:
        """`is_rank`: it iterates together with others (`--enable-dp-attention`)."""
        self.settings, self.schedules_ahead, self._is_rank = options, schedules_ahead, is_rank
        conservativeness = options.schedule_conservativeness * (RANK_CONSERVATIVENESS if is_rank else 1.0)
        self._first_ratio = min(FIRST_RATIO * conservativeness, 1.0)
        self._least_ratio = min(self._first_ratio * LEAST_RATIO_SHARE, 1.0)
        self._decay = (self._first_ratio - self._least_ratio) / RATIO_STEPS
        self.ratio = self._first_ratio
        """Of what those that run may yet generate, the share for which room is kept."""
        self.preempts = options.enable_priority_scheduling and not options.disable_priority_preemption
        self.running: list[Sequence] = []
        """Those that decode, in SGLang's order."""
        self.is_full = False
        """No request is tried until one has left."""
        self.chunked: Sequence | None = None
        """The one half-done prompt."""
        self._has_entered = False
        """What is computed of it has entered the tree."""
        self._decode_tokens = self._extend_tokens = 0
        """What a decode counts for in the queue's `computed_tokens`: SGLang's is that of the prompts it began with."""
        self._decodes_first = 0
        """Steps for which no prompt is looked at."""
        self._unread_steps = 0
        """Steps since it last looked at what has arrived."""
        self._last: list[Sequence] | None = None
        """Those of the last step, where it prefilled and they are not among `running`."""
        self._rows: list[Sequence] = []
        """Those of the plan just made, in order."""
        self._sampled: set[Sequence] = set()
        """Of them those that get a token."""
        self._has_left = False
        self._asked_in_vain = -1.0, 0
        """When there was nothing to compute, s, and how many waited then."""
        self._to_settle: deque[dict[Sequence, int]] = deque()
        """Of each plan in flight, in order: sequences that end with it (0), or the tokens of theirs that can be hit."""
        self._before: tuple[float, dict[Sequence, float]] = (-1.0, {})
        """When the tokens before those in flight came, s: of all, and of those of which it was another time."""
        self._events: list[int] = []
        self._line = ""

    def bind(self, scheduler: "Scheduler") -> None:
        super().bind(scheduler)
        memory, order = scheduler.memory, scheduler.order
        assert isinstance(memory, TreeMemory) and isinstance(order, SglangQueue), "asked for by what the part needs"
        self.tree, self.queue = memory, order
        self._windows = memory if isinstance(memory, WindowTreeMemory) else None
        self._asks_every_step = self.preempts or self._windows is not None
        order.max_new_tokens = self.max_new_tokens
        limits = self.limits
        self.page = page = memory.block_size
        self.pool_tokens = memory.gpu.num_blocks * page
        self.seats = min(limits.max_num_seqs, self.pool_tokens // 2)
        least = min(self.settings.min_free_slots_delay, self.seats)
        # SGLang takes one for none.
        self._least_seats = least if least > 1 else 0
        self.max_tokens = min(limits.max_model_len, self.pool_tokens) - 1
        # With a prompt's tokens; with its whole pages.
        self._most_tokens, self._most_paged = self.max_tokens - 1, self.pool_tokens - page - 1
        self._declared = self.settings.max_new_tokens
        if limits.enable_chunked_prefill and limits.max_num_batched_tokens % page:
            raise UserError(
                f"--max-num-batched-tokens: SGLang's chunks are whole pages, and {limits.max_num_batched_tokens} is no "
                f"multiple of {page}; take {max(1, limits.max_num_batched_tokens // page) * page}"
            )
        self.chunk_tokens = limits.max_num_batched_tokens if limits.enable_chunked_prefill else None
        self.mixes = self.settings.enable_mixed_chunk and self.chunk_tokens is not None

    # -- what requests ask for -----------------------------------------------------------------------------------------

    def refusal(self, seq: Sequence) -> str | None:
        return PROMPT_TOO_LONG if seq.num_tokens >= self.max_tokens - SPARE_PROMPT_TOKENS else None

    def max_new_tokens(self, seq: Sequence) -> int:
        """What a request asks for, as far as an empty pool has room for it."""
        request = seq.request
        prompt, most = request.prompt_tokens, self._declared or request.output_tokens
        # Asked for every request that runs at each look at the prompts: no calls.
        if most > self._most_tokens - prompt:
            most = self._most_tokens - prompt
        room = self._most_paged - prompt - -prompt % self.page
        if most > room:
            most = room
        return most if most > 0 else 0

    def known_tokens(self, seq: Sequence) -> int:
        """Tokens that it has generated, as far as the scheduler knows."""
        generated = self.scheduler.num_generated_of(seq)
        return generated - 1 if self.scheduler.in_flight and seq in self._sampled else generated

    def to_come(self, seq: Sequence) -> int:
        """Tokens that it may yet generate."""
        return self.max_new_tokens(seq) - self.known_tokens(seq)

    # -- a step ------------------------------------------------------------------------------------------------------

    def fill(self, plan: IterationPlan, now_s: float) -> None:
        asked = now_s, len(self.queue)
        if asked == self._asked_in_vain:
            return
        interval = self.settings.scheduler_recv_interval
        self._unread_steps += PREFILL_WEIGHT if self._last else 1
        if self._unread_steps >= interval:
            self._unread_steps = 0
            self.queue.read()
        self.tree.begin_step(now_s)
        self._merge()
        while (defers := self._defers_prompts()) or not self._prefill(plan, now_s):
            if self.running:
                self._decode(plan)
            elif self.scheduler.in_flight:
                pass
            elif self.queue.read():
                # Idle, it takes no time until it looks.
                self._unread_steps = 0
                continue
            elif (defers or self.tree.tree.writes_wait) and (self.queue.waiting or self.chunked is not None):
                # It looks again at once.
                self.tree.begin_step(now_s)
                continue
            elif self.tree.is_copying:
                pass
            elif self.queue.waiting or self.chunked is not None:
                if not self.scheduler.changed:
                    self._give_up()
                    continue
            elif not self._is_rank:
                self.ratio = self._first_ratio
            break
        self.eviction.requeue_victims()
        self.tree.ask_for_entered()
        if not self._rows:
            if self.scheduler.beside and not self.scheduler.in_flight and not self.scheduler.changed:
                # Copies begin alone, in no time, and it is asked again: SGLang looks once, or again where one was
                # given up.
                self._asked_in_vain = asked
            return
        self.tree.plan_copies(plan)
        self.queue.computed_tokens += self._extend_tokens if self._last else self._decode_tokens
        if self.schedules_ahead:
            self._before = self.batch.last_token_s, dict(self.batch.late)
        if self.record is not None:
            self._note(plan)
        waits = bool(self.queue.waiting)
        looks = self._asks_every_step or not self.is_full
        # Storage is asked for a prompt in the pass after it arrived.
        plan.cut_on_arrival = looks or self.tree.entered is not None or interval > 1
        # What the last step prefilled enters the tree when that has ended.
        settles = plan.chunks or self.scheduler.last_in_flight or any(self._to_settle) or self.chunked is not None
        if not settles and not self.queue.ages and not (waits and (looks or self.tree.counts_passes)):
            self.scheduler.allow_jump(plan)
            if self.queue.unread:
                plan.max_steps = min(plan.max_steps, interval - self._unread_steps)

    def _defers_prompts(self) -> bool:
        """Whether decodes come first in this step: so many have to, after one that prefilled."""
        if len(self.running) < self.settings.prefill_decode_interval_min_bs:
            self._decodes_first = 0
        if not self._decodes_first:
            return False
        self._decodes_first -= 1
        return True

    def transferred(self, move: Move) -> None:
        self._asked_in_vain = -1.0, 0

    def all_idle(self) -> None:
        # A rank that is idle alone computes an idle batch.
        if not (self.queue.waiting or self.chunked or self.scheduler.in_flight):
            self.ratio = self._first_ratio

    def _give_up(self) -> None:
        """Nothing runs, and what is next finds no room even so: SGLang waits for ever."""
        seq = self.chunked or self.queue.pop()
        if seq is self.chunked:
            self.chunked = None
            del self.partials[seq]
        seq.error = NO_ROOM_ALONE
        self.scheduler.release(seq)
        self.scheduler.ignore(seq, NO_ROOM_ALONE)

    def _merge(self) -> None:
        """What the last step prefilled joins those that run; what has ended leaves them."""
        self._rows, last, self._last = [], self._last, None
        if self.chunked is not None and not self._has_entered:
            self.memory.publish(self.chunked, self.chunked.num_computed)
            self._has_entered = True
        if last is not None:
            joining = [seq for seq in last if seq is not self.chunked and _runs(seq)]
            if len(joining) < len(last):
                self.is_full = False
            if joining and not self.running:
                self.is_full, self._decode_tokens = False, self._extend_tokens
            self.running += joining
        if self._has_left:
            self._has_left = False
            self._keep([seq for seq in self.running if _runs(seq)])

    def _keep(self, running: list[Sequence]) -> None:
        if len(running) < len(self.running):
            self.is_full = False
        self.running = running

    def _has_ended_by_length(self, seq: Sequence) -> bool:
        """Whether its last token is in flight, and known to be the last."""
        return seq in self.scheduler.last_in_flight and self.known_tokens(seq) + 1 >= self.max_new_tokens(seq)

    # -- prompts -------------------------------------------------------------------------------------------------------

    def _seats_left(self, num_continued: int = 0) -> int:
        """How many may be among a step's prompts, of which `num_continued` have a seat."""
        return self.seats - max(len(self.running), self.scheduler.num_running - num_continued)

    def _prefill(self, plan: IterationPlan, now_s: float) -> bool:
        """Put prompts into the plan; False where none goes on or starts."""
        queue, memory = self.queue, self.tree
        if self._asks_every_step or not self.running:
            self.is_full = False
        if (self.is_full or not queue.waiting) and self.chunked is None:
            return False
        if self.chunked is None and self.running and self._seats_left() < self._least_seats:
            return False
        if self._seats_left() <= 0 and self.chunked is None and not self.preempts:
            self.is_full = True
            return False
        queue.sort()
        now = PrefillPass(self)
        if self.chunked is not None:
            seq, chunk = self.chunked, now.go_on(self.chunked)
            self._has_entered = not chunk
            if chunk:
                plan.add_chunk(seq, chunk, CONTINUED)
            if seq.num_computed + chunk == seq.num_tokens:
                self.chunked = None
        most = self.settings.prefill_max_requests
        place = 0
        while place < len(queue.waiting):
            if now.verdict() is Verdict.STOP:
                break
            seq = queue.at(place)
            if len(now.chunks) >= self._seats_left(now.num_continued):
                self.is_full = True
            if self.is_full and not (self.preempts and self._preempt_for(seq, now, plan)):
                break
            if not memory.look_up_next(seq):
                place += 1
                continue
            if most and len(now.chunks) >= most:
                break
            verdict, chunk = now.admit(seq)
            if chunk:
                queue.pop(place)
                seq.output_tokens = max(1, min(seq.request.output_tokens, self.max_new_tokens(seq)))
                self.scheduler.start(seq, now_s, placed=True)
                plan.add_chunk(seq, chunk, ADMITTED)
                if seq.num_computed + chunk < seq.num_tokens:
                    self.chunked, self._has_entered = seq, False
            else:
                memory.refused(seq)
            if verdict is not Verdict.GO_ON:
                if verdict is Verdict.NO_TOKEN:
                    self.is_full = bool(now.chunks) or bool(self.running)
                break
        if not now.chunks:
            return False
        memory.plan_loads(plan)
        memory.extend(now.chunks)
        self._rows = [seq for seq, _ in now.chunks]
        if self.mixes and self.running:
            self._keep([seq for seq in self.running if not self._has_ended_by_length(seq)])
            if self.running and self._fits(self.running):
                for seq in self.running:
                    memory.ride(seq, seq.request.prompt_tokens + self.known_tokens(seq))
                self._plan_decodes(plan)
                self._rows += self.running
                self.running = []
        self._last, self._decodes_first = self._rows, self.settings.prefill_decode_interval
        self._extend_tokens = sum([tokens for _, tokens in now.chunks]) + len(self._rows) - len(now.chunks)
        self._sampled = {seq for seq in self._rows if seq is not self.chunked}
        return True

    def _preempt_for(self, seq: Sequence, now: PrefillPass, plan: IterationPlan) -> bool:
        """Preempt the least urgent that run where `seq` is urgent enough and that makes room enough."""
        queue, threshold = self.queue, self.settings.priority_scheduling_preemption_threshold
        running = [one for one in self.running if _runs(one)]
        running.sort(key=lambda one: (-queue.urgency(one), -queue.entered(one)))
        lacking = now.lacking(seq)
        victims: list[Sequence] = []
        for one in running:
            if queue.urgency(one) - queue.urgency(seq) <= threshold:
                break
            victims.append(one)
            lacking -= now.kept_for(one)
            if lacking <= 0:
                break
        if not victims or lacking > 0:
            return False
        left = len(self.running)
        for one in [one for one in self.running if one in victims]:
            now.give_back(one)
            left -= 1
            self._take_from(one, plan, left)
        self.running = [one for one in self.running if one not in victims]
        return True

    # -- decodes -------------------------------------------------------------------------------------------------------

    def _fits(self, seqs: list[Sequence]) -> bool:
        """Whether the next token of each finds a page, what is idle evicted as far as needed."""
        return self.tree.make_room(self._pages(seqs))

    def _pages(self, seqs: list[Sequence]) -> int:
        members = self.batch.members
        if len(seqs) == len(members) and not self.scheduler.last_in_flight:
            return self.batch.blocks_needed(1)
        tree, needs_block = self.tree, self.batch.needs_block
        return sum(needs_block(seq) if seq in members else tree.needs_page(seq) for seq in seqs)

    def _decode(self, plan: IterationPlan) -> None:
        before = self.running
        ending = bool(self.scheduler.last_in_flight)
        if ending:
            self.running = [seq for seq in before if not self._has_ended_by_length(seq)]
            if not self.running:
                self.is_full = False
                return
        if self._fits(self.running):
            self.ratio = max(self.ratio - self._decay, self._least_ratio)
        elif len(self.running) < len(before):
            # What ends now makes room: the others wait for it.
            self.is_full = False
            return
        else:
            self._retract(plan)
        if len(self.running) < len(before):
            self.is_full = False
        if self.running:
            self._rows = list(self.running)
            self._plan_decodes(plan)
            self._sampled = set(self.running)

    def _plan_decodes(self, plan: IterationPlan) -> None:
        """Each of those that run takes a token; such as have ended unknown to the scheduler, for nothing."""
        memory, running = self.tree, self.running
        if self._windows:
            self._windows.slide({seq: seq.request.prompt_tokens + self.known_tokens(seq) for seq in running})
        memory.decode(len(running), self._pages(running))
        if self.batch.members:
            self.decode_all(plan)
        if self.scheduler.last_in_flight:
            for seq in running:
                if seq in self.scheduler.last_in_flight:
                    memory.feed_last(seq)
                    plan.add_single_chunk(seq, CONTINUED)

    def _retract(self, plan: IterationPlan) -> None:
        """Take the pages of one at least, and of as many as are needed: those with the fewest tokens first."""
        by_priority = self.settings.retraction_policy == "priority"
        kept = sorted(
            self.running,
            key=lambda seq: (
                -self.queue.urgency(seq) if by_priority else 0,
                self.known_tokens(seq),
                -seq.request.prompt_tokens,
            ),
            reverse=True,
        )
        is_first = True
        while (is_first or not self._fits(kept)) and len(kept) > 1:
            is_first = False
            self._take_from(kept.pop(), plan, len(kept))
        if len(kept) == 1 and not self._fits(kept):
            last = kept.pop()
            self._take_out(last)
            # Nothing of it is cached.
            last.error = OUT_OF_MEMORY
            self.scheduler.release(last)
            self.scheduler.ignore(last, OUT_OF_MEMORY)
        self.running = kept
        generated = sum(map(self.known_tokens, kept))
        asked = sum(map(self.max_new_tokens, kept))
        self.ratio = min(1.0, (generated + RETRACT_STEPS * len(kept)) / (asked + 1))

    def _take_from(self, seq: Sequence, plan: IterationPlan, num_left: int) -> None:
        """Take the pages of one that runs, for `num_left` that stay."""
        self._events.append(seq.request.request_id)
        self.scheduler.counters.preemptions += 1
        self._take_out(seq)
        self.eviction.evict(seq, plan)
        self.tree.make_room(-(-num_left * RETRACT_STEPS // self.page))

    def _take_out(self, seq: Sequence) -> None:
        if seq in self.batch.members:
            self.batch.remove(seq)
        if self.scheduler.in_flight and seq in self._sampled:
            last_s, late = self._before
            self.scheduler.take_back(seq, late.get(seq, last_s))

    # -- afterwards --------------------------------------------------------------------------------------------------

    def in_order(self, seqs: list[Sequence]) -> list[Sequence]:
        places = {seq: place for place, seq in enumerate(self._rows)}
        return sorted(seqs, key=places.__getitem__)

    def end_in_order(self, plan: IterationPlan, ended: list[Sequence], end_s: float) -> None:
        """Row by row: prompts enter the tree, and what has ended gives its pages back."""
        chunks = {chunk.seq: chunk for chunk in plan.chunks[: len(plan.chunks) - plan.num_single_chunks]}
        ending = set(ended)
        to_settle: dict[Sequence, int] = {}
        for seq in self._rows if chunks or ended else ():
            if seq in ending:
                self.scheduler.end(seq, end_s)
                to_settle[seq] = 0
            elif (chunk := chunks.get(seq)) is not None:
                tokens = self._commit_chunk(chunk, end_s)
                if tokens is not None:
                    to_settle[seq] = tokens
        if self.schedules_ahead:
            self._to_settle.append(to_settle)

    def _commit_chunk(self, chunk: PrefillChunk, end_s: float) -> int | None:
        """Count it; of a complete prompt, how many tokens can be hit now (0: it has ended); else None."""
        seq = chunk.seq
        seq.num_computed = tokens = chunk.num_cached + chunk.num_new
        if tokens < seq.num_tokens:
            self.partials[seq] = None
            return None
        self.partials.pop(seq, None)
        self._before[1][seq] = seq.last_token_s
        if not self.scheduler.emit_token(seq, end_s):
            return 0
        if not self.schedules_ahead:
            self.memory.publish(seq, tokens)
        self.stage.enter(seq)
        return tokens

    def left(self, seq: Sequence) -> None:
        self._has_left = True
        self._sampled.discard(seq)
        self._before[1].pop(seq, None)
        if seq.status is Status.WAITING:
            for settled in self._to_settle:
                settled.pop(seq, None)
        elif self._to_settle and seq in self._to_settle[0]:
            # Of those in its step, the ones before it enter the tree first.
            settled = self._to_settle[0]
            while (first := next(iter(settled))) is not seq:
                self.memory.publish(first, settled.pop(first))
            del settled[seq]

    def delivered(self) -> None:
        for seq, tokens in self._to_settle.popleft().items():
            self.memory.publish(seq, tokens)

    def committed(self, plan: IterationPlan, times: StepTimes) -> None:
        if times.iterations > 1:
            self._before = times.end_s - times.last_s, {}
        self._unread_steps = (self._unread_steps + times.iterations - 1) % self.settings.scheduler_recv_interval
        self._decodes_first = max(0, self._decodes_first - times.iterations + 1)
        for _ in range(times.iterations - 1):
            if self.ratio > self._least_ratio:
                self.ratio = max(self.ratio - self._decay, self._least_ratio)
            if self.record is not None:
                self.record(self._line)

    def _note(self, plan: IterationPlan) -> None:
        assert self.record is not None
        tokens = {chunk.seq: chunk.num_new for chunk in plan.chunks}
        kind = "E" if plan.prefill_tokens else "D"
        entries = " ".join(f"{seq.request.request_id}:{tokens.get(seq, 1)}" for seq in self._rows)
        self._line = f"{kind} {entries}"
        events = f" preempt {' '.join(map(str, self._events))}" if self._events else ""
        self._events.clear()
        self.record(self._line + events)


def _runs(seq: Sequence) -> bool:
    return seq.status is not FINISHED and seq.status is not Status.IGNORED
