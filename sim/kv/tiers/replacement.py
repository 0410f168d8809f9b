"""Which chunk of the host's cache gives way: `Lru` and `Arc`, as vLLM 0.33 has them (`kv_offload/cpu/policies`).
`Pgdsf` is RAGCache's.

A request counts as one use of all chunks that it stored or loaded, at its end; until then they share a provisional
rank. Within a request tails go before heads. Chunks that are being copied stay.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush, nsmallest
from itertools import chain
from typing import Literal

Keys = tuple[int, ...]

ROOT = 0
"""No chunk's key."""
LEAST_STALE = 64
"""Stale entries of `Lru`'s heap that are not worth making it anew."""


class Chunk:
    """Some blocks of KV on the host. `num_copies` copies read it; -1 while it is being written."""

    __slots__ = ("num_copies",)

    def __init__(self) -> None:
        self.num_copies = -1


class Access:
    """What one request did to the cache. Chunks are named by their place in `keys`, those of the request's chunks."""

    __slots__ = ("cost_s", "inserted", "keys", "missed", "rank", "reused", "seen")

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self.rank = 0
        self.cost_s = 0.0
        """Of computing a token that it did not hit, s."""
        self.seen: set[int] = set()
        self.inserted: set[int] = set()
        self.reused: set[int] = set()
        self.missed: set[int] = set()


class Replacement:
    """The chunks of a cache, and the order in which they give way."""

    def get(self, key: int) -> Chunk | None:
        """The chunk of that key, if it is there."""
        raise NotImplementedError

    def keys(self) -> Iterable[int]:
        """Of the chunks, and of those whose absence is remembered."""
        raise NotImplementedError

    def insert(self, access: Access, place: int) -> None:
        """A new chunk, about to be written."""
        raise NotImplementedError

    def saw(self, access: Access, places: Iterable[int]) -> None:
        """A request stores or loads these for the first time."""

    def missed(self, access: Access, places: list[int]) -> None:
        """A request is about to store these, which are not there."""

    def idle(self, key: int) -> None:
        """No copy reads or writes the chunk any more."""

    def busy(self, key: int) -> None:
        """A copy reads the chunk, which was idle."""

    def finish(self, access: Access) -> None:
        """The request has ended."""
        raise NotImplementedError

    def evict(self, count: int, protected: Iterable[int]) -> list[int]:
        """Give up `count` idle chunks, none of the keys `protected`; which. None of them if there are too few."""
        raise NotImplementedError


class Lru(Replacement):
    """The least recently used first."""

    def __init__(self, num_chunks: int) -> None:
        self._chunks: dict[int, Chunk] = {}
        self._ranks: dict[int, tuple[int, int]] = {}
        self._idle: set[int] = set()
        # Of idle chunks, stale entries among them; None: to be made when a chunk must give way.
        self._heap: list[tuple[tuple[int, int], int]] | None = None
        self._last_rank = 0

    def get(self, key: int) -> Chunk | None:
        return self._chunks.get(key)

    def keys(self) -> Iterable[int]:
        return self._chunks

    def insert(self, access: Access, place: int) -> None:
        key = access.keys[place]
        self._chunks[key] = Chunk()
        self._ranks[key] = (self._rank_of(access), -place)

    def saw(self, access: Access, places: Iterable[int]) -> None:
        last = self._rank_of(access)
        for place in places:
            key = access.keys[place]
            if key in self._chunks and self._ranks[key] < (last, -place):
                self._rank(key, (last, -place))

    def _rank_of(self, access: Access) -> int:
        if not access.rank:
            access.rank = self._next_rank()
        return access.rank

    def _next_rank(self) -> int:
        self._last_rank += 1
        return self._last_rank

    def _rank(self, key: int, rank: tuple[int, int]) -> None:
        self._ranks[key] = rank
        if key in self._idle:
            self._push(key)

    def _push(self, key: int) -> None:
        heap = self._heap
        if heap is not None:
            heappush(heap, (self._ranks[key], key))
            if len(heap) > LEAST_STALE + 2 * len(self._idle):
                self._heap = None

    def idle(self, key: int) -> None:
        self._idle.add(key)
        self._push(key)

    def busy(self, key: int) -> None:
        self._idle.remove(key)

    def finish(self, access: Access) -> None:
        for place in sorted(access.seen, reverse=True):
            key = access.keys[place]
            if key in self._chunks:
                self._rank(key, (self._next_rank(), 0))

    def evict(self, count: int, protected: Iterable[int]) -> list[int]:
        if self._heap is None:
            self._heap = [(self._ranks[key], key) for key in self._idle]
            heapify(self._heap)
        heap, kept = self._heap, set(protected)
        chosen: dict[int, tuple[int, int]] = {}
        passed = []
        while heap and len(chosen) < count:
            rank, key = heappop(heap)
            if key not in self._idle or self._ranks[key] != rank or key in chosen:
                continue
            if key in kept:
                passed.append((rank, key))
            else:
                chosen[key] = rank
        enough = len(chosen) == count
        if not enough:
            passed += [(rank, key) for key, rank in chosen.items()]
        for entry in passed:
            heappush(heap, entry)
        return self._drop(chosen) if enough else []

    def evict_unwanted(self, count: int, protected: Iterable[int], wanted: Mapping[int, int], before: int) -> list[int]:
        """As `evict`, those that a request in a queue wants after all others, the farthest from its head first.

        A request at most `before` places from the head keeps them.
        """
        kept = set(protected)
        chosen = nsmallest(count, self._idle.difference(kept, wanted), key=self._ranks.__getitem__)
        if len(chosen) < count:
            idle = self._idle.intersection(wanted).difference(kept)
            late = (key for key in idle if wanted[key] > before)
            chosen += nsmallest(count - len(chosen), late, key=lambda key: (-wanted[key], self._ranks[key]))
        return self._drop(chosen) if len(chosen) == count else []

    def _drop(self, keys: Iterable[int]) -> list[int]:
        dropped = list(keys)
        for key in dropped:
            self._idle.remove(key)
            del self._chunks[key], self._ranks[key]
        return dropped


class Arc(Replacement):
    """Adaptive replacement (Megiddo and Modha, FAST 2003): chunks used once, and more often, in shares that adapt."""

    def __init__(self, num_chunks: int) -> None:
        self._num_chunks = num_chunks
        self._once: OrderedDict[int, Chunk] = OrderedDict()
        self._often: OrderedDict[int, Chunk] = OrderedDict()
        # Keys of what was evicted from either.
        self._gone_once: OrderedDict[int, None] = OrderedDict()
        self._gone_often: OrderedDict[int, None] = OrderedDict()
        self._once_target = 0.0

    def get(self, key: int) -> Chunk | None:
        return self._once.get(key) or self._often.get(key)

    def keys(self) -> Iterable[int]:
        return chain(self._once, self._often, self._gone_once, self._gone_often)

    def insert(self, access: Access, place: int) -> None:
        key = access.keys[place]
        self._once[key] = Chunk()
        self._gone_once.pop(key, None)
        self._gone_often.pop(key, None)

    def missed(self, access: Access, places: list[int]) -> None:
        once, often = self._gone_once, self._gone_often
        for place in reversed(places):
            key = access.keys[place]
            if key in once:
                self._once_target = min(self._once_target + max(1, len(often) / len(once)), self._num_chunks)
                once.move_to_end(key)
            elif key in often:
                self._once_target = max(self._once_target - max(1, len(once) / len(often)), 0)
                often.move_to_end(key)

    def finish(self, access: Access) -> None:
        stored = access.inserted - access.reused
        for place in sorted(access.seen, reverse=True):
            key = access.keys[place]
            if place in stored:
                # Writing a chunk is no second use of it.
                if key in self._once:
                    self._once.move_to_end(key)
                elif key in self._often:
                    self._often.move_to_end(key)
            elif place in access.reused:
                if key in self._once:
                    self._often[key] = self._once.pop(key)
                elif key in self._often:
                    self._often.move_to_end(key)

    def evict(self, count: int, protected: Iterable[int]) -> list[int]:
        kept = set(protected)

        def candidates(chunks: OrderedDict[int, Chunk]) -> Iterator[int]:
            return (key for key, chunk in chunks.items() if not chunk.num_copies and key not in kept)

        once, often, num_once = candidates(self._once), candidates(self._often), len(self._once)
        chosen: list[tuple[int, bool]] = []
        for _ in range(count):
            key = next(once, None) if num_once >= int(self._once_target) else None
            from_once = key is not None
            if key is None:
                key = next(often, None)
            if key is None:
                key, from_once = next(once, None), True
            if key is None:
                return []
            num_once -= from_once
            chosen.append((key, from_once))
        for key, from_once in chosen:
            chunks, gone = (self._once, self._gone_once) if from_once else (self._often, self._gone_often)
            del chunks[key]
            gone[key] = None
        for gone in (self._gone_once, self._gone_often):
            while len(gone) > self._num_chunks:
                gone.popitem(last=False)
        return [key for key, _ in chosen]


class Node:
    """A chunk of `Pgdsf`'s tree, and how often it was used."""

    __slots__ = ("chunk", "cost_s", "num_children", "num_uses", "parent", "priority")

    def __init__(self, parent: int, cost_s: float) -> None:
        self.chunk, self.parent, self.cost_s = Chunk(), parent, cost_s
        self.num_children = self.num_uses = 0
        self.priority = 0.0


class Pgdsf(Replacement):
    """Leaves of the tree of prefixes, the least of clock + uses x cost / size first (Jin et al., "RAGCache", 5.1).

    Cost / size is what a token took the request that computed the chunk: T(cached, new) / new. The clock is the highest
    priority that was evicted, so that what was often used long ago goes, too.
    """

    def __init__(self, num_chunks: int) -> None:
        self._nodes: dict[int, Node] = {}
        self._idle: set[int] = set()
        # Idle leaves, stale entries among them.
        self._heap: list[tuple[float, int]] = []
        self._clock = 0.0

    def get(self, key: int) -> Chunk | None:
        node = self._nodes.get(key)
        return None if node is None else node.chunk

    def keys(self) -> Iterable[int]:
        return self._nodes

    def insert(self, access: Access, place: int) -> None:
        node = Node(access.keys[place - 1] if place else ROOT, access.cost_s)
        self._nodes[access.keys[place]] = node
        if (above := self._nodes.get(node.parent)) is not None:
            above.num_children += 1
        self._use(access.keys[place], node)

    def saw(self, access: Access, places: Iterable[int]) -> None:
        for place in places:
            if (node := self._nodes.get(access.keys[place])) is not None:
                self._use(access.keys[place], node)

    def _use(self, key: int, node: Node) -> None:
        node.num_uses += 1
        node.priority = self._clock + node.num_uses * node.cost_s
        self._push(key, node)

    def _push(self, key: int, node: Node) -> None:
        if key in self._idle and not node.num_children:
            if len(self._heap) > LEAST_STALE + 2 * len(self._idle):
                leaves = ((node.priority, key) for key in self._idle if not (node := self._nodes[key]).num_children)
                self._heap = list(leaves)
                heapify(self._heap)
            else:
                heappush(self._heap, (node.priority, key))

    def idle(self, key: int) -> None:
        self._idle.add(key)
        self._push(key, self._nodes[key])

    def busy(self, key: int) -> None:
        self._idle.remove(key)

    def finish(self, access: Access) -> None:
        pass

    def evict(self, count: int, protected: Iterable[int]) -> list[int]:
        nodes, kept = self._nodes, set(protected)
        chosen: dict[int, None] = {}
        passed: list[tuple[float, int]] = []
        while self._heap and len(chosen) < count:
            priority, key = heappop(self._heap)
            node = nodes.get(key)
            if node is None or key in chosen or key not in self._idle or node.num_children or node.priority != priority:
                continue
            if key in kept:
                passed.append((priority, key))
                continue
            chosen[key] = None
            if (above := nodes.get(node.parent)) is not None:
                above.num_children -= 1
                self._push(node.parent, above)
        if enough := len(chosen) == count:
            self._clock = max((self._clock, *(nodes[key].priority for key in chosen)))
            for key in chosen:
                del nodes[key]
                self._idle.remove(key)
        else:
            for key in chosen:
                if (above := nodes.get(nodes[key].parent)) is not None:
                    above.num_children += 1
            passed += [(nodes[key].priority, key) for key in chosen]
        for entry in passed:
            heappush(self._heap, entry)
        return list(chosen) if enough else []


Named = Literal["lru", "arc", "pgdsf"]
REPLACEMENTS: dict[Named, Callable[[int], Replacement]] = {"lru": Lru, "arc": Arc, "pgdsf": Pgdsf}
