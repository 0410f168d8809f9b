"""Options of the stages at which sequences wait for tools."""

from math import inf
from typing import Literal

from sim.errors import UserError
from sim.frozen import frozen
from sim.parts.options import Only, option

Kept = Literal["preserve", "discard", "swap"]
"""What becomes of a sequence's KV while a tool works: it stays on the GPU, goes, or goes to the host."""
TTL_S = "seconds for which KV stays on the GPU after a call, and is then discarded (Continuum)"
KEEPS_PLACE = "a request whose KV was discarded comes before those that wait, not behind them, when the tool answers"


@frozen
class ToolCallOptions:
    """What becomes of KV while a tool works, and of the place in the queue of a request that lost it."""

    tool_kv: Literal["preserve", "discard", "swap", "ttl"] = option(
        "discard",
        "KV of a request that calls a tool: preserve (GPU), discard, swap (host), or ttl (preserve for tool-ttl-s)",
    )
    tool_ttl_s: float | None = option(None, TTL_S, only=Only("tool_kv", "ttl"))
    keeps_place: bool = option(False, KEEPS_PLACE)


def time_to_live(tool_kv: str, ttl_s: float | None) -> tuple[Kept, float]:
    """What becomes of KV at a call, and for how long, s. UserError where a time to live is asked for and not given."""
    if tool_kv != "ttl":
        return tool_kv, inf  # type: ignore[return-value]
    if ttl_s is None or not ttl_s > 0.0:
        raise UserError("tool-kv=ttl: needs tool-ttl-s=S, for how many seconds (above 0) KV stays after a call")
    return "preserve", ttl_s
