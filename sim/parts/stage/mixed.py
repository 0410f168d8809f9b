"""`Mixed`: prefilled sequences leave or stay, and others come (Splitwise's machines, any of which may turn mixed)."""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import ClassVar

from sim.engine.changes import Move, Tier
from sim.engine.sequence import Sequence
from sim.parts.needs import Need
from sim.parts.stage.hand_over import HandOver
from sim.parts.stage.pull import Pull


class Mixed(Pull, HandOver):
    """Both at once: `keeps` says of a sequence that has its first token whether it decodes here.

    Args:
        waiting_share, blocking: as `Pull` has them.
        layer_wise: as `HandOver` has it.
    """

    needs: ClassVar[tuple[Need, ...]] = (
        *Pull.needs,
        Need("memory", "with mixed-pool sends and takes whole sequences", names=("paged",)),
        Need("eviction", "with mixed-pool sends and takes whole sequences", lacks="moves_whole"),
    )
    hands_over: ClassVar[bool] = True

    def __init__(self, waiting_share: float, layer_wise: bool, blocking: bool = False) -> None:
        HandOver.__init__(self, layer_wise)
        Pull.__init__(self, waiting_share, blocking)
        self.keeps: Callable[[Sequence], bool] = lambda seq: True

    @property
    def num_parked(self) -> int:
        return len(self.coming) + len(self.landed) + len(self.leaving)

    def holders(self) -> Iterable[tuple[Sequence, Tier]]:
        return ((seq, Tier.GPU) for seq in chain(self.coming, self.landed, self.leaving))

    def enter(self, seq: Sequence, *, first: bool = False) -> None:
        if self.keeps(seq):
            Pull.enter(self, seq, first=first)
        else:
            HandOver.enter(self, seq, first=first)

    def migrated(self, move: Move) -> None:
        (HandOver if move.seq in self.leaving else Pull).migrated(self, move)

    def _holds_back(self) -> bool:
        # Prompts that were never computed do not delay sequences that come.
        scheduler = self.scheduler
        computed = bool(scheduler.order.waiting) and scheduler.order.head().num_generated > 0
        return computed or scheduler.eviction.num_out > 0

    def take_back(self, seq: Sequence) -> None:
        """`seq`, which no engine has pulled, decodes here."""
        del self.leaving[seq]
        self.landed.append(seq)
        self.scheduler.counters.policy["taken_back"] += 1
