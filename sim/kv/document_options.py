"""Options of `memory=documents` (CacheBlend's, Prompt Cache's), and of any mix with it."""

from sim.frozen import frozen
from sim.parts.options import CheckedOptions, option


@frozen
class DocumentOptions(CheckedOptions):
    """What is computed again of what is hit."""

    recompute_share: float = option(
        0.15, "share of the tokens hit that is computed again in each layer but the first; 0: none", within=(0.0, 1.0)
    )
