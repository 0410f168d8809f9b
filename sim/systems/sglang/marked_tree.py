"""`MarkedTree`: SGLang's tree where some layers keep what they have in a pool of their own.

A node's pages are in the tree for the layers that keep KV of all tokens. Where the others have it too, it is marked:
layers with a sliding window have its pages (`WindowTree`), layers with a state the one at its end (`StateTree`). A
prefix is hit where these have what its next token reads. Each pool evicts by its own order: whole leaves the one, by
the tree's clock; any node's mark the other, the longest unused first (a leaf goes on both sides then).
Source: sglang 0.5.23, `mem_cache/unified_cache/components/swa.py`, `mamba.py`, `unified_tree_core.py`.
"""

from heapq import heapify, heappop
from math import inf
from typing import ClassVar

from sim.systems.sglang.tree import EvictionPolicy, Keys, Match, Node, PrefixTree, parent_of
from traces.hash_ids import num_shared


class MarkedNode(Node):
    """`end`: pages from the root to its end. `is_marked`: the layers with a pool of their own have it.

    `mark_lock` counts sequences that read its mark; `mark_used` is when it was last in use.
    """

    __slots__ = ("end", "is_marked", "mark_lock", "mark_used")

    def __init__(self, parent: Node | None, keys: tuple[int, ...], used: float) -> None:
        super().__init__(parent, keys, used)
        self.end: int = parent.end + len(keys) if isinstance(parent, MarkedNode) else 0
        self.is_marked = False
        self.mark_lock = self.mark_used = 0


class MarkedTree(PrefixTree):
    """A tree of which a hit takes the marks of its last `read_pages` pages."""

    has_marks: ClassVar[bool] = True

    def __init__(self, eviction: EvictionPolicy, read_pages: int) -> None:
        self.read_pages = read_pages
        super().__init__(eviction)
        self._mark_clock = 0
        self._marked: dict[MarkedNode, None] = {}
        self.num_marked = self.num_marked_idle = 0
        """What all marks take of their pool, and those that no sequence reads."""
        self.reached = 0
        """Pages that the last match would have had without marks."""

    def _new_node(self, parent: Node | None, keys: tuple[int, ...]) -> MarkedNode:
        return MarkedNode(parent, keys, self._tick())

    def size_of(self, node: MarkedNode) -> int:
        """What its mark takes of their pool: its pages."""
        return len(node.keys)

    def _last_of(self, node: Node, pages: int) -> list[MarkedNode]:
        """Nodes from `node` up that hold the last `pages` pages."""
        found: list[MarkedNode] = []
        covered = 0
        while node is not self.root and covered < pages:
            assert isinstance(node, MarkedNode)
            found.append(node)
            covered += len(node.keys)
            node = parent_of(node)
        return found

    # -- looking up ----------------------------------------------------------------------------------------------------

    def match(self, keys: Keys, limit: int) -> Match:
        self.reached = 0
        root = self.root
        if limit <= 0:
            return Match(root, 0, root, 0)
        node = best = root
        depth = pages = 0
        # All that there is will do where it is less than what is read.
        run: float = inf
        while depth < limit and (child := node.children.get(keys[depth])) is not None:
            shared = num_shared(child.keys, 0, keys, depth, limit)
            is_whole = shared == len(child.keys)
            node = child if is_whole else self._split(child, shared)
            assert isinstance(node, MarkedNode)
            depth += shared
            run = run + shared if node.is_marked else 0.0
            if run >= self.read_pages:
                best, pages = node, depth
            if not is_whole:
                break
        self.reached = depth
        self._use(best)
        self._touch(best)
        return Match(best, pages, best, 0)

    def _use(self, node: Node) -> None:
        """What a hit that ends with `node` reads counts as used."""
        self._mark_clock += 1
        for one in self._last_of(node, self.read_pages + 1):
            if one.is_marked:
                one.mark_used = self._mark_clock

    # -- locks ---------------------------------------------------------------------------------------------------------

    def lock(self, node: Node) -> int:
        super().lock(node)
        read = self._last_of(node, self.read_pages)
        for one in read:
            if one.is_marked and not one.mark_lock:
                self.num_marked_idle -= self.size_of(one)
            one.mark_lock += 1
        return read[-1].end - len(read[-1].keys) if read else 0

    def unlock(self, node: Node, since: int = 0) -> None:
        above = node
        while isinstance(above, MarkedNode) and above.end > since:
            above.mark_lock -= 1
            if above.is_marked and not above.mark_lock:
                self.num_marked_idle += self.size_of(above)
            above = parent_of(above)
        super().unlock(node)

    # -- marks ---------------------------------------------------------------------------------------------------------

    def _mark(self, node: MarkedNode) -> None:
        """The layers with a pool of their own have `node` from now on."""
        node.is_marked = True
        self._marked[node] = None
        self.num_marked += self.size_of(node)
        if not node.mark_lock:
            self.num_marked_idle += self.size_of(node)
        self._mark_clock += 1
        node.mark_used = self._mark_clock

    def _unmark(self, node: MarkedNode) -> None:
        if node.is_marked:
            node.is_marked = False
            del self._marked[node]
            self.num_marked -= self.size_of(node)
            self.num_marked_idle -= self.size_of(node)

    def evict_marks(self, size: int) -> int:
        """Give up marks until so much of their pool is free; returns pages that are free on the other side, too."""
        heap = [(node.mark_used, node.end, node) for node in self._marked if not node.mark_lock]
        heapify(heap)
        target, freed = self.num_marked - size, 0
        while heap and self.num_marked > target:
            node = heappop(heap)[2]
            if node in self._leaves:
                freed += self._evict_leaf(node)
            else:
                self._unmark(node)
        self.num_evicted += freed
        return freed

    def _unlink(self, node: Node) -> None:
        assert isinstance(node, MarkedNode)
        self._unmark(node)
        super()._unlink(node)

    def recounted(self) -> tuple[int, int]:
        """What all marks take of their pool, and those that no sequence reads, node by node."""
        marked = [node for node in self.nodes() if isinstance(node, MarkedNode) and node.is_marked]
        return sum(map(self.size_of, marked)), sum(self.size_of(node) for node in marked if not node.mark_lock)


class WindowTree(MarkedTree):
    """Layers with a sliding window have pages; a hit reads a whole window of `read_pages`.

    A path is used at once; of its nodes those nearer to its end count as used later. So does what is split off.
    Inserted pages are in windows from page `since` on; where the tree's have gone, these take their place.
    """

    def _split(self, child: Node, length: int) -> Node:
        head = super()._split(child, length)
        assert isinstance(head, MarkedNode) and isinstance(child, MarkedNode)
        head.mark_lock, head.mark_used = child.mark_lock, child.mark_used
        if child.is_marked:
            head.is_marked = True
            self._marked[head] = None
        return head

    def _pass(self, node: Node, held: int, since: int) -> None:
        assert isinstance(node, MarkedNode)
        if not node.is_marked and node.end > max(held, since):
            begin = node.end - len(node.keys)
            if since > begin:
                self._split(node, since - begin)
            self._mark(node)

    def _begin(self, node: Node, since: int) -> None:
        assert isinstance(node, MarkedNode)
        begin = node.end - len(node.keys)
        if since >= node.end:
            return
        if since > begin:
            self._split(node, since - begin)
        if len(node.keys) > self.read_pages:
            # What holds the leaf holds no more than a window.
            head = self._split(node, len(node.keys) - self.read_pages)
            assert isinstance(head, MarkedNode)
            self._mark(head)
        self._mark(node)

    def _end(self, node: Node) -> None:
        self._use(node)


class StateTree(MarkedTree):
    """Layers with a state have that at a node's end; a hit reads it, and what is split off before has none."""

    def __init__(self, eviction: EvictionPolicy) -> None:
        super().__init__(eviction, 1)

    def size_of(self, node: MarkedNode) -> int:
        return 1

    def _use(self, node: Node) -> None:
        self._mark_clock += 1
        if isinstance(node, MarkedNode):
            node.mark_used = self._mark_clock

    def lock(self, node: Node) -> int:
        super().lock(node)
        # Whatever is split off before: its last page.
        return max(0, node.end - 1) if isinstance(node, MarkedNode) else 0

    def _end(self, node: Node) -> None:
        assert isinstance(node, MarkedNode)
        if not node.is_marked:
            self._mark(node)
        else:
            self._use(node)
