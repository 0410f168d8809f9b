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
class WindowLimits:
    """Layers with a sliding window: how much of a sequence they read, and what memory keeps for them.

    Attributes:
        tokens: of the window.
        num_full: groups of layers of a whole block that keep the whole context.
        num_window: groups of layers that keep a window, in a ring of blocks.
        blocks: of a full ring; None: memory keeps everything for every layer, and there are no groups.
    """

    tokens: int
    num_full: int = 1
    num_window: int = 0
    blocks: int | None = None


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
    enable_prefix_caching: bool = False
    window: WindowLimits | None = None


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
    prefix_query_tokens: int = 0
    """Prompt tokens of requests that were admitted where prefixes are cached."""
    prefix_hit_tokens: int = 0
    """Prompt tokens that were cached when their requests were first admitted."""
    prefix_rehit_tokens: int = 0
    """Tokens that were cached when preempted sequences were admitted again."""
    ignored: dict[str, int] = field(default_factory=dict)
    policy: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Counters of single parts, by name."""
