"""Pensieve (Yu et al., "Stateful Large Language Model Serving with Pensieve", EuroSys 2025; arXiv 2312.05516).

A conversation's KV outlives its turns in chunks of 32 tokens, on the GPU and on the host (`--swap-space`). What gives
way on either is the chunk of least

    V = cost of computing it again / time since its conversation was active,

so that the beginning of a conversation goes before its end. Chunks are copied to the host before blocks run out. A turn
computes what was dropped of its conversation again, loads layer by layer what is on the host, and takes the rest where
it is: its attention reads KV with gaps (section 4.4). Prefills and decodes share iterations.

Assumed: the cost of a chunk is what it adds to a prefill by the run's own prices, a parabola through three of them.
Time since use is counted when a sequence starts or ends. The threshold for copies (`swap-out-threshold`) is a quarter
of the blocks; the paper was not at hand for it. A chunk that has to give way before its copy has ended is lost. What
runs out of blocks is computed again, with what is left of its chunks. Loads that would be slower than computing again
are not made.
"""

from typing import ClassVar

from sim.frozen import frozen
from sim.kv.tiered_options import RetentionOptions
from sim.systems.base import VLLM055, Policy, whole_prompt_limits


@frozen
class Pensieve(RetentionOptions, Policy):
    """Conversations in chunks, kept by what they would cost again."""

    name: ClassVar[str] = "pensieve"
    summary: ClassVar[str] = "Pensieve: chunks of conversations on GPU and host, the cheapest to compute again dropped"
    default_swap_space_gib: ClassVar[float] = 128.0
    default_block_size: ClassVar[int] = 32
    default_prefix_caching: ClassVar[bool] = True
    composition: ClassVar[dict[str, str]] = {
        **VLLM055,
        "batching": "iteration-level",
        "admission": "memory",
        "memory": "retained",
    }

    engine_limits = whole_prompt_limits
