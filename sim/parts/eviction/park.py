"""`Park`: sequences leave for the host whole, beside the computation, where others pay better, and return by rank.

Rank is `Triage`'s place: kept before deferred before hopeless, the cheapest to finish first. One sequence leaves at a
time, when somebody who is kept lacks room (a prompt that waits, or the first of those parked):

- who is not kept, the dearest first;
- whoever has joined since and would stand behind the parked head;
- else, where time is short, the laxest who can afford it and has more left than the head.

Blocks that decodes will need within `HORIZON` iterations are kept free. Where they run short all the same, the victim
is copied out before the iteration or computed again, whichever costs the batch less. Blocks that others may hit never
move: who holds any is computed again, and finds in the cache what is left of them.
"""

from collections.abc import Iterable
from itertools import chain
from math import inf
from typing import TYPE_CHECKING

from sim.engine.plan import Direction, IterationPlan, Move, Tier
from sim.engine.sequence import Sequence, Status
from sim.errors import UserError
from sim.parts.eviction.recompute import Recompute
from sim.parts.memory.paged import PagedMemory
from sim.parts.order.triage import HOPELESS, KEPT, Place, Triage

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler
    from sim.parts.batching.paced import Paced

MOST_TOKENS = 1024
HORIZON = 8
"""Iterations whose growth is kept free."""
SHORT_S = 2.0
"""With less laxity than this, a head may take the room of who is kept, too."""
MARGIN_S = 5.0
"""By how much that one must be laxer."""


class Park(Recompute):
    """`away` are on the host or on the way there, `promoting` on the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.away: dict[Sequence, None] = {}
        self.promoting: dict[Sequence, None] = {}
        self.num_kept = 0
        """Of those away, when last looked at."""
        self._joined: dict[Sequence, None] = {}
        self._short = False

    def bind(self, scheduler: "Scheduler") -> None:
        super().bind(scheduler)
        memory, order = scheduler.memory, scheduler.order
        if not isinstance(order, Triage) or not isinstance(memory, PagedMemory):
            raise UserError("eviction=park asks order=triage for classes and moves whole sequences of memory=paged")
        self.order, self.paged = order, memory
        self.batching: Paced = scheduler.batching  # type: ignore[assignment]
        self.gpu, self.host = memory.gpu, memory.host
        self.max_num_seqs = scheduler.limits.max_num_seqs
        self.tally = scheduler.counters.policy
        self.cost, self.block_bytes = scheduler.deployment.cost, scheduler.limits.block_bytes

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

    def headroom(self) -> int:
        """Blocks that decodes will need soon, one who returns included."""
        return self.batch.blocks_needed(HORIZON) + 1 if self.batch.members else 1

    def seats(self) -> int:
        """How many more may run."""
        return self.max_num_seqs - len(self.scheduler.batching.running) - len(self.promoting)  # type: ignore[attr-defined]

    def prepare(self, now_s: float) -> None:
        self._short = self._is_short()
        if not self.order.changed and not self._short:
            return
        iteration_s, self.num_kept = self.order.iteration_s(), 0
        if self.away:
            self._bring_back(iteration_s)
        self._make_way(iteration_s)
        self._joined.clear()
        self._short = self._is_short()

    def _is_short(self) -> bool:
        batch = self.batch
        return bool(batch.members) and self.gpu.free + self.paged.releasing < batch.blocks_needed(HORIZON)

    def _ranked(self, iteration_s: float) -> list[tuple[Place, Sequence]]:
        """The parked whose copies have ended, the first to return first."""
        copies, places = self.paged.copies_of, []
        self.num_kept = 0
        for seq in self.away:
            kind, key, number = self.order.place_of(seq, iteration_s)
            self.num_kept += kind == KEPT
            if seq not in copies:
                # Of those who are kept, too, the cheapest returns first.
                key = key if kind == HOPELESS else self.order.rank_s(seq)
                places.append(((kind, key, number), seq))
        return sorted(places, key=lambda entry: entry[0])

    def _prompt(self) -> Sequence | None:
        """The first prompt that is kept and waits."""
        return self.order.head() if self.order.num_kept else None

    def _bring_back(self, iteration_s: float) -> None:
        prompt = self._prompt()
        reserved = self.paged.blocks_wanted(prompt, prompt.num_tokens) if prompt is not None else 0
        prompt_s = self.order.laxity_s(prompt, iteration_s) if prompt is not None else inf
        free, seats = self.gpu.free - self.headroom(), self.seats()
        for (kind, _, _), seq in self._ranked(iteration_s):
            if seats <= 0:
                return
            blocks = self.paged.held_blocks(seq) + 1
            first = kind == KEPT and self.order.laxity_s(seq, iteration_s) < prompt_s
            if blocks > free - (0 if first else reserved):
                return
            free -= blocks
            seats -= 1
            self._promote(seq)

    def _promote(self, seq: Sequence) -> None:
        del self.away[seq]
        seq.status = Status.PROMOTING
        self.promoting[seq] = None
        self.tally["returned_sequences"] += 1
        self.paged.bring_in(seq)

    def transferred(self, move: Move) -> None:
        if move.target is Tier.GPU:
            del self.promoting[move.seq]
            self.scheduler.join(move.seq)

    def joined(self, seq: Sequence) -> None:
        self._joined[seq] = None

    # -- making way ---------------------------------------------------------------------------------------------------

    def _make_way(self, iteration_s: float) -> None:
        """Park members until those who are kept and lack room have it, and the decodes will."""
        order, batch = self.order, self.batch
        missing, head = self._missing(iteration_s)
        seats = self._seats_missing()
        short = batch.blocks_needed(HORIZON) - self.gpu.free - self.paged.releasing
        if missing <= 0 and seats <= 0 and short <= 0:
            return
        members = [
            (order.class_of(seq, iteration_s), order.rank_s(seq), order.laxity_s(seq, iteration_s), seq)
            for seq in batch.members
            if self._may_leave(seq)
        ]
        # The dearest first, and who is not kept before all others.
        members.sort(key=lambda m: (m[0], m[1], m[3].request.request_id), reverse=True)
        head_s = order.laxity_s(head, iteration_s) if head is not None else inf
        price_s = order.rank_s(head) if head in self.away else 0.0
        for kind, own_s, laxity_s, seq in members:
            if len(batch.members) < 2:
                # Alone it does not help itself by leaving.
                short = 0
            if missing <= 0 and seats <= 0 and short <= 0:
                return
            if not self._may_leave(seq):
                # The host has filled up meanwhile.
                continue
            fresh = head in self.away and seq in self._joined and laxity_s >= head_s
            lax = laxity_s >= MARGIN_S if head not in self.away else head_s < SHORT_S and laxity_s >= head_s + MARGIN_S
            if kind != KEPT or (own_s > price_s and (fresh or lax)) or short > 0:
                self._park(seq)
                freed = seq.num_blocks
                missing, seats, short = missing - freed, seats - 1, short - freed

    def _missing(self, iteration_s: float) -> tuple[int, Sequence | None]:
        """Blocks that those who are kept lack, copies under way counted, and who of them is first."""
        free = self.gpu.free + self.paged.releasing - self.headroom()
        head = self._prompt()
        if head is not None:
            wanted = tokens = 0
            if not self.batching.is_due():
                return 0, None
            for seq in self.order.kept():
                wanted += self.paged.blocks_wanted(seq, seq.num_tokens)
                tokens += seq.num_tokens
                if tokens >= MOST_TOKENS:
                    break
            return wanted - free, head
        ranked = self._ranked(iteration_s) if self.away else []
        if ranked and ranked[0][0][0] == KEPT:
            return self.paged.held_blocks(ranked[0][1]) + 1 - free, ranked[0][1]
        return 0, None

    def _seats_missing(self) -> int:
        waiting = self.order.num_kept > 0 or self.num_kept > 0
        return 1 - self.seats() if waiting else 0

    def _may_leave(self, seq: Sequence) -> bool:
        memory = self.paged
        return memory.may_leave(seq) and memory.can_swap_out(seq) and not memory.outgrew_gpu(seq)

    def _victim(self, iteration_s: float) -> Sequence | None:
        """The member to leave because decodes lack blocks now: not kept, else the dearest who can afford it."""
        order = self.order
        members = [
            (order.class_of(s, iteration_s), order.laxity_s(s, iteration_s) >= MARGIN_S, order.rank_s(s), s)
            for s in self.batch.members
            if self._may_leave(s)
        ]
        return max(members, key=lambda m: (*m[:3], m[3].request.request_id))[3] if members else None

    def _park(self, seq: Sequence) -> None:
        scheduler = self.scheduler
        scheduler.take_out(seq)
        scheduler.counters.preemptions += 1
        seq.num_preemptions += 1
        self.away[seq] = None
        scheduler.park(seq)
        self.paged.send_out(seq)
        self.tally["parked_sequences"] += 1

    def holds(self, plan: IterationPlan, steps: int) -> int:
        """No further than the forecast is sure to find enough."""
        batch = self.batch
        if self._short:
            return 1
        # The first iteration's blocks are taken already.
        spare = self.gpu.free + self.paged.releasing + batch.blocks_needed(1)
        return max(1, min(steps, batch.steps_within(spare) - HORIZON))

    # -- too late ------------------------------------------------------------------------------------------------------

    def make_room(self, plan: IterationPlan) -> None:
        """Blocks for this iteration's decodes, whoever has to leave for them."""
        while self.batch.members and self.batch.blocks_needed(1) > self.gpu.free:
            iteration_s = self.order.iteration_s()
            victim = self._victim(iteration_s) or next(reversed(self.batch.members))
            self.scheduler.batching.preempt(victim, plan)

    def evict(self, seq: Sequence, plan: IterationPlan) -> None:
        if seq.prefilling or not self._may_leave(seq) or self._is_cheaper_again(seq):
            super().evict(seq, plan)
            return
        self.paged.swap_out(seq, plan)
        seq.num_preemptions += 1
        self.away[seq] = None
        self.scheduler.park(seq)
        self.tally["late_swap_outs"] += 1

    def _is_cheaper_again(self, seq: Sequence) -> bool:
        """Whether computing it again costs less than having everybody wait for its copy."""
        blocks = self.paged.held_blocks(seq)
        copy_s = self.cost.copy_s(blocks * self.block_bytes, self.cost.num_copies(blocks, 1), Direction.D2H)
        return copy_s > self.order.price.prefill_s(seq.num_tokens)

    def unblock(self) -> bool:
        """Nothing can be computed: who stands first comes back, whatever shall be free."""
        if self.away and not self.paged.copies_of:
            ranked = self._ranked(self.order.iteration_s())
            if self.paged.can_swap_in(ranked[0][1], 0):
                self._promote(ranked[0][1])
        return False
