"""`queueing.png`: why TTFT grows, its mean split into queueing and prefill, and both against arrival time."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from sim.results.figures.data import FigureRun, spread
from sim.results.figures.requests import arrivals
from sim.results.figures.style import (
    FAINT,
    INK,
    dress,
    folded_label,
    log_ticks,
    new_figure,
    pale,
    percent_text,
    policy_colour,
    policy_legend,
    policy_width,
    ranking,
    seconds_text,
    set_title,
    show_nothing,
    wants_log,
)

SCATTER_POINTS = 4000


def draw_queueing(runs: Sequence[FigureRun]) -> Figure:
    """Mean TTFT split into queueing and prefill, and both against arrival time."""
    bars_inches = 0.9 + 0.62 * len(runs)
    figure = new_figure(12, 4.6 + bars_inches)
    grid = figure.add_gridspec(2, 2, height_ratios=(bars_inches, 3.7))
    bars = figure.add_subplot(grid[0, :])
    over_time = figure.add_subplot(grid[1, 0])
    shares = figure.add_subplot(grid[1, 1], sharex=over_time)
    _bars(bars, runs)
    _arrivals(over_time, shares, runs)
    policy_legend(figure, runs)
    return figure


def _bars(ax: Axes, runs: Sequence[FigureRun]) -> None:
    longest_ms = max((run.result.mean_ttft_ms or 0.0 for run in runs), default=0.0)
    unit_s, unit = (1.0, "s") if longest_ms >= 1e3 else (1e-3, "ms")
    dress(ax, f"mean TTFT, {unit}")
    ax.grid(False, axis="y")
    shares = []
    for i, run in enumerate(runs):
        ttft_ms, queue_ms = run.result.mean_ttft_ms, run.result.mean_queue_ms
        if ttft_ms is None or queue_ms is None:
            ax.text(0.0, i, "  no completed request", va="center", fontsize=9, color=FAINT)
            continue
        ttft_s, queue_s = ttft_ms / 1e3, queue_ms / 1e3
        ax.barh(i, queue_s / unit_s, height=0.42, color=policy_colour(i))
        ax.barh(
            i, max(0.0, ttft_s - queue_s) / unit_s, left=queue_s / unit_s, height=0.42, color=pale(policy_colour(i))
        )
        text = f" queueing {seconds_text(queue_s)} + prefill {seconds_text(max(0.0, ttft_s - queue_s))}"
        ax.text(0.0, i - 0.24, text, va="bottom", fontsize=9, color=INK)
        if ttft_s > 0.0:
            shares.append((run.label, queue_s / ttft_s))
    ax.set_yticks(range(len(runs)), [folded_label(run.label, 26) for run in runs])
    ax.set_ylim(len(runs) - 0.6, -0.65)
    ax.set_xlim(left=0.0)
    keys = [Patch(color="#555555", label="queueing: arrival to first scheduled")]
    keys.append(Patch(color=pale("#555555"), label="prefill: first scheduled to first token"))
    ax.legend(handles=keys, fontsize=8.5, frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    set_title(ax, ranking("Queueing's share of mean TTFT:", shares, percent_text) if shares else "Mean TTFT")


def _arrivals(top: Axes, bottom: Axes, runs: Sequence[FigureRun]) -> None:
    came = arrivals(runs)
    dress(top, f"arrival of the request, {came.unit}", "TTFT, s")
    dress(bottom, f"arrival of the request, {came.unit}", "queueing / TTFT, %")
    for i, run, x in came.runs:
        some = spread(x.size, SCATTER_POINTS)
        top.plot(x[some], run.ttft_s[some], ".", ms=3, alpha=0.35, color=policy_colour(i), mec="none", rasterized=True)
        ttft, queue = (came.means(x, values) for values in (run.ttft_s, run.queue_s))
        marker = "o" if np.isfinite(ttft).sum() < 2 else ""
        top.plot(came.middles, ttft, color=policy_colour(i), lw=policy_width(i), marker=marker)
        share = np.divide(queue, ttft, out=np.full_like(ttft, np.nan), where=ttft > 0.0) * 100.0
        bottom.plot(came.middles, share, color=policy_colour(i), lw=policy_width(i), marker=marker)
    if came.runs:
        found = [np.sort(run.ttft_s) for _, run, _ in came.runs]
        if wants_log(found):
            top.set_yscale("log")
            log_ticks(top.yaxis, found)
    else:
        for ax in (top, bottom):
            show_nothing(ax, "no request to show")
    top.set_xlim(0.0, came.edges[-1])
    bottom.set_ylim(-3, 103)
    set_title(top, "TTFT by arrival: dots are requests, lines means")
    set_title(bottom, "Share of TTFT spent waiting in the queue, by arrival")
