"""Options of the stage `hand-over`: DistServe's, and of any mix that hands over."""

from dataclasses import dataclass

from sim.errors import UserError
from sim.parts.options import Only, option


@dataclass(frozen=True)
class HandOverOptions:
    """When a decode engine pulls, and how KV travels."""

    waiting_share: float = option(
        0.05, "a decode engine pulls while sequences that do not decode yet hold less than this share of its blocks"
    )

    layer_wise: bool = option(
        False, "copy each layer's KV while later layers of the prompt are computed, if the decode engine has room"
    )

    blocking_pull: bool = option(False, "a decode engine computes nothing while it pulls")

    @property
    def usual_share(self) -> float:
        """The default of `waiting_share`, which systems have of their own."""
        return type(self).__dataclass_fields__["waiting_share"].default

    def __post_init__(self) -> None:
        if not 0.0 < self.waiting_share <= 1.0:
            raise UserError(f"waiting-share: {self.waiting_share} is not in (0, 1]; {self.usual_share} is its default")


@dataclass(frozen=True)
class MixedPoolOptions:
    """Whether engines of either pool take on the other's work (Splitwise)."""

    mixed_pool: bool = option(
        False, "engines of either pool also do the other's work under pressure, until they are idle"
    )

    max_pending_tokens: int = option(
        8192,
        "prompt tokens that may wait at an engine before another pool is asked (mixed-pool)",
        only=Only("mixed_pool"),
    )

    def __post_init__(self) -> None:
        if self.max_pending_tokens < 1:
            raise UserError(f"max-pending-tokens: {self.max_pending_tokens} must be 1 or more; splitwise-sim's is 8192")
