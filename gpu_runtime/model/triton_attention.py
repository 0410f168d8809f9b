"""Paged attention on CUDA: one Triton kernel for prompt chunks and, split over the context, for decodes.

FlashAttention-2's online softmax (Dao 2023) over blocks found through the block table (PagedAttention, Kwon et al.
2023). A program serves all query heads of one KV head, so that keys and values are loaded once for the group. A decode
has too few queries to fill a GPU: contexts are split and the parts are combined (Flash-Decoding, Dao et al. 2023). In
a batch all parts are about equally long, as FlashInfer has them (Ye et al. 2025): one long context among short ones is
not what all others wait for. Programs find their part from lengths on the device: a graph splits each batch anew.
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
"""A part of a decode's context has at least so many tokens, lest combining cost more than splitting saves."""
PROGRAMS_PER_SM = 4
"""Programs a decode is split for, per multiprocessor: enough to hide the latency of loads."""
COMBINED = 16
"""Parts combined at a time."""
COUNTED = 256
"""Sequences whose parts a program counts at a time."""
UNALIGNED = ["tables", "seqs", "query_start", "seq_lens"]
"""Views of one buffer: a kernel compiled anew for every alignment they happen to have would stall a running server."""


@triton.jit
def _tiles(seqs, seq_lens, some, count, TILE: tl.constexpr, WINDOW: tl.constexpr) -> tl.tensor:
    """Tiles that the decodes at places `some` read: 0 from `count` on."""
    inside = some < count
    lengths = tl.load(seq_lens + tl.load(seqs + some, mask=inside, other=0), mask=inside, other=0)
    tiles = tl.cdiv(lengths, TILE)
    if WINDOW > 0:
        tiles -= tl.maximum(lengths - WINDOW, 0) // TILE
    return tiles


@triton.jit
def _share(
    seqs, seq_lens, count, slots, TILE: tl.constexpr, WINDOW: tl.constexpr, LEAST: tl.constexpr, SOME: tl.constexpr
) -> tl.tensor:
    """Tiles of a part: as few as leave `count` sequences no more than `slots` parts, but LEAST."""
    total = 0
    for first in range(0, count, SOME):
        total += tl.sum(_tiles(seqs, seq_lens, first + tl.arange(0, SOME), count, TILE, WINDOW), 0)
    # Each sequence's last part may be a short one.
    return tl.maximum(tl.cdiv(total, tl.maximum(slots - count, 1)), LEAST)


@triton.jit
def _part(slot, share, seqs, seq_lens, count, TILE: tl.constexpr, WINDOW: tl.constexpr, SOME: tl.constexpr) -> tuple:
    """The decode that a program has a part of (its place), which part that is, and of how many; of 0: it has none."""
    place, part, parts, before = 0, 0, 0, 0
    for first in range(0, count, SOME):
        some = first + tl.arange(0, SOME)
        counts = tl.cdiv(_tiles(seqs, seq_lens, some, count, TILE, WINDOW), share)
        starts = before + tl.cumsum(counts, 0) - counts
        mine = (starts <= slot) & (slot < starts + counts)
        place += tl.sum(tl.where(mine, some, 0), 0)
        part += tl.sum(tl.where(mine, slot - starts, 0), 0)
        parts += tl.sum(tl.where(mine, counts, 0), 0)
        before += tl.sum(counts, 0)
    return place, part, parts


@triton.jit(do_not_specialize=["count", "table_stride", "table_step"], do_not_specialize_on_alignment=UNALIGNED)
def _attend(
    query,
    cache,
    tables,
    seqs,
    query_start,
    seq_lens,
    out,
    partial,
    lse,
    scale,
    query_stride,
    block_stride,
    part_stride,
    head_stride,
    table_stride,
    table_step,
    count,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    LEAST: tl.constexpr,
    SOME: tl.constexpr,
) -> None:
    """A block of queries (axis 0) of a KV head (1) and sequence (2); with SPLIT a part (0) of one of `count` decodes'
    contexts, of a KV head (1).

    Row m of a program is new token `first + m // GROUP` and query head `m % GROUP` of the group. Softmax is in powers
    of two, `scale` includes log2 e. `out` is [N, heads, HEAD_DIM]; of contexts in several parts `partial` is
    [slots, heads, HEAD_DIM] in fp32, with `lse` [slots, heads] the log2 of each part's sum of exponentials. WINDOW: how
    many tokens a query sees, its own included; 0: all.
    """
    kv_head = tl.program_id(1)
    place, part, parts, share = tl.program_id(2), 0, 1, 0
    if SPLIT:
        share = _share(seqs, seq_lens, count, tl.num_programs(0), TILE, WINDOW, LEAST, SOME)
        place, part, parts = _part(tl.program_id(0), share, seqs, seq_lens, count, TILE, WINDOW, SOME)
    seq = tl.load(seqs + place)
    start = tl.load(query_start + seq)
    num_new = tl.load(query_start + seq + 1) - start
    length = tl.load(seq_lens + seq)
    first = 0 if SPLIT else tl.program_id(0) * (ROWS // GROUP)
    if (first < num_new) & (part < parts):
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
        begin = tl.maximum(length - num_new + first - WINDOW + 1, 0) if WINDOW > 0 else 0
        first_tile, last_tile = begin // TILE, tl.cdiv(end, TILE)
        if SPLIT:
            first_tile += part * share
            last_tile = tl.minimum(first_tile + share, last_tile)
        highest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        summed = tl.zeros([ROWS, DIM], tl.float32)
        for tile in range(first_tile, last_tile):
            cached = tile * TILE + tl.arange(0, TILE)
            # Before a window the table may name any block.
            inside = (begin <= cached) & (cached < end)
            entry_at = seq.to(tl.int64) * table_stride + cached // BLOCK_TOKENS * table_step
            block = tl.load(tables + entry_at, mask=inside, other=0)
            entry = block.to(tl.int64) * block_stride + kv_head * head_stride + cached % BLOCK_TOKENS * HEAD_DIM
            key_mask = in_head[:, None] & inside[None, :]
            keys = tl.load(cache + entry[None, :] + dims[:, None], mask=key_mask, other=0.0).to(queries.dtype)
            scores = tl.dot(queries, keys, input_precision="ieee") * scale
            seen = (cached[None, :] <= positions[:, None]) & inside[None, :]
            if WINDOW > 0:
                seen &= cached[None, :] > positions[:, None] - WINDOW
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
        if SPLIT and parts > 1:
            slot = tl.program_id(0) * num_heads + heads
            tl.store(partial + slot.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :], summed, mask=mask)
            tl.store(lse + slot, highest + tl.log2(total), mask=live)
        else:
            row = (start + tokens).to(tl.int64) * num_heads + heads
            tl.store(out + row[:, None] * HEAD_DIM + dims[None, :], summed.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["slots"], do_not_specialize_on_alignment=["seqs", "query_start", "seq_lens"])
def _combine(
    partial,
    lse,
    seqs,
    query_start,
    seq_lens,
    out,
    slots,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    COMBINED: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    LEAST: tl.constexpr,
    SOME: tl.constexpr,
) -> None:
    """Weigh the parts of one decode (axis 0) and head (1), where they are several, by their sums of exponentials."""
    place, count = tl.program_id(0), tl.num_programs(0)
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    share = _share(seqs, seq_lens, count, slots, TILE, WINDOW, LEAST, SOME)
    start, parts = 0, 0
    for first in range(0, count, SOME):
        some = first + tl.arange(0, SOME)
        counts = tl.cdiv(_tiles(seqs, seq_lens, some, count, TILE, WINDOW), share)
        start += tl.sum(tl.where(some < place, counts, 0), 0)
        parts += tl.sum(tl.where(some == place, counts, 0), 0)
    if parts > 1:
        dims = tl.arange(0, DIM)
        in_head = dims < HEAD_DIM
        mixed = tl.zeros([DIM], tl.float32)
        total, highest = 0.0, float("-inf")
        for first in range(0, parts, COMBINED):
            some = first + tl.arange(0, COMBINED)
            inside = some < parts
            at = (start + some) * num_heads + head
            sums = tl.load(lse + at, mask=inside, other=float("-inf"))
            new_highest = tl.maximum(highest, tl.max(sums, 0))
            fade, weights = tl.exp2(highest - new_highest), tl.exp2(sums - new_highest)
            values = tl.load(
                partial + at.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :],
                mask=inside[:, None] & in_head[None, :],
                other=0.0,
            )
            mixed = mixed * fade + tl.sum(values * weights[:, None], 0)
            total = total * fade + tl.sum(weights, 0)
            highest = new_highest
        row = tl.load(query_start + tl.load(seqs + place)).to(tl.int64)
        to = out + (row * num_heads + head) * HEAD_DIM
        tl.store(to + dims, (mixed / total).to(out.dtype.element_ty), mask=in_head)


def attend_decodes(
    query: Tensor,
    cache: Tensor,
    tables: Tensor,
    batch: AttentionBatch,
    out: Tensor,
    window: int | None = None,
    slots: int | None = None,
) -> None:
    """Attention of the sequences in `batch.decode_seqs`, written to their rows of `out`.

    Args:
        query: [N, num_heads, head_dim].
        cache: one layer's `KVPool.key_value` view.
        tables: [B, max_blocks] of the layer's group.
        batch: the iteration.
        out: [N, num_heads, head_dim], contiguous.
        window: tokens that a query attends to, its own included; None: all.
        slots: parts of all contexts together at most, one for each at least; None: as many as fill the GPU.
    """
    num_decodes, num_kv_heads = len(batch.decode_seqs), cache.shape[2]
    longest = batch.max_seq_len if window is None else min(batch.max_seq_len, window)
    slots = slots or num_slots(num_decodes, num_kv_heads, longest, query.device)
    group = query.shape[1] // num_kv_heads
    rows = max(MIN_ROWS, triton.next_power_of_2(group))
    if slots == num_decodes:
        grid = (1, num_kv_heads, num_decodes)
        _launch(grid, query, cache, tables, batch.decode_seqs, batch, out, rows, window)
        return
    shape = (slots, query.shape[1])
    partial = torch.empty((*shape, query.shape[2]), device=query.device, dtype=torch.float32)
    lse = torch.empty(shape, device=query.device, dtype=torch.float32)
    split = _launch(
        (slots, num_kv_heads, 1), query, cache, tables, batch.decode_seqs, batch, out, rows, window, (partial, lse)
    )
    _combine[(num_decodes, query.shape[1])](
        partial, lse, batch.decode_seqs, batch.query_start, batch.seq_lens, out, slots,
        HEAD_DIM=query.shape[2], DIM=triton.next_power_of_2(query.shape[2]), COMBINED=COMBINED, **split,
    )  # fmt: skip


def attend_chunks(
    query: Tensor,
    cache: Tensor,
    tables: Tensor,
    batch: AttentionBatch,
    seqs: Tensor,
    out: Tensor,
    window: int | None = None,
) -> None:
    """Attention of the sequences whose indices are `seqs`, written to their rows of `out`; the rest is as above."""
    num_kv_heads = cache.shape[2]
    group = query.shape[1] // num_kv_heads
    rows = max(_tiling(query)[0], triton.next_power_of_2(group))
    grid = (triton.cdiv(batch.max_query_len, rows // group), num_kv_heads, len(seqs))
    _launch(grid, query, cache, tables, seqs, batch, out, rows, window)


def _tiling(query: Tensor) -> tuple[int, int]:
    """Rows of a program on a chunk, and tokens of a tile."""
    rows, tile = (FP32_CHUNK_ROWS, FP32_TILE_TOKENS) if query.dtype == torch.float32 else (CHUNK_ROWS, TILE_TOKENS)
    return (rows // 2, max(MIN_ROWS, tile // 2)) if query.shape[2] > WIDE_HEAD else (rows, tile)


def _stages(query: Tensor) -> int:
    """Tiles on their way at a time: of wide heads in fp32 three do not fit the shared memory of consumer GPUs."""
    return 2 if query.dtype == torch.float32 and query.shape[2] > WIDE_HEAD else 3


def num_slots(num_decodes: int, num_kv_heads: int, longest: int, device: torch.device) -> int:
    """Parts of all contexts together: one each, and as many more as fill the GPU, if contexts can be as long."""
    more = min(_num_sms(device) * PROGRAMS_PER_SM // num_kv_heads, num_decodes * (longest // SPLIT_TOKENS))
    return num_decodes + more


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
    rows: int,
    window: int | None,
    parts: tuple[Tensor, Tensor] | None = None,
) -> dict[str, int]:
    """How contexts are split, if there are `parts` for it: partial results and their sums of exponentials."""
    head_dim, tile = query.shape[2], _tiling(query)[1]
    split = {"TILE": tile, "WINDOW": window or 0, "LEAST": max(1, SPLIT_TOKENS // tile), "SOME": COUNTED}
    _attend[grid](
        query, cache, tables, seqs, batch.query_start, batch.seq_lens, out, *(parts or (None, None)),
        LOG2_E * head_dim**-0.5, query.stride(0), *cache.stride()[:3], *tables.stride(), len(seqs),
        HEAD_DIM=head_dim, DIM=max(MIN_ROWS, triton.next_power_of_2(head_dim)), GROUP=query.shape[1] // cache.shape[2],
        BLOCK_TOKENS=batch.block_tokens, ROWS=rows, SPLIT=parts is not None, **split,
        num_warps=8 if rows >= CHUNK_ROWS else 4, num_stages=_stages(query),
    )  # fmt: skip
    return split
