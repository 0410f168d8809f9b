"""CachedAttention (Gao et al., "Cost-Efficient Large Language Model Serving for Multi-turn Conversations with
CachedAttention", USENIX ATC 2024).

A conversation's KV outlives its turns on the host (`--swap-space`) and below that on a disk. Of its next turn only the
new tokens are prefilled, while the KV of those before is loaded: layer l starts at max(layer l-1 done, its KV here),
section 3.2.1. Turns are saved as they end, beside later computation (3.2.2). Of the queue's first

    L_prefetch = C_host / S    and    L_evict = (C_host + C_disk) / S

requests, S the mean KV of a turn, the former have their KV fetched from the disk before their turn (3.3.1), and what
the latter will load gives way last on either tier, that of the last in the queue first (3.3.2).

Assumed: vLLM 0.5.5's batches and blocks, the GPU's blocks a cache as well; block by block, the longest unused given up
first of what no request waits for. What is saved goes to the disk at once, not when it leaves the host: the host can
then give way at any time, and beside a larger disk it holds nothing that the disk lacks. A prompt that is admitted
before its KV is on the host waits for the disk, and the iteration with it. No read buffer (a layer's copies begin with
the iteration). Contexts are not truncated: prompts that are too long are ignored, as in vLLM. Loads that would be
slower than computing again are not made, by price. The drive is the paper's 10 TB; its bandwidths, which differ from
drive to drive, are options.
"""

from typing import ClassVar

from sim.frozen import frozen
from sim.kv.tiered_options import TieredOptions
from sim.parts.options import with_default
from sim.systems.base import VLLM055, Policy
from sim.systems.vllm055 import vllm055_limits


@frozen
class CachedAttention(TieredOptions, Policy):
    """Sessions whose KV waits on the host or a disk for the next turn."""

    # The paper's 10 TB.
    disk_space: float = with_default(TieredOptions, "disk_space", 9313.0)

    name: ClassVar[str] = "cachedattention"
    summary: ClassVar[str] = "CachedAttention: KV of ended turns on host and disk, loaded layer by layer by the next"
    default_swap_space_gib: ClassVar[float] = 128.0
    default_prefix_caching: ClassVar[bool] = True
    composition: ClassVar[dict[str, str]] = {**VLLM055, "memory": "tiered"}

    engine_limits = vllm055_limits
