"""What an engine is given before it starts: its limits, and the machine it may predict with (`Deployment`)."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from sim.cost.model import CostModel
    from sim.cost.profile import Profile
    from sim.specs.hardware import HardwareSpec
    from sim.specs.models import ModelSpec


@dataclass(frozen=True)
class Limits:
    """The engine's limits, by vLLM's names. Blocks are whole (`block_size` tokens, all layers), per GPU."""

    num_gpu_blocks: int
    num_cpu_blocks: int
    block_size: int
    block_bytes: float
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool = False


Role = Literal["both", "prefill", "decode"]
"""What an engine of several does with a request."""


@dataclass(frozen=True)
class Deployment:
    """What policies may know of the machine: they predict with the constants that the clocks run on."""

    model: "ModelSpec"
    hardware: "HardwareSpec"
    tensor_parallel_size: int
    cost: "CostModel"
    profile: "Profile"
    role: Role = "both"


@dataclass
class Counters:
    """What a run counts beside times."""

    preemptions: int = 0
    swap_out_blocks: int = 0
    swap_in_blocks: int = 0
    swap_space_exhausted: int = 0
    """Swaps that became recomputations for lack of host blocks; vLLM 0.5.5 aborts there."""
    ignored: dict[str, int] = field(default_factory=dict)
    policy: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Counters of single parts, by name."""
