"""`ttft_tpot.png`: the cumulative distributions of TTFT and TPOT."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D

from sim.results.figures.data import FigureRun
from sim.results.figures.requests import Distribution, curve, distributions
from sim.results.figures.style import (
    FAINT,
    INK,
    dress,
    log_ticks,
    new_figure,
    policy_colour,
    policy_width,
    ranking,
    seconds_text,
    set_title,
    short_label,
    show_nothing,
    wants_log,
)

CDF_POINTS = 4000


def draw_latency(runs: Sequence[FigureRun]) -> Figure:
    """Cumulative distributions of TTFT and TPOT."""
    figure = new_figure(12, 5.2 + 0.22 * len(runs))
    left, right = figure.subplots(1, 2)
    for ax, shown in zip((left, right), distributions(runs), strict=True):
        _cdfs(ax, runs, shown)
    left.set_ylabel("requests within that time, %", fontsize=9, color=INK)
    return figure


def _cdfs(ax: Axes, runs: Sequence[FigureRun], shown: Distribution) -> None:
    (unit_s, unit), slo_s, short = shown.unit, shown.slo_s, shown.name.upper()
    dress(ax, f"{short}, {unit}")
    handles, medians = [], []
    for i, (run, values) in enumerate(zip(runs, shown.values_s, strict=True)):
        label = short_label(run.label)
        if values.size:
            median_s, p99_s = np.percentile(values, (50, 99))
            medians.append((run.label, float(median_s)))
            x, share = curve(values, CDF_POINTS)
            steps = np.r_[x[0], x] / unit_s, np.r_[0.0, share]
            ax.step(*steps, where="post", color=policy_colour(i), lw=policy_width(i))
            marks = np.array([median_s, p99_s]) / unit_s
            ax.plot(marks[:1], [50], "o", color=policy_colour(i), ms=7, mec="white", zorder=5)
            ax.plot(marks[1:], [99], "D", color=policy_colour(i), ms=6.5, mec="white", zorder=5)
            label += f": median {seconds_text(median_s)}, P99 {seconds_text(p99_s)}"
        else:
            label += ": no request"
        handles.append(Line2D([], [], color=policy_colour(i), lw=2.2, label=label))
    if not medians:
        show_nothing(ax, f"no completed request has a {short}")
    elif wants_log(shown.marked):
        ax.set_xscale("log")
        log_ticks(ax.xaxis, shown.marked)
    if slo_s is not None:
        ax.axvline(slo_s / unit_s, color=INK, ls="--", lw=1.1)
        handles.append(Line2D([], [], color=INK, ls="--", lw=1.1, label=f"SLO {seconds_text(slo_s)}"))
    ax.set_ylim(-1, 102)
    texts = [str(handle.get_label()) for handle in handles]
    marks_key = tuple(Line2D([], [], ls="", marker=marker, color=FAINT) for marker in "oD")
    place = {"loc": "upper left", "bbox_to_anchor": (0, -0.12), "fontsize": 8.5, "frameon": False}
    ax.legend([*handles, marks_key], [*texts, "median, P99"], handler_map={tuple: HandlerTuple(None)}, **place)
    set_title(ax, ranking(f"{shown.title}: median", medians, seconds_text) if medians else shown.title, 62)
