"""What is drawn of requests, in pictures and on the page alike: distributions of latencies, and TTFT by arrival."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sim.results.figures.data import FigureRun, Floats, spread, time_unit
from sim.results.goodput import Goodput
from sim.results.metrics import LATENCIES

ARRIVAL_BINS = 40


@dataclass(frozen=True)
class Distribution:
    """How many requests have a latency up to each value.

    Attributes:
        name: of the latency, as results have it.
        values_s: of each run the latencies of its requests, sorted; empty where no request has one.
        slo_s: None where it was not asked for.
    """

    name: str
    values_s: list[Floats]
    slo_s: float | None

    @property
    def title(self) -> str:
        """The latency in words."""
        return LATENCIES[self.name]

    @property
    def found(self) -> list[Floats]:
        """Of the runs that have any."""
        return [values for values in self.values_s if values.size]

    @property
    def marked(self) -> list[Floats]:
        """What the axis has to show: the latencies, and the SLO."""
        return self.found + ([] if self.slo_s is None else [np.array([self.slo_s])])

    @property
    def unit(self) -> tuple[float, str]:
        """Seconds of the unit in which they read best, and its name."""
        return (1.0, "s") if any(values[-1] >= 1.0 for values in self.found) else (1e-3, "ms")


def distributions(runs: Sequence[FigureRun]) -> list[Distribution]:
    """Of TTFT and TPOT."""
    slo = Goodput.parse(runs[0].result.scenario.goodput)
    return [
        Distribution("ttft", [np.sort(run.ttft_s) for run in runs], slo.ttft_s),
        Distribution("tpot", [np.sort(run.tpot_s) for run in runs], slo.tpot_s),
    ]


def curve(values_s: Floats, points: int) -> tuple[Floats, Floats]:
    """At most so many of sorted values, and the share of all that are no longer, %."""
    kept = spread(values_s.size, points)
    return values_s[kept], (kept + 1) / values_s.size * 100.0


@dataclass(frozen=True)
class Arrivals:
    """When requests came.

    Attributes:
        unit_s: seconds of the unit in which the times of arrival read best.
        unit: its name.
        edges: of stretches of time, in that unit.
        runs: place, run and times of arrival (in that unit) of those that have them.
    """

    unit_s: float
    unit: str
    edges: Floats
    runs: list[tuple[int, FigureRun, Floats]]

    @property
    def middles(self) -> Floats:
        """Of the stretches."""
        return (self.edges[1:] + self.edges[:-1]) / 2

    def means(self, x: Floats, values: Floats) -> Floats:
        """Mean of the values of requests that came in each stretch; NaN where none did."""
        which = np.clip(np.searchsorted(self.edges, x, side="right") - 1, 0, ARRIVAL_BINS - 1)
        count = np.bincount(which, minlength=ARRIVAL_BINS).astype(np.float64)
        total = np.bincount(which, weights=values, minlength=ARRIVAL_BINS)
        return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)


def arrivals(runs: Sequence[FigureRun]) -> Arrivals:
    """When the requests of runs came that have kept it."""
    found = [(i, run, run.arrival_s) for i, run in enumerate(runs) if run.arrival_s is not None and run.arrival_s.size]
    end_s = max((float(arrival_s.max()) for *_, arrival_s in found), default=0.0)
    unit_s, unit = time_unit(end_s)
    edges = np.linspace(0.0, max(end_s, 1e-3) / unit_s, ARRIVAL_BINS + 1)
    return Arrivals(unit_s, unit, edges, [(i, run, arrival_s / unit_s) for i, run, arrival_s in found])
