"""`ExpertLayout`: which GPUs share the routed experts of a model, how, and what brings tokens to them."""

import msgspec

GPUS_OF_A_NODE = 8
ALL_GATHER, HIGH_THROUGHPUT, LOW_LATENCY = "allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency"
"""All-to-all backends that have prices, by vLLM's names (`--all2all-backend`)."""


class ExpertLayout(msgspec.Struct, frozen=True):
    """Routed experts over all GPUs of an engine: its data-parallel ranks share them, all else each rank has whole.

    Attributes:
        tp: GPUs of a rank.
        ranks: data-parallel ones.
        expert_parallel: whole experts on each GPU; else each GPU has a share of every expert's width.
        skew: how unlike experts are chosen, 0: all alike; the i-th as often as 1 / i^skew.
        seed: of the draw that says which experts are chosen most.
        backend: what dispatches and combines where all ranks decode.
        prefill_backend: the same where any rank prefills.
    """

    tp: int = 1
    ranks: int = 1
    expert_parallel: bool = False
    skew: float = 0.0
    seed: int = 0
    backend: str = ALL_GATHER
    prefill_backend: str = ALL_GATHER

    @property
    def gpus(self) -> int:
        """Those that share the experts."""
        return self.tp * self.ranks

    @property
    def width_split(self) -> int:
        """GPUs that share the width of one expert."""
        return 1 if self.expert_parallel else self.gpus
