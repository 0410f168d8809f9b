"""`Kernels`: what a decoder's layers compute beside their products of matrices; here ours, elsewhere flashinfer's."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from gpu_runtime.kv.pool import KVPool
from gpu_runtime.model import backend
from gpu_runtime.model.attention import AttentionBatch, paged_attention

PlanDecodes = Callable[[np.ndarray, np.ndarray], None]
"""Hears, before a captured batch runs again, its `seq_lens` [size] and block ids [max_blocks, size], on the host."""


class Kernels:
    """Triton's on CUDA, plain torch on a CPU."""

    one_table = False
    """Whether all layers of a sequence must lie in the same blocks."""
    why = ""
    """Why these were chosen, in words, where a measurement chose them."""
    overwrites = False
    """Whether `add_rms_norm` writes over what it is given."""

    def rms_norm(self, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Rows [N, h] over their root mean square, times `weight` [h]."""
        return rms_norm(hidden, weight.shape, weight, epsilon)

    def add_rms_norm(self, hidden: Tensor, update: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """`hidden` [N, h] plus `update` [N, h], and the `rms_norm` of that."""
        if backend.uses_triton(hidden):
            from gpu_runtime.model import triton_layer  # noqa: PLC0415 (CUDA only)

            return triton_layer.add_rms_norm(hidden, update, weight, epsilon)
        total = hidden + update
        return total, self.rms_norm(total, weight, epsilon)

    def attend(
        self, query: Tensor, pool: KVPool, layer: int, batch: AttentionBatch, new: tuple[Tensor, Tensor]
    ) -> Tensor:
        """As `attention.paged_attention`."""
        return paged_attention(query, pool, layer, batch, new)

    def attention_of(self, dtype: torch.dtype, head_dim: int, device: torch.device) -> str:
        """What attends on a device, in words."""
        if device.type == "cpu":
            return "torch"
        flash = backend.has_flash(dtype, head_dim, device)
        return f"{backend.current_flash() if flash else 'torch'} for long prompts, else Triton"

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[N, f] of [N, 2 f]: SiLU of the left half times the right one (SwiGLU, Shazeer 2020)."""
        if backend.uses_triton(gate_up):
            from gpu_runtime.model import triton_layer  # noqa: PLC0415 (CUDA only)

            return triton_layer.silu_and_mul(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate) * up

    def planner(self, batch: AttentionBatch, pool: KVPool) -> PlanDecodes | None:
        """For a batch of decodes that is about to be captured as a graph; None where nothing need be planned."""
        return None

    def working_bytes(self, num_graphs: int) -> int:
        """Bytes of the device that they take beside what a layer computes, with so many graphs."""
        return 0
