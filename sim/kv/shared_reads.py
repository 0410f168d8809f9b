"""Radix trees for kernels that read what several decodes share once a step, for all of them.

`ChunkMemory` shares whole chunks of prompts between those that run (Ye et al., "ChunkAttention", ACL 2024);
`GroupMemory` the prefix of a group of requests that an order has planned together (Zheng et al., "BatchLLM", 2024).
Neither shares what is generated.
"""

from typing import ClassVar

from sim.engine.limits import Limits
from sim.engine.sequence import Sequence
from sim.kv.index.prefix_index import Keys
from sim.kv.radix import RadixMemory
from sim.parts.needs import Need


class ChunkMemory(RadixMemory):
    """Whole chunks of prompts are shared while a sequence runs that has them, and freed with the last of these."""

    name: ClassVar[str] = "chunks"
    shares_reads: ClassVar[bool] = True

    def keys_of(self, seq: Sequence) -> Keys:
        return self.named_keys(seq)

    def named_keys(self, seq: Sequence) -> Keys:
        request = seq.request
        return self.block_keys.of(request)[: request.prompt_tokens // self.block_size] if request.hash_ids else ()

    def release(self, seq: Sequence) -> None:
        super().release(seq)
        self.tree.evict(self.tree.num_idle)

    @property
    def num_evicted(self) -> int:
        # What ends is not given up for others.
        return 0


class GroupMemory(RadixMemory):
    """The prefix of each group is computed once and shared by its members; idle, it goes as a leaf of the tree does."""

    name: ClassVar[str] = "prefix-groups"
    shares_reads: ClassVar[bool] = True
    needs: ClassVar[tuple[Need, ...]] = (Need("order", "keeps what an order has planned", names=("prefix-groups",)),)

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self._keys: dict[Sequence, Keys] = {}

    def share(self, seqs: list[Sequence], num_blocks: int) -> None:
        """The first blocks of these prompts are the same; no other is to hit them."""
        self._keys.update(dict.fromkeys(seqs, self.private_keys(num_blocks)))

    def keys_of(self, seq: Sequence) -> Keys:
        return self._keys.pop(seq, ())

    def named_keys(self, seq: Sequence) -> Keys:
        return self._keys.get(seq, ())

    def forget(self, seq: Sequence) -> None:
        super().forget(seq)
        self._keys.pop(seq, None)
