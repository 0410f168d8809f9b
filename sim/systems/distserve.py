"""DistServe (Zhong et al., "DistServe: Disaggregating Prefill and Decoding for Goodput-optimized LLM Serving", OSDI
2024; arXiv 2401.09670), after its public code.

One pool of engines prefills, another decodes, each with its own tensor parallelism, so that neither phase delays the
other and each is given the GPUs it needs. A prompt goes to the prefill engine with the fewest prompt tokens waiting and
is computed first come, first served; a request of one token ends there. Then the least loaded decode engine is told of
it and pulls its KV when

    blocks of those pulled that do not decode yet < waiting_share x blocks,  and its own fit.

Until the copy has ended the KV stays on the prefill engine, whose memory a slow decode pool thereby fills: prefills
wait. A copy takes bytes / bandwidth of the two engines' links, each of which carries one copy at a time.

Nothing is computed while KV is pulled, and with stages it is pulled when they are empty (`sim.clock.pipeline`).

Assumed: prefill engines batch as vLLM 0.5.5 does, whole prompts up to the token budget. A decode engine that runs out
of blocks swaps its last sequences to the host, as DistServe does. Copies do not share links with all-reduces. Not
modelled: the placement search.
"""

from typing import ClassVar

from sim.frozen import frozen
from sim.parts.options import with_default
from sim.parts.stage.hand_over_options import HandOverOptions
from sim.systems.base import VLLM055, Policy, whole_prompt_limits


@frozen
class DistServe(HandOverOptions, Policy):
    """Prefill and decode on engines of their own."""

    blocking_pull: bool = with_default(HandOverOptions, "blocking_pull", True)

    name: ClassVar[str] = "distserve"
    summary: ClassVar[str] = "DistServe: prefill and decode pools, KV pulled over a link"
    composition: ClassVar[dict[str, str]] = {**VLLM055, "admission": "memory", "eviction": "swap", "stage": "hand-over"}

    engine_limits = whole_prompt_limits
