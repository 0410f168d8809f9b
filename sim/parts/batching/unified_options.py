"""Options of vLLM v1's scheduler, by vLLM's own names."""

from math import inf
from typing import Literal

from sim.errors import UserError
from sim.frozen import frozen
from sim.parts.batching.async_scheduling import AsyncScheduling
from sim.parts.batching.lora_options import LoraOptions
from sim.parts.options import Only, option, vllm_option


@frozen
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
    max_tokens_per_image: int | None = option(
        None,
        "the model's largest image, tokens: its encoder is scheduled for a trace's images, which are text otherwise",
        within=(1, inf),
    )
    encoder_tokens_per_s: float | None = option(
        None,
        "image tokens that the encoder gives a second; else it takes no time",
        within=(1e-9, inf),
        only=Only("max_tokens_per_image"),
    )
    disable_chunked_mm_input: bool = vllm_option(
        False, "compute all tokens of an image in one iteration", only=Only("max_tokens_per_image")
    )

    def check_images(self, max_num_batched_tokens: int) -> None:
        """UserError where the largest image fits no iteration, and may not be split."""
        largest = self.max_tokens_per_image or 0
        if self.disable_chunked_mm_input and largest > max_num_batched_tokens:
            raise UserError(
                f"--disable-chunked-mm-input: max-tokens-per-image={largest} is more than --max-num-batched-tokens "
                f"{max_num_batched_tokens}; raise that, or leave it out"
            )
