"""BatchLLM (Zheng et al., "BatchLLM: Optimizing Large Batched LLM Inference with Global Prefix Sharing and
Throughput-oriented Token Batching", 2024; arXiv 2412.03594).

For requests known in advance (`--request-rate inf`). They are one prefix tree, brought down to one level of prefixes;
those that share one are scheduled together, and groups by tokens to generate over tokens to compute
(`prefix_groups` has both rules). A prefix is computed once, kept while its group runs, and read once a
step for all that decode after it. Each iteration takes a token of each sequence that decodes, then prompts in chunks up
to the token budget; memory bounds how many run, not a number of seats.

Assumed:
- The engine is vLLM v1's (`unified`) with 1,024 seats, seldom all taken. The paper extends an older one.
- Lengths of answers are known; the paper predicts them.
- A prefix can be shared in the iteration that computes it.
- Its attention kernel is priced as ChunkAttention's: shared tokens are read once and computed for each.
- A request that arrives after the plan is made is planned when all of it has started.
"""

from typing import ClassVar

from sim.frozen import frozen
from sim.parts.batching.async_scheduling import AsyncScheduling
from sim.systems.base import Policy, chunked_limits


@frozen
class BatchLLM(AsyncScheduling, Policy):
    """Offline: prefixes planned over the whole batch."""

    name: ClassVar[str] = "batchllm"
    summary: ClassVar[str] = "BatchLLM: offline, groups by global prefixes, long answers first"
    default_prefix_caching: ClassVar[bool] = True
    default_max_num_seqs: ClassVar[int] = 1024
    composition: ClassVar[dict[str, str]] = {
        "order": "prefix-groups",
        "batching": "unified",
        "admission": "memory",
        "memory": "prefix-groups",
        "eviction": "recompute",
        "stage": "direct",
    }

    engine_limits = chunked_limits
