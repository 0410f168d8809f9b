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


def rounded(values: Floats, digits: int = 4) -> list[float]:
    """As plain numbers with so many decimals, which make the page smaller."""
    return np.round(values, digits).tolist()
