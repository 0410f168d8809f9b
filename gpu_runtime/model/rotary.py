"""Rotary position embedding (RoFormer, Su et al. 2021), elements paired as Hugging Face pairs them: i with i + d/2."""

import math

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from gpu_runtime.kv.pool import KVPool
from gpu_runtime.model import backend
from gpu_runtime.model.attention import AttentionBatch, write_kv
from gpu_runtime.model.config import DecoderConfig
from gpu_runtime.model.rope_scaling import LinearScaling, Llama3Scaling


class RotaryEmbedding:
    """Turns queries and keys by their positions, and puts keys and values in their blocks.

    `table` is [max_position_embeddings, head_dim] in fp32: the cosines of every position, then its sines.
    """

    def __init__(self, config: DecoderConfig, device: torch.device | str) -> None:
        positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
        angles = torch.outer(positions.to(device), inverse_frequencies(config).to(device))
        self.table = torch.cat((angles.cos(), angles.sin()), dim=1)
        self._config = config

    def rotate_and_write(
        self,
        projected: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        pool: KVPool,
        layer: int,
        batch: AttentionBatch,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Norm (where there are weights, [head_dim]) and rotate; write keys and values to the pool.

        Args:
            projected: [N, q + 2 kv] queries, keys and values side by side; or [N, 2 kv] without queries.
            q_norm: weights of the queries' RMSNorm, or None.
            k_norm: weights of the keys' RMSNorm, or None.
            pool: the KV cache.
            layer: of the model.
            batch: the iteration; ValueError if it is laid out for other blocks or a sequence outgrows
                `max_position_embeddings`.

        Returns: queries [N, num_heads, head_dim] (none of them where none were projected), keys and values
            [N, num_kv_heads, head_dim].
        """
        c = self._config
        if batch.block_tokens != pool.block_tokens:
            raise ValueError(f"batch for blocks of {batch.block_tokens} tokens, the pool's have {pool.block_tokens}")
        if batch.max_seq_len > len(self.table):
            raise ValueError(
                f"{c.name}: sequence of {batch.max_seq_len} tokens, the model has {len(self.table)} positions"
            )
        if backend.uses_triton(projected):
            from gpu_runtime.model import triton_layer  # noqa: PLC0415 (CUDA only)

            norms = None if q_norm is None or k_norm is None else (q_norm, k_norm)
            group, cache = pool.layer(layer)
            slots = batch.slot_mapping[group]
            return triton_layer.rotate_and_write(
                projected, norms, c.rms_norm_eps, self.table, batch.positions, slots, cache
            )
        widths = (projected.shape[1] - 2 * c.kv_size, c.kv_size, c.kv_size)
        queries, keys, values = (part.unflatten(1, (-1, c.head_dim)) for part in projected.split(widths, dim=1))
        queries = self._turn(queries, q_norm, batch.positions)
        keys = self._turn(keys, k_norm, batch.positions)
        write_kv(keys, values, pool, layer, batch)
        return queries, keys, values

    def _turn(self, heads: Tensor, norm: Tensor | None, positions: Tensor) -> Tensor:
        """[N, heads, head_dim], computed in fp32."""
        if norm is not None:
            heads = rms_norm(heads, (self._config.head_dim,), norm, self._config.rms_norm_eps)
        cos, sin = self.table.index_select(0, positions)[:, None, :].chunk(2, dim=-1)
        left, right = heads.float().chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(heads.dtype)


def inverse_frequencies(config: DecoderConfig) -> Tensor:
    """Radians per position of each pair of elements, [head_dim / 2]: theta^(-2i/d) (RoFormer eq. 15), scaled.

    In fp32 throughout, as models were trained: at position 100,000 the rounding of a frequency is 0.01 radian.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    plain = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    if isinstance(scaling, LinearScaling):
        return plain / scaling.factor
    return _llama3(plain, scaling)


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    waves = scaling.original_max_position_embeddings / (2 * math.pi / plain)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = (waves - low) / (high - low)
    blended = (1 - kept) * plain / scaling.factor + kept * plain
    return torch.where(waves < low, plain / scaling.factor, torch.where(waves > high, plain, blended))
