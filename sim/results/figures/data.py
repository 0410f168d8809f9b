"""What the figures need of runs: `FigureRun`, copied out of a run that has ended, and the clock that runs share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sim.results.schema import Result

if TYPE_CHECKING:
    import pandas as pd

    from sim.run.runs import Run

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class FigureRun:
    """What the figures need of a run. Times in s, one per completed request.

    `ttft_s`, `queue_s` and `arrival_s` belong together element by element. Of runs too long for
    per-request arrays `arrival_s` is None, and the others are distributions without an order.
    """

    label: str
    result: Result
    series: dict[str, Floats] | None
    """Its time series, of several engines together; None where it kept none, or no sample."""
    ttft_s: Floats
    tpot_s: Floats
    queue_s: Floats
    arrival_s: Floats | None = None
    engines: tuple[dict[str, Floats], ...] = ()
    """The time series of each of several engines."""

    @staticmethod
    def of(run: "Run", result: Result) -> "FigureRun":
        """Copy the arrays out of a run that has ended."""
        log, kept = run.log, run.log.requests
        engines = [
            {name: _floats(column) for name, column in parts.series.columns.items()}
            for parts in run.engines
            if parts.series is not None
        ]
        if kept is None:
            return FigureRun._of(result, engines, _floats(log.ttft_s), _floats(log.tpot_s), _floats(log.queue_s), None)
        times = [(row.ttft_s, row.queue_s, row.arrival_s) for row in kept if not row.error]
        ttft_s, queue_s, arrival_s = np.array(times, dtype=np.float64).reshape(-1, 3).T
        return FigureRun._of(result, engines, ttft_s, _floats(log.tpot_s), queue_s, arrival_s)

    @staticmethod
    def of_tables(result: Result, requests: "pd.DataFrame", series: "pd.DataFrame") -> "FigureRun":
        """Of the per-request table and the time series of a run, as its folder has them."""
        done = requests[np.asarray(requests["status"] == "completed")]
        names = ("ttft_s", "queue_s", "arrival_s", "tpot_s")
        ttft_s, queue_s, arrival_s, tpot_s = (_floats(done[name]) for name in names)
        tpot_s = tpot_s[np.asarray(done["output_tokens"]) > 1]
        parts = [part for _, part in series.groupby("engine")] if "engine" in series else [series] * (not series.empty)
        engines = [{name: _floats(part[name]) for name in part.columns if name != "engine"} for part in parts]
        return FigureRun._of(result, engines, ttft_s, tpot_s, queue_s, arrival_s)

    @staticmethod
    def _of(
        result: Result, engines: list[dict[str, Floats]], ttft_s: Floats, tpot_s: Floats, queue_s: Floats,
        arrival_s: Floats | None,
    ) -> "FigureRun":  # fmt: skip
        series = together(engines) if any(engine["time_s"].size for engine in engines) else None
        several = tuple(engines) if len(engines) > 1 else ()
        return FigureRun(result.policy, result, series, ttft_s, tpot_s, queue_s, arrival_s, several)


def _floats(values: ArrayLike) -> Floats:
    return np.array(values, dtype=np.float64)


def together(engines: Sequence[dict[str, Floats]]) -> dict[str, Floats]:
    """One time series of several engines': sums of what they count, means of how long their lanes were busy and
    limits bound."""
    if len(engines) == 1:
        return dict(engines[0])
    time_s = np.unique(np.concatenate([engine["time_s"] for engine in engines]))
    found = {name: np.zeros(time_s.size) for name in engines[0]}
    for engine in engines:
        for name in found:
            found[name] += held(engine, name, time_s)
    for name in found:
        if name.endswith("_busy_s") or name.startswith("bound_"):
            found[name] /= len(engines)
    return found | {"time_s": time_s}


def held(engine: dict[str, Floats], name: str, time_s: Floats) -> Floats:
    """A column of an engine's time series at other times, each sample held until the next."""
    values = engine[name]
    if not values.size:
        return np.zeros(time_s.size)
    # Before its first iteration nothing has happened: pools are free.
    before = 0.0
    if name == "gpu_free_blocks":
        before = values[0] + engine["gpu_allocated_blocks"][0] - engine["gpu_released_blocks"][0]
    elif name == "host_free_blocks":
        before = values[0]
    return np.r_[before, values][np.searchsorted(engine["time_s"], time_s, side="right")]


def waiting(run: FigureRun) -> tuple[Floats, Floats] | None:
    """How many requests wait to be first scheduled: times (s) and the number from then on.

    Of the requests' own times where they were kept, else the samples of the time series.
    """
    if run.arrival_s is not None and run.arrival_s.size:
        times_s = np.concatenate((run.arrival_s, run.arrival_s + run.queue_s))
        changes = np.repeat((1.0, -1.0), run.arrival_s.size)
        at_s, which = np.unique(times_s, return_inverse=True)
        return at_s, np.cumsum(np.bincount(which, weights=changes), dtype=np.float64)
    return None if run.series is None else (run.series["time_s"], run.series["num_waiting"])


def spread(size: int, most: int) -> NDArray[np.intp]:
    """Places of at most `most` of so many values, evenly from the first to the last."""
    return np.unique(np.linspace(0, size - 1, min(size, most)).astype(int))


def time_unit(span_s: float) -> tuple[float, str]:
    """Seconds of the unit in which a time axis of that length reads best, and its name."""
    if span_s <= 600.0:
        return 1.0, "s"
    return (60.0, "min") if span_s <= 6 * 3600.0 else (3600.0, "h")


def clock(runs: Sequence[FigureRun]) -> tuple[float, str, float]:
    """Unit of time in s, its name, and the last moment of any run in that unit."""
    ends = [float(run.series["time_s"][-1]) for run in runs if run.series is not None]
    ends += [run.result.makespan_s for run in runs]
    end_s = max(ends, default=0.0)
    unit_s, name = time_unit(end_s)
    return unit_s, name, max(end_s, 1e-3) / unit_s
