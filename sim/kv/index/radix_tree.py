"""`RadixTree`: which prefixes are cached, which sequences use them, and which leaf goes first (SGLang's radix cache).

An edge of the tree is a run of block keys; equal keys after equal prefixes mean equal KV, which is kept once. A
sequence that uses a prefix locks all nodes on its way. Unlocked nodes are idle and count as free; the leaf that was
looked at the longest ago is evicted first, whole, and its parent may be the next leaf.
"""

from collections import Counter
from collections.abc import Iterable
from heapq import heappop, heappush

from sim.engine.sequence import Sequence
from sim.kv.index.branches import nodes_below
from sim.kv.index.prefix_index import Keys
from traces.hash_ids import num_shared


class Node:
    """A run of blocks. `lock_ref` sequences use it, `num_reading` of them decode."""

    __slots__ = ("alive", "children", "keys", "last_access", "lock_ref", "num_reading", "parent", "queued")

    def __init__(self, parent: "Node | None", keys: Keys, last_access: int = 0) -> None:
        self.parent = parent
        self.keys = keys
        self.children: dict[int, Node] = {}
        self.lock_ref = 0
        self.num_reading = 0
        self.last_access = last_access
        self.alive = True
        self.queued = False
        """Whether it stands among those that may be evicted."""


class RadixTree:
    """The cached blocks of one pool."""

    def __init__(self) -> None:
        self.root = Node(None, ())
        self.num_idle = 0
        """Blocks of nodes that are not locked."""
        self.num_evicted = 0
        self.num_reread = 0
        """`num_reread_by` of all that decode."""
        self.clock = 0
        """Grows whenever something is looked at, inserted or evicted: the time of the LRU order."""
        self.version = 0
        """Grows with every change that could lengthen or shorten a match."""
        self._leaves: list[tuple[int, int, Node]] = []
        self._num_queued = 0

    # -- looking up --------------------------------------------------------------------------------------------------

    def advance(self, keys: Keys, node: Node, depth: int, limit: int) -> tuple[Node, int]:
        """The longest cached prefix of `keys[:limit]`, as the node where it ends and its blocks.

        `node` and `depth` are what was found before (the root and 0 at first), evicted since or not. A node is split
        where the prefix ends inside it.
        """
        node, depth = _still_cached(node, depth)
        while depth < limit:
            child = node.children.get(keys[depth])
            if child is None:
                break
            shared = num_shared(child.keys, 0, keys, depth, limit)
            depth += shared
            if shared < len(child.keys):
                return self._split(child, shared), depth
            node = child
        return node, depth

    def count(self, keys: Keys, node: Node, depth: int, limit: int) -> tuple[int, int]:
        """How many blocks `advance` would find, and how many of them are not locked."""
        node, depth = _still_cached(node, depth)
        idle = self.num_idle_until(node)
        while depth < limit:
            child = node.children.get(keys[depth])
            if child is None:
                break
            shared = num_shared(child.keys, 0, keys, depth, limit)
            depth += shared
            idle += 0 if child.lock_ref else shared
            if shared < len(child.keys):
                break
            node = child
        return depth, idle

    def touch(self, node: Node) -> None:
        """The prefix that ends with `node` was looked at."""
        self.clock += 1
        while node is not self.root:
            node.last_access = self.clock
            node = _parent(node)

    def num_idle_until(self, node: Node) -> int:
        """Blocks of the prefix that ends with `node` which are not locked: its end, if any."""
        idle = 0
        while not node.lock_ref and node is not self.root:
            idle += len(node.keys)
            node = _parent(node)
        return idle

    # -- using -------------------------------------------------------------------------------------------------------

    def lock(self, node: Node) -> int:
        """One more uses the prefix that ends with `node`; how many of its blocks were idle."""
        taken = 0
        while node is not self.root:
            if not node.lock_ref:
                taken += len(node.keys)
            node.lock_ref += 1
            node = _parent(node)
        self.num_idle -= taken
        return taken

    def lock_for(self, seq: Sequence, node: Node) -> int:
        """`lock` for a sequence that is about to be placed."""
        return self.lock(node)

    def insert_for(self, seq: Sequence, keys: Keys, node: Node, depth: int, end: int) -> tuple[Node, int]:
        """`insert` of what a sequence has computed."""
        return self.insert(keys, node, depth, end)

    def unlock(self, node: Node) -> int:
        """One less; how many of its blocks are idle now."""
        if node.lock_ref == 1 and not node.children:
            self._queue(node)
        freed = 0
        while node is not self.root:
            node.lock_ref -= 1
            if not node.lock_ref:
                freed += len(node.keys)
            node = _parent(node)
        self.num_idle += freed
        return freed

    def insert(self, keys: Keys, node: Node, depth: int, end: int) -> tuple[Node, int]:
        """A sequence that locks `depth` blocks, up to `node`, has computed `keys[:end]`, and now uses the tree's.

        Returns where that ends, and how many of the blocks beyond `depth` others were using already.
        """
        found, known = self.advance(keys, node, depth, end)
        used = 0
        above = found
        while above is not node:
            if above.lock_ref:
                used += len(above.keys)
            else:
                self.num_idle -= len(above.keys)
            above.lock_ref += 1
            above = _parent(above)
        if known < end:
            child = found.children[keys[known]] = Node(found, keys[known:end])
            child.lock_ref = 1
            found = child
            self.version += 1
        self.touch(found)
        return found, used

    def _split(self, node: Node, num_blocks: int) -> Node:
        """A new node for the first blocks, above what is left of `node`; returns the new one."""
        parent = _parent(node)
        head = Node(parent, node.keys[:num_blocks], node.last_access)
        head.lock_ref, head.num_reading = node.lock_ref, node.num_reading
        parent.children[node.keys[0]] = head
        node.keys = node.keys[num_blocks:]
        node.parent = head
        head.children[node.keys[0]] = node
        return head

    # -- what decodes read ---------------------------------------------------------------------------------------------

    def begin_reading(self, node: Node) -> None:
        """One more decodes after the prefix that ends with `node`."""
        while node is not self.root:
            if node.num_reading:
                self.num_reread += len(node.keys)
            node.num_reading += 1
            node = _parent(node)

    def end_reading(self, node: Node) -> None:
        """One less."""
        while node is not self.root:
            node.num_reading -= 1
            if node.num_reading:
                self.num_reread -= len(node.keys)
            node = _parent(node)

    def num_reread_by(self, nodes: Iterable[Node]) -> int:
        """Blocks that those that decode after these prefixes share: in all, less each of them once."""
        readers: Counter[Node] = Counter()
        for node in nodes:
            while node is not self.root:
                readers[node] += 1
                node = _parent(node)
        return sum((count - 1) * len(node.keys) for node, count in readers.items())

    # -- evicting ------------------------------------------------------------------------------------------------------

    def _queue(self, leaf: Node) -> None:
        if not leaf.queued:
            leaf.queued = True
            self._num_queued += 1
            heappush(self._leaves, (leaf.last_access, self._num_queued, leaf))

    def evict(self, num_blocks: int) -> None:
        """Give up idle leaves, whole, until they had `num_blocks` blocks or there are none."""
        leaves, evicted = self._leaves, 0
        while evicted < num_blocks and leaves:
            last_access, _, leaf = heappop(leaves)
            leaf.queued = False
            if leaf.lock_ref or leaf.children:
                continue
            if leaf.last_access != last_access:
                # Looked at since it was queued.
                self._queue(leaf)
                continue
            evicted += len(leaf.keys)
            parent = _parent(leaf)
            self._drop(leaf)
            if parent is not self.root and not parent.children and not parent.lock_ref:
                self._queue(parent)
        if evicted:
            self.num_idle -= evicted
            self.num_evicted += evicted
            self.clock += 1
            self.version += 1

    def _drop(self, leaf: Node) -> None:
        leaf.alive = False
        del _parent(leaf).children[leaf.keys[0]]

    def nodes(self) -> list[Node]:
        """All of them but the root. For recounts."""
        return nodes_below(self.root)


def _still_cached(node: Node, depth: int) -> tuple[Node, int]:
    """What is left of a prefix of `depth` blocks that ended with `node`, part of which may be evicted since."""
    while not node.alive:
        depth -= len(node.keys)
        node = _parent(node)
    return node, depth


def _parent(node: Node) -> Node:
    parent = node.parent
    assert parent is not None, "the root has no parent"
    return parent
