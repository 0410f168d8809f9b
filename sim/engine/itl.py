"""Inter-token latencies of a whole run, kept by iteration instead of by token.

All sequences of an iteration share its end time, so the gaps between tokens are few distinct values with large weights.
They are counted in logarithmic bins, and looked at once more in those where percentiles are. Past `EXACT_RUNS` recorded
runs only finer bins are kept, so that memory stays bounded however long the trace is. Few runs stay in a list and are
counted without numpy, which takes longer to import.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from math import ceil, exp, floor, log, sqrt
from struct import pack
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from numpy.typing import NDArray

FLOATS_PER_RUN, FLOAT_BYTES = 4, 8
FEW_FLOATS, RECENT_FLOATS = 1 << 19, 1 << 14
"""What is recorded is packed when it is so much, first and then again, to take a quarter of the room."""
EXACT_RUNS = 1 << 20
"""Runs of iterations kept exactly (32 MiB)."""
BIN_RATIO = 1.0002
"""Ratio of neighbouring bin edges: a percentile read from the bins alone is within 1e-4 of the exact one."""
SORTED_RATIO = 1.002
"""The same where a bin's gaps are sorted, which takes longer the more they are."""
LEAST_S: Final = 1e-9
MOST_S: Final = 1e6
"""Gaps of the first bin and of the last: what is shorter or longer is in these, too."""


class GapStatistics(msgspec.Struct, frozen=True):
    """Count, mean, standard deviation and percentiles of all gaps, s; `exact` is False where bins alone were kept."""

    count: int
    mean: float
    std: float
    percentiles: dict[float, float]
    exact: bool


class GapCollector:
    """Collects runs of gaps: `count` gaps from `gap_s` on, each longer by `slope_s`, each for `weight` sequences."""

    __slots__ = ("_bins", "_max_bytes", "_most_recent", "_recent", "_runs")

    def __init__(self, max_runs: int = EXACT_RUNS) -> None:
        self._runs = bytearray()
        self._recent: list[float] = []
        self._max_bytes = FLOAT_BYTES * FLOATS_PER_RUN * max_runs
        self._most_recent = min(FEW_FLOATS, FLOATS_PER_RUN * max_runs)
        self._bins: _Bins | None = None
        """What is not kept exactly."""

    def add(self, gap_s: float, slope_s: float, count: float, weight: float) -> None:
        """Record one run."""
        recent = self._recent
        recent.append(gap_s)
        recent.append(slope_s)
        recent.append(count)
        recent.append(weight)

    def bound_memory(self) -> None:
        """Keep bins alone of what is recorded if it is too much; call now and then."""
        if len(self._recent) >= self._most_recent:
            self._pack()
            self._most_recent = min(RECENT_FLOATS, self._most_recent)
            if len(self._runs) >= self._max_bytes:
                self._fold()

    def _pack(self) -> None:
        # An array takes such a list a third slower.
        self._runs += pack(f"{len(self._recent)}d", *self._recent)
        self._recent.clear()

    def _fold(self) -> "_Bins":
        if self._bins is None:
            self._bins = _Bins(BIN_RATIO)
        self._bins.add(self._runs, [])
        self._runs.clear()
        return self._bins

    def statistics(self, percentiles: tuple[float, ...]) -> GapStatistics | None:
        """Statistics over every gap recorded; percentiles interpolate linearly, as `numpy.percentile` does."""
        exact = self._bins is None
        if self._runs or not exact:
            self._pack()
        if exact:
            bins = _Bins(SORTED_RATIO)
            bins.add(self._runs, self._recent)
        else:
            bins = self._fold()
        if not bins.count:
            return None
        ranks = [percentile / 100.0 * (bins.count - 1.0) for percentile in percentiles]
        found = bins.at([float(end) for rank in ranks for end in (floor(rank), ceil(rank))], self._runs, self._recent)
        mean, variance = bins.moments()
        by_percentile = {
            percentile: low_s + (high_s - low_s) * (rank - floor(rank))
            for percentile, rank, low_s, high_s in zip(percentiles, ranks, found[::2], found[1::2], strict=True)
        }
        return GapStatistics(int(bins.count), mean, sqrt(variance), by_percentile, exact)


class _Bins:
    """How many gaps are in each bin, and sums over them."""

    def __init__(self, ratio: float) -> None:
        self._log_ratio = log(ratio)
        self._last = int(log(MOST_S / LEAST_S) / self._log_ratio)
        self._weights = [0.0] * (self._last + 1)
        self.count = 0.0
        self._about_s: float | None = None
        """One of the gaps: sums of what they are off it, s, and of its squares, s^2, lose no digits."""
        self._off_s = self._off_squared = 0.0

    def _bin(self, gap_s: float) -> int:
        if gap_s <= LEAST_S:
            return 0
        found = int(log(gap_s / LEAST_S) / self._log_ratio)
        return found if found < self._last else self._last

    def _cut(self, gap_s: float, slope_s: float, num: int) -> list[tuple[int, int, int]]:
        """A run by bins: which one, and from which to before which of the run's gaps."""
        found: list[tuple[int, int, int]] = []
        begin = 0
        while begin < num:
            place, end = self._bin(gap_s + slope_s * begin), num
            if slope_s and place < self._last:
                # To rounding, as logarithms are.
                edge_s = LEAST_S * exp((place + (slope_s > 0.0)) * self._log_ratio)
                end = max(begin + 1, ceil(min(float(num), (edge_s - gap_s) / slope_s)))
            found.append((place, begin, end))
            begin = end
        return found

    def _add_single(self, runs: bytearray) -> bytearray:
        """Count the runs of one gap; those of several."""
        import numpy as np  # noqa: PLC0415 - takes longer than few runs

        gaps_s, own, places, several = self._single(runs)
        if len(gaps_s):
            about_s = self._about_s = float(gaps_s[0]) if self._about_s is None else self._about_s
            off_s = gaps_s - about_s
            self.count += float(own.sum())
            self._off_s += float((off_s * own).sum())
            self._off_squared += float((off_s * off_s * own).sum())
            self._weights = (np.bincount(places, own, self._last + 1) + np.array(self._weights)).tolist()
        return several

    def _single(self, runs: bytearray) -> "tuple[NDArray[Any], NDArray[Any], NDArray[Any], bytearray]":
        """Of runs of one gap these, s, their weights and bins; and the other runs."""
        import numpy as np  # noqa: PLC0415 - takes longer than few runs

        table = np.frombuffer(bytes(runs)).reshape(-1, FLOATS_PER_RUN)
        is_single = table[:, 2] == 1.0
        gaps_s, own = table[is_single, 0], table[is_single, 3]
        places = np.minimum(np.log(np.maximum(gaps_s, LEAST_S) / LEAST_S) / self._log_ratio, self._last)
        return gaps_s, own, places.astype(np.int64), bytearray(table[~is_single].tobytes())

    def add(self, runs: bytearray, recent: list[float]) -> None:
        """Count what was recorded, packed or not."""
        if runs:
            runs = self._add_single(runs)
        weights, count, off_s, off_squared = self._weights, self.count, self._off_s, self._off_squared
        for row in _rows(runs, recent):
            if self._about_s is None:
                self._about_s = row[0]
            about_s = self._about_s
            for gap_s, slope_s, num, weight in zip(row[::4], row[1::4], row[2::4], row[3::4]):  # noqa: B905
                first_off_s, own = gap_s - about_s, num * weight
                count += own
                off_s += first_off_s * own
                off_squared += first_off_s * first_off_s * own
                if num == 1.0:
                    # As `+=` does, which compiled code leaves to objects.
                    place = self._bin(gap_s)
                    weights[place] = weights[place] + weight
                    continue
                rise_s = slope_s * (num - 1.0) / 2.0 * own
                off_s += rise_s
                off_squared += rise_s * (2.0 * first_off_s + slope_s * (2.0 * num - 1.0) / 3.0)
                for place, begin, end in self._cut(gap_s, slope_s, int(num)):
                    weights[place] += weight * (end - begin)
        self.count, self._off_s, self._off_squared = count, off_s, off_squared

    def moments(self) -> tuple[float, float]:
        """Mean, s, and variance, s^2."""
        off_s = self._off_s / self.count
        return (self._about_s or 0.0) + off_s, max(0.0, self._off_squared / self.count - off_s * off_s)

    def at(self, ranks: list[float], runs: bytearray, recent: list[float]) -> list[float]:
        """The gaps that so many are before in order of length, s: of those recorded; the middle of a bin without."""
        # Most are empty.
        filled = [place for place, weight in enumerate(self._weights) if weight]
        ends = list(accumulate([self._weights[place] for place in filled]))
        own_bins = [bisect_right(ends, rank) for rank in ranks]
        places = [filled[i] for i in own_bins]
        if not runs and not recent:
            return [LEAST_S * exp((place + 0.5) * self._log_ratio) for place in places]
        inside: list[dict[float, float] | None] = [None] * len(self._weights)
        for place in places:
            inside[place] = {}
        if runs:
            gaps_s, weights, bins, runs = self._single(runs)
            for place in set(places):
                here, gaps = bins == place, inside[place]
                assert gaps is not None
                for gap_s, weight in zip(gaps_s[here].tolist(), weights[here].tolist(), strict=True):
                    gaps[gap_s] = gaps.get(gap_s, 0.0) + weight
        for row in _rows(runs, recent):
            for gap_s, slope_s, num, weight in zip(row[::4], row[1::4], row[2::4], row[3::4]):  # noqa: B905
                if num == 1.0:
                    gaps = inside[self._bin(gap_s)]
                    if gaps is not None:
                        gaps[gap_s] = gaps.get(gap_s, 0.0) + weight
                    continue
                for place, begin, end in self._cut(gap_s, slope_s, int(num)):
                    gaps = inside[place]
                    if gaps is not None:
                        for i in range(begin, end):
                            next_s = gap_s + slope_s * i
                            gaps[next_s] = gaps.get(next_s, 0.0) + weight
        found: list[float] = []
        for i, rank in zip(own_bins, ranks, strict=True):
            gaps = inside[filled[i]] or {}
            own = sorted(gaps)
            before = rank - (ends[i - 1] if i else 0.0)
            found.append(own[bisect_right(list(accumulate([gaps[one_s] for one_s in own])), before)])
        return found


def _rows(runs: bytearray, recent: list[float]) -> Iterator[list[float]]:
    """What was recorded, some at a time: gap, slope, count and weight of each run, one after the other."""
    if recent:
        yield recent
    for begin in range(0, len(runs), RECENT_FLOATS * FLOAT_BYTES):
        yield array("d", bytes(runs[begin : begin + RECENT_FLOATS * FLOAT_BYTES])).tolist()
