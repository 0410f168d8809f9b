"""`adaptive`: this project's own policy, for the most requests a second that meet their SLOs.

Requests are worth the same and cost differently. It prices each (blocks or a seat over time, its context, its prompt),
serves in time the cheapest that fit the load, in order of arrival, and leaves the others to the time that is left.

- Order `triage`: classes by price, prediction and laxity; the price limit, up to which the load fits.
- Eviction `park`: sequences leave for the host beside the computation, or are computed again where that costs less;
  those on the host return by rank.
- Batching `paced`: vLLM v1's unified batches, decodes first, prompts in chunks as large as first tokens need; alone
  where decodes beside them cost more.
- Memory `paged`, with vLLM v1's prefix cache beside it.

What it costs: past the knee hopeless and dear requests wait long, so that P99 of TTFT rises; `patience-s` bounds it.
Known elsewhere: gain per resource (Andes, JITServe), decodes first (Sarathi), length history (Past-Future), swapping by
predicted length (FastServe). A knapsack's price limit with a prompt's share is, as far as we know, not.

Assumed: the output lengths that a predictor of that accuracy gives (none ships with an engine); host memory for parked
KV as large as LayerKV's. Blocks that several share are never moved: their owners are computed again.
"""

from typing import ClassVar

from sim.frozen import frozen
from sim.systems.adaptive.options import AdaptiveOptions
from sim.systems.base import Asked, EngineLimits, Policy
from sim.systems.vllm_v1 import VllmV1


@frozen
class Adaptive(AdaptiveOptions, Policy):
    """Triage on vLLM v1's batches."""

    name: ClassVar[str] = "adaptive"
    summary: ClassVar[str] = (
        "our own: the cheapest requests that fit first, by price and prediction, parked on the host"
    )
    default_prefix_caching: ClassVar[bool] = True
    num_null_blocks: ClassVar[int] = 1
    default_swap_space_gib: ClassVar[float] = 256.0
    composition: ClassVar[dict[str, str]] = {
        "order": "triage",
        "batching": "paced",
        "admission": "memory",
        "memory": "paged",
        "eviction": "park",
        "stage": "direct",
    }

    def engine_limits(self, asked: Asked) -> EngineLimits:
        return VllmV1().engine_limits(asked)
