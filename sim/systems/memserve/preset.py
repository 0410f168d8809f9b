"""MemServe (Hu et al., "MemServe: Context Caching for Disaggregated LLM Serving with Elastic Memory Pool", 2024; arXiv
2406.17565).

DistServe's pools, with a prefix cache in the GPU memory of every engine. By `caching`, as the paper builds it up:

- `prefill`: engines that prefill cache prompts;
- `both`: engines that decode cache too, and are sent only those blocks of a prompt that they have not;
- `return`: what they generate is sent back to where the prompt was computed, where the next turn hits it.

A global scheduler keeps a tree of the prompts, and the answers to come, that each engine was sent; a prompt goes to the
engine with the longest prefix of it, a sequence to be decoded likewise; ties to the fewest requests in flight.

Assumed: prompts are batched whole as vLLM 0.5.5 does; KV is sent when a prompt is complete; the trees forget nothing
(the paper's expire) and know nothing of what engines evict. What is sent back and finds no room is dropped. Not
modelled: the pool's host memory, and prefixes sent from one prefill engine to another where its cost model says so.
"""

from typing import ClassVar, Literal

from sim.frozen import frozen
from sim.parts.options import option, with_default
from sim.parts.stage.hand_over_options import HandOverOptions
from sim.systems.distserve import DistServe


@frozen
class MemPoolOptions:
    """Which engines cache."""

    caching: Literal["prefill", "both", "return"] = option(
        "return", "engines that prefill cache; both kinds do, and pull the rest alone; and answers are sent back"
    )


@frozen
class MemServe(MemPoolOptions, DistServe):
    """Disaggregated pools with caches on both sides."""

    waiting_share: float = with_default(HandOverOptions, "waiting_share", 1.0)
    blocking_pull: bool = with_default(HandOverOptions, "blocking_pull", False)

    name: ClassVar[str] = "memserve"
    summary: ClassVar[str] = "MemServe: prefill and decode pools, prefix caches on both sides, prompts routed to theirs"
    default_prefix_caching: ClassVar[bool] = True
    composition: ClassVar[dict[str, str]] = {
        **DistServe.composition,
        "admission": "watermark",
        "memory": "mempool",
        "eviction": "recompute",
    }
