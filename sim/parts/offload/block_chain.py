"""Keys that name a block's content and all before it, as vLLM's chained hashes do: `NamedChain`, `BlockChain`."""

from sim.engine.sequence import Sequence
from sim.parts.memory.block_keys import BlockKeys
from traces.request import Request

FIRST_PRIVATE_KEY = 1 << 64
"""Beyond all keys of named blocks."""


class NamedChain(BlockKeys):
    """Keys of the blocks that a trace names: equal keys for equal prefixes, and for nothing else."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self._links: dict[tuple[int, int], int] = {}

    def of(self, request: Request) -> tuple[int, ...]:
        return self.extended((), super().of(request))

    def extended(self, chained: tuple[int, ...], keys: tuple[int, ...]) -> tuple[int, ...]:
        """Keys of a sequence's first blocks, and those of the blocks that follow."""
        links, found, last = self._links, [], chained[-1] if chained else 0
        for key in keys:
            last = links.setdefault((last, key), len(links) + 1)
            found.append(last)
        return (*chained, *found)


class BlockChain:
    """The same, and keys of its own for what of a sequence has no name."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._named = NamedChain(block_size)
        self._next_private_key = FIRST_PRIVATE_KEY

    def of(self, seq: Sequence) -> tuple[int, ...]:
        """One key for each block that the sequence will ever fill."""
        count = (seq.request.prompt_tokens + seq.output_tokens) // self._block_size
        found, first = self._named.of(seq.request)[:count], self._next_private_key
        self._next_private_key += count - len(found)
        return (*found, *range(first, self._next_private_key))
