"""DeepSpeed-FastGen (Holmes et al., "DeepSpeed-FastGen: High-throughput Text Generation for LLMs ...", 2024).

Dynamic SplitFuse: every forward pass has the same size. Decodes come first; prompts, long ones split and short ones put
together and the last of them split as well, fill the rest of the budget exactly. Defaults as in DeepSpeed's inference
v2: 768 tokens, 512 sequences.

Assumed: blocks for the whole prompt at admission and vLLM's watermark, as for Sarathi; a sequence that finds no block
preempts the tail, which is computed again.
"""

from typing import ClassVar

from sim.frozen import frozen
from sim.systems.base import VLLM055, Policy, chunked_limits


@frozen
class FastGen(Policy):
    """Forward passes of one size."""

    name: ClassVar[str] = "fastgen"
    summary: ClassVar[str] = "DeepSpeed-FastGen: Dynamic SplitFuse, forward passes of one size"
    default_max_num_seqs: ClassVar[int] = 512
    composition: ClassVar[dict[str, str]] = {**VLLM055, "batching": "fastgen"}

    engine_limits = chunked_limits
