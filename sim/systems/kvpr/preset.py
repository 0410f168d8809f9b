"""KVPR (Jiang et al., "Efficient LLM Inference with I/O-Aware Partial KV Cache Recomputation", 2024), on vLLM 0.5.5.

All KV is on the host, beside the inputs of all layers; every decode step brings it in layer by layer. Of the first l
tokens the inputs are copied, half as many bytes under multi-head attention, and projected while the KV of the others
arrives; l is the one with the least time (`sim.systems.kvpr.partial_recompute`), in whole blocks, and 0 where grouped
queries make inputs the larger.

Assumed: continuous batching (the paper generates in batches of fixed size); copies of a layer follow those of the one
before while it computes; host memory (`--swap-space`) holds KV and inputs; the decode's scratch is not counted.
"""

from typing import ClassVar

from sim.frozen import frozen
from sim.parts.options import option
from sim.systems.base import VLLM055, Policy
from sim.systems.vllm055 import vllm055_limits


@frozen
class PartialRecomputeOptions:
    """What decoding from the host can be told."""

    partial_recompute: bool = option(True, "make part of the KV from saved inputs; otherwise all of it is copied")


@frozen
class Kvpr(PartialRecomputeOptions, Policy):
    """Decoding from the host, a part of the KV made anew."""

    name: ClassVar[str] = "kvpr"
    summary: ClassVar[str] = "KVPR: KV on the host, a part recomputed while the rest arrives"
    default_swap_space_gib: ClassVar[float] = 256.0
    composition: ClassVar[dict[str, str]] = {
        **VLLM055,
        "memory": "hosted-layers",
        "eviction": "layer-offload",
        "stage": "partial-recompute",
    }

    engine_limits = vllm055_limits
