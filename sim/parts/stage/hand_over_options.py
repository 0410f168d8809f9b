"""Options of the stage `hand-over`: DistServe's, and of any mix that hands over."""

from math import inf

from sim.frozen import frozen
from sim.parts.options import CheckedOptions, Only, option


@frozen
class HandOverOptions(CheckedOptions):
    """When a decode engine pulls, and how KV travels."""

    waiting_share: float = option(
        0.05,
        "a decode engine pulls while sequences that do not decode yet hold less than this share of its blocks",
        within=(1e-9, 1.0),
    )

    layer_wise: bool = option(
        False, "copy each layer's KV while later layers of the prompt are computed, if the decode engine has room"
    )

    blocking_pull: bool = option(False, "a decode engine computes nothing while it pulls")


@frozen
class MixedPoolOptions(CheckedOptions):
    """Whether engines of either pool take on the other's work (Splitwise)."""

    mixed_pool: bool = option(
        False, "engines of either pool also do the other's work under pressure, until they are idle"
    )

    max_pending_tokens: int = option(
        8192,
        "prompt tokens that may wait at an engine before another pool is asked (mixed-pool)",
        within=(1, inf),
        only=Only("mixed_pool"),
    )
