"""FlashAttention of prompts with nothing cached: all of an iteration in one call, whatever their lengths.

The call is the one that `torch.nn.attention.varlen` makes; by its own name torch has it since 2.2. Where FA3 or FA4 was
activated (`backend.activate_flash`), it is theirs. Block tables it takes with FA3 alone, so that chunks after cached
tokens stay with our kernel.
"""

import torch
from torch import Tensor

from gpu_runtime.model.attention_batch import AttentionBatch


def attend_prompts(
    query: Tensor, key: Tensor, value: Tensor, batch: AttentionBatch, window: int | None = None
) -> Tensor:
    """Causal attention of the prompts of `batch`, [rows of prompts, num_heads, head_dim].

    Args:
        query: [N, num_heads, head_dim], in 16 bits (`backend.uses_flash`).
        key, value: [N, num_kv_heads, head_dim] of the new tokens.
        batch: with at least one prompt; its `prompt_rows` are computed.
        window: tokens that a query attends to, its own included; None: all.
    """
    rows, starts, longest = batch.prompt_rows, batch.prompt_starts, batch.max_prompt_len
    query, key, value = (part[rows] for part in (query, key, value))
    # Query heads may be more than KV heads: it divides them. After the lengths: no dropout, causal, no mask returned.
    scale = query.shape[2] ** -0.5
    # Tokens to the left of a query's own, and to its right.
    sides = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    found = torch.ops.aten._flash_attention_forward(
        query, key, value, starts, starts, longest, longest, 0.0, True, False, scale=scale, **sides
    )
    return found[0]
