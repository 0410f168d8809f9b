"""`ShortestPrefill`: the prompt with the least left to compute first, less what its wait weighs (PrefillOnly's order).

Du et al., "PrefillOnly: An Inference Engine for Prefill-only Workloads in Large Language Model Applications" (SOSP
2025; arXiv 2505.07203). What a prompt would hit is looked up anew in every step, so that a request whose prefix was
just computed goes next. Of two that wait, time does not change which is first: both weigh as much more for it.
"""

from typing import TYPE_CHECKING, ClassVar, Self

from sim.engine.sequence import Sequence
from sim.kv.tiers.worth import Worth
from sim.parts.order.shortest_prefill_options import ShortestPrefillOptions
from sim.systems.radix.cache_aware import CacheAware

if TYPE_CHECKING:
    from sim.systems.builder import Builder


class ShortestPrefill(CacheAware):
    """By seconds to compute what is not cached, alone and by price."""

    name: ClassVar[str] = "shortest-prefill"
    options: ClassVar[type | None] = ShortestPrefillOptions
    ranks_uncached: ClassVar[bool] = True

    @classmethod
    def build(cls, b: "Builder") -> Self:
        return cls(Worth.of(b), b.options(ShortestPrefillOptions).wait_weight)

    def __init__(self, worth: Worth, wait_weight: float) -> None:
        super().__init__()
        self.worth, self.wait_weight = worth, wait_weight

    def _rank(self, seq: Sequence) -> tuple[float, ...]:
        left_s = self.worth.computed_s(seq, self.memory.cached_tokens(seq))
        return (left_s + self.wait_weight * seq.request.arrival_s, seq.request.request_id)
