"""`PrefixTree`: which engine has had which prefixes, by a trace's hash ids."""

from traces.errors import TraceError
from traces.hash_ids import Ids, num_shared
from traces.request import Request


def hash_ids_of(request: Request, asks: str) -> Ids:
    """The ids of the prompt's blocks; TraceError, which names what `asks`, where the trace has none."""
    if not request.hash_block_tokens:
        raise TraceError(f"request {request.request_id}: has no hash_ids, which {asks} needs; take another")
    return request.hash_ids


class Node:
    """A run of blocks, and the set of places (a bit each) that have had the prefixes that end with any of them."""

    __slots__ = ("children", "ids", "places")

    def __init__(self, ids: Ids, places: int) -> None:
        self.ids, self.places = ids, places
        self.children: dict[int, Node] = {}


class PrefixTree:
    """A radix tree: costs go with runs, not with blocks."""

    def __init__(self) -> None:
        self._root = Node((), 0)

    def add(self, ids: Ids, place: int) -> None:
        """`place` has the prefix `ids` from now on."""
        node, at, bit = self._root, 0, 1 << place
        while at < len(ids):
            child = node.children.get(ids[at])
            if child is None:
                node.children[ids[at]] = Node(ids[at:], bit)
                return
            shared = num_shared(child.ids, 0, ids, at, len(ids))
            if shared < len(child.ids):
                head = node.children[ids[at]] = Node(child.ids[:shared], child.places)
                child.ids = child.ids[shared:]
                head.children[child.ids[0]] = child
                child = head
            child.places |= bit
            node = child
            at += shared

    def longest(self, ids: Ids) -> tuple[int, list[int]]:
        """Blocks of the longest prefix of `ids` that any place has, and the places that have it; none: 0 and []."""
        node, at = self._root, 0
        while at < len(ids) and (child := node.children.get(ids[at])) is not None:
            node = child
            shared = num_shared(node.ids, 0, ids, at, len(ids))
            at += shared
            if shared < len(node.ids):
                break
        return at, [place for place in range(node.places.bit_length()) if node.places >> place & 1]
