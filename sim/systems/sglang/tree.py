"""`PrefixTree`: SGLang 0.5's radix tree of cached pages, on the GPU and, with HiCache, on the host.

It differs from `sim.kv.index.radix_tree` where decisions do: looking up splits nodes and touches them; each touch is a
tick of a clock, ancestors a hair before their descendants; whole leaves go, until what one allocation lacks is there.
Lengths are pages. A node's pages are on the GPU, on the host, or on both; those on the GPU form a prefix of each path.
Source: sglang 0.5.23, `mem_cache/unified_cache/` (the tree), `unified_radix_cache.py` (what is written and loaded).
"""

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import ClassVar, Literal, NamedTuple

from sim.kv.index.branches import nodes_below
from traces.hash_ids import num_shared

Keys = tuple[int, ...]
EvictionPolicy = Literal["lru", "lfu", "fifo", "mru", "filo", "slru", "priority", "tlru"]
WritePolicy = Literal["write_through", "write_through_selective", "write_back"]
ANCESTOR_TICK = 1e-5
"""By how much an ancestor counts as used earlier than its child, ticks."""


class Node:
    """A run of pages after those of `parent`.

    `lock` counts sequences and loads that hold it on the GPU, `host_lock` loads that read it on the host; `pins` are
    those of which it is the topmost node; `used` and `created` are ticks. `end`: pages from the root to its end;
    `reached`, for `tlru`: to the furthest end that there ever was below it.
    """

    __slots__ = (
        "children", "created", "end", "hits", "host_lock", "keys", "loading", "lock", "on_gpu", "on_host", "parent",
        "pin", "priority", "reached", "used", "writing",
    )  # fmt: skip

    def __init__(self, parent: "Node | None", keys: tuple[int, ...], used: float) -> None:
        self.parent, self.keys = parent, keys
        self.children: dict[int, Node] = {}
        self.end: int = parent.end + len(keys) if parent is not None else 0
        self.lock = self.host_lock = self.hits = self.priority = self.reached = 0
        self.on_gpu = self.on_host = False
        self.used = self.created = used
        self.pin: int | None = None
        self.loading: Node | None = None
        self.writing: Node | None = None
        """While it is copied to the host: the node that this began with, of which it may be the beginning."""


class Match(NamedTuple):
    """Where a prefix ends: `pages` on the GPU up to `node`, then `host_pages` more on the host up to `best`.

    `host_marks`: what it reads of the host's marks (`MarkedTree`).
    """

    node: Node
    pages: int
    best: Node
    host_pages: int
    host_marks: int = 0


class Writing(NamedTuple):
    """A node that is copied to the host, what its `unlock` is to be told, and how many pages and marks that copies."""

    node: Node
    since: int
    pages: int
    marks: int


Pin = tuple[int, int]
"""Which pin of a node it is, and from where on its path marks on the host are held."""


class EvictionRules(NamedTuple):
    """Insertions from which `slru` protects a node; pages of a conversation's end that `tlru` can do without."""

    protected_hits: int = 0
    spared_pages: int = 0


RANKS: dict[EvictionPolicy, Callable[[Node, EvictionRules], tuple[float, float]]] = {
    "lru": lambda node, rules: (node.used, node.used),
    "lfu": lambda node, rules: (node.hits, node.used),
    "fifo": lambda node, rules: (node.created, node.used),
    "mru": lambda node, rules: (-node.used, node.used),
    "filo": lambda node, rules: (-node.created, node.used),
    "slru": lambda node, rules: (node.hits >= rules.protected_hits, node.used),
    "priority": lambda node, rules: (node.priority, node.used),
    "tlru": lambda node, rules: (
        node.end - len(node.keys) < max(node.reached - rules.spared_pages, 0),
        node.used,
    ),
}
"""What goes first has the least."""

Heap = list[tuple[tuple[float, float], int, Node]]


class TreeSettings(NamedTuple):
    """What a tree is made with.

    Attributes:
        eviction: which leaf goes first (`--radix-eviction-policy`), by which `rules`.
        host_pages: pages of the host's pool; 0: there is none.
        host_marks: of its pool of marks (`MarkedTree`).
        write_policy: when a node is copied to the host (`--hicache-write-policy`).
        least_load: pages below which a hit on the host is computed again.
    """

    eviction: EvictionPolicy
    host_pages: int
    host_marks: int
    write_policy: WritePolicy
    least_load: int
    rules: EvictionRules = EvictionRules()


class PrefixTree:
    """The tree, what of it is idle, and how much of the host is taken."""

    has_marks: ClassVar[bool] = False
    """Whether some layers have a pool of their own (`MarkedTree`)."""

    def __init__(self, settings: TreeSettings) -> None:
        self._rank, self._rules = RANKS[settings.eviction], settings.rules
        self._keeps_reached = settings.eviction == "tlru"
        self.has_host, self.host_unused = settings.host_pages > 0, settings.host_pages
        self.host_marks_unused = settings.host_marks
        self.writes_back = self.has_host and settings.write_policy == "write_back"
        self._hits_to_write = 1 if settings.write_policy == "write_through" else 2
        self.least_load = settings.least_load
        self._clock = self._num_pins = 0
        self.root = self._new_node(None, ())
        self.num_idle = 0
        """Pages on the GPU that nothing holds."""
        self.num_evicted = self.num_written = self.num_host_evicted = 0
        self._leaves: dict[Node, None] = {}
        """Idle nodes on the GPU without children there."""
        self._host_leaves: dict[Node, None] = {}
        self._copies: dict[Node, None] = {}
        """Nodes that were on both sides when last looked at, in the order in which they came to be."""
        self._loads: list[tuple[Node, Pin, int]] = []
        # Of the step in flight.
        self._loading: list[tuple[Node, Pin, int]] = []
        self.when_written: Callable[[Node], None] | None = None
        """Hears of each node whose copy to the host has ended, or whose mark's has."""
        # Copies to the host that are yet to begin; what they copy stays on the GPU until `written`.
        self._to_write: list[Writing] = []
        # Nodes whose copies are under way.
        self._num_writing = 0
        self.num_written_back = self.marks_written_back = 0
        """Pages that the step being planned waits for: their copies must end before others use them; and marks."""

    def _new_node(self, parent: Node | None, keys: tuple[int, ...]) -> Node:
        return Node(parent, keys, self._tick())

    def _tick(self) -> float:
        self._clock += 1
        return float(self._clock)

    # -- looking up ----------------------------------------------------------------------------------------------------

    def match(self, keys: Keys, limit: int) -> Match:
        """The longest prefix of the first `limit` keys that is there. It counts as used, and ends at a node's end."""
        root = self.root
        if limit <= 0:
            return Match(root, 0, root, 0)
        node = last = root
        depth = pages = 0
        while depth < limit:
            child = node.children.get(keys[depth])
            if child is None or not (child.on_gpu or child.on_host):
                break
            shared = num_shared(child.keys, 0, keys, depth, limit)
            is_whole = shared == len(child.keys)
            node = child if is_whole else self._split(child, shared)
            depth += shared
            if node.on_gpu:
                pages, last = depth, node
            if not is_whole:
                break
        self._touch(node)
        return Match(last, pages, node, depth - pages)

    def _touch(self, node: Node) -> None:
        used = self._tick()
        above: Node | None = node
        while above is not None:
            above.used = used
            used -= ANCESTOR_TICK
            above = above.parent

    def _split(self, child: Node, length: int) -> Node:
        """The first `length` pages of `child` become a node of their own, which is returned."""
        parent = parent_of(child)
        head = self._new_node(parent, child.keys[:length])
        head.created, head.hits, head.priority, head.reached = child.created, child.hits, child.priority, child.reached
        head.lock, head.host_lock, head.loading = child.lock, child.host_lock, child.loading
        head.on_gpu, head.on_host = child.on_gpu, child.on_host
        head.pin, child.pin = child.pin, None
        head.writing = child.writing
        parent.children[head.keys[0]] = head
        child.parent, child.keys = head, child.keys[length:]
        head.children[child.keys[0]] = child
        child.used = self._tick()
        self._note_leaf(head)
        self._note_leaf(child)
        self._note_copy(head)
        return head

    # -- locks ---------------------------------------------------------------------------------------------------------

    def lock(self, node: Node) -> int:
        """What leads to `node` stays on the GPU, or will be there. Returns what `unlock` is to be told."""
        above = node
        while above is not self.root:
            if above.on_gpu:
                if not above.lock:
                    self.num_idle -= len(above.keys)
                self._leaves.pop(above, None)
            above.lock += 1
            above = parent_of(above)
        if node is not self.root:
            self._note_leaf(node)
        return 0

    def unlock(self, node: Node, since: int = 0) -> None:
        """One lock less, which `lock` returned `since` for."""
        while node is not self.root:
            node.lock -= 1
            if not node.lock:
                if node.on_gpu:
                    self.num_idle += len(node.keys)
                self._note_leaf(node)
            node = parent_of(node)

    def _note_leaf(self, node: Node) -> None:
        """Whether `node` is one that may be evicted, here or there."""
        if node is self.root:
            return
        idle = not node.lock
        if idle and node.on_gpu and not any(child.on_gpu for child in node.children.values()):
            self._leaves[node] = None
        else:
            self._leaves.pop(node, None)
        if idle and node.on_host and not node.on_gpu and not node.host_lock and not node.children:
            self._host_leaves[node] = None
        else:
            self._host_leaves.pop(node, None)

    # -- inserting -----------------------------------------------------------------------------------------------------

    def insert(
        self, keys: Keys, length: int, *, held: int, counted: int, priority: int = 0, since: int = 0
    ) -> tuple[Node, int]:
        """Cache the first `length` pages. Returns where they end, and how many of them were there as others' copies.

        The first `held` are the tree's already; insertions of the first `counted` have been counted. `since`: what
        hooks of a tree with marks are told (`MarkedTree`).
        """
        root, has_marks = self.root, self.has_marks
        root.used = self._tick()
        root.priority = max(root.priority, priority)
        node, depth, copies = root, 0, 0
        while depth < length:
            child = node.children.get(keys[depth])
            if child is None:
                break
            child.used = self._tick()
            shared = num_shared(child.keys, 0, keys, depth, length)
            if shared < len(child.keys):
                child = self._split(child, shared)
            child.priority = max(child.priority, priority)
            if child.on_gpu:
                copies += max(0, shared - max(0, held - depth))
            else:
                self._bring(child)
                self._note_copy(child)
                self._note_leaf(node)
            if has_marks:
                self._pass(child, held, since)
            depth += shared
            node = child
            if depth > counted:
                self._count(node)
        if depth < length:
            node = self._grow(node, keys[depth:length], priority)
            if has_marks:
                self._begin(node, since)
            if length > counted:
                self._count(node)
        if has_marks:
            self._end(node)
        return node, copies

    def _pass(self, node: Node, held: int, since: int) -> None:
        """`node`, which is on the way to what is inserted, is on the GPU."""

    def _begin(self, node: Node, since: int) -> None:
        """The leaf `node` is new."""

    def _end(self, node: Node) -> None:
        """What is inserted ends with `node`."""

    def _grow(self, node: Node, keys: tuple[int, ...], priority: int) -> Node:
        """A leaf of `keys` below `node`, on the GPU."""
        leaf = self._new_node(node, keys)
        leaf.priority = priority
        node.children[keys[0]] = leaf
        self._note_reached(leaf)
        self._bring(leaf)
        self._note_leaf(node)
        return leaf

    def _note_reached(self, leaf: Node) -> None:
        above: Node | None = leaf if self._keeps_reached else None
        while above is not None and above.reached < leaf.end:
            above.reached = leaf.end
            above = above.parent

    def _bring(self, node: Node) -> None:
        """`node` is on the GPU from now on."""
        node.on_gpu = True
        if not node.lock:
            self.num_idle += len(node.keys)
        self._note_leaf(node)

    def _count(self, node: Node) -> None:
        """One more insertion of `node`, which may be the one that has it written to the host."""
        if self.writes_back:
            return
        node.hits += 1
        if self.has_host and not node.on_host and node.hits >= self._hits_to_write:
            chain, above = [node], parent_of(node)
            while above is not self.root and not above.on_host:
                chain.append(above)
                above = parent_of(above)
            for below in reversed(chain):
                if not self._write(below):
                    return

    # -- evicting from the GPU -----------------------------------------------------------------------------------------

    def evict(self, pages: int) -> int:
        """Give up whole leaves on the GPU until so many pages are free; how many are."""
        freed = 0
        for node in self._by_rank(self._leaves) if pages > 0 else ():
            freed += self._evict_leaf(node)
            if freed >= pages:
                break
        self.num_evicted += freed
        return freed

    def _by_rank(self, leaves: dict[Node, None]) -> Iterator[Node]:
        """Leaves in the order in which they go; a parent that has become one when its child has gone among them."""
        rank, rules = self._rank, self._rules
        heap: Heap = [(rank(node, rules), number, node) for number, node in enumerate(leaves)]
        heapify(heap)
        number = len(heap)
        while heap:
            node = heappop(heap)[2]
            if node not in leaves:
                continue
            yield node
            parent = node.parent
            if parent is not None and parent in leaves:
                heappush(heap, (rank(parent, rules), number, parent))
                number += 1

    def _evict_leaf(self, node: Node) -> int:
        if node.on_host:
            return self._demote(node)
        if not self.writes_back:
            return self._delete(node)
        if self._write(node):
            self._note_copy(node)
            return self._demote(node)
        return self._drop(node)

    def _demote(self, node: Node) -> int:
        """`node` is on the host alone."""
        node.on_gpu = False
        self.num_idle -= len(node.keys)
        self._note_leaf(node)
        self._note_leaf(parent_of(node))
        return len(node.keys)

    def _delete(self, node: Node) -> int:
        """A leaf that is on the GPU alone is gone."""
        self.num_idle -= len(node.keys)
        node.on_gpu = False
        self._remove(node)
        return len(node.keys)

    def _drop(self, node: Node) -> int:
        """The host has no room: `node` and all below it, which are there, are gone, unless something holds one."""
        below, left = [], [node]
        while left:
            one = left.pop()
            if one.lock or one.host_lock or one.loading is not None:
                # It stays, and is no use to this allocation.
                return 0
            below.append(one)
            left.extend(one.children.values())
        for one in reversed(below[1:]):
            self.host_unused += len(one.keys)
            one.on_host = False
            self._unlink(one)
        return self._delete(node)

    def _unlink(self, node: Node) -> None:
        del parent_of(node).children[node.keys[0]]
        for known in (self._leaves, self._host_leaves, self._copies):
            known.pop(node, None)

    def _remove(self, node: Node) -> None:
        """A leaf that is nowhere, and what above it only led there, leave the tree."""
        self._unlink(node)
        above = parent_of(node)
        self._note_leaf(above)
        while above is not self.root and not above.children and not (above.lock or above.host_lock):
            if above.on_gpu or above.on_host:
                self._note_leaf(above)
                return
            self._unlink(above)
            above = parent_of(above)
            self._note_leaf(above)

    # -- the host (HiCache's L2) ---------------------------------------------------------------------------------------

    def _write(self, node: Node) -> bool:
        """Copy what is not yet there of `node` to the host, if there is room or can be made."""
        pages = 0 if node.on_host else len(node.keys)
        lacking = pages - self.host_unused
        if lacking > 0 and self.evict_host(lacking) < lacking:
            return False
        self.host_unused -= pages
        marked = self._write_marks(node)
        if marked is None:
            self.host_unused += pages
            return False
        if not pages and not marked:
            return True
        marks = sum([self.size_of(one) for one in marked])
        self.num_written += pages
        node.on_host = True
        if self.writes_back:
            self.num_written_back += pages
            self.marks_written_back += marks
            if self.when_written is not None:
                for one in reversed([*dict.fromkeys([node, *marked])]):
                    self.when_written(one)
        else:
            since = self.lock(node)
            node.writing = node
            # It may be split before the copy begins.
            self._to_write.append(Writing(node, since, pages, marks))
        return True

    def size_of(self, node: Node) -> int:
        """What its mark takes of their pool: its pages."""
        return len(node.keys)

    def _write_marks(self, node: Node) -> Sequence[Node] | None:
        """Those of which its copy takes marks to the host, the last first; None: there is no room for them."""
        return ()

    @property
    def writes_wait(self) -> bool:
        """Whether copies are to begin with the next step."""
        return bool(self._to_write)

    def begin_writing(self) -> list[Writing]:
        """The copies that begin now, as one."""
        begun, self._to_write = self._to_write, []
        self._num_writing += len(begun)
        return begun

    def written(self, writes: list[Writing]) -> None:
        """These copies have ended."""
        self._num_writing -= len(writes)
        for node, since, _, _ in writes:
            self.unlock(node, since)
            parts, part = [], node
            while part is not self.root and (part.writing is node or self.has_marks):
                if part.writing is node:
                    part.writing = None
                    parts.append(part)
                part = parent_of(part)
            for part in reversed(parts if self.when_written else ()):
                assert self.when_written is not None
                self.when_written(part)

    @property
    def is_copying(self) -> bool:
        """Whether any copy is under way, or about to begin."""
        return bool(self._to_write or self._num_writing or self._loads or self._loading)

    def _note_copy(self, node: Node) -> None:
        if node.on_gpu and node.on_host and node.loading is None:
            self._copies.setdefault(node)
        else:
            self._copies.pop(node, None)

    def evict_host(self, pages: int) -> int:
        """Free so many pages of the host: written back, of what the GPU has too; then whole leaves."""
        freed = self._give_up_copies(pages) if self.writes_back else 0
        for node in self._by_rank(self._host_leaves) if freed < pages else ():
            freed += len(node.keys)
            self._evict_host_leaf(node)
            if freed >= pages:
                break
        return freed

    def _evict_host_leaf(self, node: Node) -> None:
        self.host_unused += len(node.keys)
        self.num_host_evicted += len(node.keys)
        node.on_host = False
        self._remove(node)

    def _give_up_copies(self, pages: int) -> int:
        """First of nodes that are not about to leave the GPU."""
        freed = 0
        gone: list[Node] = []
        for spare in (True, False):
            for node in self._copies:
                if freed >= pages:
                    break
                if not (node.on_gpu and node.on_host):
                    gone.append(node)
                elif not (spare and node in self._leaves) and node.loading is None and not node.host_lock:
                    node.on_host = False
                    freed += len(node.keys)
                    self.host_unused += len(node.keys)
                    gone.append(node)
        for node in gone:
            self._copies.pop(node, None)
        return freed

    def insert_on_host(self, anchor: Node, keys: Keys) -> tuple[Node | None, int] | None:
        """Pages after `anchor` have come to the host from storage.

        Returns where they end, if the host has that (else None), and how many of them were there. None: the host has
        lost what `anchor` has, and they are of no use.
        """
        anchor.used = self._tick()
        node, depth, length, present = anchor, 0, len(keys), 0
        while depth < length and (child := node.children.get(keys[depth])) is not None:
            child.used = self._tick()
            shared = num_shared(child.keys, 0, keys, depth, length)
            if shared < len(child.keys):
                child = self._split(child, shared)
            if child.on_host or self.writes_back:
                present += shared
            else:
                child.on_host = True
                self._note_leaf(child)
                self._note_leaf(node)
                self._note_copy(child)
            depth += shared
            node = child
        if depth < length:
            if node is not self.root and not node.on_host and not self.writes_back:
                return None
            leaf = self._new_node(node, keys[depth:length])
            leaf.priority, leaf.on_host = node.priority, True
            node.children[leaf.keys[0]] = leaf
            self._note_reached(leaf)
            self._note_leaf(leaf)
            self._note_leaf(node)
            node = leaf
        return (node if length and node.on_host else None), present

    # What storage has of marks (`MarkedTree`).

    def marks_to_fetch(self, anchor: Node, pages: int) -> int:
        """Of so many pages after `anchor` how many, the last, are asked for with their marks."""
        return 0

    def take_host_marks(self, num: int) -> bool:
        """Make room on the host for so many; whether there is."""
        return True

    def mark_on_host(self, anchor: Node, node: Node, num: int) -> int:
        """The last so many of what ends with `node`, after `anchor`, have come; how many are kept."""
        return 0

    def num_host_marks(self, node: Node) -> int:
        """Those of its pages of which the host has marks; one of a state."""
        return 0

    def keys_of(self, node: Node) -> tuple[int, ...]:
        """Of all pages from the first on, to the end of `node`."""
        found: list[tuple[int, ...]] = []
        while node is not self.root:
            found.append(node.keys)
            node = parent_of(node)
        return tuple(key for keys in reversed(found) for key in keys)

    def nodes_to_load(self, node: Node) -> list[Node]:
        """Those that lead to `node` and are on the host alone, the last first."""
        found: list[Node] = []
        while not node.on_gpu and node is not self.root:
            found.append(node)
            node = parent_of(node)
        return found

    def marks_to_load(self, node: Node) -> Sequence[Node]:
        """Those of which a hit that ends with `node` reads the host's marks, the last first."""
        return ()

    def pin(self, node: Node) -> Pin:
        """`node` stays on the host until `unpin`."""
        self._num_pins += 1
        if node.pin is None:
            node.pin = self._num_pins
        node.host_lock += 1
        self._note_leaf(node)
        return node.pin, 0

    def unpin(self, node: Node, pin: Pin) -> None:
        """Of that node, and of what was split off its beginning since."""
        while True:
            node.host_lock -= 1
            self._note_leaf(node)
            if node.pin == pin[0]:
                return
            node = parent_of(node)

    def loaded(self, anchor: Node, pin: Pin) -> None:
        """All that leads to `anchor` is on the GPU, or on its way: it is held until `finish_loads`."""
        nodes = self.nodes_to_load(anchor)
        for node in reversed(nodes):
            if self.writes_back:
                node.loading = anchor
            self._bring(node)
        if nodes:
            self._note_leaf(parent_of(nodes[-1]))
        self._loads.append((anchor, pin, self.lock(anchor)))

    def finish_loads(self, *, in_flight: bool) -> None:
        """What was on its way has arrived, but for what the step `in_flight` loads."""
        arrived, self._loading = self._loading, self._loads
        if not in_flight:
            arrived += self._loading
            self._loading = []
        self._loads = []
        for anchor, pin, since in arrived:
            self.unlock(anchor, since)
            self.unpin(anchor, pin)
            node = anchor
            while node is not self.root:
                if not self.writes_back or node.loading is anchor:
                    node.loading = None
                    self._note_copy(node)
                node = parent_of(node)

    # -- for recounts --------------------------------------------------------------------------------------------------

    def nodes(self) -> list[Node]:
        """All of them but the root."""
        return nodes_below(self.root)


def parent_of(node: Node) -> Node:
    """The node before `node`, which is not the root."""
    parent = node.parent
    assert parent is not None, "the root has no parent"
    return parent
