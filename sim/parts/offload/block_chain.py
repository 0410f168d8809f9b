"""`BlockChain`: keys that name a block's content and all before it, as vLLM's chained hashes do."""

from sim.engine.sequence import Sequence
from sim.parts.memory.block_keys import BlockKeys

FIRST_PRIVATE_KEY = 1 << 64
"""Beyond all keys of named blocks."""


class BlockChain:
    """Keys of sequences' blocks: equal keys for equal prefixes, keys of its own where a trace names no content."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._named = BlockKeys(block_size)
        self._keys: dict[tuple[int, int], int] = {}
        self._next_private_key = FIRST_PRIVATE_KEY

    def of(self, seq: Sequence) -> tuple[int, ...]:
        """One key for each block that the sequence will ever fill."""
        request, keys = seq.request, self._keys
        count = (request.prompt_tokens + seq.output_tokens) // self._block_size
        found, last = [], 0
        for key in self._named.of(request)[:count]:
            last = keys.setdefault((last, key), len(keys) + 1)
            found.append(last)
        first = self._next_private_key
        self._next_private_key += count - len(found)
        return (*found, *range(first, self._next_private_key))
