"""`ttft_tpot.png`: the cumulative distributions of TTFT and TPOT."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D

from sim.results.figures.data import FigureRun, Floats
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
from sim.results.metrics import Goodput

CDF_POINTS = 4000


def draw_latency(runs: Sequence[FigureRun]) -> Figure:
    """Cumulative distributions of TTFT and TPOT."""
    figure = new_figure(12, 5.2 + 0.22 * len(runs))
    left, right = figure.subplots(1, 2)
    slo = Goodput.parse(runs[0].result.scenario.goodput)
    _cdfs(left, runs, [run.ttft_s for run in runs], slo.ttft_s, "Time to first token", "TTFT")
    _cdfs(right, runs, [run.tpot_s for run in runs], slo.tpot_s, "Time per output token", "TPOT")
    left.set_ylabel("requests within that time, %", fontsize=9, color=INK)
    return figure


def _cdfs(
    ax: Axes, runs: Sequence[FigureRun], values_s: list[Floats], slo_s: float | None, name: str, short: str
) -> None:
    found = [np.sort(values) for values in values_s if values.size]
    unit_s, unit = (1e-3, "ms") if not found or max(v[-1] for v in found) < 1.0 else (1.0, "s")
    dress(ax, f"{short}, {unit}")
    handles = []
    for i, (run, values) in enumerate(zip(runs, values_s, strict=True)):
        label = short_label(run.label)
        if values.size:
            median_s, p99_s = np.percentile(values, (50, 99))
            x = np.sort(values)
            share = np.arange(1, x.size + 1) / x.size * 100.0
            kept = np.unique(np.linspace(0, x.size - 1, min(x.size, CDF_POINTS)).astype(int))
            x_steps, y_steps = np.r_[x[0], x[kept]] / unit_s, np.r_[0.0, share[kept]]
            ax.step(x_steps, y_steps, where="post", color=policy_colour(i), lw=policy_width(i))
            marks = np.array([median_s, p99_s]) / unit_s
            ax.plot(marks[:1], [50], "o", color=policy_colour(i), ms=7, mec="white", zorder=5)
            ax.plot(marks[1:], [99], "D", color=policy_colour(i), ms=6.5, mec="white", zorder=5)
            label += f": median {seconds_text(median_s)}, P99 {seconds_text(p99_s)}"
        else:
            label += ": no request"
        handles.append(Line2D([], [], color=policy_colour(i), lw=2.2, label=label))
    if not found:
        show_nothing(ax, f"no completed request has a {short}")
    else:
        shown = [*found, np.array([slo_s])] if slo_s is not None else found
        if wants_log(shown):
            ax.set_xscale("log")
            log_ticks(ax.xaxis, shown)
    if slo_s is not None:
        ax.axvline(slo_s / unit_s, color=INK, ls="--", lw=1.1)
        handles.append(Line2D([], [], color=INK, ls="--", lw=1.1, label=f"SLO {seconds_text(slo_s)}"))
    ax.set_ylim(-1, 102)
    texts = [str(handle.get_label()) for handle in handles]
    marks_key = tuple(Line2D([], [], ls="", marker=marker, color=FAINT) for marker in "oD")
    place = {"loc": "upper left", "bbox_to_anchor": (0, -0.12), "fontsize": 8.5, "frameon": False}
    ax.legend([*handles, marks_key], [*texts, "median, P99"], handler_map={tuple: HandlerTuple(None)}, **place)
    medians = [(r.label, float(np.median(v))) for r, v in zip(runs, values_s, strict=True) if v.size]
    set_title(ax, ranking(f"{name}: median", medians, seconds_text) if medians else name, 62)
