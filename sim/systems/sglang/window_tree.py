"""`WindowTree`: SGLang's tree where layers with a sliding window keep their KV in a pool of their own.

A node's pages are in the tree for the layers that keep all; for the others they may be gone, or never have been there.
A prefix is hit where these have a whole window before its end. Each side evicts by its own order: whole leaves the
one, by the tree's clock; any node's window the other, the longest unused first (a leaf goes on both sides then).
Source: sglang 0.5.23, `mem_cache/unified_cache/components/swa.py`, `unified_tree_core.py`.
"""

from heapq import heapify, heappop
from math import inf

from sim.systems.sglang.tree import EvictionPolicy, Keys, Match, Node, PrefixTree, parent_of
from traces.hash_ids import num_shared


class WindowNode(Node):
    """`end`: pages from the root to its end. `in_window`: layers with a window have its pages.

    `window_lock` counts sequences whose window it is in; `window_used` is when it was last in one that was used.
    """

    __slots__ = ("end", "in_window", "window_lock", "window_used")

    def __init__(self, parent: Node | None, keys: tuple[int, ...], used: float) -> None:
        super().__init__(parent, keys, used)
        self.end: int = parent.end + len(keys) if isinstance(parent, WindowNode) else 0
        self.in_window = False
        self.window_lock = self.window_used = 0


class WindowTree(PrefixTree):
    """The tree with windows of `window_pages` pages.

    A path is used at once; of its nodes those nearer to its end count as used later. So does what is split off.
    """

    def __init__(self, eviction: EvictionPolicy, window_pages: int) -> None:
        self.window_pages = window_pages
        super().__init__(eviction)
        self._window_clock = 0
        self._windows: dict[WindowNode, None] = {}
        """Nodes that layers with a window have."""
        self.num_in_window = self.num_window_idle = 0
        """Pages that these layers have, and those of them that are in no sequence's window."""
        self.reached = 0
        """Pages that the last match would have had without windows."""

    def _new_node(self, parent: Node | None, keys: tuple[int, ...]) -> WindowNode:
        return WindowNode(parent, keys, self._tick())

    def _window_of(self, node: Node, pages: int) -> list[WindowNode]:
        """Nodes from `node` up that hold the last `pages` pages."""
        found: list[WindowNode] = []
        covered = 0
        while node is not self.root and covered < pages:
            assert isinstance(node, WindowNode)
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
        # All that there is will do where it is less than a window.
        run: float = inf
        while depth < limit and (child := node.children.get(keys[depth])) is not None:
            shared = num_shared(child.keys, 0, keys, depth, limit)
            is_whole = shared == len(child.keys)
            node = child if is_whole else self._split(child, shared)
            assert isinstance(node, WindowNode)
            depth += shared
            run = run + shared if node.in_window else 0.0
            if run >= self.window_pages:
                best, pages = node, depth
            if not is_whole:
                break
        self.reached = depth
        self._use_window(best)
        self._touch(best)
        return Match(best, pages, best, 0)

    def _use_window(self, node: Node) -> None:
        self._window_clock += 1
        for one in self._window_of(node, self.window_pages + 1):
            if one.in_window:
                one.window_used = self._window_clock

    def _split(self, child: Node, length: int) -> Node:
        head = super()._split(child, length)
        assert isinstance(head, WindowNode) and isinstance(child, WindowNode)
        head.window_lock, head.window_used = child.window_lock, child.window_used
        if child.in_window:
            head.in_window = True
            self._windows[head] = None
        return head

    # -- locks ---------------------------------------------------------------------------------------------------------

    def lock(self, node: Node) -> int:
        super().lock(node)
        window = self._window_of(node, self.window_pages)
        for one in window:
            if one.in_window and not one.window_lock:
                self.num_window_idle -= len(one.keys)
            one.window_lock += 1
        return window[-1].end - len(window[-1].keys) if window else 0

    def unlock(self, node: Node, since: int = 0) -> None:
        above = node
        while isinstance(above, WindowNode) and above.end > since:
            above.window_lock -= 1
            if above.in_window and not above.window_lock:
                self.num_window_idle += len(above.keys)
            above = parent_of(above)
        super().unlock(node)

    # -- inserting -----------------------------------------------------------------------------------------------------

    def insert(
        self, keys: Keys, length: int, *, held: int, counted: int, priority: int = 0, slid: int = 0
    ) -> tuple[Node, int]:
        """As the tree does; of the inserted pages the layers with a window have those from `slid` on.

        Where the tree's have gone, these take their place.
        """
        root = self.root
        root.used = self._tick()
        root.priority = max(root.priority, priority)
        node, depth, copies = root, 0, 0
        while depth < length and (child := node.children.get(keys[depth])) is not None:
            child.used = self._tick()
            shared = num_shared(child.keys, 0, keys, depth, length)
            if shared < len(child.keys):
                child = self._split(child, shared)
            child.priority = max(child.priority, priority)
            copies += max(0, shared - max(0, held - depth))
            assert isinstance(child, WindowNode)
            end = depth + shared
            if not child.in_window and end > max(held, slid):
                if slid > depth:
                    self._split(child, slid - depth)
                self._have_window(child)
            node, depth = child, end
            if depth > counted:
                self._count(node)
        if depth < length:
            leaf = self._grow(node, keys[depth:length], priority)
            assert isinstance(leaf, WindowNode)
            if slid < length:
                if slid > depth:
                    self._split(leaf, slid - depth)
                if len(leaf.keys) > self.window_pages:
                    # What holds the leaf holds no more than a window.
                    head = self._split(leaf, len(leaf.keys) - self.window_pages)
                    assert isinstance(head, WindowNode)
                    self._have_window(head)
                self._have_window(leaf)
            node = leaf
            if length > counted:
                self._count(node)
        self._use_window(node)
        return node, copies

    def _have_window(self, node: WindowNode) -> None:
        """Layers with a window have `node` from now on."""
        node.in_window = True
        self._windows[node] = None
        self.num_in_window += len(node.keys)
        if not node.window_lock:
            self.num_window_idle += len(node.keys)
        self._window_clock += 1
        node.window_used = self._window_clock

    # -- evicting ------------------------------------------------------------------------------------------------------

    def evict_window(self, pages: int) -> int:
        """Give up windows until so many of their pages are free; returns pages that are free on the other side, too."""
        heap = [(node.window_used, node.end, node) for node in self._windows if not node.window_lock]
        heapify(heap)
        target, freed = self.num_in_window - pages, 0
        while heap and self.num_in_window > target:
            node = heappop(heap)[2]
            if node in self._leaves:
                freed += self._evict_leaf(node)
            else:
                self._lose_window(node)
        self.num_evicted += freed
        return freed

    def _lose_window(self, node: WindowNode) -> None:
        if node.in_window:
            node.in_window = False
            del self._windows[node]
            self.num_in_window -= len(node.keys)
            self.num_window_idle -= len(node.keys)

    def _unlink(self, node: Node) -> None:
        assert isinstance(node, WindowNode)
        self._lose_window(node)
        super()._unlink(node)
