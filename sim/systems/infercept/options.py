"""Options of `infercept`, and of any mix with its stage."""

from dataclasses import dataclass
from typing import Literal

from sim.parts.options import option
from sim.parts.stage.tool_call_options import KEEPS_PLACE


@dataclass(frozen=True)
class InferCeptOptions:
    """What becomes of KV while a tool works."""

    tool_kv: Literal["min-waste", "preserve", "discard", "swap"] = option(
        "min-waste", "KV of a request that calls a tool: min-waste, preserve, discard or swap"
    )
    known_durations: bool = option(
        True,
        "how long a tool takes is known when it is called; else KV stays until that has wasted as much as another way",
    )
    keeps_place: bool = option(True, KEEPS_PLACE)
