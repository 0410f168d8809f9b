"""`Park`: sequences leave for the host, beside the computation, where others pay better, and return by rank.

Rank is `Triage`'s place: deferred before hopeless, the cheapest to finish first. Before them those that are kept take
turns, the one with the least time to lose first. Sequences leave when one that is kept lacks room (the first of those
parked, or the prompts that wait, for a chunk of them at once):

- one that is not kept, the dearest first;
- one that has joined since and would stand behind the parked head;
- else, where time is short, the laxest that can afford it and has more left than the head.

A sequence that is cheaper to compute again gives its blocks up at once instead (`Mechanism`). One that returns takes
its blocks when the link is about to be free, no sooner.

Where the host is full, those there that are not kept and would return last are computed again: what will not be served
in time must not delay what could be.

Scheduled ahead, a sequence whose last token is in flight has left the batch, and neither leaves nor counts as room.

Blocks that decodes will need while a sequence is copied out, at least for `HORIZON` iterations, are kept free. Where
they run short all the same, the victim is copied out before the iteration or computed again, whichever costs the batch
less. Blocks that others may hit never move: a sequence that holds any is computed again, and finds the rest in the
cache.
"""

from collections.abc import Iterable
from itertools import chain
from math import ceil, inf
from typing import TYPE_CHECKING, ClassVar, Final, Self

from sim.engine.changes import D2H, H2D, Move, Tier
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence, Status
from sim.kv.paged import PagedMemory
from sim.parts.eviction.recompute import Recompute
from sim.parts.needs import Need
from sim.systems.adaptive.mechanism import Mechanism
from sim.systems.adaptive.options import AdaptiveOptions
from sim.systems.adaptive.triage import DEFERRED, HOPELESS, KEPT, Place, Triage

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler
    from sim.systems.adaptive.paced import Paced
    from sim.systems.builder import Builder

MOST_TOKENS: Final = 1024
"""Of prompts, whose blocks and seats are made free together: beside many decodes, prompts one by one cost most."""
HORIZON: Final = 8
"""Iterations whose growth is kept free, at least."""
SHORT_S: Final = 2.0
"""With less laxity than this, a head may take the room of kept sequences, too."""
MARGIN_S: Final = 5.0
"""By how much that one must be laxer."""
MORE_TURNS: Final = 0.25
"""Share of the turns beyond one that is promised: each is copied out and in. With all, many were a little late."""


class Park(Recompute):
    """`away` are on the host or on the way there, `promoting` on the way back.

    `by_price`: a sequence that leaves is computed again where that is cheaper (`Mechanism`).
    """

    name: ClassVar[str] = "park"
    options: ClassVar[type | None] = AdaptiveOptions
    needs: ClassVar[tuple[Need, ...]] = (
        Need("order", "asks for classes and laxities", offers=Triage),
        Need("batching", "asks whether a prompt is due", names=("paced",)),
        Need("memory", "moves whole sequences beside a prefix cache", names=("paged",)),
    )

    def __init__(self, *, by_price: bool = True) -> None:
        super().__init__()
        self.by_price = by_price
        self.away: dict[Sequence, None] = {}
        self.promoting: dict[Sequence, None] = {}
        self.num_kept = 0
        """Of those away, at this step."""
        self._joined: dict[Sequence, None] = {}
        # Of those on the way back.
        self._returning_blocks = 0
        # What the first of the parked wants, where it can wait less long than prompts: none starts in these blocks.
        self._owed_blocks = 0
        self._short = False
        # What `growth` says before a sequence has joined in this step.
        self._growth = 0
        # Iterations whose growth is kept free, and for which price limit it was found.
        self._horizon, self._num_price_limits = HORIZON, 0

    @classmethod
    def build(cls, b: "Builder") -> Self:
        return cls(by_price=b.options(AdaptiveOptions).mechanism == "price")

    def bind(self, scheduler: "Scheduler") -> None:
        super().bind(scheduler)
        memory, order = scheduler.memory, scheduler.order
        assert isinstance(order, Triage)
        assert isinstance(memory, PagedMemory)
        self.order, self.paged = order, memory
        self.batching: Paced = scheduler.batching  # type: ignore[assignment]
        self.gpu, self.host = memory.gpu, memory.host
        self.max_num_seqs = scheduler.limits.max_num_seqs
        self.tally = scheduler.counters.policy
        self.cost = scheduler.deployment.cost
        self.mechanism = Mechanism(self.cost, scheduler.limits, order.price, by_price=self.by_price)

    @property
    def num_out(self) -> int:
        return len(self.away) + len(self.promoting)

    def holders(self) -> Iterable[tuple[Sequence, Tier]]:
        for seq in chain(self.away, self.promoting):
            yield seq, Tier.HOST
            if seq in self.paged.copies_of:
                # Held on both sides until the copy has ended.
                yield seq, Tier.GPU

    # -- ahead of need -----------------------------------------------------------------------------------------------

    def growth(self) -> int:
        """Blocks that decodes will need soon."""
        return self.batch.blocks_needed(self._horizon)

    def headroom(self) -> int:
        """The same, one that returns included."""
        return self.growth() + 1 + self._owed_blocks

    def seats(self, *, alone: bool = False, free_share: float = 0.0) -> int:
        """How many more may run: there are seats, and TPOTs are met beside prompts, or `alone`; a share stays free."""
        most = max(1, int((1.0 - free_share) * min(self.max_num_seqs, self.order.most_decodes(alone=alone))))
        return most - len(self.scheduler.batching.running) - len(self.promoting)  # type: ignore[attr-defined]

    def prepare(self, now_s: float) -> None:
        if self._num_price_limits != self.order.num_price_limits and self.batch.members:
            self._num_price_limits, self._horizon = self.order.num_price_limits, self._copy_iterations()
        self._growth = self.growth()
        self._short = self._is_short()
        if not self.order.changed and not self._short:
            return
        iteration_s, self.num_kept, self._owed_blocks = self.order.iteration_s(), 0, 0
        first = self._bring_back(iteration_s) if self.away else None
        if self._make_way(iteration_s, first):
            self._growth = self.growth()
        self._joined.clear()
        self._short = self._is_short()

    def _copy_iterations(self) -> int:
        """Iterations without prompts that pass while a member of mean length is copied out: no block is free before."""
        batch = self.batch
        members = len(batch.members)
        blocks = ceil(batch.context_tokens / members / self.paged.block_size)
        if self.mechanism.recomputes(batch.context_tokens // members, blocks, 0, self.order.iteration_s()):
            return HORIZON
        copy_s = self.mechanism.copy_s(blocks, D2H)
        steps = self.cost.decode_steps(members, batch.context_tokens, batch.windowed, batch.longest_tokens)
        return max(HORIZON, ceil(copy_s / steps[0]))

    def _is_short(self) -> bool:
        return self.gpu.free + self.paged.releasing < self._growth

    def _place(self, seq: Sequence, iteration_s: float) -> Place:
        """Of one that is parked: the first returns first."""
        order = self.order
        outlook = order.look(seq)
        laxity_s = order.laxity_s(outlook, iteration_s)
        kind = order.class_of(seq, outlook, laxity_s)
        if kind == KEPT:
            # Behind the cheapest, which keep coming, the dear would come too late with half of their tokens.
            return kind, laxity_s, seq.request.request_id
        key = order.rank_s(seq, outlook) if kind == DEFERRED else seq.request.arrival_s
        return kind, key, seq.request.request_id

    def _first(self, iteration_s: float) -> Sequence | None:
        """The first to return of the parked whose copies have ended. Counts all parked that are kept."""
        leaving, first = self.paged.copies_of, None
        least_kind, least_key, least_id = HOPELESS + 1, inf, 0
        self.num_kept = 0
        for seq in self.away:
            kind, key, request_id = self._place(seq, iteration_s)
            self.num_kept += kind == KEPT
            if kind > least_kind or (
                kind == least_kind and (key > least_key or (key == least_key and request_id > least_id))
            ):
                continue
            if seq not in leaving:
                first, least_kind, least_key, least_id = seq, kind, key, request_id
        return first

    def _prompt(self) -> Sequence | None:
        """The first prompt that is kept and waits."""
        return self.order.head() if self.order.num_kept else None

    def _bring_back(self, iteration_s: float) -> Sequence | None:
        """Bring back those that there is room for; returns the first for which there is none.

        What the link cannot begin before the next step waits on the host: here its blocks would lie idle.
        """
        prompt = self._prompt()
        reserved = 0
        if prompt is not None:
            self.paged.look_up(prompt, is_next=False)
            reserved = self.paged.blocks_wanted(prompt, prompt.num_tokens)
        prompt_s = self._laxity_s(prompt, iteration_s) if prompt is not None else inf
        free, seats = self.gpu.free - self._growth - 1, self.seats()
        while (seq := self._first(iteration_s)) is not None:
            if self.mechanism.copy_s(self._returning_blocks, H2D) > iteration_s:
                return None
            blocks = self.paged.held_blocks(seq) + 1
            is_first = self._is_kept(seq, iteration_s) and self._laxity_s(seq, iteration_s) < prompt_s
            if seats <= 0 or blocks > free - (0 if is_first else reserved):
                self._owed_blocks = blocks if is_first else 0
                return seq
            free -= blocks
            seats -= 1
            self._promote(seq)
        return None

    def _laxity_s(self, seq: Sequence, iteration_s: float) -> float:
        """Of one that waits or is parked; infinitely little where it has waited for so long that nothing counts."""
        order = self.order
        return -inf if order.is_impatient(seq) else order.laxity_s(order.look(seq), iteration_s)

    def _is_kept(self, seq: Sequence, iteration_s: float) -> bool:
        """Whether one that is parked is kept."""
        return self.order.class_of(seq, self.order.look(seq), self._laxity_s(seq, iteration_s)) == KEPT

    def _promote(self, seq: Sequence) -> None:
        del self.away[seq]
        seq.status = Status.PROMOTING
        self.promoting[seq] = None
        self.tally["returned_sequences"] += 1
        self._returning_blocks += self.paged.bring_in(seq)

    def transferred(self, move: Move) -> None:
        if move.target is Tier.GPU:
            del self.promoting[move.seq]
            self._returning_blocks -= move.num_blocks
            self.scheduler.join_known(move.seq)

    def joined(self, seq: Sequence) -> None:
        self._joined[seq] = None

    # -- making way ---------------------------------------------------------------------------------------------------

    def _make_way(self, iteration_s: float, parked: Sequence | None) -> bool:
        """Take members out until those that are kept and lack room have it, and decodes will; whether any left."""
        batch, order = self.batch, self.order
        missing, seats, head = self._missing(iteration_s, parked)
        # Alone it does not help itself by leaving.
        short = self._growth - self.gpu.free - self.paged.releasing if len(batch.members) > 1 else 0
        if missing <= 0 and seats <= 0 and short <= 0:
            return False
        members = len(batch.members)
        if head is not None and head.first_token_s >= 0.0:
            # Also one that is to be computed again: else two would take each other's blocks in turn.
            outlook = order.look(head)
            price_s, head_s = order.rank_s(head, outlook), order.laxity_s(outlook, iteration_s)
            fresh_lax_s, lax_s = head_s, head_s + MARGIN_S if head_s < SHORT_S else inf
        else:
            price_s, lax_s = 0.0, MARGIN_S if self._may_promise(iteration_s) else inf
            fresh_lax_s = lax_s
        droppable = self._droppable(iteration_s) if self.host.free < self.gpu.num_blocks else []
        last = HOPELESS, inf, 0
        while missing > 0 or seats > 0 or short > 0:
            # The dearest that pays and is yet to be looked at, those that are not kept before all others.
            found: Sequence | None = None
            dearest = KEPT, -inf, -1
            # As a rule those that have joined last have most left.
            for seq in reversed(batch.members):
                kind, laxity_s, rank_s = order.standing(seq, batch.num_generated_of(seq), iteration_s)
                if kind < dearest[0] or (kind == dearest[0] and rank_s < dearest[1]):
                    continue
                enough_s = fresh_lax_s if seq in self._joined else lax_s
                pays = kind != KEPT or (rank_s > price_s and laxity_s >= enough_s)
                place = kind, rank_s, seq.request.request_id
                if (pays or short > 0) and dearest < place < last and self._has_way(seq, iteration_s, droppable):
                    found, dearest = seq, place
            if found is None:
                break
            last = dearest
            blocks = self.paged.held_blocks(found)
            if self._recomputes(found, iteration_s):
                self._recompute(found)
            else:
                while droppable and self.host.free < blocks:
                    self._drop(droppable.pop())
                if self.host.free < blocks:
                    continue
                self._park(found, self.mechanism.num_pieces(blocks, iteration_s))
            missing, seats, short = missing - blocks, seats - 1, short - blocks if len(batch.members) > 1 else 0
        return len(batch.members) < members

    def _recomputes(self, seq: Sequence, iteration_s: float) -> bool:
        """Whether a member that leaves is computed again."""
        blocks, tokens = self.paged.held_blocks(seq), self.batch.num_tokens_of(seq)
        return self.mechanism.recomputes(tokens, blocks, self.paged.releasing, iteration_s)

    def _has_way(self, seq: Sequence, iteration_s: float, droppable: list[Sequence]) -> bool:
        """Whether a member may leave, and the host may have room for it unless it is computed again."""
        if not self._is_movable(seq):
            return False
        return bool(droppable) or self.host.free >= self.paged.held_blocks(seq) or self._recomputes(seq, iteration_s)

    def _may_promise(self, iteration_s: float) -> bool:
        """Whether those that are kept, one more and those on the host among them, can take turns and meet their TPOT.

        Each decodes for iterations of `iteration_s` and has P for each token: there is time for P / `iteration_s` turns
        with all seats and blocks. More than one are promised in part. Turns make no room in P itself: no more than fit
        it.
        """
        turns = self.order.pace.iteration_s / iteration_s
        turns = min(turns, 1.0 + MORE_TURNS * (turns - 1.0))
        seats = len(self.batching.running) + len(self.promoting) + self.num_kept
        away = self.host.num_blocks - self.host.free if self.away else 0
        blocks = self.gpu.num_blocks - self.gpu.free + away * self.num_kept / max(1, len(self.away))
        most = min(turns * self.max_num_seqs, self.order.most_decodes())
        return bool(seats < most and blocks < turns * self.gpu.num_blocks)

    def _missing(self, iteration_s: float, parked: Sequence | None) -> tuple[int, int, Sequence | None]:
        """Blocks and seats that those that are kept lack, copies under way counted, and the first of them."""
        free = self.gpu.free + self.paged.releasing - self._growth - 1
        head = self._prompt()
        if head is not None:
            blocks = num_prompts = tokens = 0
            self.batching.find_worth()
            if not self.batching.is_due():
                return 0, 0, None
            for seq in self.order.kept():
                self.paged.look_up(seq, is_next=False)
                blocks += self.paged.blocks_wanted(seq, seq.num_tokens)
                num_prompts += 1
                tokens += seq.num_tokens
                if tokens >= MOST_TOKENS:
                    break
            return blocks - free, num_prompts - self.seats(), head
        if parked is not None and self._is_kept(parked, iteration_s):
            return self.paged.held_blocks(parked) + 1 - free, 1 - self.seats(), parked
        return 0, 0, None

    def _is_movable(self, seq: Sequence) -> bool:
        return self.paged.may_leave(seq) and not self.paged.outgrew_gpu(seq)

    def _may_leave(self, seq: Sequence) -> bool:
        return self._is_movable(seq) and self.paged.can_swap_out(seq)

    def _victim(self, iteration_s: float) -> Sequence | None:
        """The member to leave because decodes lack blocks now: not kept, else the dearest that can afford it."""
        order = self.order
        dearest: list[tuple[int, bool, float, int, Sequence]] = []
        for seq in self.batch.members:
            kind, laxity_s, rank_s = order.standing(seq, self.batch.num_generated_of(seq), iteration_s)
            dearest.append((kind, laxity_s >= MARGIN_S, rank_s, seq.request.request_id, seq))
        dearest.sort(reverse=True)
        return next((seq for *_, seq in dearest if self._may_leave(seq)), None)

    def _recompute(self, seq: Sequence) -> None:
        """A member gives up its blocks, and is to be computed again."""
        scheduler = self.scheduler
        # What is in flight of it fills no block that could be hit.
        unknown = scheduler.num_unknown(seq)
        scheduler.take_out(seq)
        scheduler.counters.preemptions += 1
        seq.num_tokens -= unknown
        scheduler.recompute(seq)
        seq.num_tokens += unknown
        scheduler.changed = True
        self.order.put_back([seq])
        self.tally["recomputed_sequences"] += 1

    def _park(self, seq: Sequence, num_pieces: int) -> None:
        scheduler = self.scheduler
        scheduler.take_out(seq)
        scheduler.counters.preemptions += 1
        seq.num_preemptions += 1
        self.away[seq] = None
        scheduler.park(seq)
        self.paged.send_out(seq, num_pieces)
        self.tally["parked_sequences"] += 1

    def _droppable(self, iteration_s: float) -> list[Sequence]:
        """Those on the host that are not kept, the last to return last."""
        found = {self._place(seq, iteration_s): seq for seq in self.away if seq not in self.paged.copies_of}
        return [found[place] for place in sorted(found) if place[0] != KEPT]

    def _drop(self, seq: Sequence) -> None:
        """One on the host is to be computed again."""
        del self.away[seq]
        self.scheduler.tell_left(seq)
        self.paged.drop_swapped(seq)
        seq.reset_for_recompute()
        self.scheduler.counters.preemptions += 1
        self.order.put_back([seq])
        self.tally["dropped_sequences"] += 1

    def repeats(self, plan: IterationPlan, steps: int) -> int:
        """No further than the forecast is sure to find enough."""
        batch = self.batch
        if self._short:
            return 1
        # The first iteration's blocks are taken already.
        spare = self.gpu.free + self.paged.releasing + batch.blocks_needed(1)
        return max(1, min(steps, batch.steps_within(spare) - self._horizon))

    # -- too late ------------------------------------------------------------------------------------------------------

    def make_room(self, plan: IterationPlan) -> None:
        """Blocks for this iteration's decodes, whatever has to leave for them."""
        while self.batch.members and self.batch.blocks_needed(1) > self.gpu.free:
            iteration_s = self.order.iteration_s()
            victim = self._victim(iteration_s) or next(reversed(self.batch.members))
            self.scheduler.batching.preempt(victim, plan)

    def evict(self, seq: Sequence, plan: IterationPlan) -> None:
        stays = seq.prefilling or not self._may_leave(seq)
        if stays or self.mechanism.recomputes_late(seq.num_tokens, self.paged.held_blocks(seq)):
            super().evict(seq, plan)
            return
        self.paged.swap_out(seq, plan)
        seq.num_preemptions += 1
        self.away[seq] = None
        self.scheduler.park(seq)
        self.tally["late_swap_outs"] += 1

    def unblock(self) -> bool:
        """Nothing can be computed: the first comes back, whatever shall be free."""
        if self.away and not self.paged.copies_of:
            first = self._first(self.order.iteration_s())
            if first is not None and self.paged.can_swap_in(first, 0):
                self._promote(first)
        return False
