"""`Pull`: sequences that were prefilled elsewhere are pulled, first come first served, when there is room for their KV.

DistServe's rule: while the sequences that are here and do not decode hold less than a share of the blocks, and the next
one's blocks fit. Room goes to sequences that lost theirs here before it goes to newcomers.
"""

from collections import deque
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, ClassVar

from sim.engine.changes import Move, Tier
from sim.engine.sequence import Sequence
from sim.kv.memory import ReturnsKV
from sim.parts.base import Stage, Wait
from sim.parts.needs import Need

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler

NEVER_FITS = "KV needs more blocks than the decode engine has"


class Pull(Stage):
    """`offered` have their KV elsewhere, `coming` on its way, `landed` here and no seat yet.

    Args:
        waiting_share: of the GPU's blocks that `coming` and `landed` may hold before no more is pulled.
        blocking: whether the engine waits for what it pulls before it computes.
    """

    name: ClassVar[str] = "hand-over"
    needs: ClassVar[tuple[Need, ...]] = (
        Need("memory", "moves whole blocks between engines", offers="can_receive"),
        Need("order", "decodes sequences that never stood in this queue", lacks="follows_all"),
    )
    pulls: ClassVar[bool] = True

    def __init__(self, waiting_share: float, blocking: bool = False) -> None:
        self.waiting_share, self.blocking = waiting_share, blocking
        self.offered: deque[Sequence] = deque()
        self.coming: dict[Sequence, None] = {}
        self.landed: deque[Sequence] = deque()

    def bind(self, scheduler: "Scheduler") -> None:
        super().bind(scheduler)
        self.max_num_seqs = scheduler.limits.max_num_seqs

    @property
    def num_parked(self) -> int:
        # An offered sequence is counted where its KV is.
        return len(self.coming) + len(self.landed)

    @property
    def waits_for(self) -> Wait | None:
        if self.landed or (self.offered and self.scheduler.num_seated >= self.max_num_seqs):
            return "seat"
        return "memory" if self.offered else "link" if self.coming else None

    def holders(self) -> Iterable[tuple[Sequence, Tier]]:
        return ((seq, Tier.GPU) for seq in chain(self.coming, self.landed))

    def enter(self, seq: Sequence, *, first: bool = False) -> None:
        # Computed again here.
        self.scheduler.join(seq, first=first)

    def offer(self, seq: Sequence) -> None:
        self.offered.append(seq)

    def prepare(self, now_s: float) -> None:
        # Those whose KV is here go on, as there are seats.
        while self.landed and self.scheduler.num_seated < self.max_num_seqs:
            self.scheduler.join_known(self.landed.popleft())
        self.pull(self.scheduler.admission.keep_free)

    def pull(self, keep_free: int) -> None:
        memory, always_free = self.memory, self.scheduler.admission.keep_free
        while self.offered and not self._holds_back():
            seq = self.offered[0]
            if memory.ever_fits(seq, always_free):
                if not self._few_wait():
                    break
                memory.look_up_received(seq)
                if not memory.fits_received(seq, keep_free):
                    break
            self._pull(self.offered.popleft())

    def _few_wait(self) -> bool:
        """Whether those that were pulled and do not decode yet leave room for more."""
        waiting = sum(map(self.memory.held_blocks, chain(self.coming, self.landed)))
        return waiting < self.waiting_share * self.memory.gpu.num_blocks

    def _sent_tokens(self, seq: Sequence) -> int:
        """Those whose KV comes: the last one is yet to be fed."""
        return seq.num_tokens - 1

    def _holds_back(self) -> bool:
        """Whether a sequence is to come back before another is pulled."""
        return bool(self.scheduler.order.waiting) or self.scheduler.eviction.num_out > 0

    def _pull(self, seq: Sequence) -> None:
        scheduler, memory, blocks = self.scheduler, self.memory, 0
        if memory.ever_fits(seq, scheduler.admission.keep_free):
            blocks = memory.receive(seq, self._sent_tokens(seq))
            self.coming[seq] = None
        else:
            # Nothing is copied; the other engine is told to let go.
            scheduler.ignore(seq, NEVER_FITS)
        first, end = (num * memory.block_size for num in (seq.num_blocks - blocks, seq.num_blocks))
        scheduler.pulled.append(Move(seq, (0,), first, end, Tier.PEER, Tier.GPU, blocks, blocks, True))

    def migrated(self, move: Move) -> None:
        if move.target is Tier.PEER:
            assert isinstance(self.memory.backing, ReturnsKV)
            self.memory.backing.returned(move.seq)
        elif move.seq in self.coming:
            del self.coming[move.seq]
            self.landed.append(move.seq)
