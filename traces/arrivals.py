"""Arrival processes: a renewal process of unit rate, and the clocks that stretch it to ramps and bursts.

A process whose rate changes with time is the unit-rate process read on another clock (the time-rescaling theorem):
arrival i comes when the expected number of arrivals, the integral of the rate, reaches the i-th unit time. Each clock
below is the inverse of that integral in closed form.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from traces.errors import TraceError
from traces.rates import LEAST, check_between

CHUNK = 4096
FloatArray = NDArray[np.float64]
Clock = Callable[[FloatArray], FloatArray]


def unit_chunks(burstiness: float, seed: int) -> Iterator[FloatArray]:
    """Yield, in chunks and without end, the times of a gamma renewal process of mean interval 1, from 0 on.

    The shape is `burstiness`; the coefficient of variation of the intervals is burstiness ** -0.5.
    """
    random = np.random.default_rng([seed, 0])
    last = 0.0
    first = True
    while True:
        intervals = random.gamma(burstiness, 1.0 / burstiness, CHUNK)
        if first:
            intervals[0], first = 0.0, False
        intervals[0] += last
        times = np.cumsum(intervals)
        last = float(times[-1])
        yield times


def unit_times(burstiness: float, seed: int) -> Iterator[float]:
    """Yield the same times one by one, as floats."""
    return chain.from_iterable(times.tolist() for times in unit_chunks(burstiness, seed))


@dataclass(frozen=True, slots=True)
class SteadyClock:
    """One rate throughout; infinity puts every request at 0."""

    rate_per_s: float

    def __call__(self, expected: FloatArray) -> FloatArray:
        """Return the times, in seconds, at which `expected` requests have come on average."""
        return expected / self.rate_per_s


@dataclass(frozen=True, slots=True)
class RampClock:
    """A rate that goes straight from `start_per_s` to `end_per_s` while `requests` come, and stays there."""

    start_per_s: float
    end_per_s: float
    requests: int

    def __call__(self, expected: FloatArray) -> FloatArray:
        """Return the times, in seconds, at which `expected` requests have come on average."""
        start, end = self.start_per_s, self.end_per_s
        duration = 2.0 * self.requests / (start + end)
        slope = (end - start) / duration
        within = np.minimum(expected, self.requests)
        # start*t + slope*t**2/2 = expected, solved in the form that loses no digits where the slope is 0.
        root = np.sqrt(np.maximum(start * start + 2.0 * slope * within, 0.0))
        return 2.0 * within / (start + root) + (expected - within) / end


@dataclass(frozen=True, slots=True)
class BurstClock:
    """A base rate, and `factor` times as much during the last `burst_s` of every `period_s`."""

    rate_per_s: float
    factor: float
    period_s: float
    burst_s: float

    def __call__(self, expected: FloatArray) -> FloatArray:
        """Return the times, in seconds, at which `expected` requests have come on average."""
        calm_s = self.period_s - self.burst_s
        calm, burst = self.rate_per_s * calm_s, self.rate_per_s * self.factor * self.burst_s
        periods, rest = np.divmod(expected, calm + burst)
        in_calm = np.minimum(rest, calm) / self.rate_per_s
        in_burst = np.maximum(rest - calm, 0.0) / (self.rate_per_s * self.factor)
        return periods * self.period_s + in_calm + in_burst


def ramp(start_per_s: float, end_per_s: float, requests: int) -> RampClock:
    """Return the clock of a ramp, or raise `TraceError`."""
    for rate in (start_per_s, end_per_s):
        check_between("ramp rate", rate, "give requests per second")
    return RampClock(start_per_s, end_per_s, requests)


def bursts(rate_per_s: float, factor: float, period_s: float, burst_s: float) -> BurstClock:
    """Return the clock of bursts, or raise `TraceError`."""
    check_between("request rate", rate_per_s, "give requests per second")
    check_between("burst factor", factor, "10 is ten times the rate")
    check_between("burst period", period_s, "give seconds")
    if not LEAST <= burst_s < period_s:
        raise TraceError(f"burst of {burst_s} s in a period of {period_s} s; give 0 < burst duration < period")
    return BurstClock(rate_per_s, factor, period_s, burst_s)
