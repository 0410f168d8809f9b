"""Options of SGLang's scheduler, by SGLang's own names."""

from dataclasses import dataclass
from typing import Literal

from sim.parts.options import CheckedOptions, Only, option


@dataclass(frozen=True)
class RadixOptions(CheckedOptions):
    """The order of the queue, and how cautiously prompts are admitted."""

    schedule_policy: Literal["lpm", "dfs-weight", "fcfs"] = option(
        "lpm", "what comes first: the longest cached prefix, the heaviest branch of the tree, or the first to arrive"
    )
    lpm_longest: int = option(
        128,
        "lpm leaves a longer queue than this as it is; 0: sorts any",
        within=(0, 1e12),
        only=Only("schedule_policy", "lpm"),
    )
    schedule_conservativeness: float = option(
        1.0, "multiplies the least share of what runs that is kept room for", within=(0.0, 1e12)
    )
    max_new_tokens: int = option(
        0, "tokens that requests ask for; 0: what they generate, as where all stop there", within=(0, 1e12)
    )
