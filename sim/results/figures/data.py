"""What the figures need of runs: `FigureRun`, copied out of a run that has ended, and the clock that runs share."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sim.results.schema import Result

if TYPE_CHECKING:
    from sim.simulate import Run

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class FigureRun:
    """What the figures need of a run. Times in s, one per completed request.

    `ttft_s`, `queue_s`, `prefill_s` and `arrival_s` belong together element by element. Of runs too long for
    per-request arrays `prefill_s` is empty and `arrival_s` None, and the others are distributions without an order.
    """

    label: str
    result: Result
    series: dict[str, Floats] | None
    ttft_s: Floats
    tpot_s: Floats
    queue_s: Floats
    prefill_s: Floats
    arrival_s: Floats | None = None

    @staticmethod
    def of(run: "Run", result: Result) -> "FigureRun":
        """Copy the arrays out of a run that has ended."""
        log, kept = run.log, run.log.per_request
        label = result.policy
        series = None
        if run.series is not None:
            series = {name: _floats(column) for name, column in run.series.columns.items()}
        if kept is None:
            distributions = (_floats(values) for values in (log.ttft_s, log.tpot_s, log.queue_s))
            return FigureRun(label, result, series, *distributions, prefill_s=np.empty(0))
        done = np.array([request_id not in kept.errors for request_id in kept.request_ids], dtype=bool)
        ttft_s, queue_s, arrival_s = (_floats(a)[done] for a in (kept.ttft_s, kept.queue_s, kept.arrival_s))
        return FigureRun(label, result, series, ttft_s, _floats(log.tpot_s), queue_s, ttft_s - queue_s, arrival_s)


def _floats(values: array) -> Floats:
    return np.array(values, dtype=np.float64)


def has_series(run: FigureRun) -> bool:
    """Whether the run kept a time series with samples in it."""
    return run.series is not None and run.series["time_s"].size > 0


def time_unit(span_s: float) -> tuple[float, str]:
    """Seconds of the unit in which a time axis of that length reads best, and its name."""
    if span_s <= 600.0:
        return 1.0, "s"
    return (60.0, "min") if span_s <= 6 * 3600.0 else (3600.0, "h")


def clock(runs: Sequence[FigureRun]) -> tuple[float, str, float]:
    """Unit of time in s, its name, and the last moment of any run in that unit."""
    ends = [float(run.series["time_s"][-1]) for run in runs if has_series(run) and run.series is not None]
    ends += [run.result.makespan_s for run in runs]
    end_s = max(ends, default=0.0)
    unit_s, name = time_unit(end_s)
    return unit_s, name, max(end_s, 1e-3) / unit_s
