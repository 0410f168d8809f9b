"""The simulation beside the measurement: TTFT and TPOT as distributions, over arrivals, and request against request."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gpu_runtime.twin.figure import draw_shares
from sim.results.figures.style import (
    COLOURS,
    FAINT,
    draw_diagonal,
    dress,
    log_ticks,
    new_figure,
    plain_text,
    set_title,
    wants_log,
)
from sim.results.metrics import LATENCIES
from sim.run.served import Array, Times
from traces.served import ServedRun

SIMULATED, MEASURED = COLOURS[0], COLOURS[1]


def draw_against(label: str, served: ServedRun, ours: Times, theirs: Times) -> Figure:
    """Four panels for one policy: its times, and those measured."""
    figure = new_figure(12.0, 8.6)
    axes = figure.subplots(2, 2)
    _distribution(axes[0][0], ours.ttft_s, theirs.ttft_s, "ttft")
    _distribution(axes[0][1], ours.tpot_s, theirs.tpot_s, "tpot")
    _over_arrivals(axes[1][0], [request.arrival_s for request in served.requests], ours, theirs)
    _against(axes[1][1], ours.e2el_s, theirs.e2el_s)
    text = f"{label}  |  {served.path.name}, {len(served.requests)} requests"
    figure.suptitle(plain_text(text), fontsize=8.5, color=FAINT, x=0.01, ha="left")
    return figure


def _distribution(ax: Axes, simulated_s: Array, measured_s: Array, latency: str) -> None:
    found: list[Array] = []
    for values_s, label, colour in ((simulated_s, "simulated", SIMULATED), (measured_s, "measured", MEASURED)):
        ordered = np.sort(values_s[np.isfinite(values_s)])
        draw_shares(ax, ordered, color=colour, lw=1.4, label=label)
        if len(ordered):
            found.append(ordered)
    if found and wants_log(found):
        ax.set_xscale("log")
        log_ticks(ax.xaxis, found)
    if found:
        ax.legend(fontsize=8.5, frameon=False)
    dress(ax, f"{latency.upper()}, s", "% of requests")
    set_title(ax, LATENCIES[latency])


def _over_arrivals(ax: Axes, arrivals_s: list[float], ours: Times, theirs: Times) -> None:
    for times, label, colour in ((theirs, "measured", MEASURED), (ours, "simulated", SIMULATED)):
        ax.plot(arrivals_s, times.ttft_s, ".", color=colour, ms=4, alpha=0.7, label=label)
    ax.legend(fontsize=8.5, frameon=False)
    dress(ax, "arrival, s", "TTFT, s")
    set_title(ax, "TTFT over the run")


def _against(ax: Axes, simulated_s: Array, measured_s: Array) -> None:
    both = np.concatenate([simulated_s, measured_s])
    draw_diagonal(ax, both[both > 0] if (both > 0).any() else np.ones(1))
    ax.plot(measured_s, simulated_s, ".", color=SIMULATED, ms=4, alpha=0.7)
    dress(ax, "measured end to end, s", "simulated end to end, s")
    set_title(ax, "Request against request")
