"""Options of Mooncake's conductor, and of any mix with its store."""

from dataclasses import dataclass
from math import inf
from typing import Literal

from sim.parts.options import CheckedOptions, Only, option

REJECTS = Only("rejection", "early", "predicted")


@dataclass(frozen=True)
class ConductorOptions(CheckedOptions):
    """Which requests the conductor turns away, and when it moves a prefix."""

    balancing_threshold: float = option(
        1.0,
        "a prefix is copied from another node where that has more than this many times as much of it",
        within=(1.0, inf),
    )
    rejection: Literal["none", "early", "predicted"] = option(
        "none", "turn requests away that would break an SLO: never, by the load of now, or as predicted"
    )
    ttft_slo_ms: float = option(
        30_000.0,
        "time to first token that must be met, where requests are turned away, ms",
        within=(1e-6, inf),
        only=REJECTS,
    )
    tbt_slo_ms: float = option(100.0, "the same of the time between tokens, ms", within=(1e-6, inf), only=REJECTS)
    predicted_decode_s: float = option(
        20.0,
        "for how long a request is taken to decode (rejection=predicted), s",
        within=(1e-9, inf),
        only=Only("rejection", "predicted"),
    )
