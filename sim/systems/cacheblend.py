"""CacheBlend (Yao et al., "CacheBlend: Fast Large Language Model Serving for RAG with Cached Knowledge Fusion", EuroSys
2025; arXiv 2405.16444); LMCache's blending.

Passages that prompts have in common are hit wherever they stand (`sim.kv.documents`). Their KV is loaded layer by
layer, while 15 % of their tokens are computed again.

Assumed: vLLM 0.5.5's batches. Passages enter the cache with the prompt that has them first, when it ends, not ahead of
it. Tokens computed again are whole blocks, spread evenly; all are in the first layer, as that many more tokens in each.
The share is fixed: the paper's controller raises it where loads are slower. The cache is the host's; the paper's may be
a disk. Loads that would be slower than computing all of a prompt are not made. Turning keys to their new positions is
not priced. Nothing is said of answers: how good they are hangs on the share.
"""

from typing import ClassVar

from sim.frozen import frozen
from sim.kv.document_options import DocumentOptions
from sim.systems.base import VLLM055, Policy
from sim.systems.vllm055 import vllm055_limits


@frozen
class CacheBlend(DocumentOptions, Policy):
    """Passages hit wherever they stand."""

    name: ClassVar[str] = "cacheblend"
    summary: ClassVar[str] = "CacheBlend: passages of prompts hit wherever they stand, a share of them computed again"
    default_swap_space_gib: ClassVar[float] = 128.0
    default_prefix_caching: ClassVar[bool] = True
    composition: ClassVar[dict[str, str]] = {**VLLM055, "memory": "documents"}

    engine_limits = vllm055_limits
