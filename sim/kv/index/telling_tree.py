"""`TellingTree`: a radix tree that puts into the plan what becomes of blocks, for those who keep their ids."""

from typing import TYPE_CHECKING

from sim.engine.changes import Change, Evict, Hit, Keep, Split
from sim.engine.sequence import Sequence
from sim.kv.index.prefix_index import Keys
from sim.kv.index.radix_tree import Node, RadixTree

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler


class TellingTree(RadixTree):
    """Appends to the scheduler's changes, in order. Nodes name themselves: each stays cached until it is evicted."""

    def __init__(self, scheduler: "Scheduler") -> None:
        super().__init__()
        self._scheduler = scheduler

    def _tell(self, change: Change) -> None:
        self._scheduler.changes.append(change)

    def lock_for(self, seq: Sequence, node: Node) -> int:
        depth = 0
        for part in _below(self.root, node):
            self._tell(Hit(seq, depth, len(part.keys), part))
            depth += len(part.keys)
        return super().lock_for(seq, node)

    def insert_for(self, seq: Sequence, keys: Keys, node: Node, depth: int, end: int) -> tuple[Node, int]:
        version = self.version
        found = super().insert_for(seq, keys, node, depth, end)
        for part in _below(node, found[0]):
            # What is new to the tree has made a version of its own.
            is_new = part is found[0] and self.version != version
            self._tell((Keep if is_new else Hit)(seq, depth, len(part.keys), part))
            depth += len(part.keys)
        return found

    def _split(self, node: Node, num_blocks: int) -> Node:
        head = super()._split(node, num_blocks)
        self._tell(Split(node, head, num_blocks))
        return head

    def _drop(self, leaf: Node) -> None:
        self._tell(Evict(leaf, 0))
        super()._drop(leaf)


def _below(above: Node, node: Node) -> list[Node]:
    """The nodes from `above`, which is none of them, to `node`."""
    found: list[Node] = []
    while node is not above:
        found.append(node)
        assert node.parent is not None
        node = node.parent
    return found[::-1]
