"""`MarkedTree`: SGLang's tree where some layers keep what they have in a pool of their own.

A node's pages are in the tree for the layers that keep KV of all tokens. Where the others have it too, it is marked:
layers with a sliding window have its pages (`WindowTree`), layers with a state the one at its end (`StateTree`). A
prefix is hit where these have what its next token reads. Each pool evicts by its own order: whole leaves the one, by
the tree's clock; any node's mark the other, the longest unused first (a leaf goes on both sides then). With HiCache
the host has a pool of marks, too, of those of its nodes and of nodes whose mark has left the GPU.
Source: sglang 0.5.23, `mem_cache/unified_cache/components/swa.py`, `mamba.py`, `unified_tree_core.py`.
"""

from collections.abc import Sequence
from heapq import heapify, heappop
from math import inf
from typing import ClassVar

from sim.systems.sglang.tree import Keys, Match, Node, Pin, PrefixTree, TreeSettings, parent_of
from traces.hash_ids import num_shared


class MarkedNode(Node):
    """`is_marked`: the layers with a pool of their own have it.

    `mark_lock` counts sequences that read its mark; `mark_used` is when it was last in use. `host_marked` and the
    others: the host's, where `host_mark_used` is when it was last put among those that may go.
    """

    __slots__ = ("host_mark_lock", "host_mark_used", "host_marked", "is_marked", "mark_lock", "mark_used")

    def __init__(self, parent: Node | None, keys: tuple[int, ...], used: float) -> None:
        super().__init__(parent, keys, used)
        self.is_marked = self.host_marked = False
        self.mark_lock = self.mark_used = self.host_mark_lock = self.host_mark_used = 0


class MarkedTree(PrefixTree):
    """A tree of which a hit takes the marks of its last `read_pages` pages."""

    has_marks: ClassVar[bool] = True

    def __init__(self, settings: TreeSettings, read_pages: int) -> None:
        self.read_pages = read_pages
        super().__init__(settings)
        self._mark_clock = 0
        self._marked: dict[MarkedNode, None] = {}
        self.num_marked = self.num_marked_idle = 0
        """What all marks take of their pool, and those that no sequence reads."""
        self._host_marks: dict[MarkedNode, None] = {}
        """Nodes of which the host alone has the mark."""
        self.reached = 0
        """Pages that the last match would have had without marks."""

    def _new_node(self, parent: Node | None, keys: tuple[int, ...]) -> MarkedNode:
        return MarkedNode(parent, keys, self._tick())

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
        node = best = last = root
        depth = pages = 0
        # All that there is will do where it is less than what is read.
        run: float = inf
        gpu_run: float = inf
        while depth < limit and (child := node.children.get(keys[depth])) is not None:
            if not (child.on_gpu or child.on_host):
                break
            shared = num_shared(child.keys, 0, keys, depth, limit)
            is_whole = shared == len(child.keys)
            node = child if is_whole else self._split(child, shared)
            assert isinstance(node, MarkedNode)
            depth += shared
            run = run + shared if node.is_marked or node.host_marked else 0.0
            gpu_run = gpu_run + shared if node.is_marked else 0.0
            if run >= self.read_pages:
                best = node
            if node.on_gpu and gpu_run >= self.read_pages:
                last, pages = node, depth
            if not is_whole:
                break
        self.reached = depth
        self._use(best)
        self._touch(best)
        if best is last:
            return Match(best, pages, best, 0)
        host_pages, above = 0, best
        while above is not last:
            host_pages += len(above.keys) if above.on_host else 0
            above = parent_of(above)
        return Match(last, pages, best, host_pages, sum(map(self.size_of, self.marks_to_load(best))))

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
        return self._since(read)

    def _since(self, read: list[MarkedNode]) -> int:
        """Where what is held begins; `read` has it, the last first."""
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
        self._host_marks.pop(node, None)
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
            if node.host_marked:
                self._put_on_host(node)

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
                if self.writes_back and node.on_gpu and not node.on_host and not node.host_marked:
                    self._find_host_marks(sum(map(self.size_of, self._unwritten(node))))
                    if self._write(node):
                        self._note_copy(node)
                self._unmark(node)
        self.num_evicted += freed
        return freed

    def _demote(self, node: Node) -> int:
        assert isinstance(node, MarkedNode)
        self._unmark(node)
        return super()._demote(node)

    def _unlink(self, node: Node) -> None:
        assert isinstance(node, MarkedNode)
        self._unmark(node)
        self._unmark_host(node)
        super()._unlink(node)

    # -- the host's ----------------------------------------------------------------------------------------------------

    def _put_on_host(self, node: MarkedNode) -> None:
        """The host alone has its mark, and may give that up after those that it has already."""
        if node not in self._host_marks:
            self._host_marks[node] = None
            self._mark_clock += 1
            node.host_mark_used = self._mark_clock

    def _unmark_host(self, node: MarkedNode) -> None:
        if node.host_marked:
            node.host_marked = False
            self._host_marks.pop(node, None)
            self.host_marks_unused += self.size_of(node)

    def _end(self, node: Node) -> None:
        # What the host has already gets marks there that are new.
        if node.on_host and node.writing is None and not self.writes_back and self._unwritten(node):
            self._write(node)

    def _unwritten(self, node: Node) -> list[MarkedNode]:
        """Nodes of which a hit that ends with `node` reads marks that the host does not have."""
        found: list[MarkedNode] = []
        for one in self._last_of(node, self.read_pages):
            if one.writing is not None or not (one.is_marked or one.host_marked):
                break
            if one.is_marked and not one.host_marked:
                found.append(one)
        return found

    def _find_host_marks(self, size: int) -> bool:
        """Whether the host has room for so much, evicting for all of it where it has too little."""
        if self.host_marks_unused < size:
            self._evict_host_marks(size)
        return self.host_marks_unused >= size

    def _write_marks(self, node: Node) -> Sequence[Node] | None:
        nodes = self._unwritten(node)
        size = sum(map(self.size_of, nodes))
        if not self._find_host_marks(size):
            return None
        self.host_marks_unused -= size
        for one in nodes:
            one.host_marked = True
            if not self.writes_back:
                one.writing = node
        return nodes

    def _evict_host_marks(self, size: int) -> None:
        """Give up marks on the host until so much is free; a leaf there goes with all that it has."""
        order = [(node.host_mark_used, node.end, node) for node in self._host_marks if not node.host_mark_lock]
        for _, _, node in sorted(order, key=lambda item: item[:2]):
            if size <= 0:
                break
            if node not in self._host_marks:
                continue
            size -= self.size_of(node)
            if node in self._host_leaves:
                self._evict_host_leaf(node)
            else:
                self._unmark_host(node)

    def marks_to_load(self, node: Node) -> Sequence[MarkedNode]:
        return [one for one in self._last_of(node, self.read_pages) if not one.is_marked]

    def pin(self, node: Node) -> Pin:
        read = self._last_of(node, self.read_pages)
        for one in read:
            if not one.host_mark_lock:
                self._host_marks.pop(one, None)
            one.host_mark_lock += 1
        return super().pin(node)[0], self._since(read)

    def unpin(self, node: Node, pin: Pin) -> None:
        above = node
        while isinstance(above, MarkedNode) and above.end > pin[1]:
            above.host_mark_lock -= 1
            if not above.host_mark_lock and above.host_marked and not above.is_marked:
                self._put_on_host(above)
            above = parent_of(above)
        super().unpin(node, pin)

    def loaded(self, anchor: Node, pin: Pin) -> None:
        marks = self.marks_to_load(anchor)
        super().loaded(anchor, pin)
        for node in reversed(marks):
            self._mark(node)

    def take_host_marks(self, num: int) -> bool:
        if not self._find_host_marks(num):
            return False
        self.host_marks_unused -= num
        return True

    def num_host_marks(self, node: Node) -> int:
        return self.size_of(node) if isinstance(node, MarkedNode) and node.host_marked else 0

    def _bring_mark(self, node: MarkedNode) -> int:
        """The host has its mark from now on, for which room was taken."""
        node.host_marked = True
        if not node.is_marked:
            self._put_on_host(node)
        self._note_leaf(node)
        self._note_leaf(parent_of(node))
        return self.size_of(node)

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
        head.host_marked, head.host_mark_lock = child.host_marked, child.host_mark_lock
        head.host_mark_used = child.host_mark_used
        if child.is_marked:
            head.is_marked = True
            self._marked[head] = None
        if child in self._host_marks:
            self._host_marks[head] = None
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
        super()._end(node)

    def marks_to_fetch(self, anchor: Node, pages: int) -> int:
        # After others' pages no less than a window is of use.
        return min(pages, self.read_pages) if pages >= self.read_pages or anchor is self.root else 0

    def mark_on_host(self, anchor: Node, node: Node, num: int) -> int:
        if anchor is not self.root and num < self.read_pages:
            return 0
        assert isinstance(node, MarkedNode)
        begin, kept = node.end - num, 0
        while isinstance(node, MarkedNode) and node is not anchor and node.end > begin:
            if not node.host_marked:
                before = begin - node.end + len(node.keys)
                if before > 0:
                    self._split(node, before)
                kept += self._bring_mark(node)
            node = parent_of(node)
        return kept


class StateTree(MarkedTree):
    """Layers with a state have that at a node's end; a hit reads it, and what is split off before has none."""

    def size_of(self, node: Node) -> int:
        return 1

    def marks_to_fetch(self, anchor: Node, pages: int) -> int:
        return 1

    def mark_on_host(self, anchor: Node, node: Node, num: int) -> int:
        assert isinstance(node, MarkedNode)
        return 0 if node.host_marked else self._bring_mark(node)

    def _use(self, node: Node) -> None:
        self._mark_clock += 1
        if isinstance(node, MarkedNode):
            node.mark_used = self._mark_clock

    def _since(self, read: list[MarkedNode]) -> int:
        # Whatever is split off before: its last page.
        return max(0, read[0].end - 1) if read else 0

    def _begin(self, node: Node, since: int) -> None:
        assert isinstance(node, MarkedNode)
        self._mark(node)

    def _end(self, node: Node) -> None:
        assert isinstance(node, MarkedNode)
        if not node.is_marked:
            self._mark(node)
        else:
            self._use(node)
        super()._end(node)
