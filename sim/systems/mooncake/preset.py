"""Mooncake (Qin et al., "Mooncake: Trading More Storage for Less Computation - A KVCache-centric Architecture for
Serving LLM Chatbot", FAST 2025; arXiv 2407.00079).

Engines that prefill and engines that decode, and one store over the host memory of the nodes that prefill. A conductor
sends each prompt to the engine where its first token is expected soonest (`sim.topology.conductor`, Algorithm 1), after
what the stores have of it, queues, and transfers between nodes. What a node has is loaded layer by layer while the rest
of the prompt is computed, and KV streams layer by layer to the decode engine. Under overload requests may be turned
away as they arrive.

Assumed: prompts are batched whole as vLLM 0.5.5 does (Mooncake splits long ones and pipelines chunks over nodes); an
engine is a node, whose store takes `--swap-space`, by default half of the host's memory; copies into the store cost
nothing; what decode engines generate is not stored, as the published traces do not name it. The paper gives no
threshold and no time of a decode for its prediction: both are options. Decode engines that run out of blocks compute
their last sequences again. Not modelled: chunked pipeline parallelism, SSDs, and the choice of the decode engine at
arrival (it is the least loaded when the prefill ends).
"""

from math import inf
from typing import ClassVar, Literal

from sim.frozen import frozen
from sim.parts.options import CheckedOptions, Only, option, with_default
from sim.parts.stage.hand_over_options import HandOverOptions
from sim.systems.distserve import DistServe

REJECTS = Only("rejection", "early", "predicted")


@frozen
class ConductorOptions(CheckedOptions):
    """Which requests the conductor turns away, and when it moves a prefix."""

    balancing_threshold: float = option(
        1.0,
        "a prefix is copied from another node where that has more than this many times as much of it",
        within=(1.0, inf),
    )
    rejection: Literal["none", "early", "predicted"] = option(
        "none", "turn requests away that would break an SLO: never, by the load of now, or as predicted"
    )
    ttft_slo_ms: float = option(
        30_000.0,
        "time to first token that must be met, where requests are turned away, ms",
        within=(1e-6, inf),
        only=REJECTS,
    )
    tbt_slo_ms: float = option(100.0, "the same of the time between tokens, ms", within=(1e-6, inf), only=REJECTS)
    predicted_decode_s: float = option(
        20.0,
        "for how long a request is taken to decode (rejection=predicted), s",
        within=(1e-9, inf),
        only=Only("rejection", "predicted"),
    )


@frozen
class Mooncake(ConductorOptions, DistServe):
    """Disaggregated pools around a global store of KV."""

    waiting_share: float = with_default(HandOverOptions, "waiting_share", 1.0)
    layer_wise: bool = with_default(HandOverOptions, "layer_wise", True)
    blocking_pull: bool = with_default(HandOverOptions, "blocking_pull", False)

    name: ClassVar[str] = "mooncake"
    summary: ClassVar[str] = "Mooncake: prefill and decode pools around a global KV store, early rejection"
    composition: ClassVar[dict[str, str]] = {
        **DistServe.composition,
        "admission": "watermark",
        "memory": "stored",
        "eviction": "recompute",
    }
    default_swap_space_gib: ClassVar[float] = 1 << 20
