"""Paged attention in plain torch: what runs on a CPU, and what the Triton kernels are tested against."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gpu_runtime.kv.stored import raw, to_stored
from gpu_runtime.model.attention_batch import AttentionBatch

GATHER_BYTES = 16 * 2**20
"""Bytes of keys and values gathered at once for decodes: what stays in caches until it is used."""


def write_kv(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor, block_tokens: int) -> None:
    """Put new tokens' KV ([N, num_kv_heads, head_dim] each) in their slots of one layer's `KVPool.key_value` view."""
    blocks, offsets = slots // block_tokens, slots % block_tokens
    held = raw(cache)
    held[blocks, 0, :, offsets] = to_stored(key, cache.dtype)
    held[blocks, 1, :, offsets] = to_stored(value, cache.dtype)


def paged_attention(
    query: Tensor,
    cache: Tensor,
    tables: Tensor,
    batch: AttentionBatch,
    new: tuple[Tensor, Tensor] | None,
    window: int | None = None,
) -> Tensor:
    """`attention.paged_attention` on a layer's `KVPool.key_value` view and its group's block tables [B, max_blocks].

    A query attends to the last `window` tokens, its own included; of blocks before these the tables may say anything.

    All decodes are attended together, prompt chunks one after the other.
    """
    out = torch.empty_like(query)
    grouped = _grouped(out, cache.shape[2])
    if new is not None:
        attend_prompts(query, *new, batch, out, window=window)
    for seq, rows in batch.chunk_rows():
        cached = batch.context[seq]
        if cached or new is None:
            blocks = tables[seq : seq + 1, : batch.num_blocks(seq)]
            gathered = _gather(cache, blocks, query.dtype)
            keys, values = (part[0, :, : cached + batch.num_new[seq]] for part in gathered)
            grouped[rows] = _attend_chunk(query[rows], keys, values, cached, window)
    if len(batch.decode_seqs):
        widest = max(batch.num_blocks(seq) for seq, n in enumerate(batch.num_new) if n == 1)
        rows = batch.query_start[batch.decode_seqs]
        queries = _grouped(query[rows], cache.shape[2])
        attended = torch.empty_like(queries)
        lengths, tables = batch.seq_lens[batch.decode_seqs], tables[batch.decode_seqs, :widest]
        for seqs, heads in _portions(len(rows), cache, widest):
            keys, values = _gather(cache[:, :, heads], tables[seqs], query.dtype)
            attended[seqs, heads] = _attend_decodes(queries[seqs, heads], keys, values, lengths[seqs], window)
        grouped[rows] = attended
    return out


def _portions(num_seqs: int, cache: Tensor, num_blocks: int) -> Iterator[tuple[slice, slice]]:
    """Ranges of sequences and KV heads whose keys and values, `num_blocks` blocks each, are gathered together."""
    num_heads = cache.shape[2]
    head_bytes = num_blocks * cache[0, :, 0].numel() * cache.element_size()
    fitting = max(1, GATHER_BYTES // head_bytes)
    seqs, heads = max(1, fitting // num_heads), min(fitting, num_heads)
    for seq in range(0, num_seqs, seqs):
        for head in range(0, num_heads, heads):
            yield slice(seq, seq + seqs), slice(head, head + heads)


def attend_prompts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: AttentionBatch,
    out: Tensor,
    least: int = 2,
    window: int | None = None,
) -> None:
    """Attention of the sequences with `least` new tokens or more and nothing cached, written to their rows of `out`.

    On CUDA never cuDNN's, torch's first choice on Hopper: it makes a plan for each new length, which takes the host as
    long as many layers take the GPU (23 to 37 ms, by public logs).
    """
    if query.is_cuda:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            _attend_prompts(query, key, value, batch, out, least, window)
    else:
        _attend_prompts(query, key, value, batch, out, least, window)


def _attend_prompts(
    query: Tensor, key: Tensor, value: Tensor, batch: AttentionBatch, out: Tensor, least: int, window: int | None
) -> None:
    grouped = _grouped(out, key.shape[1])
    for seq, rows in batch.chunk_rows():
        if not batch.context[seq] and batch.num_new[seq] >= least:
            keys, values = (part[rows].transpose(0, 1) for part in (key, value))
            grouped[rows] = _attend_chunk(query[rows], keys, values, 0, window)


def _gather(cache: Tensor, tables: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values [B, num_kv_heads, max_blocks * block_tokens, head_dim] of the blocks in `tables`, as `dtype`."""
    num_kv_heads, head_dim = cache.shape[2], cache.shape[4]
    heads = torch.arange(num_kv_heads, device=cache.device)[None, :, None]
    # Indexing by [B, 1, max_blocks] and [1, heads, 1] gives tokens in order without a second copy.
    held = raw(cache)
    keys, values = (held[:, part][tables[:, None, :], heads].view(cache.dtype).to(dtype) for part in (0, 1))
    shape = (len(tables), num_kv_heads, -1, head_dim)
    return keys.reshape(shape), values.reshape(shape)


def _attend_decodes(query: Tensor, keys: Tensor, values: Tensor, seq_lens: Tensor, window: int | None) -> Tensor:
    """One query a sequence, [B, num_kv_heads, group, head_dim]: heads of a group share one product with their keys."""
    positions = torch.arange(keys.shape[2], device=query.device)
    seen = positions < seq_lens[:, None]
    if window is not None:
        seen &= positions >= seq_lens[:, None] - window
    return scaled_dot_product_attention(query, keys, values, attn_mask=seen[:, None, None, :])


def _attend_chunk(query: Tensor, keys: Tensor, values: Tensor, cached: int, window: int | None = None) -> Tensor:
    """One sequence's new tokens [n, num_heads, head_dim], each of which sees what is cached and those before it.

    Keys and values are [num_kv_heads, cached + n, head_dim], and heads of a group share theirs by broadcasting. The
    result is [n, num_kv_heads, group, head_dim].
    """
    n = len(query)
    grouped = _grouped(query, len(keys)).permute(1, 2, 0, 3)
    keys, values = (part[:, None].expand(-1, grouped.shape[1], -1, -1) for part in (keys, values))
    if cached or (window is not None and window < n):
        seen = torch.ones(n, cached + n, dtype=torch.bool, device=query.device).tril(cached)
        if window is not None:
            seen = seen.triu(cached - window + 1)
        attended = scaled_dot_product_attention(grouped, keys, values, attn_mask=seen)
    else:
        attended = scaled_dot_product_attention(grouped, keys, values, is_causal=True)
    return attended.permute(2, 0, 1, 3)


def _grouped(query: Tensor, num_kv_heads: int) -> Tensor:
    """View [N, num_kv_heads, group, head_dim]: query heads that share a KV head stand beside one another."""
    return query.unflatten(1, (num_kv_heads, -1))
