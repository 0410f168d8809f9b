"""The simulated twin over the live one: KV blocks over time, errors, TTFT and TPOT of every request, iterations."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gpu_runtime.twin.agreement import JUDGED, TOLERANCE, Agreement
from gpu_runtime.twin.iterations import KINDS, Pair
from sim.results.figures.data import FigureRun
from sim.results.figures.style import (
    COLOURS,
    FAINT,
    draw_diagonal,
    dress,
    new_figure,
    plain_text,
    set_title,
    show_nothing,
)
from sim.results.metrics import LATENCIES

SIMULATED, LIVE = COLOURS[0], COLOURS[1]


def draw_twin(
    label: str, simulated: FigureRun, live: Sequence[FigureRun], found: Sequence[Agreement], iterations: Sequence[Pair]
) -> Figure:
    """Six panels for one policy."""
    figure = new_figure(17.0, 8.0)
    axes = figure.subplots(2, 3)
    _draw_memory(axes[0][0], simulated, live)
    _draw_errors(axes[0][1], found)
    _draw_distribution(axes[1][0], simulated.ttft_s, [run.ttft_s for run in live], "ttft")
    _draw_distribution(axes[1][1], simulated.tpot_s, [run.tpot_s for run in live], "tpot")
    _draw_iterations(axes[0][2], axes[1][2], iterations)
    figure.suptitle(
        plain_text(f"twin:  {label}  |  {len(live)} live runs"), fontsize=8.5, color=FAINT, x=0.01, ha="left"
    )
    return figure


def _draw_memory(ax: Axes, simulated: FigureRun, live: Sequence[FigureRun]) -> None:
    for run, colour, label in [*((r, LIVE, "live") for r in live), (simulated, SIMULATED, "simulated")]:
        if run.series is None or not len(run.series["time_s"]):
            continue
        free = run.series["gpu_free_blocks"]
        held = run.series["gpu_allocated_blocks"] - run.series["gpu_released_blocks"]
        used = 100 * held / np.maximum(free + held, 1)
        ax.step(run.series["time_s"], used, where="post", color=colour, lw=1.2, alpha=0.8, label=label)
    _legend_once(ax)
    dress(ax, "s", "GPU KV blocks in use, %")
    set_title(ax, "KV blocks over time")


def _draw_errors(ax: Axes, found: Sequence[Agreement]) -> None:
    for row, agreement in enumerate(reversed(found)):
        allowed = 100 * TOLERANCE
        ax.barh(row, 2 * allowed, left=-allowed, height=0.7, color="#E4E4E4")
        colour = SIMULATED if agreement.agrees else LIVE
        ax.plot([100 * agreement.error], [row], "o", color=colour, ms=7)
    names = [f"{a.name}{' *' if a.field in JUDGED else ''}" for a in reversed(found)]
    ax.set_yticks(range(len(found)), names)
    ax.axvline(0.0, color=FAINT, lw=0.8)
    dress(ax, "simulated over live, % (grey: allowed)")
    set_title(ax, "Errors of the simulator")


def _draw_distribution(ax: Axes, simulated_s: np.ndarray, live_s: Sequence[np.ndarray], latency: str) -> None:
    for values, colour, label in [*((v, LIVE, "live") for v in live_s), (simulated_s, SIMULATED, "simulated")]:
        draw_shares(ax, np.sort(values[np.isfinite(values)]) * 1e3, color=colour, lw=1.3, alpha=0.8, label=label)
    _legend_once(ax)
    dress(ax, f"{latency.upper()}, ms", "% of requests")
    set_title(ax, LATENCIES[latency])


def draw_shares(ax: Axes, ordered: np.ndarray, **style: Any) -> None:  # noqa: ANN401 - matplotlib's
    """How many per cent are at most as large as each of these, which ascend; nothing of none."""
    if len(ordered):
        ax.step(ordered, 100 * (np.arange(len(ordered)) + 1) / len(ordered), where="post", **style)


def _draw_iterations(against: Axes, errors: Axes, pairs: Sequence[Pair]) -> None:
    """Those that both runs decided alike: one against the other, and how their errors are distributed."""
    set_title(against, "Iteration against iteration, of the same decision")
    set_title(errors, "Errors of iterations")
    aligned = [(p.live.kind, 1e3 * p.live.duration_s, 1e3 * p.simulated.duration_s) for p in pairs if p.simulated]
    if not aligned:
        for ax in (against, errors):
            show_nothing(ax, "no decision is common to both")
        return
    draw_diagonal(against, np.array([times for _, *times in aligned]))
    errors.axvspan(-100 * TOLERANCE, 100 * TOLERANCE, color="#E4E4E4")
    for kind, colour in zip(KINDS, COLOURS[2:], strict=False):
        live_ms, simulated_ms = np.array([times for name, *times in aligned if name == kind]).reshape(-1, 2).T
        if not len(live_ms):
            continue
        against.plot(live_ms, simulated_ms, ".", color=colour, ms=4, alpha=0.6, label=kind)
        error = np.sort(100 * (simulated_ms / live_ms - 1))
        draw_shares(errors, error, color=colour, lw=1.3, label=f"{kind}, {len(error)}")
    against.legend(fontsize=8.5, frameon=False)
    errors.legend(fontsize=8.5, frameon=False)
    dress(against, "live, ms", "simulated, ms")
    dress(errors, "simulated over live, % (grey: 10 %)", "% of iterations")


def _legend_once(ax: Axes) -> None:
    handles, labels = ax.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    if unique:
        ax.legend(unique.values(), unique.keys(), fontsize=8.5, frameon=False)
