"""`GlobalStore`: which node's host memory holds the KV of which prefixes, block by block of a trace's hash ids."""

from collections import OrderedDict
from collections.abc import Sequence
from heapq import heappop, heappush


class GlobalStore:
    """Blocks of every node, the longest unused of which give way.

    Args:
        nodes: how many.
        capacity_tokens: of each.
    """

    def __init__(self, nodes: int, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        # (the block before, 0 for none; id) -> its number.
        self._numbers: dict[tuple[int, int], int] = {}
        self._held: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(nodes)]
        # Whose link brings one thing after another: no two of a node come at a time.
        self._coming: list[tuple[float, int, list[int], int]] = []
        self.num_evicted = 0
        """Blocks (of the trace) that gave way."""

    def path(self, ids: Sequence[int]) -> list[int]:
        """Numbers of the prefixes that end with each block."""
        numbers, at, found = self._numbers, 0, []
        for ident in ids:
            at = numbers.setdefault((at, ident), len(numbers) + 1)
            found.append(at)
        return found

    def lengths(self, path: Sequence[int], now_s: float) -> list[int]:
        """Blocks of the prefix that each node has at `now_s`."""
        while self._coming and self._coming[0][0] <= now_s:
            _, node, arrived, block_tokens = heappop(self._coming)
            self.add(node, arrived, block_tokens)
        return [next((i for i, number in enumerate(path) if number not in held), len(path)) for held in self._held]

    def add(self, node: int, path: Sequence[int], block_tokens: int) -> None:
        """`node` holds these blocks, or has used them again."""
        held, most = self._held[node], self.capacity_tokens // block_tokens
        # The last ones first: they are the oldest then, and the first to go.
        for number in reversed(path[:most]):
            held[number] = None
            held.move_to_end(number)
        while len(held) > most:
            held.popitem(last=False)
            self.num_evicted += 1

    def add_at(self, at_s: float, node: int, path: list[int], block_tokens: int) -> None:
        """From `at_s` on."""
        heappush(self._coming, (at_s, node, path, block_tokens))
