"""What `kvtwin sweep` shows on a terminal: its points with the metrics most asked for."""

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sim.results.report import METRICS, Metric
from sim.study.axes import Study
from sim.study.figures import axis_text, shown
from sim.study.tables import Frame

MOST_POINTS = 24
KEYS = "output_throughput", "mean_ttft_ms", "p99_ttft_ms", "p99_tpot_ms"
ATTAINED = Metric("goodput_attainment", "SLOs met", less_is_better=False, form=".1%")
"""As the tables have it: a share."""


def print_points(study: Study, means: Frame) -> None:
    """Print a row a point, its mean over the runs that ended; `means` as `sim.study.tables.means` makes it."""
    metrics = [metric for metric in (*(m for m in METRICS if m.key in KEYS), ATTAINED) if metric.key in means]
    metrics = [metric for metric in metrics if means[metric.key].notna().any()]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in study.axes:
        side = "right" if pd.api.types.is_numeric_dtype(means[name]) else "left"
        table.add_column(shown(name), justify=side, overflow="fold", no_wrap=side == "left")
    for metric in metrics:
        table.add_column(metric.name, justify="right", overflow="fold")
    for row in means.head(MOST_POINTS).to_dict("records"):
        values = (metric.text(_number(row[metric.key])) for metric in metrics)
        table.add_row(*(axis_text(row[name]) for name in study.axes), *values)
    console = Console()
    console.print(table)
    if (left := len(means) - MOST_POINTS) > 0:
        console.print(f"and {left} more points in the tables", highlight=False)


def _number(value: float) -> float | None:
    return None if pd.isna(value) else value
