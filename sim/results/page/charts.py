"""The page's figures, in order."""

from collections.abc import Sequence

from sim.results.figures.data import FigureRun
from sim.results.page.chart import Chart
from sim.results.page.latency_charts import arrivals, distributions
from sim.results.page.machine_charts import engines, lanes, memory
from sim.results.page.time_use_charts import limits, time_parts


def charts(runs: Sequence[FigureRun]) -> list[Chart]:
    """All figures that the runs have data for."""
    drawn = [time_parts(runs), limits(runs), *distributions(runs), arrivals(runs), *memory(runs), lanes(runs)]
    drawn.append(engines(runs))
    return [chart for chart in drawn if chart is not None]
