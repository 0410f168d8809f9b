"""Names of the synthetic workloads and their options: apart from the generators, so that help needs no numpy."""

from collections.abc import Mapping
from types import MappingProxyType

WORKLOADS: Mapping[str, str] = MappingProxyType(
    {
        "fixed": "every request --input-len (512) and --output-len (128) tokens long",
        "uniform": "lengths uniform within 1 +- --range-ratio (0.5) of --input-len (512) and --output-len (128)",
        "azure-conv-2023": "lengths and arrivals fitted to Azure's conversation trace of 2023 (5.53 requests/s)",
        "sharegpt": "ShareGPT's published mean lengths, 161 and 338 tokens, heavy-tailed",
        "ramp": "ShareGPT's lengths at a rate going straight from --request-rate to --end-rate (4x)",
        "burst": "ShareGPT's lengths at --burst-factor (10) x the rate in the last --burst-duration (5 s) of 60 s",
        "sessions": "conversations of several turns, each prompt repeating all before it, and shared system prompts",
        "documents": "--documents (6) passages of a corpus, in any order, before a question of --input-len (64)",
    }
)

# The options that each workload takes beside those of `generate`'s own signature, with their defaults.
OPTIONS: Mapping[str, Mapping[str, float | None]] = {
    "uniform": {"range_ratio": 0.5},
    "ramp": {"end_rate": None},
    "burst": {"burst_factor": 10.0, "burst_period": 60.0, "burst_duration": 5.0},
    "sessions": {
        "turns": 4.0,
        "think_time": 30.0,
        "shared_prefix": 512,
        "prefix_groups": 1,
        "range_ratio": 0.5,
        "max_context": 32_768,
        "hash_block_tokens": 16,
    },
    "documents": {
        "documents": 6,
        "document_len": 512,
        "corpus": 1000,
        "skew": 1.0,
        "range_ratio": 0.5,
        "hash_block_tokens": 16,
    },
}
ABOUT: Mapping[str, str] = {
    "range_ratio": "lengths within 1 +- this of the mean",
    "end_rate": "requests/s at the end of a ramp, by default 4 times the first",
    "burst_factor": "rate in a burst over that outside",
    "burst_period": "seconds from burst to burst",
    "burst_duration": "seconds that a burst lasts",
    "turns": "mean turns of a session",
    "think_time": "mean seconds from a turn to the next",
    "shared_prefix": "tokens of a system prompt",
    "prefix_groups": "how many system prompts there are",
    "max_context": "sessions end before exceeding this many tokens",
    "documents": "passages in each prompt, all different",
    "document_len": "tokens of a passage",
    "corpus": "passages to draw from",
    "skew": "the passage of rank r is drawn with a weight of 1 / r^skew",
    "hash_block_tokens": "tokens of a prefix block",
}


def takers(option: str) -> list[str]:
    """The workloads that take an option."""
    return [name for name, options in OPTIONS.items() if option in options]


def option_help(option: str) -> str:
    """What an option is, which workloads take it, and its default."""
    names = takers(option)
    default = OPTIONS[names[0]][option]
    return f"{ABOUT[option]} ({', '.join(names)}{'' if default is None else f'; default {default:g}'})"


def option_type(option: str) -> type:
    """`int` or `float`."""
    return int if isinstance(OPTIONS[takers(option)[0]][option], int) else float
