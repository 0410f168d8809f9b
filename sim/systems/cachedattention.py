"""CachedAttention (Gao et al., "Cost-Efficient Large Language Model Serving for Multi-turn Conversations with
CachedAttention", USENIX ATC 2024).

A conversation's KV outlives its turns on the host (`--swap-space`). Of its next turn only the new tokens are prefilled,
while the KV of those before is loaded: layer l starts at max(layer l-1 done, its KV here), section 3.2.1. Turns are
saved as they end, beside later computation (3.2.2).

Assumed: vLLM 0.5.5's batches and blocks, the GPU's blocks a cache as well, the longest unused given up on either tier.
No disk below the host yet, and so none of the queue's look-ahead windows; no read buffer (a layer's copies begin with
the iteration); no truncated contexts. Loads that would be slower than computing again are not made, by price.
"""

from dataclasses import dataclass
from typing import ClassVar

from sim.systems.base import Asked, EngineLimits, Policy
from sim.systems.vllm055 import vllm055_limits


@dataclass(frozen=True)
class CachedAttention(Policy):
    """Sessions whose KV waits on the host for the next turn."""

    name: ClassVar[str] = "cachedattention"
    summary: ClassVar[str] = "CachedAttention: KV of ended turns on the host, loaded layer by layer by the next"
    default_swap_space_gib: ClassVar[float] = 128.0
    default_prefix_caching: ClassVar[bool] = True
    composition: ClassVar[dict[str, str]] = {
        "order": "fcfs",
        "batching": "vllm",
        "admission": "watermark",
        "memory": "tiered",
        "eviction": "recompute",
        "stage": "direct",
    }

    def engine_limits(self, asked: Asked) -> EngineLimits:
        return vllm055_limits(self, asked)
