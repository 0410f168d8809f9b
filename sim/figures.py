"""Figures of one or several finished runs: latency distributions, why TTFT grows, memory over time, busy lanes.

Drawn with matplotlib's object API on the Agg canvas: no display, no pyplot, no global state. A policy has one colour in
all figures. Whatever a run does not have (no request completed, no time series) leaves its place empty.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from sim.files import make_folder, write_atomically
from sim.metrics import Goodput

if TYPE_CHECKING:
    from sim.simulate import Run

Floats = NDArray[np.float64]

DPI = 160
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette, which colour-blind readers tell apart, without its yellow (too pale for lines on white)."""
INK, FAINT = "#222222", "#6E6E6E"
CDF_POINTS = 4000
SCATTER_POINTS = 4000
ARRIVAL_BINS = 40
LANE_BINS = 60
SERIES_BINS = 300
LOG_RANGE = 30.0
"""Values that span more than this factor are drawn on a logarithmic axis."""
LANES = {
    "compute_busy_s": "GPU compute",
    "h2d_busy_s": "PCIe host to device",
    "d2h_busy_s": "PCIe device to host",
}
"""Columns of the time series and the names of the lanes in a result."""


@dataclass(frozen=True)
class FigureRun:
    """What the figures need of a run. Times in s, one per completed request.

    `ttft_s`, `queue_s`, `prefill_s` and `arrival_s` belong together element by element. Of runs too long for
    per-request arrays `prefill_s` is empty and `arrival_s` None, and the others are distributions without an order.
    """

    label: str
    result: dict[str, Any]
    series: dict[str, Floats] | None
    ttft_s: Floats
    tpot_s: Floats
    queue_s: Floats
    prefill_s: Floats
    arrival_s: Floats | None = None

    @staticmethod
    def of(run: "Run", result: dict[str, Any]) -> "FigureRun":
        """Copy the arrays out of a run that has ended."""
        log, kept = run.log, run.log.per_request
        label = str(result.get("policy") or run.setup.label)
        series = None
        if run.series is not None:
            series = {name: _floats(column) for name, column in run.series.columns.items()}
        if kept is None:
            distributions = (_floats(values) for values in (log.ttft_s, log.tpot_s, log.queue_s))
            return FigureRun(label, result, series, *distributions, prefill_s=np.empty(0))
        done = np.array([request_id not in kept.errors for request_id in kept.request_ids], dtype=bool)
        ttft_s, queue_s, arrival_s = (_floats(a)[done] for a in (kept.ttft_s, kept.queue_s, kept.arrival_s))
        return FigureRun(label, result, series, ttft_s, _floats(log.tpot_s), queue_s, ttft_s - queue_s, arrival_s)


def _floats(values: Any) -> Floats:  # noqa: ANN401 - any sequence of numbers
    return np.array(values, dtype=np.float64)


def write_figures(folder: Path, runs: Sequence[FigureRun]) -> list[Path]:
    """Draw the four figures as PNG (160 dpi) into `folder`; returns their paths, none without a run."""
    if not runs:
        return []
    make_folder(folder, "--out")
    return [_save(folder / name, draw(runs), runs[0].result) for name, draw in FIGURES.items()]


def _save(path: Path, figure: Figure, result: dict[str, Any]) -> Path:
    figure.suptitle(_plain(_subject(result)), fontsize=8.5, color=FAINT, x=0.01, ha="left")
    canvas = FigureCanvasAgg(figure)
    write_atomically(path, canvas.print_png)
    return path


def _subject(result: dict[str, Any]) -> str:
    """Model, GPU, traffic and where the times come from: the line above every figure."""
    scenario, profile = result.get("scenario") or {}, result.get("profile") or {}
    traffic = scenario.get("workload") or Path(scenario.get("trace") or "traffic").name
    rate = scenario.get("request_rate")
    tp = scenario.get("tp") or 1
    words = [
        f"{result.get('model_id') or scenario.get('model') or 'model'} on {scenario.get('gpu') or 'GPU'}",
        f"tensor parallel {tp}" if tp > 1 else "",
        traffic + (f" at {rate:g} requests/s" if rate else ""),
        f"constants {profile.get('name')} ({_status(profile)})" if profile else "",
    ]
    return "simulated:  " + "  |  ".join(filter(None, words))


def _status(profile: dict[str, Any]) -> str:
    return "measured" if profile.get("status") == "measured" else f"{profile.get('status')}, not measured"


# -- small helpers -----------------------------------------------------------------------------------------------------


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _width(index: int) -> float:
    """Later policies are drawn thinner: of equal curves the first still shows as a rim."""
    return max(1.0, 3.0 - 0.9 * index)


def _pale(colour: str, share: float = 0.4) -> tuple[float, float, float]:
    """The colour mixed with white, of which it keeps `share`."""
    red, green, blue = (1.0 - share * (1.0 - c) for c in to_rgb(colour))
    return red, green, blue


def _plain(text: str) -> str:
    """Text as matplotlib shows it verbatim: no mathematics, no glyphs that its font lacks."""
    return text.encode("latin-1", "replace").decode("latin-1").replace("$", r"\$")


def _short(label: str, width: int = 30) -> str:
    return _plain(label if len(label) <= width else label[: width - 3] + "...")


def _folded(label: str, width: int) -> str:
    """A label in at most three lines, broken between its options."""
    spaced = label.replace(":", ": ").replace(",", ", ")
    return fill(_plain(spaced), width, max_lines=3, placeholder="...", break_on_hyphens=False)


def _policy_legend(figure: Figure, runs: Sequence[FigureRun]) -> None:
    keys = [Line2D([], [], color=_colour(i), lw=2.2, label=_short(run.label, 60)) for i, run in enumerate(runs)]
    figure.legend(handles=keys, fontsize=9, frameon=False, loc="outside lower left", ncols=min(3, len(runs)))


def _title(ax: Axes, text: str, width: int) -> None:
    ax.set_title(fill(text, width, break_on_hyphens=False), fontsize=10.5, fontweight="bold", color=INK, loc="left")


def _dress(ax: Axes, x: str = "", y: str = "") -> None:
    ax.set_xlabel(x, fontsize=9, color=INK)
    ax.set_ylabel(y, fontsize=9, color=INK)
    ax.tick_params(labelsize=8.5, colors=INK)
    ax.grid(True, color="#E4E4E4", linewidth=0.7)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def _nothing(ax: Axes, why: str) -> None:
    ax.text(0.5, 0.5, why, transform=ax.transAxes, ha="center", va="center", fontsize=9, color=FAINT)


def _seconds(value_s: float) -> str:
    """A duration as one reads it; the unit does not part from its number where a title is broken into lines."""
    if abs(value_s) < 0.9995:
        return f"{value_s * 1e3:.3g}\xa0ms"
    return f"{value_s:.3g}\xa0s" if value_s < 999.5 else f"{value_s:,.0f}\xa0s"


def _time_unit(span_s: float) -> tuple[float, str]:
    """Seconds of the unit in which a time axis of that length reads best, and its name."""
    if span_s <= 600.0:
        return 1.0, "s"
    return (60.0, "min") if span_s <= 6 * 3600.0 else (3600.0, "h")


def _clock(runs: Sequence[FigureRun]) -> tuple[float, str, float]:
    """Unit of time in s, its name, and the last moment of any run in that unit."""
    ends = [float(run.series["time_s"][-1]) for run in runs if _has_series(run) and run.series is not None]
    ends += [float(run.result.get("makespan_s") or 0.0) for run in runs]
    end_s = max(ends, default=0.0)
    unit_s, name = _time_unit(end_s)
    return unit_s, name, max(end_s, 1e-3) / unit_s


def _has_series(run: FigureRun) -> bool:
    return run.series is not None and run.series["time_s"].size > 0


def _percent_axis(ax: Axes, top: float) -> None:
    ax.set_ylim(0.0, 1.04 * top)
    ticks = np.linspace(0.0, top, 5)
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])


def _share(value: float) -> str:
    return f"{value * 100:.3g}\xa0%"


def _ranking(what: str, values: Sequence[tuple[str, float]], text: Callable[[float], str]) -> str:
    """`what` and who has least and most of it."""
    if len(values) == 1:
        return f"{what} {text(values[0][1])}"
    low, high = min(values, key=lambda v: v[1]), max(values, key=lambda v: v[1])
    if text(low[1]) == text(high[1]):
        return f"{what} {text(low[1])} with each policy" if len(values) > 2 else f"{what} {text(low[1])} with both"
    return f"{what} {text(low[1])} with {_short(low[0])}, {text(high[1])} with {_short(high[0])}"


# -- ttft_tpot.png -----------------------------------------------------------------------------------------------------


def draw_latency(runs: Sequence[FigureRun]) -> Figure:
    """Cumulative distributions of TTFT and TPOT."""
    figure = Figure(figsize=(12, 5.2 + 0.22 * len(runs)), dpi=DPI, layout="constrained")
    left, right = figure.subplots(1, 2)
    words = (runs[0].result.get("scenario") or {}).get("goodput") or []
    slo = Goodput.parse([str(word) for word in words])
    _cdfs(left, runs, [run.ttft_s for run in runs], slo.ttft_s, "Time to first token", "TTFT")
    _cdfs(right, runs, [run.tpot_s for run in runs], slo.tpot_s, "Time per output token", "TPOT")
    left.set_ylabel("requests within that time, %", fontsize=9, color=INK)
    return figure


def _cdfs(
    ax: Axes, runs: Sequence[FigureRun], values_s: list[Floats], slo_s: float | None, name: str, short: str
) -> None:
    found = [np.sort(values) for values in values_s if values.size]
    unit_s, unit = (1e-3, "ms") if not found or max(v[-1] for v in found) < 1.0 else (1.0, "s")
    _dress(ax, f"{short}, {unit}")
    handles = []
    for i, (run, values) in enumerate(zip(runs, values_s, strict=True)):
        label = _short(run.label)
        if values.size:
            median_s, p99_s = np.percentile(values, (50, 99))
            x = np.sort(values)
            share = np.arange(1, x.size + 1) / x.size * 100.0
            kept = np.unique(np.linspace(0, x.size - 1, min(x.size, CDF_POINTS)).astype(int))
            x_steps, y_steps = np.r_[x[0], x[kept]] / unit_s, np.r_[0.0, share[kept]]
            ax.step(x_steps, y_steps, where="post", color=_colour(i), lw=_width(i))
            marks = np.array([median_s, p99_s]) / unit_s
            ax.plot(marks[:1], [50], "o", color=_colour(i), ms=7, mec="white", zorder=5)
            ax.plot(marks[1:], [99], "D", color=_colour(i), ms=6.5, mec="white", zorder=5)
            label += f": median {_seconds(median_s)}, P99 {_seconds(p99_s)}"
        else:
            label += ": no request"
        handles.append(Line2D([], [], color=_colour(i), lw=2.2, label=label))
    if not found:
        _nothing(ax, f"no completed request has a {short}")
    else:
        shown = [*found, np.array([slo_s])] if slo_s is not None else found
        if _wants_log(shown):
            _log_axis(ax, shown, unit_s)
    if slo_s is not None:
        ax.axvline(slo_s / unit_s, color=INK, ls="--", lw=1.1)
        handles.append(Line2D([], [], color=INK, ls="--", lw=1.1, label=f"SLO {_seconds(slo_s)}"))
    ax.set_ylim(-1, 102)
    texts = [str(handle.get_label()) for handle in handles]
    marks_key = tuple(Line2D([], [], ls="", marker=marker, color=FAINT) for marker in "oD")
    place = {"loc": "upper left", "bbox_to_anchor": (0, -0.12), "fontsize": 8.5, "frameon": False}
    ax.legend([*handles, marks_key], [*texts, "median, P99"], handler_map={tuple: HandlerTuple(None)}, **place)
    medians = [(r.label, float(np.median(v))) for r, v in zip(runs, values_s, strict=True) if v.size]
    _title(ax, _ranking(f"{name}: median", medians, _seconds) if medians else name, 62)


def _wants_log(found: list[Floats]) -> bool:
    low_s, high_s = min(v[0] for v in found), max(v[-1] for v in found)
    return bool(low_s > 0.0 and high_s / low_s > LOG_RANGE)


def _log_axis(ax: Axes, found: list[Floats], unit_s: float) -> None:
    ax.set_xscale("log")
    decades = np.log10(max(v[-1] for v in found) / min(v[0] for v in found))
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 3.3 else (1,), numticks=20))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())


# -- queueing.png ------------------------------------------------------------------------------------------------------


def draw_queueing(runs: Sequence[FigureRun]) -> Figure:
    """Mean TTFT split into queueing and prefill, and both against arrival time."""
    bars_inches = 0.9 + 0.62 * len(runs)
    figure = Figure(figsize=(12, 4.6 + bars_inches), dpi=DPI, layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(bars_inches, 3.7))
    bars = figure.add_subplot(grid[0, :])
    over_time = figure.add_subplot(grid[1, 0])
    shares = figure.add_subplot(grid[1, 1], sharex=over_time)
    _bars(bars, runs)
    _arrivals(over_time, shares, runs)
    _policy_legend(figure, runs)
    return figure


def _bars(ax: Axes, runs: Sequence[FigureRun]) -> None:
    longest_ms = max((float(run.result.get("mean_ttft_ms") or 0.0) for run in runs), default=0.0)
    unit_s, unit = (1.0, "s") if longest_ms >= 1e3 else (1e-3, "ms")
    _dress(ax, f"mean TTFT, {unit}")
    ax.grid(False, axis="y")
    shares = []
    for i, run in enumerate(runs):
        ttft_ms, queue_ms = run.result.get("mean_ttft_ms"), run.result.get("mean_queue_ms")
        if ttft_ms is None or queue_ms is None:
            ax.text(0.0, i, "  no completed request", va="center", fontsize=9, color=FAINT)
            continue
        ttft_s, queue_s = ttft_ms / 1e3, queue_ms / 1e3
        ax.barh(i, queue_s / unit_s, height=0.42, color=_colour(i))
        ax.barh(i, max(0.0, ttft_s - queue_s) / unit_s, left=queue_s / unit_s, height=0.42, color=_pale(_colour(i)))
        text = f" queueing {_seconds(queue_s)} + prefill {_seconds(max(0.0, ttft_s - queue_s))}"
        ax.text(0.0, i - 0.24, text, va="bottom", fontsize=9, color=INK)
        if ttft_s > 0.0:
            shares.append((run.label, queue_s / ttft_s))
    ax.set_yticks(range(len(runs)), [_folded(run.label, 26) for run in runs])
    ax.set_ylim(len(runs) - 0.6, -0.65)
    ax.set_xlim(left=0.0)
    keys = [Patch(color="#555555", label="queueing: arrival to first scheduled")]
    keys.append(Patch(color=_pale("#555555"), label="prefill: first scheduled to first token"))
    ax.legend(handles=keys, fontsize=8.5, frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    _title(ax, _ranking("Queueing's share of mean TTFT:", shares, _share) if shares else "Mean TTFT", 60)


def _arrivals(top: Axes, bottom: Axes, runs: Sequence[FigureRun]) -> None:
    paired = [(i, run, run.arrival_s) for i, run in enumerate(runs) if run.arrival_s is not None and run.arrival_s.size]
    end_s = max((float(arrival_s.max()) for *_, arrival_s in paired), default=0.0)
    unit_s, unit = _time_unit(end_s)
    end = max(end_s, 1e-3) / unit_s
    edges = np.linspace(0.0, end, ARRIVAL_BINS + 1)
    _dress(top, f"arrival of the request, {unit}", "TTFT, s")
    _dress(bottom, f"arrival of the request, {unit}", "queueing / TTFT, %")
    for i, run, arrival_s in paired:
        x = arrival_s / unit_s
        some = np.unique(np.linspace(0, x.size - 1, min(x.size, SCATTER_POINTS)).astype(int))
        top.plot(x[some], run.ttft_s[some], ".", ms=3, alpha=0.35, color=_colour(i), mec="none", rasterized=True)
        ttft, queue = (_bin_means(x, values, edges) for values in (run.ttft_s, run.queue_s))
        middle = (edges[1:] + edges[:-1]) / 2
        marker = "o" if np.isfinite(ttft).sum() < 2 else ""
        top.plot(middle, ttft, color=_colour(i), lw=_width(i), marker=marker)
        share = np.divide(queue, ttft, out=np.full_like(ttft, np.nan), where=ttft > 0.0) * 100.0
        bottom.plot(middle, share, color=_colour(i), lw=_width(i), marker=marker)
    if paired:
        if _wants_log([np.sort(run.ttft_s) for _, run, _ in paired]):
            top.set_yscale("log")
            top.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        for ax in (top, bottom):
            _nothing(ax, "no request to show")
    top.set_xlim(0.0, end)
    bottom.set_ylim(-3, 103)
    _title(top, "TTFT by arrival: dots are requests, lines means", 62)
    _title(bottom, "Share of TTFT spent waiting in the queue, by arrival", 62)


def _bin_means(x: Floats, values: Floats, edges: Floats) -> Floats:
    """Mean of the values in each bin of x; NaN in empty ones."""
    which = np.clip(np.searchsorted(edges, x, side="right") - 1, 0, len(edges) - 2)
    count = np.bincount(which, minlength=len(edges) - 1).astype(np.float64)
    total = np.bincount(which, weights=values, minlength=len(edges) - 1)
    return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)


# -- memory.png --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Panel:
    """One quantity over time, all policies in it."""

    title: str
    axis: str
    text: Callable[[float], str]
    values: list[Floats | None]
    always: bool = True


def draw_memory(runs: Sequence[FigureRun]) -> Figure:
    """KV memory in use and how many sequences decode, wait and are swapped out, over time."""
    host = [host_in_use(run) if _has_series(run) else None for run in runs]
    in_gib = all(unit == "GiB" for unit in (pair[1] for pair in host if pair is not None))
    host_unit = "GiB" if in_gib else "blocks"
    panels = [
        _Panel("GPU KV blocks in use: mean", "% of the pool", lambda v: f"{v:.0f}\xa0%", [_gpu_share(r) for r in runs]),
        _Panel(
            "KV kept in host memory: peak",
            host_unit,
            lambda v: f"{v:.3g}\xa0{host_unit}",
            [None if pair is None else pair[0] for pair in host],
            always=False,
        ),
    ]
    for column, title, always in (
        ("num_decoding", "Requests decoding: mean", True),
        ("num_waiting", "Requests waiting for their prefill: peak", True),
        ("num_swapped", "Requests swapped out or parked: peak", False),
    ):
        values = [run.series[column] if run.series is not None and _has_series(run) else None for run in runs]
        panels.append(_Panel(title, "requests", lambda v: f"{v:.0f}", values, always=always))
    shown = [panel for panel in panels if panel.always or any(v is not None and v.any() for v in panel.values)]
    figure = Figure(figsize=(12, 0.9 + 2.05 * len(shown)), dpi=DPI, layout="constrained")
    axes = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    unit_s, unit, end = _clock(runs)
    for ax, panel in zip(axes, shown, strict=True):
        _over_time(ax, runs, panel, unit_s, end)
    _percent_axis(axes[0], 100.0)
    axes[-1].set_xlabel(f"time, {unit}", fontsize=9, color=INK)
    _policy_legend(figure, runs)
    return figure


def _gpu_share(run: FigureRun) -> Floats | None:
    if run.series is None or not _has_series(run):
        return None
    free = run.series["gpu_free_blocks"]
    total = free + run.series["gpu_allocated_blocks"] - run.series["gpu_released_blocks"]
    return 100.0 * (1.0 - np.divide(free, total, out=np.ones_like(free), where=total > 0.0))


def host_in_use(run: FigureRun) -> tuple[Floats, str]:
    """KV in host memory per GPU over time and its unit: GiB, or blocks where a block's size is not known.

    A pool unit is a block of one layer group; the GPU pool's size in units over its size in whole blocks gives the
    groups of a block, which both tiers share.
    """
    series, scenario = run.series or {}, run.result.get("scenario") or {}
    free = series["host_free_blocks"]
    gpu_units = series["gpu_free_blocks"][0] + series["gpu_allocated_blocks"][0] - series["gpu_released_blocks"][0]
    gpu_blocks, host_blocks = scenario.get("num_gpu_blocks"), scenario.get("num_cpu_blocks")
    groups = gpu_units / gpu_blocks if gpu_blocks else 1.0
    total = host_blocks * groups if host_blocks is not None and gpu_blocks else free.max()
    blocks = np.maximum(0.0, total - free) / (groups or 1.0)
    block_bytes = scenario.get("block_bytes")
    return (blocks * block_bytes / 2**30, "GiB") if block_bytes and gpu_blocks else (blocks, "blocks")


def _over_time(ax: Axes, runs: Sequence[FigureRun], panel: _Panel, unit_s: float, end: float) -> None:
    """A line a policy: the mean over short stretches of time, within a band from least to most."""
    _dress(ax, "", panel.axis)
    edges = np.linspace(0.0, end, SERIES_BINS + 1)
    told = []
    for i, (run, values) in enumerate(zip(runs, panel.values, strict=True)):
        if values is None or run.series is None:
            continue
        time = run.series["time_s"] / unit_s
        last = max(float(run.result.get("makespan_s") or 0.0) / unit_s, float(time[-1]))
        x, mean, low, high = _stretches(time, values, last, edges)
        ax.fill_between(x, low, high, color=_colour(i), alpha=0.18, lw=0, step="mid")
        ax.plot(x, mean, color=_colour(i), lw=0.8 * _width(i), drawstyle="steps-mid", marker="" if x.size > 1 else "o")
        weights = np.diff(np.r_[time, last])
        whole = float(np.average(values, weights=weights)) if weights.sum() > 0.0 else float(values.mean())
        told.append((run.label, whole if panel.title.endswith("mean") else float(values.max())))
    if not told:
        _nothing(ax, "no time series was kept")
    ax.set_xlim(0.0, end)
    nothing = not any(values is not None and values.any() for values in panel.values)
    ax.set_ylim(0.0, 1.0 if nothing else None)
    ax.yaxis.set_major_locator(MaxNLocator(4))
    _title(ax, _ranking(panel.title, told, panel.text) if told else panel.title.partition(":")[0], 120)


def _stretches(time: Floats, values: Floats, last: float, edges: Floats) -> tuple[Floats, Floats, Floats, Floats]:
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


# -- lanes.png ---------------------------------------------------------------------------------------------------------


def draw_lanes(runs: Sequence[FigureRun]) -> Figure:
    """How busy each lane is over time: a row a policy, a column a lane."""
    figure = Figure(figsize=(12, 1.3 + 1.75 * len(runs)), dpi=DPI, layout="constrained")
    axes = figure.subplots(len(runs), len(LANES), sharex=True, sharey="col", squeeze=False)
    unit_s, unit, end = _clock(runs)
    edges = np.linspace(0.0, end * unit_s, LANE_BINS + 1)
    for column, (name, title) in enumerate(LANES.items()):
        top = 0.0
        for i, run in enumerate(runs):
            ax = axes[i, column]
            _dress(ax, f"time, {unit}" if i == len(runs) - 1 else "", "busy, % of the time" if not column else "")
            if run.series is None or not _has_series(run):
                _nothing(ax, "no time series was kept")
                continue
            busy = busy_shares(run, name, title, edges)
            ax.stairs(busy * 100.0, edges / unit_s, fill=True, color=_pale(_colour(i)))
            ax.stairs(busy * 100.0, edges / unit_s, color=_colour(i), lw=1.4)
            top = max(top, float(busy.max()) * 100.0)
            total_s = _lane_total(run, name, title)
            makespan_s = float(run.result.get("makespan_s") or 0.0)
            _title(ax, f"{title}: {_use(total_s, makespan_s)}" if not i else _use(total_s, makespan_s), 44)
        # 0 to 100 % would hide a lane that is hardly used; the scale is shared by the policies, so they compare.
        _percent_axis(axes[0, column], next(scale for scale in (4.0, 10.0, 20.0, 40.0, 100.0) if top <= scale + 1e-6))
        axes[0, column].set_xlim(0.0, end)
    for i, run in enumerate(runs):
        axes[i, -1].yaxis.set_label_position("right")
        axes[i, -1].set_ylabel(
            _folded(run.label, 27),
            fontsize=7.5,
            fontweight="bold",
            color=_colour(i),
            rotation=270,
            va="bottom",
        )
    return figure


def _use(total_s: float, makespan_s: float) -> str:
    if total_s <= 0.0:
        return "never used"
    return f"busy {_share(min(1.0, total_s / makespan_s))} of the time" if makespan_s > 0.0 else f"busy {total_s:.3g} s"


def _lane_total(run: FigureRun, name: str, title: str) -> float:
    """Busy seconds over the whole run: the result's, or the last sample's."""
    told = ((run.result.get("lanes") or {}).get(title) or {}).get("busy_s")
    sampled = float(run.series[name][-1]) if run.series is not None else 0.0
    return max(sampled, float(told)) if told is not None else sampled


def busy_shares(run: FigureRun, name: str, title: str, edges_s: Floats) -> Floats:
    """Share of each bin of time (edges in s) in which a lane is busy.

    The series' running totals are read at the end of an iteration and stamped with its start, so the total at a
    sample's time is the sample before's. What is booked beyond a bin's end is carried into the bins after it.
    """
    if run.series is None:
        return np.zeros(len(edges_s) - 1)
    time_s, busy_s = run.series["time_s"], run.series[name]
    last_s = max(float(run.result.get("makespan_s") or 0.0), float(time_s[-1]))
    totals_s = np.r_[0.0, busy_s[:-1], _lane_total(run, name, title)]
    booked_s = np.diff(np.interp(edges_s, np.r_[time_s, last_s], totals_s))
    shares, backlog_s = np.zeros(len(edges_s) - 1), 0.0
    for k, width_s in enumerate(np.diff(edges_s)):
        backlog_s += booked_s[k]
        shares[k] = min(1.0, backlog_s / width_s)
        backlog_s = max(0.0, backlog_s - width_s)
    return shares


FIGURES: dict[str, Callable[[Sequence[FigureRun]], Figure]] = {
    "ttft_tpot.png": draw_latency,
    "queueing.png": draw_queueing,
    "memory.png": draw_memory,
    "lanes.png": draw_lanes,
}
"""File names and what draws them."""
