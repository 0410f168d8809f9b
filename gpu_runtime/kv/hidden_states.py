"""`HiddenStateStore`: layer inputs kept on the host, from which `DecoderLayer.restore_kv` makes KV again (HCache)."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from gpu_runtime.kv.block_ids import BlockIds
from gpu_runtime.kv.copy_engine import CopyEngine
from gpu_runtime.kv.copy_worker import CopyHandle
from gpu_runtime.kv.page_locked import page_locked
from gpu_runtime.model.config import DecoderConfig
from sim.engine.plan import Direction


class HiddenStateStore:
    """Blocks of `block_tokens` tokens, each with the inputs of all layers: `data` [num_blocks, L, block_tokens, h].

    Half the bytes of KV where n_kv d = h (HCache, Gao et al. 2025), more than KV in models with few KV heads.
    """

    def __init__(
        self, engine: CopyEngine, config: DecoderConfig, num_blocks: int, block_tokens: int, dtype: torch.dtype
    ) -> None:
        """Allocate the blocks on the host, pinned where the engine's device is CUDA."""
        self._engine = engine
        self._ids = BlockIds(num_blocks)
        self.block_tokens = block_tokens
        shape = (num_blocks, config.num_layers, block_tokens, config.hidden_size)
        on_cuda = engine.device.type == "cuda"
        self.data = page_locked(shape, dtype, self)[0] if on_cuda else torch.zeros(shape, dtype=dtype)

    @property
    def num_free(self) -> int:
        """Blocks that are not allocated."""
        return self._ids.num_free

    def allocate(self, n: int) -> list[int]:
        """Ids of `n` blocks; raises `OutOfBlocks` and takes none if fewer are free."""
        return self._ids.allocate(n)

    def free(self, ids: Iterable[int]) -> None:
        """Give blocks back; InvariantError for a block that is not allocated."""
        self._ids.free(ids)

    def check(self) -> None:
        """InvariantError unless every free block is listed exactly once."""
        self._ids.check()

    def save(self, layer: int, hidden: Tensor, ids: Sequence[int], first: int = 0) -> CopyHandle:
        """Keep the inputs [n, h] of a layer for a sequence's tokens `first` to `first + n`.

        Args:
            layer: of the model.
            hidden: must not be written to before the copy is done.
            ids: the sequence's blocks, from its token 0 on.
            first: position of the first token.
        """
        rows = self._rows(layer, ids, first, len(hidden))
        return self._engine.copy_tensors([(hidden[part], block) for part, block in rows], Direction.D2H)

    def load(self, layer: int, ids: Sequence[int], first: int, count: int) -> tuple[Tensor, CopyHandle]:
        """The inputs [count, h] of a layer for tokens from `first` on, and the copy that brings them to the device."""
        hidden = torch.empty((count, self.data.shape[3]), dtype=self.data.dtype, device=self._engine.device)
        rows = self._rows(layer, ids, first, count)
        return hidden, self._engine.copy_tensors([(block, hidden[part]) for part, block in rows], Direction.H2D)

    def _rows(self, layer: int, ids: Sequence[int], first: int, count: int) -> Iterator[tuple[slice, Tensor]]:
        """Pieces of `count` rows and the view of the block each stands in."""
        if len(ids) * self.block_tokens < first + count:
            raise ValueError(f"{len(ids)} blocks of {self.block_tokens} tokens for {first + count} tokens")
        at = first
        while at < first + count:
            offset = at % self.block_tokens
            n = min(self.block_tokens - offset, first + count - at)
            block = self.data[ids[at // self.block_tokens], layer, offset : offset + n]
            yield slice(at - first, at - first + n), block
            at += n
