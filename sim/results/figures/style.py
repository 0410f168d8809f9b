"""How all figures look: a policy's colour and line, axes and titles, and how labels and numbers are written."""

from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import fill

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from sim.files import write_atomically
from sim.results.figures.data import FigureRun, Floats

DPI = 160
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#000000", "#56B4E9")
"""Okabe and Ito's palette, which colour-blind readers tell apart, without its yellow (too pale for lines on white)."""
MARKERS = "os^DvPX"
INK, FAINT = "#222222", "#6E6E6E"
LOG_RANGE = 30.0
"""Values that span more than this factor are drawn on a logarithmic axis."""


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of that size in inches, its layout fitted when drawn."""
    return Figure(figsize=(width, height), dpi=DPI, layout="constrained")


def save_figure(path: Path, figure: Figure) -> Path:
    """Write a figure as PNG, whole or not at all."""
    write_atomically(path, FigureCanvasAgg(figure).print_png)
    return path


def policy_colour(index: int) -> str:
    """The colour of the policy with that place in the comparison."""
    return COLOURS[index % len(COLOURS)]


def policy_marker(index: int) -> str:
    """Its marker: lines are told apart without colours too."""
    return MARKERS[index % len(MARKERS)]


def policy_width(index: int) -> float:
    """Later policies are drawn thinner: of equal curves the first still shows as a rim."""
    return max(1.0, 3.0 - 0.9 * index)


def pale(colour: str, share: float = 0.4) -> tuple[float, float, float]:
    """The colour mixed with white, of which it keeps `share`."""
    red, green, blue = (1.0 - share * (1.0 - c) for c in to_rgb(colour))
    return red, green, blue


def plain_text(text: str) -> str:
    """Text as matplotlib shows it verbatim: no mathematics, no glyphs that its font lacks."""
    return text.encode("latin-1", "replace").decode("latin-1").replace("$", r"\$")


def short_label(label: str, width: int = 30) -> str:
    """A label in one line, cut where it is longer than `width`."""
    return plain_text(label if len(label) <= width else label[: width - 3] + "...")


def folded_label(label: str, width: int) -> str:
    """A label in at most three lines, broken between its options."""
    spaced = label.replace(":", ": ").replace(",", ", ")
    return fill(plain_text(spaced), width, max_lines=3, placeholder="...", break_on_hyphens=False)


def policy_legend(figure: Figure, runs: Sequence[FigureRun]) -> None:
    """Name the policies' colours below the whole figure."""
    keys = [
        Line2D([], [], color=policy_colour(i), lw=2.2, label=short_label(run.label, 60)) for i, run in enumerate(runs)
    ]
    figure.legend(handles=keys, fontsize=9, frameon=False, loc="outside lower left", ncols=min(3, len(runs)))


def set_title(ax: Axes, text: str, width: int = 60) -> None:
    """Set a title over the axes, broken into lines of `width` characters."""
    ax.set_title(fill(text, width, break_on_hyphens=False), fontsize=10.5, fontweight="bold", color=INK, loc="left")


def dress(ax: Axes, x: str = "", y: str = "") -> None:
    """Name the axes and give them their ticks, grid and frame."""
    ax.set_xlabel(x, fontsize=9, color=INK)
    ax.set_ylabel(y, fontsize=9, color=INK)
    ax.tick_params(labelsize=8.5, colors=INK)
    ax.grid(True, color="#E4E4E4", linewidth=0.7)
    ax.set_axisbelow(True)
    # Labels reach further out, and measuring lines takes time.
    ax.spines[:].set_in_layout(False)
    ax.spines[["top", "right"]].set_visible(False)


def show_nothing(ax: Axes, why: str) -> None:
    """Say in the middle of empty axes why they are."""
    ax.text(0.5, 0.5, why, transform=ax.transAxes, ha="center", va="center", fontsize=9, color=FAINT)


def percent_axis(ax: Axes, top: float) -> None:
    """Scale the y axis from 0 to `top` percent, with five ticks."""
    ax.set_ylim(0.0, 1.04 * top)
    ticks = np.linspace(0.0, top, 5)
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])


def wants_log(found: list[Floats]) -> bool:
    """Whether sorted values, all above 0, span more than `LOG_RANGE`."""
    low_s, high_s = min(v[0] for v in found), max(v[-1] for v in found)
    return bool(low_s > 0.0 and high_s / low_s > LOG_RANGE)


def log_ticks(axis: Axis, found: list[Floats]) -> None:
    """Label a logarithmic axis of sorted values with plain numbers: 0.5, 1, 2, or powers of ten where it is long."""
    decades = np.log10(max(v[-1] for v in found) / min(v[0] for v in found))
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 3.3 else (1,), numticks=20))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def draw_diagonal(ax: Axes, values: Floats) -> None:
    """Where two runs agree, over the range of `values`; both axes logarithmic where that is long."""
    ends = np.array([values.min(), values.max()])
    ax.plot(ends, ends, color=FAINT, lw=0.8)
    if wants_log([ends]):
        ax.set_xscale("log")
        ax.set_yscale("log")
        for axis in (ax.xaxis, ax.yaxis):
            log_ticks(axis, [ends])


LEAST_S, LEAST_SHARE = 5e-7, 5e-6
"""Less is rounding, of sums that cancel, and reads as 0."""


def seconds_text(value_s: float) -> str:
    """A duration as one reads it; the unit does not part from its number where a title is broken into lines."""
    value_s = value_s if abs(value_s) >= LEAST_S else 0.0
    if abs(value_s) < 0.9995:
        return f"{value_s * 1e3:.3g}\xa0ms"
    return f"{value_s:.3g}\xa0s" if value_s < 999.5 else f"{value_s:,.0f}\xa0s"


def time_text(value_s: float) -> str:
    """A duration in a sentence, whose lines may be broken anywhere."""
    return seconds_text(value_s).replace("\xa0", " ")


def percent_text(value: float) -> str:
    """A share as a percentage; the sign does not part from its number."""
    return f"{value * 100 if abs(value) >= LEAST_SHARE else 0.0:.3g}\xa0%"


def ranking(what: str, values: Sequence[tuple[str, float]], text: Callable[[float], str]) -> str:
    """`what`, and which names have least and most of it."""
    if len(values) == 1:
        return f"{what} {text(values[0][1])}"
    low, high = min(values, key=lambda v: v[1]), max(values, key=lambda v: v[1])
    if text(low[1]) == text(high[1]):
        return f"{what} {text(low[1])} with each policy" if len(values) > 2 else f"{what} {text(low[1])} with both"
    return f"{what} {text(low[1])} with {short_label(low[0])}, {text(high[1])} with {short_label(high[0])}"
