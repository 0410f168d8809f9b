"""Options of `infercept`, and of any mix with its stage."""

from dataclasses import dataclass
from typing import Literal

from sim.parts.options import Only, option
from sim.parts.stage.tool_call_options import KEEPS_PLACE, TTL_S


@dataclass(frozen=True)
class InferCeptOptions:
    """What becomes of KV while a tool works."""

    tool_kv: Literal["min-waste", "preserve", "discard", "swap", "ttl"] = option(
        "min-waste",
        "KV of a request that calls a tool: min-waste, preserve, discard, swap, or ttl (preserve for tool-ttl-s)",
    )
    tool_ttl_s: float | None = option(None, TTL_S, only=Only("tool_kv", "ttl"))
    known_durations: bool = option(
        True,
        "how long a tool takes is known when it is called; else KV stays until that has wasted as much as another way",
    )
    keeps_place: bool = option(True, KEEPS_PLACE)
