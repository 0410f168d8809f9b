"""Inter-token latencies of a whole run, kept by iteration instead of by token.

All sequences of an iteration share its end time, so the gaps between tokens are few distinct values with large weights.
Up to `EXACT_RUNS` recorded runs of `EXACT_GAPS` iterations in all the statistics are exact; past that the oldest are
folded, some at a time, into a histogram of logarithmic bins, so that memory stays bounded however long the trace is.
"""

from collections.abc import Iterator
from math import sqrt
from struct import pack

import msgspec
import numpy as np
from numpy.typing import NDArray

FLOATS_PER_RUN, FLOAT_BYTES = 4, 8
RECENT_FLOATS = 1 << 14
"""What is recorded is packed when it is so much, to take a quarter of the room."""
EXACT_RUNS = 1 << 20
"""Runs of iterations kept exactly (32 MiB)."""
EXACT_GAPS = 1 << 22
"""Iterations of theirs that are looked at one by one, all at once (about 200 MB)."""
PIECE = 1 << 18
"""Iterations, about, that are folded at once."""
BIN_RATIO = 1.0002
"""Ratio of neighbouring bin edges: a percentile read from the histogram is within 1e-4 of the exact one."""


class GapStatistics(msgspec.Struct, frozen=True):
    """Count, mean, standard deviation and percentiles of all gaps, s; `exact` is False once bins were used."""

    count: int
    mean: float
    std: float
    percentiles: dict[float, float]
    exact: bool


class GapCollector:
    """Collects runs of gaps: `count` gaps from `gap_s` on, each longer by `slope_s`, each for `weight` sequences."""

    __slots__ = ("_bins", "_count", "_max_bytes", "_max_gaps", "_recent", "_runs", "_sum", "_sum_squares")

    def __init__(self, max_runs: int = EXACT_RUNS, max_gaps: int = EXACT_GAPS) -> None:
        self._runs = bytearray()
        self._recent: list[float] = []
        self._max_bytes = FLOAT_BYTES * FLOATS_PER_RUN * max_runs
        self._max_gaps = max_gaps
        self._bins: dict[int, int] = {}
        self._count = 0
        self._sum = 0.0
        self._sum_squares = 0.0

    def add(self, gap_s: float, slope_s: float, count: int, weight: int) -> None:
        """Record one run."""
        self._recent += (gap_s, slope_s, count, weight)

    def bound_memory(self) -> None:
        """Fold what is recorded into bins if it is too much; call now and then."""
        if len(self._recent) >= RECENT_FLOATS or len(self._recent) * FLOAT_BYTES >= self._max_bytes:
            self._pack()
            if len(self._runs) >= self._max_bytes:
                self._fold()

    def _pack(self) -> None:
        # An array takes such a list a third slower.
        self._runs += pack(f"{len(self._recent)}d", *self._recent)
        self._recent.clear()

    def _table(self) -> NDArray[np.float64]:
        """What is recorded, a row a run."""
        self._pack()
        # A copy: the bytes could not grow while a view of them lives.
        return np.frombuffer(self._runs).reshape(-1, FLOATS_PER_RUN).copy()

    def _fold(self) -> None:
        for runs in _pieces(self._table()):
            values, weights = _expanded(runs)
            self._count += int(weights.sum())
            self._sum += float((values * weights).sum())
            self._sum_squares += float((values * values * weights).sum())
            bins = np.floor(np.log(np.maximum(values, 1e-12)) / np.log(BIN_RATIO)).astype(np.int64)
            keys, inverse = np.unique(bins, return_inverse=True)
            for key, weight in zip(keys.tolist(), np.bincount(inverse, weights).tolist(), strict=True):
                self._bins[key] = self._bins.get(key, 0) + int(weight)
        del self._runs[:]

    def statistics(self, percentiles: tuple[float, ...]) -> GapStatistics | None:
        """Statistics over every gap recorded; percentiles interpolate linearly, as `numpy.percentile` does."""
        runs = self._table()
        exact = not self._bins and runs[:, 2].sum() <= self._max_gaps
        if exact:
            values, weights = _expanded(runs)
            count, total = int(weights.sum()), float((values * weights).sum())
        else:
            del runs
            self._fold()
            keys = np.array(sorted(self._bins))
            values = np.exp((keys + 0.5) * np.log(BIN_RATIO))
            weights = np.array([self._bins[key] for key in keys.tolist()], dtype=np.int64)
            count, total = self._count, self._sum
        if not count:
            return None
        mean = total / count
        if exact:
            variance = float(((values - mean) ** 2 * weights).sum()) / count
        else:
            variance = max(0.0, self._sum_squares / count - mean * mean)
        return GapStatistics(count, mean, sqrt(variance), weighted_percentiles(values, weights, percentiles), exact)


def _expanded(runs: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Gap values (s) of `runs` and their weights, one entry an iteration."""
    counts = runs[:, 2].astype(np.int64)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    position = np.arange(len(first), dtype=np.float64) - first
    values: NDArray[np.float64] = np.repeat(runs[:, 0], counts) + np.repeat(runs[:, 1], counts) * position
    return values, np.repeat(runs[:, 3].astype(np.int64), counts)


def _pieces(runs: NDArray[np.float64]) -> Iterator[NDArray[np.float64]]:
    """`runs` in order, some at a time: of `PIECE` iterations, or of fewer than two runs."""
    ends = np.cumsum(runs[:, 2])
    begin = 0
    while begin < len(runs):
        done = ends[begin - 1] if begin else 0.0
        end = max(begin + 1, int(np.searchsorted(ends, done + PIECE, "right")))
        yield runs[begin:end]
        begin = end


def weighted_percentiles(
    values: NDArray[np.float64], weights: NDArray[np.int64], percentiles: tuple[float, ...]
) -> dict[float, float]:
    """Percentiles of `values` repeated `weights` times, by linear interpolation, without repeating them."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    last = np.cumsum(weights[order]) - 1
    result: dict[float, float] = {}
    for percentile in percentiles:
        rank = percentile / 100.0 * float(last[-1])
        low = int(rank)
        low_value = float(ordered[np.searchsorted(last, low)])
        high_value = float(ordered[np.searchsorted(last, min(low + 1, int(last[-1])))])
        result[percentile] = low_value + (high_value - low_value) * (rank - low)
    return result
