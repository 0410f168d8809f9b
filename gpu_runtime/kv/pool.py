"""`KVPool`: the keys and values of one tier in one tensor of blocks."""

from collections.abc import Callable

import torch
from torch import Tensor

from gpu_runtime.kv.block_ids import BlockIds
from gpu_runtime.kv.layer_places import Places
from gpu_runtime.kv.page_locked import page_locked
from gpu_runtime.kv.stored import raw
from gpu_runtime.model.config import DecoderConfig


class KVPool:
    """Blocks of `block_tokens` tokens x `layer_group` layers: all layers for vLLM, 1 for LayerKV, 4 for eLLM.

    Layers with and without a window are in groups of their own where memory keeps a window only (`kv.layer_places`).

    `data` is [num_blocks, layer_group, 2 (K, V), num_kv_heads, block_tokens, head_dim]: a block is one piece of memory
    (one copy moves it), a layer within a block is one piece, and one head's keys within that are one, which is what a
    program of the attention kernel reads. Layer l lies in group l // layer_group unless `places` say otherwise; a
    sequence has a block table for each group.
    """

    def __init__(
        self,
        config: DecoderConfig,
        num_blocks: int,
        block_tokens: int,
        layer_group: int,
        device: torch.device | str,
        dtype: torch.dtype,
        pin: bool = False,
        places: Places | None = None,
    ) -> None:
        """Allocate the blocks, zeroed, so that what attention masks out is at least a number.

        Args:
            num_blocks: of block_tokens x layer_group each.
            layer_group: layers per block, 1 to num_layers.
            dtype: that keys and values are stored in (`gpu_runtime.kv.stored`).
            pin: page-lock the memory (host pools of a CUDA runtime).
            places: of each layer, its group and its place in a block of that; None: in order.
        """
        if num_blocks < 1 or block_tokens < 1 or not 1 <= layer_group <= config.num_layers:
            raise ValueError(
                f"num_blocks {num_blocks} and block_tokens {block_tokens} must be positive, "
                f"layer_group {layer_group} 1 to {config.num_layers}"
            )
        self.config, self.num_blocks = config, num_blocks
        self.block_tokens, self.layer_group = block_tokens, layer_group
        self._places = places or [divmod(layer, layer_group) for layer in range(config.num_layers)]
        self.num_groups = 1 + max(group for group, _ in self._places)
        shape = (num_blocks, layer_group, 2, config.num_kv_heads, block_tokens, config.head_dim)
        self._unlock: Callable[[], object] | None = None
        if pin:
            self.data, self._unlock = page_locked(shape, dtype, self)
        else:
            # Written, not only promised: else the first copy to each page would pay for the page.
            self.data = torch.empty(shape, device=device, dtype=dtype)
            self.raw.zero_()
        self.ids = BlockIds(num_blocks)
        """Which blocks are free."""

    @property
    def device(self) -> torch.device:
        """Where the blocks lie."""
        return self.data.device

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""
        return self.data.dtype

    @property
    def raw(self) -> Tensor:
        """`data` as what can be copied and indexed everywhere: 8-bit floats as bytes."""
        return raw(self.data)

    @property
    def raw_layers(self) -> Tensor:
        """`raw` as [num_blocks x layer_group, ...]: layer l of block b lies at b x layer_group + l."""
        return self.raw.flatten(0, 1)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.data[0].numel() * self.data.element_size()

    def key_value(self, layer_in_group: int) -> Tensor:
        """View [num_blocks, 2 (K, V), num_kv_heads, block_tokens, head_dim] of one layer of every block."""
        return self.data[:, layer_in_group]

    def layer(self, layer: int) -> tuple[int, Tensor]:
        """The group of a layer of the model, and that layer's `key_value` view."""
        if not 0 <= layer < len(self._places):
            raise IndexError(f"layer {layer} of a pool of {self.num_groups} groups of {self.layer_group} layers")
        group, layer_in_group = self._places[layer]
        return group, self.key_value(layer_in_group)

    def release(self) -> None:
        """Give the memory back; `ids` can still be counted, but nothing reads, writes or copies blocks any more."""
        if self._unlock is not None:
            self._unlock()
        self.data = self.data.new_empty(0)
