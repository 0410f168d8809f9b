"""vLLM v1, decision for decision as vLLM 0.33.0 (`vllm/v1/core/sched/scheduler.py`, `kv_cache_manager.py`).

One token budget for prompts and decodes, running before waiting, blocks taken chunk by chunk, preemption by
recomputation, prefix caching, speculative decoding. `tests/oracle` holds it to vLLM's own scheduler. Limits are the API
server's on the GPU.

Assumed: at most one window among the layers; of connectors the OffloadingConnector alone (`--kv-offloading-size`).
Async scheduling is on by default wherever host time can be hidden, but not where tokens are drafted
(`--spec-method`): vLLM would schedule ahead there, too. As many tokens are drafted in every step, and what is accepted
is drawn.
"""

from typing import ClassVar

from sim.errors import UserError
from sim.frozen import frozen
from sim.kv.offload_options import OffloadOptions
from sim.parts.batching.unified_options import VllmV1Options
from sim.parts.options import GIB
from sim.parts.stage.speculative_options import SpeculativeOptions
from sim.systems.base import VLLM055, Asked, EngineLimits, Policy


@frozen
class VllmV1(SpeculativeOptions, OffloadOptions, VllmV1Options, Policy):
    """The vLLM that people run today."""

    name: ClassVar[str] = "vllm-v1"
    summary: ClassVar[str] = "vLLM v1 as of 0.33: unified batches, prefix caching, preemption by recomputation"
    default_prefix_caching: ClassVar[bool] = True
    num_null_blocks: ClassVar[int] = 1
    composition: ClassVar[dict[str, str]] = {**VLLM055, "batching": "unified", "admission": "memory"}

    @property
    def names(self) -> dict[str, str]:
        # A system that derives from this one has an order of its own where arrival decides here.
        by_priority = {"order": "priority"} if self.scheduling_policy == "priority" else {}
        drafting = {"stage": "speculative"} if self.spec_method is not None else {}
        return {**self.composition, **by_priority, **drafting, **dict(self.mixed)}

    def engine_limits(self, asked: Asked) -> EngineLimits:
        """The API server's defaults by GPU (`EngineArgs.get_batch_defaults`)."""
        if asked.enable_chunked_prefill is False:
            raise UserError("--no-enable-chunked-prefill: vllm-v1 splits prompts as the budget demands; leave it out")
        large = asked.gpu_memory_bytes >= 70 * GIB and "a100" not in asked.gpu_name.lower()
        tokens = asked.max_num_batched_tokens or (8192 if large else 2048)
        if asked.gpu_memory_bytes >= 160 * GIB and not asked.max_num_batched_tokens:
            tokens = 16384
        seqs = asked.max_num_seqs or min(1024 if large else 256, tokens)
        return EngineLimits(seqs, tokens, True).checked()
