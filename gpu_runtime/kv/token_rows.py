"""`TokenRows`: what layers keep of single tokens on the host: their inputs (HCache, KVPR), or keys and values."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from gpu_runtime.kv.copy_engine import CopyEngine
from gpu_runtime.kv.copy_worker import CopyHandle
from gpu_runtime.kv.page_locked import page_locked
from sim.engine.changes import Direction


class TokenRows:
    """Blocks of a row for each token and layer: `data` [num_blocks, num_layers, block_tokens, width].

    Inputs are half the bytes of KV where n_kv d = h (HCache, Gao et al. 2025), more in models with few KV heads. Block
    ids are the caller's.
    """

    def __init__(
        self, engine: CopyEngine, num_blocks: int, num_layers: int, block_tokens: int, width: int, dtype: torch.dtype
    ) -> None:
        """Allocate the blocks on the host, pinned where the engine's device is CUDA."""
        self._engine, self.block_tokens, self.num_layers = engine, block_tokens, num_layers
        shape = (num_blocks, num_layers, block_tokens, width)
        self._unlock: Callable[[], object] | None = None
        if engine.device.type == "cuda" and num_blocks * num_layers:
            self.data, self._unlock = page_locked(shape, dtype, self)
        else:
            self.data = torch.zeros(shape, dtype=dtype)

    def release(self) -> None:
        """Give the memory back."""
        if self._unlock is not None:
            self._unlock()
        self.data = self.data.new_empty(0)

    def save(self, layer: int, values: Tensor, rows: Sequence[int], places: np.ndarray) -> CopyHandle:
        """Keep some rows of `values` [N, width] as those of the tokens at `places` (`token_places`).

        Args:
            layer: of those kept.
            values: must not be written to before the copy is done.
            rows: which rows.
            places: [len(rows)] where they go.
        """
        return self._engine.copy_rows(values, rows, self._flat(), self._at(layer, places), Direction.D2H)

    def load(self, layer: int, places: np.ndarray) -> tuple[Tensor, CopyHandle]:
        """The rows [len(places), width] of a layer, and the copy that brings them to the device."""
        found = torch.empty((len(places), self.data.shape[3]), dtype=self.data.dtype, device=self._engine.device)
        rows = self._at(layer, places)
        return found, self._engine.copy_rows(self._flat(), rows, found, range(len(rows)), Direction.H2D)

    def _flat(self) -> Tensor:
        return self.data.view(-1, self.data.shape[3])

    def _at(self, layer: int, places: np.ndarray) -> list[int]:
        blocks, offsets = np.divmod(places, self.block_tokens)
        return ((blocks * self.num_layers + layer) * self.block_tokens + offsets).tolist()


def token_places(ids: Sequence[int], first: int, end: int, block_tokens: int) -> np.ndarray:
    """Where tokens `first` to `end` of a sequence with these blocks stand: id x block_tokens + offset.

    ValueError where they need more blocks.
    """
    if len(ids) * block_tokens < end:
        raise ValueError(f"{len(ids)} blocks of {block_tokens} tokens for {end} tokens")
    positions = np.arange(first, end)
    return np.asarray(ids, dtype=np.int64)[positions // block_tokens] * block_tokens + positions % block_tokens
