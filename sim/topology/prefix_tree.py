"""`PrefixTree`: which engine has had which prefixes, block by block of a trace's hash ids."""

from collections.abc import Sequence

from traces.errors import TraceError
from traces.request import Request


def hash_ids_of(request: Request, asks: str) -> tuple[int, ...]:
    """The ids of the prompt's blocks; TraceError, which names who `asks`, where the trace has none."""
    if not request.hash_block_tokens:
        raise TraceError(f"request {request.request_id}: has no hash_ids, which {asks} needs; take another")
    return request.hash_ids


class PrefixTree:
    """A tree of blocks, each with the set of places (a bit each) that have had the prefix that ends with it."""

    def __init__(self) -> None:
        # (the block before, 0 for none; id) -> its number; its places are at that number.
        self._numbers: dict[tuple[int, int], int] = {}
        self._places = [0]

    def add(self, ids: Sequence[int], place: int) -> None:
        """`place` has the prefix `ids` from now on."""
        numbers, places, at, bit = self._numbers, self._places, 0, 1 << place
        for ident in ids:
            number = numbers.get((at, ident))
            if number is None:
                number = numbers[at, ident] = len(places)
                places.append(0)
            places[number] |= bit
            at = number

    def longest(self, ids: Sequence[int]) -> tuple[int, list[int]]:
        """Blocks of the longest prefix of `ids` that any place has, and the places that have it; none: 0 and []."""
        numbers, places, at, found, length = self._numbers, self._places, 0, 0, 0
        for ident in ids:
            number = numbers.get((at, ident))
            if number is None:
                break
            at, found = number, places[number]
            length += 1
        return length, [place for place in range(found.bit_length()) if found >> place & 1]
