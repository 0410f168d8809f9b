"""Paged attention on any device: plain torch on a CPU; on CUDA Triton, and FlashAttention for prompts."""

import torch
from torch import Tensor

from gpu_runtime.kv.pool import KVPool
from gpu_runtime.model import backend, flash_prompts, torch_attention
from gpu_runtime.model.attention_batch import LONG_PROMPT, AttentionBatch

__all__ = ["AttentionBatch", "paged_attention", "write_kv"]


def write_kv(key: Tensor, value: Tensor, pool: KVPool, layer: int, batch: AttentionBatch) -> None:
    """Put the new tokens' keys and values ([N, num_kv_heads, head_dim] each) of a layer in their blocks."""
    group, cache = pool.layer(layer)
    torch_attention.write_kv(key, value, cache, batch.slot_mapping[group], pool.block_tokens)


def paged_attention(
    query: Tensor, pool: KVPool, layer: int, batch: AttentionBatch, new: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Causal attention of the new tokens over all tokens of their sequences, read from the blocks in place.

    Args:
        query: [N, num_heads, head_dim], rotated.
        pool: with the keys and values, those of the new tokens included (`write_kv`).
        layer: of the model.
        batch: the iteration.
        new: keys and values [N, num_kv_heads, head_dim] of the new tokens, where they are at hand: a prompt with
            nothing cached attends to them without looking into blocks.

    Returns: [N, num_heads, head_dim].
    """
    group, cache = pool.layer(layer)
    tables, window = batch.block_tables[group], pool.config.window(layer)
    if not backend.uses_triton(query):
        return torch_attention.paged_attention(query, cache, tables, batch, new, window)
    from gpu_runtime.model import triton_attention  # noqa: PLC0415 (CUDA only)

    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    chunks = batch.chunk_seqs
    if new is not None and batch.max_prompt_len:
        # Stored in fewer bits, a prompt's own keys are better taken as they are.
        is_exact = cache.dtype == query.dtype
        if backend.uses_flash(query):
            attended = flash_prompts.attend_prompts(query, *new, batch, window)
            if len(attended) == len(query):
                return attended
            out[batch.prompt_rows] = attended
            chunks = chunks[: batch.num_cached_chunks]
        else:
            least = LONG_PROMPT if is_exact else 2
            torch_attention.attend_prompts(query, *new, batch, out, least, window)
            chunks = chunks[: batch.num_batched_chunks if is_exact else batch.num_cached_chunks]
    if len(chunks):
        triton_attention.attend_chunks(query, cache, tables, batch, chunks, out, window)
    if len(batch.decode_seqs):
        triton_attention.attend_decodes(query, cache, tables, batch, out, window)
    return out
