"""`memory.png`: KV memory in use and how many requests decode, wait and are swapped out, over time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sim.results.figures.data import FigureRun, Floats, clock, waiting
from sim.results.figures.style import (
    INK,
    dress,
    new_figure,
    percent_axis,
    policy_colour,
    policy_legend,
    policy_width,
    ranking,
    set_title,
    show_nothing,
)

SERIES_BINS = 300


@dataclass(frozen=True)
class Panel:
    """One quantity over time, all policies in it."""

    title: str
    axis: str
    text: Callable[[float], str]
    steps: list[tuple[Floats, Floats] | None]
    """Of each policy times (s) and the values from then on; None where it has none."""
    always: bool = True


def draw_memory(runs: Sequence[FigureRun]) -> Figure:
    """KV memory in use and how many sequences decode, wait and are swapped out, over time."""
    shown = memory_panels(runs)
    figure = new_figure(12, 0.9 + 2.05 * len(shown))
    axes = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    unit_s, unit, end = clock(runs)
    for ax, panel in zip(axes, shown, strict=True):
        _over_time(ax, runs, panel, unit_s, end)
    percent_axis(axes[0], 100.0)
    axes[-1].set_xlabel(f"time, {unit}", fontsize=9, color=INK)
    policy_legend(figure, runs)
    return figure


def memory_panels(runs: Sequence[FigureRun]) -> list[Panel]:
    """What is shown of these runs, from top to bottom."""
    panels = [
        Panel("GPU KV blocks in use: mean", "% of the pool", lambda v: f"{v:.0f}\xa0%", _timed(runs, _gpu_share)),
        Panel("KV kept in host memory: peak", "GiB", lambda v: f"{v:.3g}\xa0GiB", _timed(runs, host_in_use_gib), False),
    ]
    decoding, swapped = (_timed(runs, _column(name)) for name in ("num_decoding", "num_swapped"))
    for title, steps, always in (
        ("Requests decoding: mean", decoding, True),
        ("Requests waiting for their prefill: peak", [waiting(run) for run in runs], True),
        ("Requests swapped out or parked: peak", swapped, False),
    ):
        panels.append(Panel(title, "requests", lambda v: f"{v:.0f}", steps, always=always))
    return [panel for panel in panels if panel.always or any(step and step[1].any() for step in panel.steps)]


def _timed(runs: Sequence[FigureRun], of: Callable[[FigureRun], Floats | None]) -> list[tuple[Floats, Floats] | None]:
    """What each run's time series says, with its times."""
    found = ((run.series, of(run)) for run in runs)
    return [None if series is None or values is None else (series["time_s"], values) for series, values in found]


def _column(name: str) -> Callable[[FigureRun], Floats | None]:
    return lambda run: None if run.series is None else run.series[name]


def _gpu_share(run: FigureRun) -> Floats | None:
    if run.series is None:
        return None
    free = run.series["gpu_free_blocks"]
    total = free + run.series["gpu_allocated_blocks"] - run.series["gpu_released_blocks"]
    return 100.0 * (1.0 - np.divide(free, total, out=np.ones_like(free), where=total > 0.0))


def host_in_use_gib(run: FigureRun) -> Floats | None:
    """KV in host memory per GPU over time, GiB.

    A pool unit is a block of one layer group; the GPU pool's size in units over its size in whole blocks gives the
    groups of a block, which both tiers share.
    """
    if run.series is None:
        return None
    series, scenario = run.series, run.result.scenario
    gpu_units = series["gpu_free_blocks"][0] + series["gpu_allocated_blocks"][0] - series["gpu_released_blocks"][0]
    groups = gpu_units / scenario.num_gpu_blocks
    blocks = np.maximum(0.0, scenario.num_cpu_blocks * groups - series["host_free_blocks"]) / (groups or 1.0)
    return blocks * scenario.block_bytes / 2**30


def _over_time(ax: Axes, runs: Sequence[FigureRun], panel: Panel, unit_s: float, end: float) -> None:
    """A line a policy: the mean over short stretches of time, within a band from least to most."""
    dress(ax, "", panel.axis)
    edges = np.linspace(0.0, end, SERIES_BINS + 1)
    told = []
    for i, run, time, values, last in step_functions(runs, panel, unit_s):
        x, mean, low, high = stretches(time, values, last, edges)
        ax.fill_between(x, low, high, color=policy_colour(i), alpha=0.18, lw=0, step="mid")
        look = {"color": policy_colour(i), "lw": 0.8 * policy_width(i), "marker": "" if x.size > 1 else "o"}
        ax.plot(x, mean, drawstyle="steps-mid", **look)
        weights = np.diff(np.r_[time, last])
        whole = float(np.average(values, weights=weights)) if weights.sum() > 0.0 else float(values.mean())
        told.append((run.label, whole if panel.title.endswith("mean") else float(values.max())))
    if not told:
        show_nothing(ax, "no time series was kept")
    ax.set_xlim(0.0, end)
    nothing = not any(steps and steps[1].any() for steps in panel.steps)
    ax.set_ylim(0.0, 1.0 if nothing else None)
    ax.yaxis.set_major_locator(MaxNLocator(4))
    set_title(ax, ranking(panel.title, told, panel.text) if told else panel.title.partition(":")[0], 120)


def step_functions(
    runs: Sequence[FigureRun], panel: Panel, unit_s: float
) -> Iterator[tuple[int, FigureRun, Floats, Floats, float]]:
    """Place and run of each policy that a panel shows, times and values, the last time; times in units of `unit_s`."""
    for place, (run, steps) in enumerate(zip(runs, panel.steps, strict=True)):
        if steps is not None:
            time = steps[0] / unit_s
            yield place, run, time, steps[1], max(run.result.makespan_s / unit_s, float(time[-1]))


def stretches(time: Floats, values: Floats, last: float, edges: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Middle, mean over time, least and most of a step function in each bin up to `last`; bins without samples hold."""
    bins = max(1, min(len(edges) - 1, int(np.searchsorted(edges, last))))
    first = int(np.clip(np.searchsorted(edges, time[0], side="right") - 1, 0, bins - 1))
    used = edges[first : bins + 1]
    # Integrate the step function exactly: its integral is piecewise linear with knots at the samples.
    knots, integral = np.r_[time, max(last, time[-1])], np.r_[0.0, np.cumsum(values * np.diff(np.r_[time, last]))]
    span = np.minimum(used[1:], knots[-1]) - np.maximum(used[:-1], knots[0])
    area = np.diff(np.interp(used, knots, integral))
    at_start = values[np.clip(np.searchsorted(time, used[:-1], side="right") - 1, 0, values.size - 1)]
    mean = np.divide(area, span, out=at_start.copy(), where=span > 1e-12)
    low, high = at_start.copy(), at_start.copy()
    which = np.clip(np.searchsorted(used, time, side="right") - 1, 0, len(used) - 2)
    np.minimum.at(low, which, values)
    np.maximum.at(high, which, values)
    return (used[1:] + used[:-1]) / 2, np.clip(mean, low, high), low, high
