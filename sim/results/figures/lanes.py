"""`lanes.png`: how busy the GPU and each direction of PCIe are over time."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from sim.results.figures.data import FigureRun, Floats, clock
from sim.results.figures.style import (
    dress,
    folded_label,
    new_figure,
    pale,
    percent_axis,
    percent_text,
    policy_colour,
    set_title,
    show_nothing,
)

LANE_BINS = 60
LANES = {
    "compute_busy_s": "GPU compute",
    "h2d_busy_s": "PCIe host to device",
    "d2h_busy_s": "PCIe device to host",
}
"""Columns of the time series and the names of the lanes in a result."""
COPIES = dict(list(LANES.items())[1:])
"""Those that a run may never use; then they are not drawn."""


def draw_lanes(runs: Sequence[FigureRun]) -> Figure:
    """How busy each lane is over time: a row a policy, a column a lane."""
    figure = new_figure(12, 1.3 + 1.75 * len(runs))
    never = [title for name, title in COPIES.items() if not any(_lane_total(run, name, title) for run in runs)]
    drawn = {name: title for name, title in LANES.items() if title not in never}
    axes = figure.subplots(len(runs), len(drawn), sharex=True, sharey="col", squeeze=False)
    unit_s, unit, end = clock(runs)
    edges = np.linspace(0.0, end * unit_s, LANE_BINS + 1)
    for column, (name, title) in enumerate(drawn.items()):
        top = 0.0
        for i, run in enumerate(runs):
            ax = axes[i, column]
            dress(ax, f"time, {unit}" if i == len(runs) - 1 else "", "busy, % of the time" if not column else "")
            if not i:
                unused = f" (never used: {', '.join(never)})" if never and not column else ""
                set_title(ax, title + unused, 44 * len(LANES) // len(drawn))
            if run.series is None:
                show_nothing(ax, "no time series was kept")
                continue
            busy = busy_shares(run, run.series, name, title, edges)
            ax.stairs(busy * 100.0, edges / unit_s, fill=True, color=pale(policy_colour(i)))
            ax.stairs(busy * 100.0, edges / unit_s, color=policy_colour(i), lw=1.4)
            top = max(top, float(busy.max()) * 100.0)
            use = _use(_lane_total(run, name, title), run.result.makespan_s)
            ax.set_title(use, fontsize=9, color=policy_colour(i), loc="right")
        # 0 to 100 % would hide a lane that is hardly used; the scale is shared by the policies, so they compare.
        percent_axis(axes[0, column], next(scale for scale in (4.0, 10.0, 20.0, 40.0, 100.0) if top <= scale + 1e-6))
        axes[0, column].set_xlim(0.0, end)
    for i, run in enumerate(runs):
        axes[i, -1].yaxis.set_label_position("right")
        look = {"fontsize": 7.5, "fontweight": "bold", "color": policy_colour(i), "rotation": 270, "va": "bottom"}
        axes[i, -1].set_ylabel(folded_label(run.label, 27), **look)
    return figure


def _use(total_s: float, makespan_s: float) -> str:
    if total_s <= 0.0:
        return "never used"
    share = f"{percent_text(min(1.0, total_s / makespan_s))} of the time" if makespan_s > 0.0 else f"{total_s:.3g} s"
    return f"busy {share}"


def _lane_total(run: FigureRun, name: str, title: str) -> float:
    """Busy seconds over the whole run: the result's, or the last sample's."""
    told_s = run.result.lanes.by_name()[title].busy_s
    return max(told_s, float(run.series[name][-1])) if run.series is not None else told_s


def busy_shares(run: FigureRun, series: Mapping[str, Floats], name: str, title: str, edges_s: Floats) -> Floats:
    """Share of each bin of time (edges in s) in which a lane is busy, of a run that kept a time series.

    The series' running totals are read at the end of an iteration and stamped with its start, so the total at a
    sample's time is the sample before's. What is booked beyond a bin's end is carried into the bins after it.
    """
    time_s, busy_s = series["time_s"], series[name]
    last_s = max(run.result.makespan_s, float(time_s[-1]))
    totals_s = np.r_[0.0, busy_s[:-1], _lane_total(run, name, title)]
    booked_s = np.diff(np.interp(edges_s, np.r_[time_s, last_s], totals_s))
    shares, backlog_s = np.zeros(len(edges_s) - 1), 0.0
    for k, width_s in enumerate(np.diff(edges_s)):
        backlog_s += booked_s[k]
        shares[k] = min(1.0, backlog_s / width_s)
        backlog_s = max(0.0, backlog_s - width_s)
    return shares
