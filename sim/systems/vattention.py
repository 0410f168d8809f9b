"""vAttention (Prabhu et al., "vAttention: Dynamic Memory Management for Serving LLMs without PagedAttention", ASPLOS
2025; arXiv 2405.04437), after its public code, which stands on Sarathi-Serve.

KV is contiguous in virtual memory; the driver maps pages (`sim.kv.mapped`). What blocks are is decided by the page:
2 MiB hold the keys of 256 tokens of Llama-2-7B in one layer. vTensor (Xu et al., 2024; arXiv 2407.15309) maps pages
ahead beside the computation: `map-us=0`.

Assumed: 40 us to map a page of 2 MiB. What decodes take is mapped in time. A prompt that starts where more is mapped
than it needs leaves the rest unmapped. Kernels are those of the profile, whatever the memory: what contiguous KV saves
in them is not priced.
"""

from typing import ClassVar

from sim.frozen import frozen
from sim.kv.page_options import PageOptions
from sim.systems.base import VLLM055, Policy, chunked_limits


@frozen
class VAttention(PageOptions, Policy):
    """Sarathi's batches over pages of the driver."""

    name: ClassVar[str] = "vattention"
    summary: ClassVar[str] = "vAttention: contiguous virtual memory for KV, in pages that the driver maps"
    composition: ClassVar[dict[str, str]] = {**VLLM055, "batching": "sarathi", "memory": "mapped"}

    engine_limits = chunked_limits
