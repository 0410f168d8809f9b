"""Fused Triton kernels around attention: norm, rotation and KV write in one pass; sum and norm, SiLU and product.

Done in plain torch they are some twenty small kernels a layer, whose launches would outweigh a small decode.
"""
# ruff: noqa: ANN001 (arguments of kernels are pointers and scalars, typed by what is passed)
# pyright: reportMissingImports=false, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_runtime.kv.stored import finite_limit

ACTIVATION_TILE = 1024
"""Elements of the MLP's width per program."""
NORM_TILE = 4096
"""Elements of a token that a program sums at a time."""


@triton.jit
def _turn(source, norm, cos, sin, epsilon, mask, half, HEAD_DIM: tl.constexpr, NORM: tl.constexpr) -> tuple:
    """Both halves of some heads (pointers to the left one), normed and rotated, in fp32."""
    left = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(source + HEAD_DIM // 2, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        mean = (tl.sum(left * left, 1) + tl.sum(right * right, 1)) / HEAD_DIM
        scale = tl.rsqrt(mean + epsilon)[:, None]
        in_half = half < HEAD_DIM // 2
        left = left * scale * tl.load(norm + half, mask=in_half, other=0.0).to(tl.float32)[None, :]
        right = right * scale * tl.load(norm + HEAD_DIM // 2 + half, mask=in_half, other=0.0).to(tl.float32)[None, :]
    return left * cos - right * sin, right * cos + left * sin


@triton.jit
def _stored(values, cache, LIMIT: tl.constexpr) -> tl.tensor:
    """As the cache stores them; beyond LIMIT, where there is one, cut to it."""
    if LIMIT > 0.0:
        values = tl.minimum(tl.maximum(values.to(tl.float32), -LIMIT), LIMIT)
    return values.to(cache.dtype.element_ty)


# Views of one buffer, like those of `triton_attention.UNALIGNED`.
@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _rotate_and_write(
    projected,
    q_norm,
    k_norm,
    table,
    positions,
    slots,
    cache,
    queries,
    keys,
    epsilon,
    block_stride,
    part_stride,
    head_stride,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    NORM: tl.constexpr,
    LIMIT: tl.constexpr,
) -> None:
    """One token (axis 0). HEADS, KV_HEADS, HALF: NUM_HEADS, NUM_KV_HEADS, HEAD_DIM / 2 up to a power of two."""
    token = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, HALF)
    in_half = half < HEAD_DIM // 2
    angles = table + tl.load(positions + token).to(tl.int64) * HEAD_DIM + half
    cos = tl.load(angles, mask=in_half, other=0.0)[None, :]
    sin = tl.load(angles + HEAD_DIM // 2, mask=in_half, other=0.0)[None, :]
    row = projected + token * (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    if NUM_HEADS > 0:
        heads = tl.arange(0, HEADS)
        mask = (heads < NUM_HEADS)[:, None] & in_half[None, :]
        offsets = heads[:, None] * HEAD_DIM + half[None, :]
        left, right = _turn(row + offsets, q_norm, cos, sin, epsilon, mask, half, HEAD_DIM, NORM)
        to = queries + token * NUM_HEADS * HEAD_DIM + offsets
        tl.store(to, left.to(queries.dtype.element_ty), mask=mask)
        tl.store(to + HEAD_DIM // 2, right.to(queries.dtype.element_ty), mask=mask)
    kv_heads = tl.arange(0, KV_HEADS)
    mask = (kv_heads < NUM_KV_HEADS)[:, None] & in_half[None, :]
    offsets = kv_heads[:, None] * HEAD_DIM + half[None, :]
    source = row + NUM_HEADS * HEAD_DIM + offsets
    left, right = _turn(source, k_norm, cos, sin, epsilon, mask, half, HEAD_DIM, NORM)
    to = keys + token * NUM_KV_HEADS * HEAD_DIM + offsets
    tl.store(to, left.to(keys.dtype.element_ty), mask=mask)
    tl.store(to + HEAD_DIM // 2, right.to(keys.dtype.element_ty), mask=mask)
    slot = tl.load(slots + token)
    # A negative slot is padding.
    if slot >= 0:
        entry = (slot // BLOCK_TOKENS).to(tl.int64) * block_stride + slot % BLOCK_TOKENS * HEAD_DIM
        # A name of its own: what a branch assigns keeps its type, and the cache's may be another.
        into = cache + entry + kv_heads[:, None] * head_stride + half[None, :]
        tl.store(into, _stored(left, cache, LIMIT), mask=mask)
        tl.store(into + HEAD_DIM // 2, _stored(right, cache, LIMIT), mask=mask)
        values = source + NUM_KV_HEADS * HEAD_DIM
        into += part_stride
        tl.store(into, _stored(tl.load(values, mask=mask), cache, LIMIT), mask=mask)
        tl.store(into + HEAD_DIM // 2, _stored(tl.load(values + HEAD_DIM // 2, mask=mask), cache, LIMIT), mask=mask)


@triton.jit
def _silu_and_mul(gate_up, out, width, TILE: tl.constexpr) -> None:
    """A tile of the width (axis 1) of one token (0)."""
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = columns < width
    row = tl.program_id(0).to(tl.int64) * width
    gate = tl.load(gate_up + 2 * row + columns, mask=mask).to(tl.float32)
    up = tl.load(gate_up + 2 * row + width + columns, mask=mask).to(tl.float32)
    tl.store(out + row + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _add_rms_norm(hidden, update, weight, total, normed, width, epsilon, TILE: tl.constexpr) -> None:
    """One token (axis 0), TILE elements of it at a time."""
    row = tl.program_id(0).to(tl.int64) * width
    squares = tl.zeros([TILE], tl.float32)
    for first in range(0, width, TILE):
        columns = first + tl.arange(0, TILE)
        mask = columns < width
        left = tl.load(hidden + row + columns, mask=mask, other=0.0).to(tl.float32)
        right = tl.load(update + row + columns, mask=mask, other=0.0).to(tl.float32)
        # The norm is of the sum as it is kept.
        kept = (left + right).to(total.dtype.element_ty)
        tl.store(total + row + columns, kept, mask=mask)
        squares += kept.to(tl.float32) * kept.to(tl.float32)
    scale = tl.rsqrt(tl.sum(squares, 0) / width + epsilon)
    for first in range(0, width, TILE):
        columns = first + tl.arange(0, TILE)
        mask = columns < width
        left = tl.load(hidden + row + columns, mask=mask).to(tl.float32)
        right = tl.load(update + row + columns, mask=mask).to(tl.float32)
        kept = (left + right).to(total.dtype.element_ty).to(tl.float32)
        factor = tl.load(weight + columns, mask=mask).to(tl.float32)
        tl.store(normed + row + columns, (kept * scale * factor).to(normed.dtype.element_ty), mask=mask)


def rotate_and_write(
    projected: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    epsilon: float,
    table: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `RotaryEmbedding.rotate_and_write` says.

    Args:
        projected: [N, (num_heads + 2 num_kv_heads) head_dim], contiguous.
        norms: weights [head_dim] for queries and keys, or None.
        epsilon: of the norms.
        table: [positions, head_dim] cosines and sines, fp32.
        positions: [N].
        slots: [N] where KV goes; negative: nowhere.
        cache: one layer's `KVPool.key_value` view.
    """
    num_kv_heads, block_tokens, head_dim = cache.shape[2:]
    num_heads = projected.shape[1] // head_dim - 2 * num_kv_heads
    q_norm, k_norm = norms or (None, None)
    queries = projected.new_empty((len(projected), num_heads, head_dim))
    keys = projected.new_empty((len(projected), num_kv_heads, head_dim))
    _rotate_and_write[(len(projected),)](
        projected, q_norm, k_norm, table, positions, slots, cache, queries, keys, epsilon, *cache.stride()[:3],
        NUM_HEADS=num_heads, HEADS=triton.next_power_of_2(max(1, num_heads)),
        NUM_KV_HEADS=num_kv_heads, KV_HEADS=triton.next_power_of_2(num_kv_heads),
        HEAD_DIM=head_dim, HALF=triton.next_power_of_2(head_dim // 2),
        BLOCK_TOKENS=block_tokens, NORM=norms is not None, LIMIT=finite_limit(cache.dtype),
    )  # fmt: skip
    return queries, keys, projected[:, (num_heads + num_kv_heads) * head_dim :].unflatten(1, (-1, head_dim))


def add_rms_norm(hidden: Tensor, update: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """`hidden` [N, h] plus `update` [N, h], both contiguous, and the RMSNorm of that with `weight` [h]."""
    total, normed = torch.empty_like(hidden), torch.empty_like(hidden)
    width = hidden.shape[1]
    tile = min(NORM_TILE, triton.next_power_of_2(width))
    _add_rms_norm[(len(hidden),)](hidden, update, weight, total, normed, width, epsilon, TILE=tile)
    return total, normed


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[N, f] of [N, 2 f], contiguous: SiLU of the left half times the right one (SwiGLU, Shazeer 2020)."""
    width = gate_up.shape[1] // 2
    out = gate_up.new_empty((len(gate_up), width))
    grid = (len(gate_up), triton.cdiv(width, ACTIVATION_TILE))
    _silu_and_mul[grid](gate_up, out, width, TILE=ACTIVATION_TILE)
    return out
