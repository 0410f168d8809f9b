"""Figures of one or several finished runs: latency distributions, why TTFT grows, memory over time, busy lanes.

Drawn with matplotlib's object API on the Agg canvas: no display, no pyplot, no global state. A policy has one colour in
all figures. Whatever a run does not have (no request completed, no time series) leaves its place empty.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from sim.files import make_folder
from sim.results.figures.data import FigureRun
from sim.results.figures.engines import draw_engines
from sim.results.figures.lanes import draw_lanes
from sim.results.figures.latency import draw_latency
from sim.results.figures.memory import draw_memory
from sim.results.figures.queueing import draw_queueing
from sim.results.figures.style import FAINT, plain_text, save_figure
from sim.results.report import origin, traffic
from sim.results.schema import Result

FIGURES: dict[str, Callable[[Sequence[FigureRun]], Figure]] = {
    "ttft_tpot.png": draw_latency,
    "queueing.png": draw_queueing,
    "memory.png": draw_memory,
    "lanes.png": draw_lanes,
    "engines.png": draw_engines,
}
"""File names and what draws them."""
ENGINES = "engines.png"
"""Drawn only where a run has several engines."""


def write_figures(folder: Path, runs: Sequence[FigureRun]) -> list[Path]:
    """Draw the figures as PNG (160 dpi) into `folder`; returns their paths, none without a run."""
    if not runs:
        return []
    make_folder(folder, "--out")
    several = any(run.engines for run in runs)
    drawn = {name: draw for name, draw in FIGURES.items() if several or name != ENGINES}
    return [_save(folder / name, draw(runs), runs[0].result) for name, draw in drawn.items()]


def _save(path: Path, figure: Figure, result: Result) -> Path:
    figure.suptitle(plain_text(_subject(result)), fontsize=8.5, color=FAINT, x=0.01, ha="left")
    return save_figure(path, figure)


def _subject(result: Result) -> str:
    """Model, GPU, traffic and where the times come from: the line above every figure."""
    scenario, profile = result.scenario, result.profile
    words = [
        f"{result.model_id} on {scenario.gpu}",
        f"tensor parallel {scenario.tp}" if scenario.tp > 1 else "",
        f"{len(result.engines)} engines" if result.engines else "",
        traffic(scenario),
        f"constants {profile.name} ({origin(profile)})",
    ]
    return ("live:  " if result.backend == "kvtwin-live" else "simulated:  ") + "  |  ".join(filter(None, words))
