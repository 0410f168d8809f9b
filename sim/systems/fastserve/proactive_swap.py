"""`ProactiveSwap`: what will run last leaves for the host before blocks run out, what runs soon returns (FastServe).

Copies go on beside the computation. At least max(max_num_seqs, `min_free_blocks`) blocks are kept free: while fewer
are, the last of the queue that do not run leave; else the first `max_num_seqs` of the queue that are away return, with
no blocks that a prompt before them wants. The first of all is called back all the same (`Quanta`). New prompts wait
while less than a tenth of the host's blocks is free. Thresholds as in FastServe's public code.
"""

from collections.abc import Iterable
from itertools import islice
from math import ceil
from typing import TYPE_CHECKING, ClassVar, Self

from sim.engine.changes import Move, Tier
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence, Status
from sim.parts.eviction.recompute import Recompute
from sim.parts.needs import Need
from sim.systems.fastserve.mlfq import Mlfq
from sim.systems.fastserve.preset import MlfqOptions
from sim.systems.fastserve.quanta import Quanta

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler
    from sim.systems.builder import Builder

HOST_SHARE_FREE = 0.1
"""Share of the host's blocks that must be free for new prompts to start."""


class ProactiveSwap(Recompute):
    """Residents of the queue move between the tiers; where the host is full, a victim is computed again."""

    name: ClassVar[str] = "proactive-swap"
    options: ClassVar[type | None] = MlfqOptions
    needs: ClassVar[tuple[Need, ...]] = (
        Need("order", "looks down the queue's levels", offers=Mlfq),
        Need("batching", "moves what is paused", offers=Quanta),
        Need("memory", "moves whole sequences", offers="can_swap"),
    )
    moves_whole: ClassVar[bool] = True

    def __init__(self, min_free_blocks: int) -> None:
        super().__init__()
        self._min_free = min_free_blocks
        self.away: dict[Sequence, None] = {}
        """On the host, or on the way there or back."""
        # Whether a sequence has paused since it was last looked at which could leave.
        self._has_paused = False

    @classmethod
    def build(cls, b: "Builder") -> Self:
        return cls(b.options(MlfqOptions).min_free_blocks)

    def bind(self, scheduler: "Scheduler") -> None:
        super().bind(scheduler)
        order, batching = scheduler.order, scheduler.batching
        assert isinstance(order, Mlfq)
        assert isinstance(batching, Quanta)
        self.order, self.batching = order, batching
        self.threshold = max(scheduler.limits.max_num_seqs, self._min_free)
        self._may_admit_from = ceil(HOST_SHARE_FREE * self.memory.host.num_blocks)

    @property
    def num_out(self) -> int:
        return len(self.away)

    def holders(self) -> Iterable[tuple[Sequence, Tier]]:
        for seq in self.away:
            yield seq, Tier.HOST
            if seq in self.memory.copies_of:
                # Held on both sides until the copy has ended.
                yield seq, Tier.GPU

    def may_admit(self) -> bool:
        return self.memory.host.free >= self._may_admit_from

    # -- ahead of need -----------------------------------------------------------------------------------------------

    def prepare(self, now_s: float) -> None:
        # Places depend on the quanta that have ended.
        self.batching.expire()
        self._has_paused = False
        free = self.memory.gpu.free + self.memory.releasing
        if free < self.threshold:
            if self.batching.paused:
                self._send_out(self.threshold - free)
        elif self.away:
            self._bring_in()

    def _send_out(self, shortage: int) -> None:
        paused = self.batching.paused
        # Those that would be chosen next stay.
        soon = set(islice(self.order.in_order(), self.scheduler.limits.max_num_seqs))
        for seq in self.order.residents_from_last():
            if shortage <= 0:
                return
            if seq in paused and seq not in soon and self._may_leave(seq):
                del paused[seq]
                self.away[seq] = None
                seq.status = Status.SWAPPED
                self.swaps.send_out(seq)
                shortage -= self.scheduler.beside[-1].num_freed
                self.scheduler.counters.policy["proactive_swap_outs"] += 1

    def _may_leave(self, seq: Sequence) -> bool:
        """Whether the host has room, and the GPU will have when it returns."""
        return self.swaps.can_swap_out(seq) and not self.memory.outgrew_gpu(seq)

    def _bring_in(self) -> None:
        keep_free = self.threshold
        for seq in islice(self.order.in_order(self.may_admit), self.scheduler.limits.max_num_seqs):
            if seq.status is Status.WAITING:
                keep_free += self.memory.blocks_for(seq)
            elif self.is_out(seq):
                if not self.swaps.can_swap_in(seq, keep_free):
                    return
                self.call_back(seq)

    def room(self) -> float:
        return self.memory.host.free

    def is_out(self, seq: Sequence) -> bool:
        return seq in self.away and seq not in self.memory.copies_of

    def call_back(self, seq: Sequence) -> None:
        seq.status = Status.PROMOTING
        self.swaps.bring_in(seq)

    def parked(self, seq: Sequence) -> None:
        self._has_paused = True

    def transferred(self, move: Move) -> None:
        if move.target is Tier.GPU:
            del self.away[move.seq]
            self.batching.paused[move.seq] = None
            self.scheduler.park(move.seq)

    def repeats(self, plan: IterationPlan, steps: int) -> int:
        """Until fewer blocks are free than shall be, if a sequence could leave then."""
        if not self.batching.paused:
            return steps
        # Before this step.
        spare = self.memory.gpu.free + self.memory.releasing + self.batch.blocks_needed(1) - self.threshold
        if spare < 0:
            # Too few were free, and those that could leave then have been looked at.
            return 1 if self._has_paused else steps
        return max(1, min(steps, self.batch.steps_within(spare)))

    # -- too late ----------------------------------------------------------------------------------------------------

    def evict(self, seq: Sequence, plan: IterationPlan) -> None:
        self.batching.paused.pop(seq, None)
        if self.memory.outgrew_gpu(seq):
            self.scheduler.release(seq)
            self.scheduler.ignore(seq, "swapped sequence outgrew the GPU blocks")
        elif self.swap_out(seq, plan):
            self.away[seq] = None
            self.order.idle_since_s.setdefault(seq, self.scheduler.now_s)
            self.scheduler.counters.policy["late_swap_outs"] += 1
