"""Options of RAGCache's order."""

from dataclasses import dataclass

from sim.parts.options import CheckedOptions, option


@dataclass(frozen=True)
class ReuseOptions(CheckedOptions):
    """How long requests that hit little wait."""

    reorder_window: int = option(
        32, "later requests that may start before one; 0: first come, first served", within=(0, 1e12)
    )
