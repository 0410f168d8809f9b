"""Splitwise (Patel et al., "Splitwise: Efficient Generative LLM Inference Using Phase Splitting", ISCA 2024; arXiv
2311.18677).

One pool of machines computes prompts, another the tokens after the first. A prompt goes to the machine with the fewest
prompt tokens pending (join the shortest queue), its tokens to the one with the fewest requests. The KV of each layer is
sent while later layers are computed, so that only the last layer's copy, or what the link is too slow for, is seen:

    end = max(start of the copy + bytes / bandwidth,  end of the prompt + bytes / layers / bandwidth).

With `mixed-pool` machines of either pool do the other's work under pressure (`sim.topology.mixed_pool`). A machine that
can do nothing else decodes what it prefilled itself, so that two cannot wait for each other's memory.

A token machine without room at its first look gets all of it once there is, and until then the prompt machine keeps it.

Assumed: prompt machines batch as vLLM 0.5.5 does, whole prompts up to the token budget; a token machine that runs out
of blocks computes its last sequences again, as the vLLM that Splitwise extends does. Copies do not slow the computation
down, and a mixed machine computes prompts before it decodes. Memory taken counts prompts, not the tokens to come, which
splitwise-sim knows. Not modelled: whole transfers of short prompts.
"""

from typing import ClassVar

from sim.frozen import frozen
from sim.parts.options import with_default
from sim.parts.stage.hand_over_options import HandOverOptions, MixedPoolOptions
from sim.systems.distserve import DistServe


@frozen
class Splitwise(MixedPoolOptions, DistServe):
    """Prompts and tokens on machines of their own, KV sent layer by layer."""

    waiting_share: float = with_default(HandOverOptions, "waiting_share", 1.0)
    layer_wise: bool = with_default(HandOverOptions, "layer_wise", True)
    blocking_pull: bool = with_default(HandOverOptions, "blocking_pull", False)

    name: ClassVar[str] = "splitwise"
    summary: ClassVar[str] = "Splitwise: prompt and token pools, KV sent layer by layer"
    composition: ClassVar[dict[str, str]] = {
        **DistServe.composition,
        "admission": "watermark",
        "eviction": "recompute",
    }
