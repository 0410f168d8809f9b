"""Options of the stages at which sequences wait for tools."""

from dataclasses import dataclass
from typing import Literal

from sim.parts.options import option

Kept = Literal["preserve", "discard", "swap"]
"""What becomes of a sequence's KV while a tool works: it stays on the GPU, goes, or goes to the host."""
KEEPS_PLACE = "a request whose KV was discarded comes before those that wait, not behind them, when the tool answers"


@dataclass(frozen=True)
class ToolCallOptions:
    """What becomes of KV while a tool works, and of the place in the queue of a request that lost it."""

    tool_kv: Literal["preserve", "discard", "swap"] = option(
        "discard", "KV of a request that calls a tool: preserve (GPU), discard, or swap (host)"
    )
    keeps_place: bool = option(False, KEEPS_PLACE)
