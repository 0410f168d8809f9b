"""Figures of a study: a metric over an axis, a line a policy, a panel for every value of the other axes."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullFormatter, NullLocator

from sim.files import make_folder
from sim.options.scenario import Scenario
from sim.results.figures.style import (
    COLOURS,
    FAINT,
    dress,
    new_figure,
    plain_text,
    policy_colour,
    policy_marker,
    save_figure,
    set_title,
    short_label,
    show_nothing,
)
from sim.results.report import METRICS
from sim.study.axes import Study
from sim.study.sweep import told_where
from sim.study.tables import Frame

MOST_PANELS = 12
FEW = 8
"""Values of an axis that each have a tick."""
X_RANGE, Y_RANGE = 4.0, 12.0
"""Values that span such a factor are drawn on a logarithmic axis."""
MILLION = 1e6
NAMES = {metric.key: metric.name for metric in METRICS}
UNITS = {f.name: unit for f in fields(Scenario) if (unit := f.metadata["unit"])}
UNITS |= {"long_prefill_token_threshold": "tokens", "kv_offloading_size": "GiB"}
"""Of axes whose names do not say it."""
CONSTANTS = {"pcie": "PCIe bandwidth", "h2d": "PCIe bandwidth to the GPU", "d2h": "PCIe bandwidth to the host"}
NAMES |= {f"profile_{lane}_bytes_per_s": name for lane, name in CONSTANTS.items()}
UNITS |= {f"profile_{lane}_bytes_per_s": "bytes/s" for lane in CONSTANTS}


def shown(name: str) -> str:
    """An axis or a metric as people read it."""
    return NAMES.get(name, name.replace("_", " "))


def with_unit(name: str) -> str:
    """An axis with what it is counted in."""
    return f"{shown(name)} ({UNITS[name]})" if name in UNITS else shown(name)


def axis_text(value: object) -> str:
    """A point's value as people write it: no `.0` after whole numbers."""
    return f"{value:,.6g}" if isinstance(value, float) else str(value)


def write_figures(folder: Path, study: Study, table: Frame) -> list[Path]:
    """Draw every metric of `kvtwin compare` that the table has, as PNG into `folder`; returns their paths."""
    make_folder(folder, "--out")
    found = []
    for metric in METRICS:
        if metric.key in table and table[metric.key].notna().any():
            with told_where(folder, "every point is kept: make room and give the same command again"):
                found.append(save_figure(folder / f"{metric.key}.png", draw(study, table, metric.key)))
    return found


def draw(study: Study, table: Frame, metric: str) -> Figure:
    """One metric over the axes of a study; `table` is that of the means, or of single runs."""
    if study.drawn:
        panels = [(shown(name), name, table) for name in study.drawn]
        line = next((name for name in study.axes if name not in study.drawn), None)
    else:
        x, line, rest = _roles(study, table)
        panels = [(label, x, part) for label, part in _parts(table, rest)]
    left, panels = len(panels) - MOST_PANELS, panels[:MOST_PANELS]
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure(max(6.0, 4.4 * columns), 3.4 * rows + 0.7)
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    lines = [None] if line is None else list(pd.unique(table[line]))
    for ax, (label, x, part) in zip(grid.flat, panels, strict=False):
        _scale(ax, table[x] if x else None, table[metric])
        for place, value in enumerate(lines):
            own = part if line is None else part[part[line] == value]
            _curve(ax, own, x, metric, place, points_only=bool(study.drawn))
        first = ax in grid[:, 0]
        dress(ax, with_unit(x) if x else "", shown(metric) if first else "")
        if label:
            set_title(ax, plain_text(label), 48)
        if not part[metric].notna().any():
            show_nothing(ax, "no run ended")
    _limit(grid.flat[0], table[metric])
    for ax in list(grid.flat)[len(panels) :]:
        ax.set_visible(False)
    _legend(figure, line, lines, left)
    return figure


def _roles(study: Study, table: Frame) -> tuple[str | None, str | None, list[str]]:
    """The axis along which is drawn, the one that lines are for, and the others."""
    counts = {name: table[name].nunique() for name in study.axes}
    numeric = [name for name in study.axes if _numeric(table[name]) and counts[name] > 1]
    others = [name for name in study.axes if name not in numeric]
    x = max(numeric or others, key=lambda name: counts[name], default=None)
    rest = [name for name in study.axes if name != x]
    few = [name for name in rest if 1 < counts[name] <= len(COLOURS)]
    line = "policy" if "policy" in few else next(iter(few), None)
    used = [name for name in (x, line) if name is not None]
    # Axes that go together with those drawn need no panels of their own.
    panels = []
    for name in rest:
        if name == line or (used and table.groupby(used, dropna=False)[name].nunique(dropna=False).max() == 1):
            continue
        panels.append(name)
        used.append(name)
    return x, line, panels


def _parts(table: Frame, axes: list[str]) -> Iterator[tuple[str, Frame]]:
    if not axes:
        yield "", table
        return
    for values, part in table.groupby(axes, dropna=False, sort=False):
        yield ", ".join(f"{shown(name)} {axis_text(value)}" for name, value in zip(axes, values, strict=True)), part


def _numeric(column: Frame) -> bool:
    """Whether an axis has numbers, not names or yes and no."""
    return pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column)


def _curve(ax: Axes, part: Frame, x: str | None, metric: str, place: int, *, points_only: bool) -> None:
    part = part[part[metric].notna()]
    if part.empty:
        return
    where = part[x] if x else pd.Series([""] * len(part))
    if _numeric(where):
        part = part.sort_values(x)
        across = np.sort(np.asarray(where, dtype=float))
    else:
        across = where.astype(str).tolist()
    up = np.asarray(part[metric], dtype=float)
    # Nothing lies between names, nor between draws whose other axes differ too.
    line = "none" if points_only or isinstance(across, list) else "-"
    # Of equal values the first still shows as a rim.
    size = max(3.0, 7.0 - 0.8 * place)
    ax.plot(across, up, ls=line, lw=1.8, marker=policy_marker(place), ms=size, color=policy_colour(place))
    interval = f"{metric}_ci95"
    if interval in part and part[interval].notna().any() and not points_only:
        error = np.asarray(part[interval], dtype=float)
        # On a logarithmic axis nothing lies below 0.
        down = np.minimum(error, up * 0.9) if ax.get_yscale() == "log" else error
        ax.errorbar(across, up, [down, error], fmt="none", lw=1.0, capsize=2.5, color=policy_colour(place), alpha=0.6)


def _scale(ax: Axes, x: Frame | None, metric: Frame) -> None:
    """Logarithmic where values span much; ticks as plain numbers, at the values themselves where they are few."""
    along, up = (x, X_RANGE, ax.set_xscale, ax.xaxis), (metric, Y_RANGE, ax.set_yscale, ax.yaxis)
    for values, most, set_scale, axis in (along, up):
        if values is None or not _numeric(values):
            continue
        numbers = np.unique(np.asarray(values.dropna(), dtype=float))
        if len(numbers) and numbers[0] > 0 and numbers[-1] >= most * numbers[0]:
            set_scale("log")
            narrow = numbers[-1] < 1000 * numbers[0]
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if narrow else (1.0,)))
            axis.set_minor_formatter(NullFormatter())
        if values is x and len(numbers) <= FEW:
            axis.set_minor_locator(NullLocator())
            axis.set_major_locator(FixedLocator(numbers.tolist()))
        axis.set_major_formatter(lambda value, _: f"{value:,.0f}" if 1000 <= value < MILLION else f"{value:.3g}")


def _limit(ax: Axes, metric: Frame) -> None:
    """From 0, once all panels, which share the axis, have their curves; whole numbers have no ticks between them."""
    if ax.get_yscale() != "linear":
        return
    values = metric.dropna()
    if not (values < 0).any():
        ax.set_ylim(bottom=0.0, top=None if values.any() else 1.0)
    if (values % 1 == 0).all():
        ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))


def _legend(figure: Figure, line: str | None, lines: Sequence[object], left: int) -> None:
    if line is not None and len(lines) > 1:
        handles = [Line2D([], [], marker=policy_marker(i), color=policy_colour(i)) for i in range(len(lines))]
        words = [short_label(axis_text(value), 60) for value in lines]
        # Policies say what they are; values of other options do not.
        words = words if line == "policy" else [f"{shown(line)} {word}" for word in words]
        figure.legend(handles, words, fontsize=9, frameon=False, loc="outside lower left", ncols=3)
    if left > 0:
        figure.suptitle(f"{left} more panels are in the table", fontsize=8.5, color=FAINT, x=0.01, ha="left")
