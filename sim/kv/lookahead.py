"""`LookaheadKeys`: names of cached blocks that cover the token behind them (vLLM's `num_hash_lookahead_tokens`).

A head on the target (EAGLE, MTP) makes its KV at a position of the hidden state there and of the next token. So a full
block is as another prompt's only where both go on alike, and it can be hit once that token is known.
"""

from itertools import pairwise

from sim.kv.index.block_keys import BlockKeys
from traces.request import Request


class LookaheadKeys(BlockKeys):
    """Keys of blocks of which the next one is named, too."""

    num_ahead = 1

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self._pairs: dict[tuple[int, int], int] = {}

    def of(self, request: Request) -> tuple[int, ...]:
        keys, pairs = super().of(request), self._pairs
        return tuple(pairs.setdefault(pair, len(pairs)) for pair in pairwise(keys))
