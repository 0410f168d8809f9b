"""`Fence`: free blocks whose stores are under way, and the call when they are handed out again.

What was a sequence's block table is a run of blocks in the prefix index, or a piece of the stack of free blocks where
nothing is cached: both hand out from the end.

With async scheduling vLLM names such a store once more where the next step hits what the blocks hold by then. Here it
does not: that store has ended, since the step before waited for it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from sim.engine.sequence import Sequence
from sim.kv.block_pool import BlockPool
from sim.kv.index.prefix_index import CachedRun, Holding, Node, PrefixIndex
from sim.kv.tiers.jobs import Job

Reused = Callable[[Job, range], None]
"""Hears which blocks of a job are handed out, as places in its request's block table."""


@dataclass(slots=True)
class Fence:
    """Blocks `begin` to `end` of a run, which were those from `begin + shift` on of the request."""

    job: Job
    begin: int
    end: int
    shift: int

    def cut(self, num_blocks: int, reused: Reused) -> bool:
        """Only the first `num_blocks` blocks of the run are left; whether any of them are here."""
        if self.end > num_blocks:
            begin = max(self.begin, num_blocks)
            reused(self.job, range(begin + self.shift, self.end + self.shift))
            self.end = begin
        return self.begin < self.end


def fences_of(jobs: list[Job], first: int, num_blocks: int) -> list[Fence]:
    """Fences around what `jobs` read of a run of blocks that begins with the request's block `first`."""
    found = []
    for job in jobs:
        for blocks in job.blocks:
            begin, end = max(blocks.start, first), min(blocks.stop, first + num_blocks)
            if begin < end:
                found.append(Fence(job, begin - first, end - first, first))
    return found


class FencedIndex(PrefixIndex):
    """A prefix index that tells when fenced blocks are evicted or hit."""

    def __init__(self, published: Callable[[Sequence], tuple[int, int]], reused: Reused) -> None:
        super().__init__(published)
        self.fences: dict[CachedRun, list[Fence]] = {}
        self.leaving: list[Job] = []
        """Jobs that read what is released next."""
        self._reused = reused

    def release(self, holding: Holding) -> int:
        first = 0
        for run in holding.runs if self.leaving else ():
            if found := fences_of(self.leaving, first, run.num_blocks):
                self.fences.setdefault(run, []).extend(found)
            first += run.num_blocks
        self.leaving = []
        return super().release(holding)

    def hit(self, holding: Holding) -> None:
        """All blocks of `holding` are handed to it: to vLLM those that it hits are no different."""
        for run in holding.runs:
            for fence in self.fences.get(run, ()):
                # It stays: until the scheduler sees the store's end, the next to hit them waits as well.
                self._reused(fence.job, range(fence.begin + fence.shift, fence.end + fence.shift))

    def _cut(self, run: CachedRun, num_blocks: int) -> None:
        if run in self.fences:
            left = [fence for fence in self.fences.pop(run) if fence.cut(num_blocks, self._reused)]
            if left:
                self.fences[run] = left

    def _shorten(self, node: Node, run: CachedRun) -> None:
        self._cut(run, run.num_blocks)
        super()._shorten(node, run)

    def _split(self, node: Node, num_blocks: int) -> Node:
        runs = list(node.runs)
        head = super()._split(node, num_blocks)
        for run, first in zip(runs, head.runs, strict=True):
            if run is not first and run in self.fences:
                self._part(run, first, num_blocks)
        return head

    def _part(self, run: CachedRun, first: CachedRun, num_blocks: int) -> None:
        """The first `num_blocks` blocks of `run` are in `first` now."""
        before, after = [], []
        for fence in self.fences.pop(run):
            if fence.begin < num_blocks:
                before.append(Fence(fence.job, fence.begin, min(fence.end, num_blocks), fence.shift))
            if fence.end > num_blocks:
                begin = max(0, fence.begin - num_blocks)
                after.append(Fence(fence.job, begin, fence.end - num_blocks, fence.shift + num_blocks))
        self.fences.update((part, found) for part, found in ((first, before), (run, after)) if found)


class FencedStack(BlockPool):
    """A pool without cached blocks, whose free blocks are handed out again from the last given back to the first."""

    __slots__ = ("_free", "_reused")

    def __init__(self, name: str, num_blocks: int, reused: Reused) -> None:
        super().__init__(name, num_blocks)
        self._reused = reused
        # Pieces of free blocks, the last one on top: how many, and their fences.
        self._free: list[tuple[int, list[Fence]]] = [(num_blocks, [])]

    def allocate(self, count: int) -> None:
        super().allocate(count)
        while count:
            num_blocks, fences = self._free.pop()
            left = max(0, num_blocks - count)
            count -= num_blocks - left
            fences = [fence for fence in fences if fence.cut(left, self._reused)]
            if left:
                self._free.append((left, fences))

    def release_fenced(self, count: int, jobs: list[Job]) -> None:
        """Give back a request's blocks, which `jobs` read."""
        self.release(count)
        fences = fences_of(jobs, 0, count)
        if self._free and not fences and not self._free[-1][1]:
            count += self._free.pop()[0]
        if count:
            self._free.append((count, fences))
