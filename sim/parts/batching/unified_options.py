"""Options of vLLM v1's scheduler, by vLLM's own names."""

from dataclasses import dataclass
from math import inf
from typing import Literal

from sim.parts.batching.async_scheduling import AsyncScheduling
from sim.parts.batching.lora_options import LoraOptions
from sim.parts.options import Only, vllm_option


@dataclass(frozen=True)
class VllmV1Options(LoraOptions, AsyncScheduling):
    """`SchedulerConfig` of vLLM 0.33, as far as it decides."""

    scheduling_policy: Literal["fcfs", "priority"] = vllm_option(
        "fcfs",
        "what comes next, what is preempted: by arrival, or by the trace's priority column (lower is more urgent)",
    )
    long_prefill_token_threshold: int = vllm_option(
        0, "most tokens of one prompt in an iteration; 0: no such limit", within=(0, inf)
    )
    long_prefill_token_threshold_adaptive: bool = vllm_option(
        False,
        "raise that limit to an equal share of the budget where few requests are there",
        only=Only("long_prefill_token_threshold"),
    )
    watermark: float = vllm_option(
        0.0, "share of the GPU's blocks kept free when a prompt is admitted beside others", within=(0.0, 1 - 1e-9)
    )
    scheduler_reserve_full_isl: bool = vllm_option(
        True, "admit a prompt only where all of it fits, not only its first chunk"
    )
