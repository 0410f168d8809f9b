"""InferCept (Abhyankar et al., "InferCept: Efficient Intercept Support for Augmented LLM Inference", ICML 2024).

A request that calls a tool pauses; its KV is preserved, discarded or swapped by least waste (`min_waste`), and it goes
on in its old place. What is computed again comes in chunks beside the decodes, as FastGen's batches have them; swaps
run beside the computation.

Assumed: a swap goes whole, not block by block within each iteration's share; it is hidden if it is no longer than the
next iteration. A sequence that comes back and finds no blocks waits for them while others run.
"""

from typing import ClassVar, Literal

from sim.frozen import frozen
from sim.parts.options import Only, option
from sim.parts.stage.tool_call_options import KEEPS_PLACE, TTL_S
from sim.systems.base import VLLM055, Policy, chunked_limits


@frozen
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


@frozen
class InferCept(InferCeptOptions, Policy):
    """Least waste while tools work."""

    name: ClassVar[str] = "infercept"
    summary: ClassVar[str] = "InferCept: KV of requests that call a tool preserved, discarded or swapped by least waste"
    default_swap_space_gib: ClassVar[float] = 64.0
    composition: ClassVar[dict[str, str]] = {**VLLM055, "batching": "fastgen", "stage": "min-waste"}

    engine_limits = chunked_limits
