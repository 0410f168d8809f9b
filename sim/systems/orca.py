"""Orca (Yu et al., "Orca: A Distributed Serving System for Transformer-Based Generative Models", OSDI 2022).

Iteration-level scheduling with selective batching: every iteration decodes all and prefills, whole, the prompts that
could join. Memory for the longest context is reserved at admission, so none is ever preempted and no watermark is
needed: ceil(max_model_len / block_size) blocks a request.

Assumed: the token budget bounds an iteration's prompts, not its decodes. This is the vLLM paper's "Orca (Max)";
`--max-model-len` says what is reserved.
"""

from typing import ClassVar

from sim.frozen import frozen
from sim.systems.base import VLLM055, Policy, whole_prompt_limits


@frozen
class Orca(Policy):
    """Iteration-level scheduling on reserved memory."""

    name: ClassVar[str] = "orca"
    summary: ClassVar[str] = "Orca: iteration-level scheduling, memory reserved for the longest context"
    composition: ClassVar[dict[str, str]] = {
        **VLLM055,
        "batching": "iteration-level",
        "admission": "memory",
        "memory": "reserved",
    }

    engine_limits = whole_prompt_limits
