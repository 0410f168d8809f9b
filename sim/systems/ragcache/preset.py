"""RAGCache (Jin et al., "RAGCache: Efficient Knowledge Caching for Retrieval-Augmented Generation", 2024; arXiv
2404.12457).

KV of retrieved passages is kept on the GPU and the host in a tree of prefixes: passages in another order are others.
On the host the leaf of least clock + uses x cost / size gives way (PGDSF, 5.1). Of the requests that wait, the one with
the most cached tokens for each that it has to compute is next; none is overtaken by more than `reorder-window` (5.2).

Assumed: vLLM 0.5.5's batches. Chunks are blocks, not passages, and their cost is that of the request that computed
them. The GPU's part of the tree is vLLM's prefix cache, which gives up what was unused the longest. What a request
leaves is copied to the host when it ends, so that the GPU can give it up at once (the paper's swap out only once).
Loads go layer by layer, unless computing again is sooner. Retrieval takes no time here, so there is nothing for the
paper's speculative pipelining to hide.
"""

from typing import ClassVar, Literal

from sim.frozen import frozen
from sim.kv.tiered_options import TieredOptions
from sim.parts.options import CheckedOptions, option, with_default
from sim.systems.base import VLLM055, Policy
from sim.systems.vllm055 import vllm055_limits


@frozen
class ReuseOptions(CheckedOptions):
    """How long requests that hit little wait."""

    reorder_window: int = option(
        32, "later requests that may start before one; 0: first come, first served", within=(0, 1e12)
    )


@frozen
class RagCache(ReuseOptions, TieredOptions, Policy):
    """A tree of passages on GPU and host, kept by what they save."""

    replacement: Literal["lru", "pgdsf"] = with_default(TieredOptions, "replacement", "pgdsf")

    name: ClassVar[str] = "ragcache"
    summary: ClassVar[str] = "RAGCache: prefixes on GPU and host, kept by uses and cost, the most reused first"
    default_swap_space_gib: ClassVar[float] = 128.0
    default_prefix_caching: ClassVar[bool] = True
    composition: ClassVar[dict[str, str]] = {**VLLM055, "memory": "tiered", "order": "most-reused"}

    engine_limits = vllm055_limits
