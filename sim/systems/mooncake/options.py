"""Options of Mooncake's conductor, and of any mix with its store."""

from dataclasses import dataclass
from typing import Literal

from sim.errors import UserError
from sim.parts.options import Only, option

REJECTS = Only("rejection", "early", "predicted")


@dataclass(frozen=True)
class ConductorOptions:
    """Which requests the conductor turns away, and when it moves a prefix."""

    balancing_threshold: float = option(
        1.0, "a prefix is copied from another node where that has more than this many times as much of it"
    )
    rejection: Literal["none", "early", "predicted"] = option(
        "none", "turn requests away that would break an SLO: never, by the load of now, or as predicted"
    )
    ttft_slo_ms: float = option(
        30_000.0, "time to first token that must be met, where requests are turned away, ms", only=REJECTS
    )
    tbt_slo_ms: float = option(100.0, "the same of the time between tokens, ms", only=REJECTS)
    predicted_decode_s: float = option(
        20.0, "for how long a request is taken to decode (rejection=predicted), s", only=Only("rejection", "predicted")
    )

    def __post_init__(self) -> None:
        if not self.balancing_threshold >= 1.0:
            raise UserError(f"balancing-threshold: {self.balancing_threshold} must be 1 or more; 1 takes the longest")
        for name in ("ttft_slo_ms", "tbt_slo_ms", "predicted_decode_s"):
            if not getattr(self, name) > 0.0:
                raise UserError(f"{name.replace('_', '-')}: {getattr(self, name)} must be more than 0")
