"""`LookaheadMemory`: cached blocks whose names cover the token behind them (vLLM's `num_hash_lookahead_tokens`).

A head on the target (EAGLE, MTP) makes its KV at a position of the hidden state there and of the next token. So a full
block is as another prompt's only where both go on alike, and it can be hit once that token is known.
"""

from itertools import pairwise

from sim.engine.limits import Limits
from sim.engine.sequence import Sequence
from sim.kv.index.block_keys import BlockKeys
from sim.kv.prefix import PrefixMemory
from traces.request import Request


class LookaheadKeys(BlockKeys):
    """Keys of blocks of which the next one is named, too."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self._pairs: dict[tuple[int, int], int] = {}

    def of(self, request: Request) -> tuple[int, ...]:
        keys, pairs = super().of(request), self._pairs
        return tuple(pairs.setdefault(pair, len(pairs)) for pair in pairwise(keys))


class LookaheadMemory(PrefixMemory):
    """Blocks shared where prefixes and the token behind them are."""

    def __init__(self, limits: Limits, *, in_flight_hits: bool = False) -> None:
        super().__init__(limits, in_flight_hits=in_flight_hits)
        self.keys = LookaheadKeys(limits.block_size)

    def full_blocks(self, seq: Sequence) -> int:
        return min(super().full_blocks(seq), (seq.num_tokens - 1) // self.block_size)
