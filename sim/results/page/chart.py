"""`Chart`: a figure of the page as Plotly takes it, and the same numbers as a small table.

Colours are names that the page resolves for light and dark: `@p0` the first policy, `@c0` the first kind of time.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sim.results.figures.data import Floats

Json = dict[str, Any]
TIME_BINS = 120
"""Stretches that a run's time is cut into."""


@dataclass(frozen=True)
class Chart:
    """A figure: what it shows, how to read it, Plotly's data and layout, and a table with its main numbers."""

    name: str
    title: str
    caption: str
    data: list[Json]
    layout: Json
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)


def line(place: int, label: str, x: Floats, y: Floats, hover: str, digits: int = 4, **style: object) -> Json:
    """A line of the policy in that place, in its colour; `hover` is what Plotly shows of a point."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": label,
        "meta": place,
        "x": rounded(x),
        "y": rounded(y, digits),
        "line": {"color": f"@p{place}", "width": 2, **style},
        "hovertemplate": hover,
    }


def over_time(unit: str, end: float) -> Json:
    """The axis of a run's time."""
    return {"title": {"text": f"time, {unit}"}, "range": [0, end]}


def rounded(values: Floats, digits: int = 4) -> list[float]:
    """As plain numbers with so many decimals, which make the page smaller."""
    return np.round(values, digits).tolist()
