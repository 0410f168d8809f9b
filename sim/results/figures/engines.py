"""`engines.png`: KV memory in use and requests of each of several engines over time."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sim.results.figures.data import FigureRun, Floats, clock, held
from sim.results.figures.style import INK, folded_label, new_figure, set_title, show_nothing

TIME_BINS = 240


def draw_engines(runs: Sequence[FigureRun]) -> Figure:
    """A row a policy: on the left how full each engine's KV memory is, on the right how many requests it has."""
    rows = [max(1.6, 0.8 + 0.22 * len(run.engines)) for run in runs]
    figure = new_figure(12, 0.6 + sum(min(5.0, row) for row in rows))
    axes = figure.subplots(len(runs), 2, sharex=True, squeeze=False, height_ratios=rows)
    unit_s, unit, end = clock(runs)
    middles_s = (np.arange(TIME_BINS) + 0.5) * end * unit_s / TIME_BINS
    # Policies share the scales, so that they compare.
    most = max((num_requests(e, middles_s).max(initial=1.0) for run in runs for e in run.engines), default=1.0)
    for i, run in enumerate(runs):
        for ax, title, of, top in (
            (axes[i, 0], "GPU KV blocks in use, %", kv_share, 100.0),
            (axes[i, 1], "requests waiting, decoding and swapped out", num_requests, most),
        ):
            ax.set_xlabel(f"time, {unit}" if i == len(runs) - 1 else "", fontsize=9, color=INK)
            if run.engines:
                _heat(figure, ax, np.array([of(engine, middles_s) for engine in run.engines]), end, top)
                set_title(ax, title)
            else:
                show_nothing(ax, "one engine, or no time series")
        axes[i, 0].set_ylabel(f"{folded_label(run.label, 27)}\nengine", fontsize=8, color=INK)
    return figure


def _heat(figure: Figure, ax: Axes, values: Floats, end: float, top: float) -> None:
    extent = (0.0, end, len(values) - 0.5, -0.5)
    image = ax.imshow(values, aspect="auto", interpolation="nearest", extent=extent, cmap="viridis", vmin=0.0, vmax=top)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=ax, pad=0.01)


def kv_share(engine: dict[str, Floats], time_s: Floats) -> Floats:
    """GPU KV blocks in use at each time, %."""
    free, taken, given = (held(engine, f"gpu_{name}_blocks", time_s) for name in ("free", "allocated", "released"))
    total = free + taken - given
    return 100.0 * (1.0 - np.divide(free, total, out=np.ones_like(free), where=total > 0.0))


def num_requests(engine: dict[str, Floats], time_s: Floats) -> Floats:
    """Requests that wait, decode or are swapped out at each time."""
    return sum((held(engine, f"num_{name}", time_s) for name in ("waiting", "decoding", "swapped")), np.zeros(1))
