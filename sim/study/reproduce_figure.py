"""A paper's figure with our numbers: a row a metric, cases side by side, lines over x or bars where there is no x."""

from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from sim.results.figures.style import (
    INK,
    LOG_RANGE,
    dress,
    log_ticks,
    new_figure,
    policy_colour,
    policy_marker,
    policy_width,
    save_figure,
    set_title,
)
from sim.study.reproduce import Found, digits
from sim.study.setup_files import value_of

NAMES = {
    "mean_ttft_ms": "mean TTFT, ms", "p99_ttft_ms": "P99 TTFT, ms", "mean_tpot_ms": "mean TPOT, ms",
    "request_throughput": "requests/s", "output_throughput": "tokens/s", "violations": "violations, %",
    "attainment": "share within SLO", "fragmentation": "fragmentation", "p99_itl_ms": "P99 between tokens, ms",
    "uncached": "uncached share", "input_len": "prompt, tokens", "request_rate": "requests/s", "tp": "GPUs",
}  # fmt: skip
LONG_MS = 10_000.0
"""A metric that gets longer is drawn in seconds."""

Points = list[tuple[Any, float]]  # x is None where there is none


class Scale(NamedTuple):
    """What panels of one metric share: its name with its unit, and how values are drawn."""

    name: str
    divisor: float
    log: bool


def draw(found: Found, path: Path) -> Path:
    """Write the setup's figure as PNG."""
    path.parent.mkdir(exist_ok=True)
    return save_figure(path, figure_of(found))


def figure_of(found: Found) -> Figure:
    """The setup's figure."""
    setup = found.setup
    cases = list(setup.cases) or [""]
    rows, columns = len(setup.draw), len(cases)
    figure = new_figure(3.4 * columns + 1.4, 2.5 * rows + 0.7)
    figure.suptitle(fill(setup.heading, 38 * columns + 22), fontsize=10, color=INK)
    for r, metric in enumerate(setup.draw):
        panels = [_points(found, case, metric) for case in cases]
        scale = _scale(metric, panels)
        for c, (case, known) in enumerate(zip(cases, panels, strict=True)):
            axis = figure.add_subplot(rows, columns, r * columns + c + 1)
            dress(axis, NAMES.get(setup.x or "", setup.x or ""), scale.name if c == 0 else "")
            scaled = {label: [(x, y / scale.divisor) for x, y in points] for label, points in known.items()}
            (_lines if setup.x else _bars)(axis, scaled, scale)
            if r == 0:
                set_title(axis, case, 40)
            if r == c == 0 and setup.x:
                axis.legend(fontsize=8, frameon=False)
    return figure


def _points(found: Found, case: str, metric: str) -> dict[str, Points]:
    along = found.setup.along(case)
    return {
        label: [
            (x, value_of(found.results[case, x, label], metric)) for x in along if (case, x, label) in found.results
        ]
        for label in found.setup.policies
    }


def _scale(metric: str, panels: list[dict[str, Points]]) -> Scale:
    values = [[y for points in known.values() for _, y in points if y > 0.0] for known in panels]
    name, divisor = NAMES.get(metric, metric), 1.0
    if name.endswith(", ms") and max(map(max, filter(None, values)), default=0.0) >= LONG_MS:
        name, divisor = f"{name[:-2]}s", 1e3
    return Scale(name, divisor, any(ys and max(ys) > LOG_RANGE * min(ys) for ys in values))


def _bars(axis: Axes, known: dict[str, Points], scale: Scale) -> None:
    labels = [label for label, points in known.items() if points]
    values = [known[label][0][1] for label in labels]
    bars = axis.bar(range(len(labels)), values, width=0.7, color=[policy_colour(i) for i in range(len(labels))])
    axis.bar_label(bars, [digits(value) for value in values], fontsize=7.5, color=INK, padding=1.5)
    axis.set_xticks(range(len(labels)), labels, rotation=20 if len(labels) > 3 else 0, fontsize=8)
    axis.grid(visible=False, axis="x")
    axis.margins(y=0.12)
    _upright(axis, values, scale)


def _lines(axis: Axes, known: dict[str, Points], scale: Scale) -> None:
    for i, (label, points) in enumerate(known.items()):
        axis.plot(
            [x for x, _ in points], [y for _, y in points], color=policy_colour(i), linewidth=policy_width(i),
            marker=policy_marker(i), markersize=6.5 - i, label=label,
        )  # fmt: skip
    ticks = sorted({x for points in known.values() for x, _ in points if x is not None})
    if ticks and ticks[-1] >= 4 * ticks[0]:
        axis.set_xscale("log")
    axis.minorticks_off()
    axis.set_xticks(ticks, [f"{tick:,g}" for tick in ticks], rotation=35 if len(ticks) > 5 else 0)
    _upright(axis, [y for points in known.values() for _, y in points], scale)


def _upright(axis: Axes, values: list[float], scale: Scale) -> None:
    """Logarithmic where panels of the row need it, else from 0."""
    if scale.log and values and min(values) > 0.0:
        axis.set_yscale("log")
        log_ticks(axis.yaxis, [np.array([min(values), max(values)])])
    else:
        axis.set_ylim(0.0, max(axis.get_ylim()[1], 1.08 * max(values, default=0.0)))
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
