"""Paged attention on CUDA: one Triton kernel for prompt chunks and, split over the context, for decodes.

FlashAttention-2's online softmax (Dao 2023) over blocks found through the block table (PagedAttention, Kwon et al.
2023). A program serves all query heads of one KV head, so that keys and values are loaded once for the group. A decode
has too few queries to fill a GPU: its context is split and the parts are combined (Flash-Decoding, Dao et al. 2023).
With TRITON_INTERPRET=1 the kernels run on a CPU.
"""
# ruff: noqa: ANN001 (arguments of kernels are pointers and scalars, typed by what is passed)
# pyright: reportMissingImports=false, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_runtime.model.attention_batch import AttentionBatch

LOG2_E = 1.4426950408889634
TILE_TOKENS = 64
"""Cached tokens per step of the loop."""
CHUNK_ROWS = 128
"""Rows (new tokens x query heads of a group) of one program on a chunk."""
FP32_TILE_TOKENS = 16
FP32_CHUNK_ROWS = 32
"""The same for fp32, which has no tensor cores: larger tiles would not fit the shared memory of consumer GPUs."""
WIDE_HEAD = 128
"""Heads of more elements leave registers and shared memory for tiles of half the size."""
MIN_ROWS = 16
"""Least rows, columns and terms of a matrix product."""
SPLIT_TOKENS = 256
"""A split of a decode's context has at least so many tokens, lest combining cost more than splitting saves."""
MAX_SPLITS = 64
PROGRAMS_PER_SM = 4
"""Programs a decode is split for, per multiprocessor: enough to hide the latency of loads."""
COMBINED = 16
"""Splits combined at a time."""
UNALIGNED = ["tables", "seqs", "query_start", "seq_lens"]
"""Views of one buffer: a kernel compiled anew for every alignment they happen to have would stall a running server."""


@triton.jit(do_not_specialize=["splits", "table_stride", "table_step"], do_not_specialize_on_alignment=UNALIGNED)
def _attend(
    query,
    cache,
    tables,
    seqs,
    query_start,
    seq_lens,
    out,
    lse,
    scale,
    query_stride,
    block_stride,
    part_stride,
    head_stride,
    table_stride,
    table_step,
    splits,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """A block of queries (axis 0; with SPLIT one of `splits` parts of the context) of a KV head (1) and sequence (2).

    Row m of a program is new token `first + m // GROUP` and query head `m % GROUP` of the group. Softmax is in powers
    of two, `scale` includes log2 e. `out` is [N, heads, HEAD_DIM]; of splits [B, heads, splits, HEAD_DIM] in fp32, with
    `lse` [B, heads, splits] the log2 of each split's sum of exponentials.
    """
    kv_head = tl.program_id(1)
    seq = tl.load(seqs + tl.program_id(2))
    start = tl.load(query_start + seq)
    num_new = tl.load(query_start + seq + 1) - start
    length = tl.load(seq_lens + seq)
    first = 0 if SPLIT else tl.program_id(0) * (ROWS // GROUP)
    if first < num_new:
        rows = tl.arange(0, ROWS)
        dims = tl.arange(0, DIM)
        tokens = first + rows // GROUP
        heads = kv_head * GROUP + rows % GROUP
        live = (rows < ROWS // GROUP * GROUP) & (tokens < num_new)
        in_head = dims < HEAD_DIM
        at = (start + tokens).to(tl.int64) * query_stride + heads * HEAD_DIM
        queries = tl.load(query + at[:, None] + dims[None, :], mask=live[:, None] & in_head[None, :], other=0.0)
        positions = length - num_new + tokens
        end = tl.minimum(length, length - num_new + first + ROWS // GROUP)
        first_tile, last_tile = 0, tl.cdiv(end, TILE)
        if SPLIT:
            share = tl.cdiv(last_tile, splits)
            first_tile = tl.program_id(0) * share
            last_tile = tl.minimum(first_tile + share, last_tile)
        highest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        summed = tl.zeros([ROWS, DIM], tl.float32)
        for tile in range(first_tile, last_tile):
            cached = tile * TILE + tl.arange(0, TILE)
            inside = cached < end
            place = seq.to(tl.int64) * table_stride + cached // BLOCK_TOKENS * table_step
            block = tl.load(tables + place, mask=inside, other=0)
            entry = block.to(tl.int64) * block_stride + kv_head * head_stride + cached % BLOCK_TOKENS * HEAD_DIM
            key_mask = in_head[:, None] & inside[None, :]
            keys = tl.load(cache + entry[None, :] + dims[:, None], mask=key_mask, other=0.0).to(queries.dtype)
            scores = tl.dot(queries, keys, input_precision="ieee") * scale
            seen = (cached[None, :] <= positions[:, None]) & inside[None, :]
            scores = tl.where(seen, scores, float("-inf"))
            new_highest = tl.maximum(highest, tl.max(scores, 1))
            # A row that has seen nothing yet keeps -inf, whose difference with itself is no number.
            base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
            weights = tl.exp2(scores - base[:, None])
            fade = tl.exp2(highest - base)
            value_mask = inside[:, None] & in_head[None, :]
            values = tl.load(cache + part_stride + entry[:, None] + dims[None, :], mask=value_mask, other=0.0)
            values = values.to(queries.dtype)
            summed = summed * fade[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
            total = total * fade + tl.sum(weights, 1)
            highest = new_highest
        total = tl.where(total > 0.0, total, 1.0)
        summed = summed / total[:, None]
        mask = live[:, None] & in_head[None, :]
        num_heads = tl.num_programs(1) * GROUP
        if SPLIT:
            part = (tl.program_id(2) * num_heads + heads) * splits + tl.program_id(0)
            tl.store(out + part.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :], summed, mask=mask)
            tl.store(lse + part, highest + tl.log2(total), mask=live)
        else:
            row = (start + tokens).to(tl.int64) * num_heads + heads
            tl.store(out + row[:, None] * HEAD_DIM + dims[None, :], summed.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["seqs", "query_start"])
def _combine(
    parts,
    lse,
    seqs,
    query_start,
    out,
    splits,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    MOST: tl.constexpr,
    SOME: tl.constexpr,
) -> None:
    """Weigh the splits of one decode (axis 0) and head (1) by their sums of exponentials. MOST: MAX_SPLITS."""
    index = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    every = tl.arange(0, MOST)
    highest = tl.max(tl.load(lse + index * splits + every, mask=every < splits, other=float("-inf")), 0)
    dims = tl.arange(0, DIM)
    in_head = dims < HEAD_DIM
    mixed = tl.zeros([DIM], tl.float32)
    total = 0.0
    for first in range(0, splits, SOME):
        some = first + tl.arange(0, SOME)
        sums = tl.load(lse + index * splits + some, mask=some < splits, other=float("-inf"))
        weights = tl.exp2(sums - highest)
        at = (index.to(tl.int64) * splits + some)[:, None] * HEAD_DIM + dims[None, :]
        part = tl.load(parts + at, mask=(some < splits)[:, None] & in_head[None, :], other=0.0)
        mixed += tl.sum(part * weights[:, None], 0)
        total += tl.sum(weights, 0)
    row = tl.load(query_start + tl.load(seqs + tl.program_id(0))).to(tl.int64)
    to = out + (row * tl.num_programs(1) + tl.program_id(1)) * HEAD_DIM
    tl.store(to + dims, (mixed / total).to(out.dtype.element_ty), mask=in_head)


def attend_decodes(
    query: Tensor, cache: Tensor, tables: Tensor, batch: AttentionBatch, out: Tensor, splits: int | None = None
) -> None:
    """Attention of the sequences in `batch.decode_seqs`, written to their rows of `out`.

    Args:
        query: [N, num_heads, head_dim].
        cache: one layer's `KVPool.key_value` view.
        tables: [B, max_blocks] of the layer's group.
        batch: the iteration.
        out: [N, num_heads, head_dim], contiguous.
        splits: parts of each context, MAX_SPLITS at most; None: as many as fill the GPU.
    """
    num_decodes, num_kv_heads = len(batch.decode_seqs), cache.shape[2]
    if splits is None:
        splits = num_splits(num_decodes * num_kv_heads, batch.max_seq_len, query.device)
    group = query.shape[1] // num_kv_heads
    rows = max(MIN_ROWS, triton.next_power_of_2(group))
    grid = (splits, num_kv_heads, num_decodes)
    if splits == 1:
        _launch(grid, query, cache, tables, batch.decode_seqs, batch, out, None, rows, splits)
        return
    shape = (num_decodes, query.shape[1], splits)
    parts = torch.empty((*shape, query.shape[2]), device=query.device, dtype=torch.float32)
    lse = torch.empty(shape, device=query.device, dtype=torch.float32)
    _launch(grid, query, cache, tables, batch.decode_seqs, batch, parts, lse, rows, splits)
    _combine[(num_decodes, query.shape[1])](
        parts,
        lse,
        batch.decode_seqs,
        batch.query_start,
        out,
        splits,
        HEAD_DIM=query.shape[2],
        DIM=triton.next_power_of_2(query.shape[2]),
        MOST=MAX_SPLITS,
        SOME=COMBINED,
    )


def attend_chunks(
    query: Tensor, cache: Tensor, tables: Tensor, batch: AttentionBatch, seqs: Tensor, out: Tensor
) -> None:
    """Attention of the sequences whose indices are `seqs`, written to their rows of `out`; the rest is as above."""
    num_kv_heads = cache.shape[2]
    group = query.shape[1] // num_kv_heads
    rows = max(_tiling(query)[0], triton.next_power_of_2(group))
    grid = (triton.cdiv(batch.max_query_len, rows // group), num_kv_heads, len(seqs))
    _launch(grid, query, cache, tables, seqs, batch, out, None, rows, 1)


def _tiling(query: Tensor) -> tuple[int, int]:
    """Rows of a program on a chunk, and tokens of a tile."""
    rows, tile = (FP32_CHUNK_ROWS, FP32_TILE_TOKENS) if query.dtype == torch.float32 else (CHUNK_ROWS, TILE_TOKENS)
    return (rows // 2, max(MIN_ROWS, tile // 2)) if query.shape[2] > WIDE_HEAD else (rows, tile)


def _stages(query: Tensor) -> int:
    """Tiles on their way at a time: of wide heads in fp32 three do not fit the shared memory of consumer GPUs."""
    return 2 if query.dtype == torch.float32 and query.shape[2] > WIDE_HEAD else 3


def num_splits(programs: int, max_seq_len: int, device: torch.device) -> int:
    """Parts to cut each context in: as many as fill the GPU, as long as a part has SPLIT_TOKENS."""
    return max(1, min(MAX_SPLITS, _num_sms(device) * PROGRAMS_PER_SM // programs, max_seq_len // SPLIT_TOKENS))


@lru_cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _launch(
    grid: tuple[int, int, int],
    query: Tensor,
    cache: Tensor,
    tables: Tensor,
    seqs: Tensor,
    batch: AttentionBatch,
    out: Tensor,
    lse: Tensor | None,
    rows: int,
    splits: int,
) -> None:
    head_dim = query.shape[2]
    _attend[grid](
        query,
        cache,
        tables,
        seqs,
        batch.query_start,
        batch.seq_lens,
        out,
        lse,
        LOG2_E * head_dim**-0.5,
        query.stride(0),
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        tables.stride(0),
        tables.stride(1),
        splits,
        HEAD_DIM=head_dim,
        DIM=max(MIN_ROWS, triton.next_power_of_2(head_dim)),
        GROUP=query.shape[1] // cache.shape[2],
        BLOCK_TOKENS=batch.block_tokens,
        ROWS=rows,
        TILE=_tiling(query)[1],
        SPLIT=splits > 1,
        num_warps=8 if rows >= CHUNK_ROWS else 4,
        num_stages=_stages(query),
    )
