"""vLLM 0.5.5, decision for decision (`vllm/core/scheduler.py`, `block_manager_v1.py`, `engine/arg_utils.py`).

Default: a step is all prefill or all decode, prefill first. Chunked prefill: decodes first, then prompts in chunks.
Block size, budgets and watermark are vLLM's; `tests/oracle` holds both to vLLM's own scheduler. Kwon et al., SOSP 2023.

Where vLLM never ends we do: a prompt that can never continue is ignored, a swapped sequence that the watermark keeps
out for ever is given up, lack of swap space becomes a recomputation.
"""

from typing import ClassVar

from sim.errors import UserError
from sim.frozen import frozen
from sim.parts.catalogue import BATCHINGS
from sim.systems.base import VLLM055, Asked, EngineLimits, Policy, default_budget

LONG_CONTEXT = 32_768
"""Above this context length chunked prefill is on unless told otherwise."""


def vllm055_limits(self: Policy, asked: Asked) -> EngineLimits:
    """`engine_limits` as vLLM 0.5.5 sets and refuses them: max(max_model_len, 2048) tokens, or 512 in chunks."""
    warnings: list[str] = []
    length, batching = asked.max_model_len, self.names["batching"]
    kind = BATCHINGS[batching]
    splits = None if kind.has_choice else kind.splits_prompts
    chunked = asked.enable_chunked_prefill if splits is None else splits
    if splits is not None and asked.enable_chunked_prefill not in (None, splits):
        raise UserError(f"--enable-chunked-prefill: batching={batching} leaves no choice; leave it out")
    if chunked is None:
        chunked = length > LONG_CONTEXT
        if chunked:
            warnings.append(
                f"chunked prefill is on because the context length {length} is above {LONG_CONTEXT}, as in vLLM "
                "0.5.5; lower --max-model-len or give --no-enable-chunked-prefill"
            )
    tokens = asked.max_num_batched_tokens or default_budget(batching, length, chunked=chunked)
    if not chunked and tokens < length:
        raise UserError(
            f"--max-num-batched-tokens: {tokens} is less than the context length {length}; raise it, lower "
            "--max-model-len or give --enable-chunked-prefill"
        )
    return EngineLimits(asked.max_num_seqs or self.default_max_num_seqs, tokens, chunked, tuple(warnings)).checked()


@frozen
class VllmRecompute(Policy):
    """vLLM 0.5.5 as it comes: whole-request blocks, preemption frees them and computes the sequence again."""

    name: ClassVar[str] = "vllm-recompute"
    summary: ClassVar[str] = "vLLM 0.5.5, preemption by recomputation (its default)"
    composition: ClassVar[dict[str, str]] = VLLM055

    engine_limits = vllm055_limits


@frozen
class VllmSwap(VllmRecompute):
    """vLLM 0.5.5 with `--preemption-mode swap`: preempted blocks go to host memory, copied before the step computes."""

    name: ClassVar[str] = "vllm-swap"
    summary: ClassVar[str] = "vLLM 0.5.5, preemption by swapping to host memory"
    composition: ClassVar[dict[str, str]] = {**VllmRecompute.composition, "eviction": "swap"}
