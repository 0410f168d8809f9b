"""Runs of gaps between tokens, packed: what batches record, and `sim.engine.itl` reads."""

from collections.abc import Callable
from struct import Struct
from typing import Final

FLOATS_PER_RUN = 4
RUN = Struct(f"{FLOATS_PER_RUN}d")
gap_run: Final[Callable[[float, float, int, int], bytes]] = RUN.pack
"""Packs a run of gaps for `GapCollector.add`: gap_s, slope_s, count, weight. An array of floats would take three times
as long."""
