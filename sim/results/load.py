"""Offered against served: at which rate requests came, and whether the engine kept up until the last of them."""

from math import sqrt
from typing import NamedTuple

from msgspec import UNSET

from sim.results.schema import Result

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
    arrival_s = [] if result.start_times is UNSET else result.start_times
    if len(arrival_s) < 2 or not (span_s := max(arrival_s) - min(arrival_s)):
        return None
    return (len(arrival_s) - 1) / span_s


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
    came_s, queued_s, took_s, errors = result.start_times, result.queue_times, result.latencies, result.errors
    if came_s is UNSET or queued_s is UNSET or took_s is UNSET or errors is UNSET:
        return None
    rows = [row[:3] for row in zip(came_s, queued_s, took_s, errors, strict=True) if not row[3]]
    if not rows:
        return None
    first_s, last_s = min(rows)[0], max(rows)[0]
    middle_s, quarter_s = (first_s + last_s) / 2, (last_s - first_s) / 4
    if not quarter_s:
        return None
    num_arrived = num_ended = num_scheduled = 0
    early_s: list[float] = []
    for arrival_s, queue_s, e2el_s in rows:
        num_arrived += arrival_s > middle_s
        num_ended += middle_s < arrival_s + e2el_s <= last_s
        num_scheduled += middle_s < arrival_s + queue_s <= last_s
        if arrival_s <= first_s + quarter_s:
            early_s.append(e2el_s - queue_s)
    behind = num_arrived - num_scheduled
    if sum(early_s) / len(early_s) < quarter_s and num_ended < KEPT_UP * num_arrived:
        behind = max(behind, num_arrived - num_ended)
    if behind <= NOISE * sqrt(num_arrived):
        return None
    return Overload(num_arrived / (2 * quarter_s), num_ended / (2 * quarter_s))
