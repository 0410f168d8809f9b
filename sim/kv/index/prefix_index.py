"""`PrefixIndex`: which blocks have which prefix, which sequences use them, and which go first (vLLM's cache, in runs).

A radix tree over block keys; equal keys after equal prefixes mean equal KV. A node is a run of keys, and has a
`CachedRun` of blocks for each time its content was computed: vLLM keeps duplicates and hits the oldest. Unused runs
wait in one LRU list; a sequence gives its blocks back from the last to the first, so that tails are evicted before
heads and what is cached is always closed under prefixes. Costs go with runs, not with blocks.
"""

from collections.abc import Callable, Iterator
from typing import Final

from sim.engine.sequence import Sequence
from sim.kv.block_pool import Evicts
from traces.hash_ids import num_shared

Keys = tuple[int, ...]


class CachedRun:
    """The first `num_blocks` blocks of a node's content, computed once. In the LRU list while none holds them."""

    __slots__ = ("after", "before", "holders", "node", "num_blocks")

    def __init__(self, node: "Node", num_blocks: int) -> None:
        self.node = node
        self.num_blocks = num_blocks
        self.holders: dict[Holding, None] = {}
        self.before: CachedRun = self
        self.after: CachedRun = self


class Node:
    """A run of block keys. `runs` are oldest first, the longest as long as `keys`; the root has neither."""

    __slots__ = ("children", "growing", "keys", "parent", "runs")

    def __init__(self, parent: "Node | None", keys: list[int]) -> None:
        self.parent = parent
        # A list: a few at its end come and go, of thousands.
        self.keys = keys
        self.children: dict[int, Node] = {}
        self.runs: list[CachedRun] = []
        self.growing: dict[Holding, None] = {}
        """Sequences whose last run is here (at the root: that have none) and that may yet publish keys beyond it."""


DEAD: Final = Node(None, [])
"""Where runs are that can no longer be hit."""


class Holding:
    """What one sequence holds of the index: runs from the first block on. `keys` name the blocks whose content others
    can know; blocks beyond are the sequence's own."""

    __slots__ = ("keys", "num_blocks", "number", "place", "runs", "seq")

    def __init__(self, seq: Sequence, keys: Keys) -> None:
        self.seq = seq
        self.keys = keys
        self.runs: list[CachedRun] = []
        self.num_blocks = 0
        self.number = 0
        """Grows from one admission to the next."""
        self.place: Node | None = None
        """Where it is listed as growing."""


class Match:
    """The longest cached prefix of some keys: nodes and how many blocks of each, from the root on."""

    __slots__ = ("growing", "num_blocks", "num_idle", "path")

    def __init__(self, path: tuple[tuple[Node, int], ...], num_blocks: int, num_idle: int, growing: bool) -> None:
        self.path, self.num_blocks = path, num_blocks
        self.num_idle = num_idle
        """Blocks of these that no sequence holds: they count as free until they are taken."""
        self.growing = growing
        """Whether a sequence that decodes may lengthen it."""


class PrefixIndex(Evicts):
    """The cached blocks of one pool.

    Args:
        published: how many blocks of a sequence that holds some are full by now, and its tokens; asked when a
            prefix is looked up closely. Sequences between two publications grow in step: the longer one has had each
            block first.
    """

    def __init__(self, published: Callable[[Sequence], tuple[int, int]]) -> None:
        self.published = published
        self.root = Node(None, [])
        self.num_idle = 0
        """Blocks that no sequence holds; the next to be evicted stands first in the LRU list."""
        self.num_evicted = 0
        self.version = 0
        """Grows with every change that could lengthen or shorten a match."""
        self._lru = CachedRun(DEAD, 0)
        self._num_taken = 0

    # -- looking up --------------------------------------------------------------------------------------------------

    def keys(self) -> Iterator[int]:
        """Of all blocks that are cached."""
        nodes = [self.root]
        while nodes:
            node = nodes.pop()
            yield from node.keys
            nodes += node.children.values()

    def match(self, keys: Keys, limit: int) -> Match:
        """The longest cached prefix of `keys[:limit]`, without what growing sequences have not published yet."""
        return self._match(keys, limit, lambda node: None)

    def publish_and_match(self, keys: Keys, limit: int) -> Match:
        """The same, once sequences that grow along it have published what they have filled."""
        return self._match(keys, limit, self._publish_growing)

    def _match(self, keys: Keys, limit: int, publish: Callable[[Node], None]) -> Match:
        path: list[tuple[Node, int]] = []
        found = idle = 0
        node = self.root
        publish(node)
        while found < limit:
            child = node.children.get(keys[found])
            if child is None:
                break
            publish(child)
            # That may have split it.
            node = node.children[keys[found]]
            shared = num_shared(node.keys, 0, keys, found, limit)
            path.append((node, shared))
            found += shared
            idle += _idle_within(node, shared)
            if shared < len(node.keys):
                break
        growing = found < limit and self._may_lengthen(path, keys, found)
        return Match(tuple(path), found, idle, growing)

    def _may_lengthen(self, path: list[tuple[Node, int]], keys: Keys, found: int) -> bool:
        """Whether a sequence on the way has `keys[found]` yet to come, wherever on the way it is now."""
        for node in (self.root, *(node for node, _ in path)):
            for holding in node.growing:
                if len(holding.keys) > found and holding.keys[found] == keys[found]:
                    return True
        return False

    def take(self, holding: Holding, match: Match) -> None:
        """Let a sequence that holds nothing hold what it matched."""
        for node, num_blocks in match.path:
            rest, left = node, num_blocks
            while left:
                # The oldest copy is hit as far as it goes.
                taken = min(rest.runs[0].num_blocks, left)
                part = self._split(rest, taken) if taken < len(rest.keys) else rest
                self._hold(holding, part.runs[0])
                left -= taken
        self.version += 1
        self._num_taken += 1
        holding.number = self._num_taken
        self._list_growing(holding)

    def _hold(self, holding: Holding, run: CachedRun) -> None:
        if not run.holders:
            self._unlink(run)
            self.num_idle -= run.num_blocks
        run.holders[holding] = None
        holding.runs.append(run)
        holding.num_blocks += run.num_blocks

    def extend(self, holding: Holding, keys: Keys) -> None:
        """The content of more blocks of a sequence that holds some is known."""
        holding.keys += keys
        self.version += 1
        self._list_growing(holding)

    # -- publishing --------------------------------------------------------------------------------------------------

    def publish(self, holding: Holding, num_blocks: int, before: tuple[int, int] | None = None) -> None:
        """The first `num_blocks` blocks of a sequence are full: others may hit those that have keys.

        What others have had for longer comes first: all that they have, or that of those that are `before` it.
        """
        keys = holding.keys
        end = min(num_blocks, len(keys))
        if holding.num_blocks >= end:
            return
        self.version += 1
        # Others that are brought up to date on the way shall not come back to this one.
        self._unlist(holding)
        # What computes the same content may be on its way there.
        self._publish_growing(self.root, before)
        for run in list(holding.runs):
            if run.node.growing:
                self._publish_growing(run.node, before)
        while holding.num_blocks < end:
            self._publish_growing(self._end_of(holding), before)
            last = holding.runs[-1] if holding.runs else None
            node = self._end_of(holding)
            offset = last.num_blocks if last is not None else 0
            begin = holding.num_blocks
            if offset < len(node.keys):
                self._publish_inside(holding, node, offset, end)
                continue
            child = node.children.get(keys[begin])
            if child is not None:
                self._add_run(holding, child, num_shared(child.keys, 0, keys, begin, end))
            elif last is not None and not node.children and len(last.holders) == 1:
                node.keys += keys[begin:end]
                self._lengthen(holding, last, end - begin)
            else:
                child = node.children[keys[begin]] = Node(node, list(keys[begin:end]))
                self._add_run(holding, child, end - begin)
        self._list_growing(holding)

    def _publish_inside(self, holding: Holding, node: Node, offset: int, end: int) -> None:
        """The node goes on beyond the last run of `holding`: grow along it, or part from it."""
        last = holding.runs[-1]
        shared = num_shared(node.keys, offset, holding.keys, holding.num_blocks, end)
        younger = node.runs[node.runs.index(last) + 1 :]
        # Blocks that a younger run has already are older there than those to come.
        if shared and len(last.holders) == 1 and all(run.num_blocks <= offset for run in younger):
            self._lengthen(holding, last, shared)
        else:
            self._split(node, offset)

    def _add_run(self, holding: Holding, node: Node, num_blocks: int) -> None:
        run = CachedRun(node, 0)
        run.holders[holding] = None
        node.runs.append(run)
        holding.runs.append(run)
        self._lengthen(holding, run, num_blocks)

    def _lengthen(self, holding: Holding, run: CachedRun, num_blocks: int) -> None:
        """The next blocks of a sequence are those of its last run."""
        run.num_blocks += num_blocks
        holding.num_blocks += num_blocks

    def _publish_growing(self, node: Node, before: tuple[int, int] | None = None) -> None:
        """Bring sequences that grow here up to date, or those of them that were `before` another.

        They decode in step: of two that compute the same content, the longer one has each block first, and of two as
        long the one admitted first.
        """
        if not node.growing:
            return
        growing: list[tuple[int, int, int, Holding]] = []
        for holding in node.growing:
            full, tokens = self.published(holding.seq)
            growing.append((-tokens, holding.number, full, holding))
        growing.sort()
        for shortest, number, full, holding in growing:
            if before is not None and (shortest, number) > before:
                return
            if holding.place is node:
                self.publish(holding, full, (shortest, number))

    def _end_of(self, holding: Holding) -> Node:
        """Where its last run is."""
        return holding.runs[-1].node if holding.runs else self.root

    def _list_growing(self, holding: Holding) -> None:
        place = self._end_of(holding) if holding.num_blocks < len(holding.keys) else None
        if place is not holding.place:
            self._unlist(holding)
            holding.place = place
            if place is not None:
                place.growing[holding] = None

    def _unlist(self, holding: Holding) -> None:
        if holding.place is not None:
            del holding.place.growing[holding]
            holding.place = None

    # -- splitting ---------------------------------------------------------------------------------------------------

    def _split(self, node: Node, num_blocks: int) -> Node:
        """A new node for the first `num_blocks` keys, above what is left of `node`; returns the new one."""
        assert node.parent is not None
        head = Node(node.parent, node.keys[:num_blocks])
        node.parent.children[node.keys[0]] = head
        del node.keys[:num_blocks]
        node.parent = head
        head.children[node.keys[0]] = node
        longer: list[CachedRun] = []
        for run in node.runs:
            if run.num_blocks <= num_blocks:
                run.node = head
                head.runs.append(run)
                for holding in run.holders:
                    if holding.place is node:
                        del node.growing[holding]
                        head.growing[holding] = None
                        holding.place = head
                continue
            first = CachedRun(head, num_blocks)
            head.runs.append(first)
            run.num_blocks -= num_blocks
            longer.append(run)
            if run.holders:
                first.holders = dict(run.holders)
                for holding in run.holders:
                    holding.runs.insert(holding.runs.index(run), first)
            else:
                self._link(first, run)
        node.runs = longer
        return head

    # -- giving back and evicting --------------------------------------------------------------------------------------

    def release(self, holding: Holding) -> int:
        """A sequence lets go of all that it holds, from the last block to the first; how many blocks are idle now."""
        freed = 0
        for run in reversed(holding.runs):
            del run.holders[holding]
            if not run.holders:
                self._link(run, self._lru.before)
                freed += run.num_blocks
        self._unlist(holding)
        holding.runs.clear()
        holding.num_blocks = 0
        self.num_idle += freed
        self.version += 1
        return freed

    def rest(self, num_blocks: int) -> None:
        """Blocks that can no longer be hit are idle: the last to be evicted so far."""
        self.num_idle += num_blocks
        last = self._lru.before
        if last is not self._lru and last.node is DEAD:
            last.num_blocks += num_blocks
        else:
            self._link(CachedRun(DEAD, num_blocks), last)

    def evict(self, num_blocks: int) -> None:
        """Give up idle blocks, the longest idle first."""
        self.num_idle -= num_blocks
        self.num_evicted += num_blocks
        oldest = self._lru.after
        if oldest.node is DEAD and oldest.num_blocks > num_blocks:
            # No prompt could match any of these.
            oldest.num_blocks -= num_blocks
            return
        self.version += 1
        while num_blocks:
            run = self._lru.after
            lost = min(num_blocks, run.num_blocks)
            run.num_blocks -= lost
            num_blocks -= lost
            if not run.num_blocks:
                self._unlink(run)
            if run.node is not DEAD:
                self._shorten(run.node, run)

    def _shorten(self, node: Node, run: CachedRun) -> None:
        if not run.num_blocks:
            node.runs.remove(run)
        longest = max([left.num_blocks for left in node.runs], default=0)
        if longest < len(node.keys):
            assert not node.children, "what is cached is closed under prefixes"
            if not longest:
                assert node.parent is not None
                del node.parent.children[node.keys[0]]
            del node.keys[longest:]

    def _link(self, run: CachedRun, before: CachedRun) -> None:
        """Put `run` into the LRU list, right behind `before`."""
        run.before, run.after = before, before.after
        before.after.before = run
        before.after = run

    def _unlink(self, run: CachedRun) -> None:
        run.before.after, run.after.before = run.after, run.before
        run.before = run.after = run


def _idle_within(node: Node, num_blocks: int) -> int:
    """How many of the first blocks, each from the oldest copy that has it, no sequence holds."""
    idle = covered = 0
    for run in node.runs:
        if run.num_blocks > covered:
            end = min(run.num_blocks, num_blocks)
            if not run.holders:
                idle += end - covered
            covered = end
            if covered == num_blocks:
                break
    return idle
