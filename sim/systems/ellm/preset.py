"""eLLM (Chen et al., "High Throughput and Low Latency LLM Serving via Adaptive KV Caching", EuroSys '26).

A share r of all tokens, the first of each sequence, has no KV on the GPU: every decode step computes it again in some
layers and copies it in from the host in the others (section 4.3, six configurations). Every step chooses the batch
size b and r that promise the least time a token within the TPOT SLO (Eq. 1-5), requests first come, first served.
Blocks hold F layers (section 3.2).

What the paper leaves open, and what is done here:
- Eq. 5 as printed has no cost of a step: b then hangs on the solver's start. `equations="paper"` takes the largest b
  that memory and SLO allow. `corrected` prices reading as well and takes the b, r and configuration with the least T/b.
- WT_max is the longest time since the last token of one that runs: waiting requests exceed any TPOT under load.
- What runs goes on: b is chosen from there up. Where no b keeps to the SLO none is admitted; where memory holds those
  that run with no r whose T keeps to it, the last of them is computed again. One alone always goes on.
- Uncached tokens are computed again in the interleaved layers that the paper draws, though these need the output of the
  layers between. With `layer_order="contiguous"` the first layers compute and the last are copied, in whole blocks.
  That runs live as well, and waits for copies, of which few can run ahead.
- Newly uncached tokens leave before the step; those that are cached again are brought back once more.
- Threads of fused kernels are split by Eq. 8-9 in the form chosen; what a kernel takes is never as printed.
- Sequences lose the rest of their last block and of that at which their uncached tokens end.
"""

from dataclasses import dataclass
from typing import ClassVar

from sim.systems.base import VLLM055, Policy, whole_prompt_limits
from sim.systems.ellm.options import TokenWiseOptions


@dataclass(frozen=True)
class Ellm(TokenWiseOptions, Policy):
    """The defaults are the paper's system with the corrected equations."""

    name: ClassVar[str] = "ellm"
    summary: ClassVar[str] = "eLLM: a share of all tokens uncached, rebuilt in every decode step"
    # 40 GB for one GPU, 160 for four.
    default_swap_space_gib: ClassVar[float] = 37.25
    composition: ClassVar[dict[str, str]] = {**VLLM055, "admission": "token-wise", "memory": "token-wise"}

    engine_limits = whole_prompt_limits
