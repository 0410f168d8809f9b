"""Prompt Cache (Gim et al., "Prompt Cache: Modular Attention Reuse for Low-Latency Inference", MLSys 2024; arXiv
2311.04934).

Modules of prompts have KV that was computed by itself, at positions of their own, and is taken as it is: CacheBlend
with nothing computed again.

Assumed: as for `cacheblend`. Modules are kept on the host (the paper's slower variant); a copy within the GPU's memory
is not simulated. Blocks that the trace names are the modules; the paper has a markup for them.
"""

from typing import ClassVar

from sim.frozen import frozen
from sim.kv.document_options import DocumentOptions
from sim.parts.options import with_default
from sim.systems.cacheblend import CacheBlend


@frozen
class PromptCache(CacheBlend):
    """Modules hit wherever they stand, and nothing of them computed again."""

    recompute_share: float = with_default(DocumentOptions, "recompute_share", 0.0)

    name: ClassVar[str] = "promptcache"
    summary: ClassVar[str] = "Prompt Cache: modules of prompts hit wherever they stand, from the host"
