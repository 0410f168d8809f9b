"""Options of adapters (LoRA), by vLLM's own names."""

from math import inf

from sim.errors import UserError
from sim.frozen import frozen
from sim.parts.options import CheckedOptions, Only, vllm_option

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@frozen
class LoraOptions(CheckedOptions):
    """`LoRAConfig` of vLLM 0.33, as far as it decides."""

    enable_lora: bool = vllm_option(
        False, "serve the adapters that requests name (lora): --max-loras of them at once, in GPU memory of their own"
    )
    max_loras: int = vllm_option(
        1,
        "adapters that run at once; a request of another waits, and those behind it go first",
        within=(1, inf),
        only=Only("enable_lora"),
    )
    max_lora_rank: int = vllm_option(
        16, "the largest rank of an adapter, for which its memory is taken", only=Only("enable_lora")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_lora_rank not in RANKS:
            raise UserError(f"--max-lora-rank: {self.max_lora_rank} is none of vLLM's: {', '.join(map(str, RANKS))}")
