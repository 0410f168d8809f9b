"""`MostReused`: the most cached tokens for each to compute first, and none is overtaken for ever (RAGCache, 5.2)."""

from typing import TYPE_CHECKING, ClassVar, Self

from sim.engine.sequence import Sequence
from sim.systems.radix.cache_aware import CacheAware
from sim.systems.ragcache.preset import ReuseOptions

if TYPE_CHECKING:
    from sim.systems.builder import Builder


class MostReused(CacheAware):
    """By cached / computed tokens; before those, by arrival, what `window` later requests have overtaken."""

    name: ClassVar[str] = "most-reused"
    options: ClassVar[type | None] = ReuseOptions

    @classmethod
    def build(cls, b: "Builder") -> Self:
        return cls(b.options(ReuseOptions).reorder_window)

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window
        self._overtaken: dict[Sequence, int] = {}

    def _rank(self, seq: Sequence) -> tuple[float, ...]:
        if self._overtaken.get(seq, 0) >= self.window:
            return (0, seq.request.request_id)
        cached = self.memory.cached_tokens(seq)
        return (1, -cached / (seq.num_tokens - cached), seq.request.request_id)

    def pop(self) -> Sequence:
        seq, overtaken = super().pop(), self._overtaken
        overtaken.pop(seq, None)
        for other in self._queue:
            if other.request.request_id < seq.request.request_id:
                overtaken[other] = overtaken.get(other, 0) + 1
        self._is_sorted = False
        return seq

    def remove(self, seq: Sequence) -> bool:
        self._overtaken.pop(seq, None)
        return super().remove(seq)
