"""`RankedBatch`: the decode batch of a GPU whose attention waits for the longest of unlike contexts.

A member that joins or leaves costs a search among the members' lengths; an iteration costs nothing.
"""

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

from sim.engine.batch import DecodeBatch
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence

if TYPE_CHECKING:
    from sim.engine.itl import GapCollector


class RankedBatch(DecodeBatch):
    """As `DecodeBatch`; knows its longest context."""

    __slots__ = ("_offsets",)

    def __init__(self, block_size: int, gaps: "GapCollector") -> None:
        super().__init__(block_size, gaps)
        # The members' `batch_offset`, in order.
        self._offsets: list[int] = []

    @property
    def longest_tokens(self) -> int:
        return self._offsets[-1] + self.step if self._offsets else 0

    def follow(self, plan: IterationPlan) -> None:
        """Say the longest context of a plan's decodes."""
        if plan.num_decodes == len(self.members):
            plan.decode_longest_tokens = self.longest_tokens
        else:
            plan.decode_longest_tokens = max(map(self.num_tokens_of, plan.decodes))

    def add(self, seq: Sequence, *, first: bool = False, num_hosted: int = 0) -> None:
        super().add(seq, first=first, num_hosted=num_hosted)
        insort(self._offsets, seq.batch_offset)

    def remove(self, seq: Sequence) -> None:
        super().remove(seq)
        self._drop(seq.batch_offset)

    def _shift(self, seq: Sequence) -> None:
        self._drop(seq.batch_offset)
        super()._shift(seq)
        insort(self._offsets, seq.batch_offset)

    def _drop(self, offset: int) -> None:
        del self._offsets[bisect_left(self._offsets, offset)]
