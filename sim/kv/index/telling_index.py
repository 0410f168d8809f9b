"""`TellingIndex`: a prefix index that puts into the plan what becomes of blocks, for those who keep their ids."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from sim.engine.changes import Change, Evict, Hit, Keep, Split
from sim.engine.sequence import Sequence
from sim.kv.index.prefix_index import CachedRun, Holding, Node, PrefixIndex

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler


class TellingIndex(PrefixIndex):
    """Appends to the scheduler's changes, in order. Runs name themselves: each is cached until it is evicted."""

    def __init__(self, published: Callable[[Sequence], tuple[int, int]], scheduler: "Scheduler") -> None:
        super().__init__(published)
        self._scheduler = scheduler

    def _tell(self, change: Change) -> None:
        self._scheduler.changes.append(change)

    def _hold(self, holding: Holding, run: CachedRun) -> None:
        self._tell(Hit(holding.seq, holding.num_blocks, run.num_blocks, run))
        super()._hold(holding, run)

    def _lengthen(self, holding: Holding, run: CachedRun, num_blocks: int) -> None:
        self._tell(Keep(holding.seq, holding.num_blocks, num_blocks, run))
        super()._lengthen(holding, run, num_blocks)

    def _split(self, node: Node, num_blocks: int) -> Node:
        runs = set(node.runs)
        head = super()._split(node, num_blocks)
        made = [run for run in head.runs if run not in runs]
        for first, rest in zip(made, node.runs, strict=True):
            self._tell(Split(rest, first, num_blocks))
        return head

    def _shorten(self, node: Node, run: CachedRun) -> None:
        self._tell(Evict(run, run.num_blocks))
        super()._shorten(node, run)
