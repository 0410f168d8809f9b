"""Options of `memory=mempool`: MemServe's, and of any mix with it."""

from dataclasses import dataclass
from typing import Literal

from sim.parts.options import option


@dataclass(frozen=True)
class MemPoolOptions:
    """Which engines cache."""

    caching: Literal["prefill", "both", "return"] = option(
        "return", "engines that prefill cache; both kinds do, and pull the rest alone; and answers are sent back"
    )
