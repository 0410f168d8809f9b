"""What an engine is given before it starts: its limits, and the machine it may predict with (`Deployment`)."""

from collections import defaultdict
from typing import TYPE_CHECKING, Literal

import msgspec

from sim.frozen import frozen

if TYPE_CHECKING:
    from sim.cost.model import CostModel
    from sim.cost.profile import Profile
    from sim.specs.hardware import HardwareSpec
    from sim.specs.kv_format import KeptOfPrompt
    from sim.specs.models import ModelSpec


class WindowLimits(msgspec.Struct, frozen=True):
    """Layers with a sliding window: how much of a sequence they read, and what memory keeps for them.

    Attributes:
        tokens: of the window.
        num_full: groups of layers of a whole block that keep the whole context.
        num_window: groups of layers that keep a window, in a ring of blocks.
        blocks: of a full ring; None: memory keeps everything for every layer, and there are no groups.
        window_first: the model's first layer has the window.
        chosen: memory keeps tokens that are chosen, not the latest ones: rings whatever the manager, no prefixes.
        own_blocks: of a pool of their own, beside that of the layers that keep all (SGLang); None: there is none.
        own_bytes: of such a block, on one GPU.
    """

    tokens: int
    num_full: int = 1
    num_window: int = 0
    blocks: int | None = None
    window_first: bool = False
    chosen: bool = False
    own_blocks: int | None = None
    own_bytes: float = 0.0


class StateLimits(msgspec.Struct, frozen=True):
    """Layers that keep a state of fixed size in place of KV; a block of theirs is one state.

    Attributes:
        num_full: groups of layers of a whole block that keep KV.
        num_state: groups of layers that keep a state.
        exports_within_chunks: kernels write a state out amid a chunk of a prompt, at a block's end.
        own_slots: states of a pool of their own, beside that of the layers that attend (SGLang); None: there is none.
        own_bytes: of such a state, on one GPU.
        chunk_tokens: of a chunk of the kernels that compute states: these are had where such a chunk ends.
    """

    num_full: int = 1
    num_state: int = 0
    exports_within_chunks: bool = False
    own_slots: int | None = None
    own_bytes: float = 0.0
    chunk_tokens: int = 64


@frozen
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
    states: StateLimits | None = None
    kept_of_prompt: "KeptOfPrompt | None" = None
    stages: int = 1
    """Of a pipeline whose batches one scheduler makes (vLLM v1); 1 where each has one of its own."""
    stops_at_max_model_len: bool = False
    """Whether a request ends when it has so many tokens: a prompt of as many is refused."""

    @property
    def has_window_groups(self) -> bool:
        """Whether memory keeps a window of some groups of layers, in rings of blocks."""
        return self.window is not None and self.window.blocks is not None


Role = Literal["both", "prefill", "decode"]
"""What an engine of several does with a request."""


class Deployment(msgspec.Struct, frozen=True):
    """What policies may know of the machine: they predict with the constants that the clocks run on."""

    model: "ModelSpec"
    hardware: "HardwareSpec"
    tensor_parallel_size: int
    cost: "CostModel"
    profile: "Profile"
    role: Role = "both"
    seed: int = 0
    """Of what is drawn of requests that a trace does not say."""
    ranks: int = 1
    """Data-parallel ranks, this engine among them, that share experts and iterate together."""


TierName = Literal["host", "disk"]
"""Where prefixes are kept when they leave the GPU."""


class TierCounters(msgspec.Struct):
    """What a tier below the GPU was good for. Seconds are by price, as if each copy and computation were alone."""

    num_blocks: int = 0
    """Of the tier."""
    hit_tokens: int = 0
    """Tokens of prompts that came from there, of `prefix_hit_tokens` and `prefix_rehit_tokens`."""
    num_loads: int = 0
    stored_blocks: int = 0
    evicted_blocks: int = 0
    saved_s: float = 0.0
    """By which copies were shorter than the computations that they replaced."""
    lost_s: float = 0.0
    """By which others were longer."""

    def add(self, other: "TierCounters") -> None:
        """Count another engine's tier, too."""
        for name, value in msgspec.structs.asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


class Counters(msgspec.Struct):
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
    ignored: dict[str, int] = msgspec.field(default_factory=dict)
    tiers: dict[TierName, TierCounters] = msgspec.field(default_factory=dict)
    """Of tiers below the GPU that keep prefixes, by name, the nearest first."""
    policy: defaultdict[str, int] = msgspec.field(default_factory=lambda: defaultdict(int))
    """Counters of single parts, by name."""
