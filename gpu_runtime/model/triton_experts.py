"""Experts on CUDA: the products of all that are chosen in one Triton kernel each for gate and up, and for down.

Rows are sorted by their expert, and each expert's are cut into tiles (MegaBlocks, Gale et al. 2023). Which tiles there
are is found on the device, from how often each expert was chosen: the host reads nothing, so that a graph can be
captured. With TRITON_INTERPRET=1 the kernel runs on a CPU.
"""
# ruff: noqa: ANN001 (arguments of kernels are pointers and scalars, typed by what is passed)
# pyright: reportMissingImports=false, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

LEAST_ROWS, MOST_ROWS = 16, 64
"""Rows of a tile: about what an expert has, if all are chosen as often."""
COLUMNS = 64
"""Of a tile."""
DEPTH, FP32_DEPTH = 64, 32
"""Terms of a product that are loaded at a time."""


@triton.jit(do_not_specialize=["width", "columns"])
def _multiply(
    rows,
    matrices,
    order,
    starts,
    out,
    width,
    columns,
    NUM: tl.constexpr,
    EXPERTS: tl.constexpr,
    PER_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """A tile of an expert's rows (axis 0) and of columns (1): `out` [pairs, columns], in the order of experts.

    Pair `order[p]` reads row `order[p] // PER_ROW` of `rows`; with PER_ROW 0 pair p reads row p. Expert e has the pairs
    from `starts[e]` to `starts[e + 1]`. EXPERTS: NUM up to a power of two.
    """
    tile = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    first = tl.load(starts + experts, mask=experts < NUM, other=0)
    last = tl.load(starts + experts + 1, mask=experts < NUM, other=0)
    tiles = tl.cdiv(last - first, ROWS)
    ends = tl.cumsum(tiles, 0)
    mine = (ends - tiles <= tile) & (tile < ends)
    if tl.sum(mine.to(tl.int32), 0) > 0:
        expert = tl.sum(tl.where(mine, experts, 0), 0).to(tl.int64)
        begin = tl.sum(tl.where(mine, first + (tile - ends + tiles) * ROWS, 0), 0)
        places = begin + tl.arange(0, ROWS)
        live = places < tl.sum(tl.where(mine, last, 0), 0)
        read = places
        if PER_ROW > 0:
            read = tl.load(order + places, mask=live, other=0) // PER_ROW
        at = rows + read.to(tl.int64)[:, None] * width
        chosen = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        matrix = matrices + (expert * columns + chosen.to(tl.int64))[None, :] * width
        summed = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, width, DEPTH):
            terms = start + tl.arange(0, DEPTH)
            left = tl.load(at + terms[None, :], mask=live[:, None] & (terms < width)[None, :], other=0.0)
            mask = (terms < width)[:, None] & (chosen < columns)[None, :]
            right = tl.load(matrix + terms[:, None], mask=mask, other=0.0)
            summed += tl.dot(left, right, input_precision="ieee")
        to = out + places.to(tl.int64)[:, None] * columns + chosen[None, :]
        tl.store(to, summed.to(out.dtype.element_ty), mask=live[:, None] & (chosen < columns)[None, :])


def mix(
    hidden: Tensor, gate_up: Tensor, down: Tensor, shares: Tensor, chosen: Tensor, act: Callable[[Tensor], Tensor]
) -> Tensor:
    """[N, h] of `hidden` [N, h]: what the `chosen` experts [N, k] of each token give, by their `shares` [N, k].

    Args:
        hidden: contiguous.
        gate_up: [E, 2 f, h], contiguous.
        down: [E, h, f], contiguous.
        shares: fp32.
        chosen: indices of experts.
        act: [n, f] of gate and up [n, 2 f].
    """
    per_token = chosen.shape[1]
    experts, order = chosen.flatten().sort(stable=True)
    # Where each expert's pairs begin, and where the last one's end.
    starts = torch.searchsorted(experts, torch.arange(len(gate_up) + 1, device=hidden.device))
    acted = act(_product(hidden, gate_up, order, starts, per_token))
    computed = _product(acted, down, order, starts, 0)
    in_turn = torch.empty_like(computed).index_copy_(0, order, computed).unflatten(0, (-1, per_token))
    return (in_turn * shares[:, :, None]).sum(dim=1).to(hidden.dtype)


def _product(rows: Tensor, matrices: Tensor, order: Tensor, starts: Tensor, per_row: int) -> Tensor:
    """`_multiply` of all pairs."""
    pairs, (num, columns, width) = len(order), matrices.shape
    out = rows.new_empty((pairs, columns))
    tile = min(MOST_ROWS, max(LEAST_ROWS, triton.next_power_of_2(pairs // num)))
    grid = (triton.cdiv(pairs, tile) + min(num, pairs), triton.cdiv(columns, COLUMNS))
    _multiply[grid](
        rows, matrices, order, starts, out, width, columns,
        NUM=num, EXPERTS=triton.next_power_of_2(num), PER_ROW=per_row, ROWS=tile, COLUMNS=COLUMNS,
        DEPTH=FP32_DEPTH if rows.dtype == torch.float32 else DEPTH,
    )  # fmt: skip
    return out
