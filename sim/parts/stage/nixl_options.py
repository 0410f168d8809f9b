"""Options of the stage `nixl`."""

from math import inf

from sim.frozen import frozen
from sim.parts.options import CheckedOptions, option


@frozen
class NixlOptions(CheckedOptions):
    """Which prompts are prefilled where they decode."""

    local_prefill_tokens: int = option(
        0,
        "prompts with at most so many tokens that the engine that decodes has not cached are prefilled there",
        within=(0, inf),
    )
