"""`map`: over two parameters, which policy wins and by how much.

The study is one with a table `[map]`: policies, two axes, and a third if wanted, a panel a value. Without axes it is
prompt length against PCIe bandwidth.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter
from msgspec import Struct

from sim.errors import UserError
from sim.files import write_atomically
from sim.results.figures.style import FAINT, INK, new_figure, pale, plain_text, policy_colour, save_figure, set_title
from sim.results.report import METRICS
from sim.study.axes import Study, read_study
from sim.study.figures import shown, with_unit
from sim.study.sweep import told_where
from sim.study.tables import Frame

DEFAULT_AXES = {
    "input-len": {"log": [500, 16000], "num": 6},
    "profile-pcie-bytes-per-s": {"log": [1.6e9, 5e10], "num": 6},
}
"""Prompts up to 16,000 tokens; links from a laptop's to PCIe 5.0 x16."""
DEFAULT_METRIC = "request_goodput"
LESS_IS_BETTER = {metric.key: metric.less_is_better for metric in METRICS}
TIE = 0.01
"""Relative difference up to which no policy wins."""
MUCH = 2.0
"""Ratio to the second from which a winner's colour is full."""
NO_POLICY = ""
MILLION = 1e6
"""Numbers from which a tick has a prefix: 5.0 G."""


class Regimes(Struct, frozen=True):
    """What a map is over: its study, the two axes, the third if there is one, and what decides."""

    study: Study
    x: str
    y: str
    panel: str | None
    metric: str


class Cell(Struct, frozen=True):
    """One place of the map: the winner (`NO_POLICY`: a tie, or no run ended), the ratio of the best to the second."""

    winner: str
    ratio: float
    values: dict[str, float]


def read_map(table: Mapping[str, Any], where: str) -> Regimes:
    """What a study with `[map]` asks for. UserError unless there are several policies and two or three axes."""
    if "sweep" in table:
        raise UserError(f"{where}: a map has its axes in [map.grid] in place of [sweep.grid]")
    own = table.get("map", {})
    if isinstance(own, dict) and not {"grid", "zip", "random"} & own.keys():
        table = {**table, "map": {**own, "grid": DEFAULT_AXES}}
    study = read_study(table, "map", where, {"metric": str})
    metric = study.extra.get("metric", DEFAULT_METRIC)
    if LESS_IS_BETTER.get(metric) is None:
        better = ", ".join(key for key, less in LESS_IS_BETTER.items() if less is not None)
        raise UserError(f"{where}: map.metric = {metric!r} is not one of {better}")
    if metric == DEFAULT_METRIC and not study.fixed.get("goodput"):
        raise UserError(
            f"{where}: goodput needs SLOs: write goodput = ['ttft:3000', 'tpot:200'], or another map.metric"
        )
    axes = [name for name in study.axes if name != "policy"]
    if "policy" not in study.axes or len(axes) not in (2, 3) or study.drawn:
        raise UserError(f"{where}: a map has two or more policies and two axes in [map.grid], or three: it has {axes}")
    return Regimes(study, axes[0], axes[1], axes[2] if len(axes) == 3 else None, metric)


def cells(regimes: Regimes, means: Frame) -> dict[tuple[object, ...], Cell]:
    """The winner at each place, (x, y) or (x, y, panel), of the means over the repeats."""
    names = [name for name in (regimes.x, regimes.y, regimes.panel) if name is not None]
    found = {}
    for place, part in means.groupby(names, sort=False):
        values = {row["policy"]: float(row[regimes.metric]) for _, row in part.iterrows()}
        found[tuple(place)] = _cell(values, bool(LESS_IS_BETTER[regimes.metric]))
    return found


def _cell(values: dict[str, float], less: bool) -> Cell:
    known = sorted(((v, policy) for policy, v in values.items() if not np.isnan(v)), reverse=not less)
    if not known or (len(known) > 1 and known[0][0] == known[1][0]):
        return Cell(NO_POLICY, 1.0, values)
    best, winner = known[0]
    if len(known) == 1:
        return Cell(winner, float("inf"), values)
    ends = (known[1][0], best) if less else (best, known[1][0])
    ratio = ends[0] / ends[1] if ends[1] else float("inf")
    return Cell(winner if ratio > 1.0 + TIE else NO_POLICY, ratio, values)


def lines(regimes: Regimes, found: Mapping[tuple[object, ...], Cell]) -> Iterator[str]:
    """How many places each policy wins, and where by most."""
    wins: dict[str, list[tuple[float, tuple[object, ...]]]] = {}
    for place, cell in found.items():
        wins.setdefault(cell.winner, []).append((cell.ratio, place))
    yield f"{shown(regimes.metric)} over {len(found)} places:"
    for winner, own in sorted(wins.items(), key=lambda item: -len(item[1])):
        if winner == NO_POLICY:
            yield f"  no policy ahead by more than {TIE:.0%}: {len(own)}"
            continue
        ratio, place = max(own, key=lambda item: item[0])
        names = (regimes.x, regimes.y, regimes.panel)
        where = ", ".join(f"{shown(n)} {_tick(value)}" for n, value in zip(names, place, strict=False) if n is not None)
        most = "where no other has any" if ratio == float("inf") else f"at most {ratio:.3g} times the second"
        yield f"  {winner}: {len(own)}, {most} ({where})"


def draw(regimes: Regimes, found: Mapping[tuple[object, ...], Cell]) -> Figure:
    """The map: a cell's colour is the winner's, paler where it is little ahead; its number the ratio to the second."""
    policies = list(dict.fromkeys(policy for cell in found.values() for policy in cell.values))
    panels = list(dict.fromkeys(place[2] for place in found if len(place) > 2)) or [None]
    xs, ys = (sorted({place[i] for place in found}, key=_order) for i in (0, 1))
    width = max(5.0, 0.75 * len(xs) + 2.2)
    figure = new_figure(min(18.0, width * len(panels)), max(3.4, 0.5 * len(ys) + 1.9))
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)
    for ax, panel in zip(grid.flat, panels, strict=True):
        _panel(ax, regimes, found, xs, ys, panel, policies)
    grid[0, 0].set_ylabel(with_unit(regimes.y), fontsize=9, color=INK)
    handles = [Patch(color=policy_colour(i), label=plain_text(policy)) for i, policy in enumerate(policies)]
    handles.append(Patch(color="#EEEEEE", label=f"no policy ahead by {TIE:.0%}"))
    figure.legend(handles=handles, fontsize=9, frameon=False, loc="outside lower left", ncols=4)
    better = "least" if LESS_IS_BETTER[regimes.metric] else "most"
    title = f"The policy with the {better} {shown(regimes.metric)}, and by what factor it is before the second"
    figure.suptitle(plain_text(title), fontsize=9, color=FAINT, x=0.01, ha="left")
    return figure


def _panel(
    ax: Axes, regimes: Regimes, found: Mapping[tuple[object, ...], Cell], xs: Sequence[object], ys: Sequence[object],
    panel: object, policies: Sequence[str],
) -> None:  # fmt: skip
    image = np.ones((len(ys), len(xs), 3))
    for row, y in enumerate(ys):
        for column, x in enumerate(xs):
            cell = found.get((x, y) if panel is None else (x, y, panel))
            if cell is None:
                continue
            image[row, column] = _colour(cell, policies)
            text = "" if cell.winner == NO_POLICY else "only" if cell.ratio > 1e3 else f"{cell.ratio:.2f}"
            ax.text(column, row, text, ha="center", va="center", fontsize=8, color=INK)
    ax.imshow(image, origin="lower", aspect="auto")
    ax.set_xticks(range(len(xs)), [_tick(x) for x in xs], rotation=30, fontsize=8.5)
    ax.set_yticks(range(len(ys)), [_tick(y) for y in ys], fontsize=8.5)
    ax.set_xlabel(with_unit(regimes.x), fontsize=9, color=INK)
    if panel is not None:
        set_title(ax, plain_text(f"{shown(regimes.panel or '')} {panel}"), 40)


def _colour(cell: Cell, policies: Sequence[str]) -> tuple[float, float, float]:
    if cell.winner == NO_POLICY:
        return to_rgb("#EEEEEE")
    share = 0.25 + 0.6 * min(1.0, (cell.ratio - 1.0) / (MUCH - 1.0))
    return pale(policy_colour(policies.index(cell.winner)), share)


def _order(value: Any) -> tuple[bool, Any]:  # noqa: ANN401 - numbers before words
    return isinstance(value, str), value


def _tick(value: object) -> str:
    if not isinstance(value, int | float | np.number):
        return plain_text(str(value))
    return f"{value:,.6g}" if value < MILLION else EngFormatter(places=1)(float(value))


def write(folder: Path, regimes: Regimes, means: Frame) -> dict[tuple[object, ...], Cell]:
    """Write `map.csv` (a row a place: winner, ratio, each policy's value) and `map.png`; returns the cells."""
    found = cells(regimes, means)
    names = [name for name in (regimes.x, regimes.y, regimes.panel) if name is not None]
    rows = [
        dict(zip(names, place, strict=True)) | {"winner": cell.winner or None, "ratio": cell.ratio} | cell.values
        for place, cell in found.items()
    ]
    with told_where(folder, "the runs are kept: make room and give the same command again"):
        write_atomically(folder / "map.csv", pd.DataFrame(rows).to_csv(index=False).encode())
        save_figure(folder / "map.png", draw(regimes, found))
    return found
