"""Lengths of measured sequences.

Prompts of a point are never alike: a served engine never meets a length often, and what kernels cost only the first
time that they see one shall show.
"""

from collections.abc import Iterator

import numpy as np

from calib.measure.points import Point


def drawn_lengths(point: Point, seed: int) -> Iterator[list[int]]:
    """New tokens of each sequence of a point, execution by execution.

    Those of prompts lie within `Point.draw` of `new_tokens`, every sequence's other than in all executions before
    until the range is used up. In a batch of even size they sum to the point's tokens: products keep their shape.
    """
    if not point.draw:
        while True:
            yield [point.new_tokens] * point.batch_size
    rng = np.random.default_rng(seed)
    signs = [1, -1] * (-(-point.batch_size // 2))
    while True:
        for away in rng.permutation(np.arange(-point.draw, point.draw + 1)).tolist():
            yield [point.new_tokens + sign * away for sign in signs[: point.batch_size]]


def spread_lengths(point: Point) -> list[int]:
    """Contexts of a point's decodes: evenly from 3/4 to 5/4 of its context tokens, which are their mean."""
    last = point.batch_size - 1
    away = (point.context_tokens * (2 * i - last) / (4 * max(1, last)) for i in range(point.batch_size))
    return [point.context_tokens + round(tokens) for tokens in away]
