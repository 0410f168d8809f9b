"""RadixAttention (Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", NeurIPS 2024;
arXiv 2312.07104), as served by SGLang 0.3.

From the paper: KV of all requests, those that run and those that have ended, is one radix tree in one pool; nodes that
run are locked, others go leaf by leaf, the longest unused first; the queue is sorted by the length of cached prefixes
(Algorithm 1). From the code (0.3.0, `radix_cache.py`, `policy_scheduler.py`, `tp_worker.py`): tokens as blocks, chunks
of 8,192 prompt tokens, prompts before decodes, admission by expected growth (`sim.systems.radix.sglang`), retraction,
`dfs-weight`, and whole leaves evicted; from later code: no sorting of queues above 128.

Assumed:
- A trace names blocks of tokens, 16 or 512 at a time. Prompts that part within a block share nothing of it; what a
  prompt fills of its last block is hit token by token.
- The queue is looked at after every decode step, as with clients that stream; others wait for ten.
- Requests ask for as many tokens as they generate (`max-new-tokens` says otherwise).
- A preempted request counts what it has yet to generate; 0.3.0 counts all of it, and such a request can wait for ever.
- A prompt that can never fit is ignored, with its answer; SGLang shortens either. `fcfs` puts those preempted first.
- The pool is sized as vLLM's, with 1,024 seats; the code has 2,048 or more.
"""

from typing import ClassVar, Literal

from sim.frozen import frozen
from sim.parts.options import CheckedOptions, Only, option
from sim.systems.base import Policy, chunked_limits


@frozen
class RadixOptions(CheckedOptions):
    """The order of the queue, and how cautiously prompts are admitted."""

    schedule_policy: Literal["lpm", "dfs-weight", "fcfs"] = option(
        "lpm", "what comes first: the longest cached prefix, the heaviest branch of the tree, or the first to arrive"
    )
    lpm_longest: int = option(
        128,
        "lpm leaves a longer queue than this as it is; 0: sorts any",
        within=(0, 1e12),
        only=Only("schedule_policy", "lpm"),
    )
    schedule_conservativeness: float = option(
        1.0, "multiplies the least share of what runs that is kept room for", within=(0.0, 1e12)
    )
    max_new_tokens: int = option(
        0, "tokens that requests ask for; 0: what they generate, as where all stop there", within=(0, 1e12)
    )


@frozen
class Radix(RadixOptions, Policy):
    """One radix tree for what runs and what has ended, and a queue that knows it."""

    name: ClassVar[str] = "radix"
    summary: ClassVar[str] = "SGLang 0.3: RadixAttention, longest cached prefix first"
    default_prefix_caching: ClassVar[bool] = True
    default_block_size: ClassVar[int] = 1
    ranks_share_tokeniser: ClassVar[bool] = True
    default_max_num_seqs: ClassVar[int] = 1024
    composition: ClassVar[dict[str, str]] = {
        "order": "lpm",
        "batching": "sglang",
        "admission": "memory",
        "memory": "radix",
        "eviction": "recompute",
        "stage": "direct",
    }

    @property
    def names(self) -> dict[str, str]:
        return {**self.composition, "order": self.schedule_policy, **dict(self.mixed)}

    @property
    def own_engine_profile(self) -> str:
        return "sglang-0.3"

    engine_limits = chunked_limits
