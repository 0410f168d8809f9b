"""Caches that put into the plan what becomes of their blocks, for what keeps the ids (`gpu_runtime/kv/replay`).

A memory has these in place of its own once it is asked to (`Memory.tell_blocks`). They append to the scheduler's
changes, in order. Runs, nodes and chunks name themselves: each is cached on the GPU until it is evicted.
"""

from collections import abc
from collections.abc import Callable
from typing import TYPE_CHECKING

from sim.engine.changes import Change, Drop, Evict, Hit, Keep, Split
from sim.engine.sequence import Sequence
from sim.kv.index import radix_tree
from sim.kv.index.prefix_index import CachedRun, Holding, Keys, Node, PrefixIndex
from sim.kv.index.radix_tree import RadixTree
from sim.kv.index.retained_chunks import Chunk, ChunkStore
from sim.kv.tiers.host_cache import HostCache, Wanted
from sim.kv.tiers.replacement import Access, Named

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler


class _Telling:
    _scheduler: "Scheduler"

    def _tell(self, change: Change) -> None:
        self._scheduler.changes.append(change)


class TellingIndex(_Telling, PrefixIndex):
    """A prefix index whose runs are told."""

    def __init__(self, published: Callable[[Sequence], tuple[int, int]], scheduler: "Scheduler") -> None:
        super().__init__(published)
        self._scheduler = scheduler

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


class TellingTree(_Telling, RadixTree):
    """A radix tree whose nodes are told."""

    def __init__(self, scheduler: "Scheduler") -> None:
        super().__init__()
        self._scheduler = scheduler

    def lock_for(self, seq: Sequence, node: radix_tree.Node) -> int:
        depth = 0
        for part in _below(self.root, node):
            self._tell(Hit(seq, depth, len(part.keys), part))
            depth += len(part.keys)
        return super().lock_for(seq, node)

    def insert_for(
        self, seq: Sequence, keys: Keys, node: radix_tree.Node, depth: int, end: int
    ) -> tuple[radix_tree.Node, int]:
        version = self.version
        found = super().insert_for(seq, keys, node, depth, end)
        for part in _below(node, found[0]):
            # What is new to the tree has made a version of its own.
            is_new = part is found[0] and self.version != version
            self._tell((Keep if is_new else Hit)(seq, depth, len(part.keys), part))
            depth += len(part.keys)
        return found

    def _split(self, node: radix_tree.Node, num_blocks: int) -> radix_tree.Node:
        head = super()._split(node, num_blocks)
        self._tell(Split(node, head, num_blocks))
        return head

    def _drop(self, leaf: radix_tree.Node) -> None:
        self._tell(Evict(leaf, 0))
        super()._drop(leaf)


def _below(above: radix_tree.Node, node: radix_tree.Node) -> list[radix_tree.Node]:
    """The nodes from `above`, which is none of them, to `node`."""
    found: list[radix_tree.Node] = []
    while node is not above:
        found.append(node)
        assert node.parent is not None
        node = node.parent
    return found[::-1]


class TellingChunks(_Telling, ChunkStore):
    """Chunks that are told: on the GPU a chunk is a cached run of a block."""

    def __init__(self, num_host: int, cost_s: Callable[[int], float], scheduler: "Scheduler") -> None:
        super().__init__(num_host, cost_s)
        self._scheduler = scheduler

    def put(self, key: int, place: int, owner: Sequence) -> bool:
        is_new = super().put(key, place, owner)
        if is_new:
            self._tell(Keep(owner, place, 1, self.chunks[key]))
        return is_new

    def left_gpu(self, chunk: Chunk) -> None:
        self._tell(Evict(chunk, 0))

    def left_host(self, chunk: Chunk) -> None:
        self._tell(Drop((chunk.key,)))


class TellingCache(_Telling, HostCache):
    """A host's cache that tells what it gives up, before what takes the room."""

    def __init__(self, num_chunks: int, scheduler: "Scheduler", replacement: Named = "lru") -> None:
        super().__init__(num_chunks, replacement)
        self._scheduler = scheduler

    def evict(
        self, count: int, access: Access, places: abc.Sequence[int], wanted: Wanted | None, before: int
    ) -> list[int]:
        dropped = super().evict(count, access, places, wanted, before)
        if dropped:
            self._tell(Drop(tuple(dropped)))
        return dropped
