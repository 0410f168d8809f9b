"""`KernelTables`: measured times of one model's kernels on one GPU, and how to interpolate between points."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence

import msgspec

Point = tuple[int, float]
"""Tokens or sequences, and seconds."""
Grid = tuple[list[float], "list[Grid] | list[float]"]
"""Coordinates along the first axis, and for each the grid of the others; after the last axis, seconds."""


class KernelTables(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds of kernels on one GPU of `tp`, all-reduces left out.

    Attributes:
        model, tp: what was timed, and over how many GPUs it was split.
        weight_bytes, kv_bytes: of a layer's matrices and of a token's KV in a layer: the types that were timed.
        layer: all of a layer but attention, by tokens.
        iteration: what an iteration runs once, by tokens (embedding, last norm).
        head: LM head and sampler, by sequences that get a token.
        attention: of a layer: tokens of a prompt's chunk (0: none), cached before it, decodes, cached before each, s.
    """

    model: str
    tp: int
    weight_bytes: float
    kv_bytes: float
    layer: list[Point]
    iteration: list[Point]
    head: list[Point]
    attention: list[tuple[int, int, int, int, float]]

    def fault(self) -> str:
        """What is wrong with the tables; empty if nothing is."""
        for name in ("layer", "iteration", "head"):
            points = getattr(self, name)
            if not points or any(x < 1 or not 0 < s < 600 for x, s in points):
                return f"{name}: give points [count, seconds], counts from 1 on and seconds above 0"
        for *shape, seconds in self.attention:
            if min(shape) < 0 or not 0 < seconds < 600 or not (shape[0] or shape[2]):
                return f"attention: row {[*shape, seconds]} is no chunk or decodes with seconds above 0"
        if not any(not row[0] for row in self.attention) or not any(not row[2] for row in self.attention):
            return "attention: needs rows of decodes alone (chunk 0) and of chunks alone (decodes 0)"
        return ""


def grid_of(rows: Iterable[Sequence[float]]) -> Grid:
    """Rows of coordinates and a value as nested axes; the inner axes of two outer coordinates may differ."""
    groups: dict[float, list[Sequence[float]]] = {}
    for row in rows:
        groups.setdefault(row[0], []).append(row[1:])
    keys = sorted(groups)
    if len(groups[keys[0]][0]) == 1:
        return keys, [groups[key][0][0] for key in keys]
    return keys, [grid_of(groups[key]) for key in keys]


def value_at(grid: Grid, point: Sequence[float]) -> float:
    """The value at a point, piecewise linear along each axis; that of the edge beyond it."""
    keys, children = grid
    x, rest = point[0], point[1:]
    above = bisect_right(keys, x)
    low, high = max(0, above - 1), min(above, len(keys) - 1)
    first = value_at(children[low], rest) if rest else children[low]  # pyright: ignore[reportArgumentType]
    if low == high or x <= keys[low]:
        return first  # pyright: ignore[reportReturnType]
    last = value_at(children[high], rest) if rest else children[high]  # pyright: ignore[reportArgumentType]
    weight = (x - keys[low]) / (keys[high] - keys[low])
    return (1 - weight) * first + weight * last  # pyright: ignore[reportOperatorIssue]


def edge(grid: Grid, point: Sequence[float]) -> tuple[float, ...]:
    """The point, brought back to the grid's edge where it lies beyond."""
    keys, children = grid
    x = min(max(point[0], keys[0]), keys[-1])
    if len(point) == 1:
        return (x,)
    inner = children[bisect_right(keys, x) - 1]
    return (x, *edge(inner, point[1:]))  # pyright: ignore[reportArgumentType]


def coordinates(grid: Grid, x: float) -> list[float]:
    """Coordinates of the second axis at which values along it bend, at `x` of the first."""
    keys, children = grid
    above = bisect_right(keys, x)
    near = {max(0, above - 1), min(above, len(keys) - 1)}
    return sorted({c for i in near for c in children[i][0]})  # pyright: ignore[reportIndexIssue]
