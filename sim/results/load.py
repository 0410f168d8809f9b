"""Offered against served: at which rate requests came, and whether the engine kept up until the last of them."""

from math import sqrt
from typing import NamedTuple

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from sim.results.schema import Result

Floats = NDArray[np.float64]
KEPT_UP = 0.95
"""Share of the requests that came that must have ended for an engine to keep up."""
NOISE = 3.0
"""Growth counts from so many standard deviations of Poisson arrivals on."""


class Overload(NamedTuple):
    """In the second half of the arrivals requests came faster than they ended, both in 1/s."""

    arrived_per_s: float
    ended_per_s: float

    def __str__(self) -> str:
        return f"{self.arrived_per_s:.3g} requests/s came and {self.ended_per_s:.3g} ended"


def offered(result: Result) -> float | None:
    """Requests that came, 1/s between the first and the last; None of fewer than two, all at once, or not kept."""
    arrival_s = _array(result.start_times)
    if arrival_s.size < 2 or not (span_s := float(np.ptp(arrival_s))):
        return None
    return (arrival_s.size - 1) / span_s


def mean_decoding(result: Result) -> float | None:
    """Requests between first and last token, averaged over the run: their rate times their stay (Little's law)."""
    if result.mean_e2el_ms is None or result.mean_ttft_ms is None or not result.duration:
        return None
    return result.completed * (result.mean_e2el_ms - result.mean_ttft_ms) / 1e3 / result.duration


def overload(result: Result) -> Overload | None:
    """Whether the queue grew to the end of the arrivals; None where it did not, or where the run cannot tell.

    It grew if, in the second half of the arrivals, more requests joined those waiting for their prefill, or those that
    have not ended, than chance explains. The latter counts only if requests stay for less than a quarter of the
    arrivals on average: until then more come than end in any engine.
    """
    if result.errors is UNSET:
        return None
    completed = np.array([not error for error in result.errors], dtype=bool)
    arrival_s, queue_s, e2el_s = (
        _array(values)[completed] for values in (result.start_times, result.queue_times, result.latencies)
    )
    if not arrival_s.size or not (quarter_s := float(np.ptp(arrival_s)) / 4):
        return None
    first_s, last_s = float(arrival_s.min()), float(arrival_s.max())
    middle_s = (first_s + last_s) / 2
    late = arrival_s > middle_s
    num_arrived = int(late.sum())

    def within(times_s: Floats) -> int:
        return int(((times_s > middle_s) & (times_s <= last_s)).sum())

    num_ended = within(arrival_s + e2el_s)
    noise = NOISE * sqrt(num_arrived)
    early = arrival_s <= first_s + quarter_s
    is_steady = float(np.mean((e2el_s - queue_s)[early])) < quarter_s
    behind = num_arrived - within(arrival_s + queue_s)
    if is_steady and num_ended < KEPT_UP * num_arrived:
        behind = max(behind, num_arrived - num_ended)
    if behind <= noise:
        return None
    return Overload(num_arrived / (2 * quarter_s), num_ended / (2 * quarter_s))


def _array(values: object) -> Floats:
    return np.asarray(() if values is UNSET else values, dtype=np.float64)
