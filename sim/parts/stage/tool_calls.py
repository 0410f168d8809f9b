"""`ToolCalls`: a sequence that calls a tool leaves the batch, its KV kept, dropped or swapped, until the tool answers.

The answer's tokens are a prompt behind its context. By default the KV is discarded, which is what a server does that
sees each answer as the end of a request and the next turn as a new one, whose prompt is all that came before.
"""

from collections.abc import Iterable
from math import inf
from typing import TYPE_CHECKING, ClassVar, Self, get_args

from sim.engine.changes import GPU, HOST, Move, Tier
from sim.engine.plan import IterationPlan
from sim.engine.sequence import PARKED, PROMOTING, WAITING, CallingSequence, Sequence, Status
from sim.errors import UserError
from sim.kv.paged import PagedMemory
from sim.parts.base import Stage, Wait
from sim.parts.needs import Need
from sim.parts.stage.tool_call_options import Kept, ToolCallOptions, time_to_live
from traces.request import ToolCall

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler
    from sim.systems.builder import Builder

TIE_S = 1e-9


class Calling:
    """One call, from when it begins until its sequence computes on."""

    __slots__ = ("call", "ends_s", "kept", "rethought_s", "since_s")

    def __init__(self, call: ToolCall, since_s: float, kept: Kept) -> None:
        self.call, self.since_s, self.kept = call, since_s, kept
        self.ends_s = since_s + call.duration_s
        self.rethought_s = inf
        """When it is asked again what becomes of the KV (`ToolCalls.choose`), s."""


class ToolCalls(Stage):
    """Sequences in `calling` are with a tool, those in `answered` wait to compute on, KV of those in `coming` returns.

    Args:
        kept: what becomes of their KV.
        ttl_s: how long after a call it does; then KV is discarded. With `preserve`, the time to live of Continuum
            (Li et al., arXiv 2511.02230), as a number: what tools took so far is not learnt from.
        keeps_place: whether a sequence whose KV was discarded comes first in the queue when the tool has answered.
    """

    name: ClassVar[str] = "tool-calls"
    options: ClassVar[type | None] = ToolCallOptions
    needs: ClassVar[tuple[Need, ...]] = (
        Need("batching", "goes on with sequences whose context has grown", offers="resumes"),
        Need("memory", "keeps, drops and moves whole sequences", names=("paged",)),
        Need("memory", "keeps, drops and moves whole sequences", offers=PagedMemory),
        Need("eviction", "moves sequences itself", names=("recompute",)),
        Need("order", "puts sequences back in their place", offers="sticky"),
    )
    takes_calls: ClassVar[bool] = True

    @classmethod
    def build(cls, b: "Builder") -> Self:
        b.refuse_windows("stage=tool-calls")
        options = b.options(ToolCallOptions)
        kept, ttl_s = time_to_live(options.tool_kv, options.tool_ttl_s)
        if kept not in get_args(Kept):
            raise UserError(
                f"stage=tool-calls: tool-kv={options.tool_kv} is a way of stage=min-waste; give one of its own, "
                f"{' or '.join((*get_args(Kept), 'ttl'))}"
            )
        return cls(kept, ttl_s, keeps_place=options.keeps_place)

    def __init__(self, kept: Kept, ttl_s: float, *, keeps_place: bool) -> None:
        self.kept: Kept = kept
        self.ttl_s = ttl_s
        self.keeps_place = keeps_place
        self.calling: dict[CallingSequence, Calling] = {}
        self.answered: dict[CallingSequence, Calling] = {}
        self.coming: dict[CallingSequence, Calling] = {}
        self._begun: list[CallingSequence] = []
        self._waits_for: Wait | None = None

    def bind(self, scheduler: "Scheduler") -> None:
        super().bind(scheduler)
        memory = scheduler.memory
        assert isinstance(memory, PagedMemory)
        self.paged, self.tally = memory, scheduler.counters.policy

    # -- what it does with the KV of a sequence that calls: what other systems decide otherwise ------------------------

    def choose(self, seq: CallingSequence, calling: Calling, now_s: float) -> Kept:
        """What becomes of the KV of one that has it on the GPU, asked when it calls and at `rethought_s`."""
        expires_s = calling.since_s + self.ttl_s
        if now_s >= expires_s - TIE_S:
            self.tally["tool_calls_expired"] += 1
            return "discard"
        calling.rethought_s = expires_s
        return self.kept

    def in_turn(self, begun: list[CallingSequence]) -> list[CallingSequence]:
        """Those that have begun to call since the last step, in the order in which to choose."""
        return begun

    # -- what is here --------------------------------------------------------------------------------------------------

    @property
    def num_parked(self) -> int:
        return len(self.calling) + len(self.answered) + len(self.coming)

    @property
    def num_calling(self) -> int:
        return len(self.calling) + len(self.answered)

    @property
    def num_returning(self) -> int:
        return len(self.coming)

    @property
    def waits_for(self) -> Wait | None:
        return self._waits_for or ("link" if self.coming else "tool" if self.calling else None)

    def holders(self) -> Iterable[tuple[Sequence, Tier]]:
        for held in (self.calling, self.answered):
            for seq, calling in held.items():
                if calling.kept == "preserve":
                    yield seq, GPU
                elif calling.kept == "swap":
                    yield seq, HOST
                    if seq in self.paged.copies_of:
                        yield seq, GPU
        for seq in self.coming:
            yield seq, HOST
            yield seq, GPU

    def enter(self, seq: Sequence, *, first: bool = False) -> None:
        self.scheduler.join(seq, first=first)

    def call(self, seq: Sequence) -> None:
        assert isinstance(seq, CallingSequence)
        has_kv = seq.status is not WAITING
        self.calling[seq] = Calling(seq.begin_call(), seq.last_token_s, "preserve" if has_kv else "discard")
        self.tally["tool_calls"] += 1
        if has_kv:
            self.scheduler.park(seq, Status.CALLING)
            self._begun.append(seq)
        else:
            seq.status = Status.CALLING
            self.tally["tool_calls_discard"] += 1

    # -- a step --------------------------------------------------------------------------------------------------------

    def prepare(self, now_s: float) -> None:
        if self._begun:
            for seq in self.in_turn(self._begun):
                self._rethink(seq, now_s)
            for seq in self._begun:
                self.tally[f"tool_calls_{self.calling[seq].kept}"] += 1
            self._begun = []
        due_s = now_s + TIE_S
        for seq, calling in list(self.calling.items()):
            if calling.ends_s <= due_s:
                del self.calling[seq]
                self._answer(seq, calling)
            elif calling.rethought_s <= due_s:
                self._rethink(seq, now_s)
        self._waits_for = None
        for seq, calling in list(self.answered.items()):
            wait = self._go_on(seq, calling)
            self._waits_for = self._waits_for or wait

    def _rethink(self, seq: CallingSequence, now_s: float) -> None:
        calling = self.calling[seq]
        calling.rethought_s = inf
        kept = self.choose(seq, calling, now_s)
        if kept == "swap" and not (self.paged.may_leave(seq) and self.paged.can_swap_out(seq)):
            kept = "discard"
        calling.kept = kept
        if kept == "swap":
            self.paged.send_out(seq)
        elif kept == "discard":
            self.scheduler.recompute(seq)
            seq.status = Status.CALLING

    def _answer(self, seq: CallingSequence, calling: Calling) -> None:
        """The tool has answered: its tokens are behind the context."""
        seq.end_call(calling.call)
        if calling.kept != "discard":
            # Its last token was never fed.
            seq.num_computed = seq.num_tokens - 1
            seq.prefilling = True
            seq.status = PARKED
        self.scheduler.append(seq, calling.call.returned_tokens)
        self.answered[seq] = calling

    def _go_on(self, seq: CallingSequence, calling: Calling) -> Wait | None:
        """Let a sequence compute on whose tool has answered; what it waits for if it cannot."""
        scheduler, paged = self.scheduler, self.paged
        if calling.kept == "swap" and seq in paged.copies_of:
            return "link"
        if (reason := scheduler.batching.refusal(seq)) is not None:
            self._drop(seq, calling)
            scheduler.ignore(seq, reason)
            return None
        if calling.kept == "discard":
            self._queue(seq)
            return None
        if calling.kept == "swap":
            missing = max(0, paged.blocks_holding(seq.num_tokens) - paged.held_blocks(seq))
            if paged.held_blocks(seq) + 1 + missing > paged.gpu.num_blocks:
                self._drop(seq, calling)
                self._queue(seq)
                return None
            if scheduler.num_seated >= scheduler.limits.max_num_seqs:
                return "seat"
            if not paged.can_swap_in(seq, missing):
                return "memory"
            del self.answered[seq]
            self.coming[seq] = calling
            seq.status = PROMOTING
            paged.bring_in(seq)
            return None
        wait = scheduler.batching.resume(seq)
        if wait is None:
            del self.answered[seq]
        elif wait == "memory" and not self.batch.members and not scheduler.batching.partials:
            # Sequences like it may hold all there is.
            self.tally["tool_calls_without_room"] += 1
            self._drop(seq, calling)
            self._queue(seq)
            return None
        return wait

    def _drop(self, seq: CallingSequence, calling: Calling) -> None:
        """`seq`, whose KV is nowhere on its way, loses it."""
        if calling.kept == "swap":
            self.paged.drop_swapped(seq)
            seq.reset_for_recompute()
        elif calling.kept == "preserve":
            self.scheduler.recompute(seq)
        del self.answered[seq]
        self.scheduler.changed = True

    def _queue(self, seq: CallingSequence) -> None:
        self.answered.pop(seq, None)
        seq.status = WAITING
        self.scheduler.changed = True
        if self.keeps_place:
            self.scheduler.order.put_back([seq])
        else:
            self.scheduler.order.add(seq)

    def transferred(self, move: Move) -> None:
        seq = move.seq
        if move.target is GPU and isinstance(seq, CallingSequence) and seq in self.coming:
            calling = self.answered[seq] = self.coming.pop(seq)
            calling.kept = "preserve"
            seq.status = PARKED

    # -- time ----------------------------------------------------------------------------------------------------------

    def wakes_s(self) -> float:
        return min((min(calling.ends_s, calling.rethought_s) for calling in self.calling.values()), default=inf)

    def repeats(self, plan: IterationPlan, steps: int) -> int:
        return 1 if self.answered else steps
