"""ChunkAttention (Ye et al., "ChunkAttention: Efficient Self-Attention with Prefix-Aware KV Cache and Two-Phase
Partition", ACL 2024; arXiv 2402.15220).

KV lies in chunks of 64 tokens in a prefix tree of the sequences that run. A prompt takes the whole chunks that one of
them has, and computes the rest. The kernel's first phase reads each shared chunk once a step for all that share it, its
second phase the rest of each. A decode step of contexts s_i therefore reads

    sum(s_i) - sum over shared chunks of (sharers - 1) * 64   tokens,

and still computes sum(s_i). Chunks are freed with the last sequence that has them: nothing is cached for those to come.

Assumed:
- Time is that of reading; what is read once for several is computed at the speed of prefills, not beside its reading.
- Scheduling is vLLM 0.5.5's, by blocks of a chunk, 32 seats as in the public code; that admits without asking memory.
- What is matched is not computed again, as the paper has it. The public code computes prompts whole.
- Generated tokens are not shared. A chunk can be shared from the step after the one that computes it.
"""

from typing import ClassVar

from sim.frozen import frozen
from sim.systems.base import VLLM055, Policy
from sim.systems.vllm055 import vllm055_limits


@frozen
class ChunkAttention(Policy):
    """Shared chunks are kept once and read once a step."""

    name: ClassVar[str] = "chunkattention"
    summary: ClassVar[str] = "ChunkAttention: prompts' chunks shared between sequences that run, read once a step"
    default_prefix_caching: ClassVar[bool] = True
    default_block_size: ClassVar[int] = 64
    default_max_num_seqs: ClassVar[int] = 32
    composition: ClassVar[dict[str, str]] = {**VLLM055, "memory": "chunks"}

    engine_limits = vllm055_limits
