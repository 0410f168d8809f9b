"""`TellingIndex`: a prefix index that puts into the plan what becomes of blocks, for those who keep their ids."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from sim.engine.changes import Change, Evict, Keep, Share, Split
from sim.engine.sequence import Sequence
from sim.kv.index.prefix_index import CachedRun, Holding, Node, PrefixIndex

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler


class TellingIndex(PrefixIndex):
    """Appends to the scheduler's changes, in order, whatever moves blocks between sequences and the cache.

    Runs name themselves: who follows the changes knows the blocks of each run that nobody holds. The blocks of a run
    that somebody holds stand at the same places of all its holders.
    """

    def __init__(self, published: Callable[[Sequence], tuple[int, int]], scheduler: "Scheduler") -> None:
        super().__init__(published)
        self._scheduler = scheduler

    def _tell(self, change: Change) -> None:
        self._scheduler.changes.append(change)

    def _hold(self, holding: Holding, run: CachedRun) -> None:
        self._tell(Share(holding.seq, run.num_blocks, next(iter(run.holders)).seq if run.holders else run))
        super()._hold(holding, run)

    def _split(self, node: Node, num_blocks: int) -> Node:
        runs = set(node.runs)
        head = super()._split(node, num_blocks)
        made = [run for run in head.runs if run not in runs]
        for first, rest in zip(made, node.runs, strict=True):
            if not rest.holders:
                self._tell(Split(rest, first, num_blocks))
        return head

    def release(self, holding: Holding) -> int:
        begin = 0
        for run in holding.runs:
            if len(run.holders) == 1:
                self._tell(Keep(holding.seq, begin, run.num_blocks, run))
            begin += run.num_blocks
        return super().release(holding)

    def _shorten(self, node: Node, run: CachedRun) -> None:
        self._tell(Evict(run, run.num_blocks))
        super()._shorten(node, run)
