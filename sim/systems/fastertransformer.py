"""FasterTransformer (NVIDIA), as Orca and vLLM describe their baseline: request-level batching on reserved memory.

A batch is formed when nothing runs and then runs to its end; memory for the longest context is reserved for each.

Assumed, in its favour: a request returns as soon as it has its own tokens, and those that have ended cost no more
computation. Batches form from what waits, without a timer.
"""

from typing import ClassVar

from sim.frozen import frozen
from sim.systems.base import VLLM055, Policy, whole_prompt_limits


@frozen
class FasterTransformer(Policy):
    """Request-level scheduling on reserved memory."""

    name: ClassVar[str] = "fastertransformer"
    summary: ClassVar[str] = "FasterTransformer: request-level batches, memory reserved for the longest context"
    composition: ClassVar[dict[str, str]] = {
        **VLLM055,
        "batching": "request-level",
        "admission": "memory",
        "memory": "reserved",
    }

    engine_limits = whole_prompt_limits
