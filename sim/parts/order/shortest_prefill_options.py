"""Options of `order=shortest-prefill`."""

from sim.frozen import frozen
from sim.parts.options import CheckedOptions, option


@frozen
class ShortestPrefillOptions(CheckedOptions):
    """What a wait weighs."""

    wait_weight: float = option(
        0.1, "seconds of computing that a second of waiting makes up for (assumed); 0: none", within=(0.0, 1e9)
    )
