"""`KVFormat`: what a model keeps of a token at a position, what a decode reads of it and what a copy moves.

Position, tokens stored, tokens read and tokens copied are four things. For each class of like layers the last three are
capped-linear functions of the first: a share of it, and min(position, window). Layers that share their KV read it and
store none; sparse attention (`sim.specs.sparse_attention`) reads less than is stored. Sources:

- windows: Mistral 7B (Jiang et al. 2023), Gemma 2 and 3 (2024, 2025), Qwen2's `max_window_layers`;
- CLA, layers in a row share KV: Brandon et al. 2024; MLKV, KV heads shared across layers: Zuhri et al. 2024;
- YOCO, half the layers read one global cache: Sun et al. 2024;
- group-wise int4 and int8: FlexGen (Sheng et al. 2023, section 4.1): groups of 64 with a minimum and a scale in fp16;
- 2 bits: KIVI (Liu et al., ICML 2024; arXiv 2402.02750): keys in groups of 32 tokens of a channel, values in groups of
  32 channels of a token, and the last 128 tokens as they were computed;
- fp8: vLLM's `--kv-cache-dtype`, one scale per tensor.
"""

import msgspec

from sim.errors import UserError
from sim.specs.hardware import HardwareSpec

GROUP_BYTES = 4
"""Bytes of a group's scale and zero point, fp16 each."""


class KVDtype(msgspec.Struct, frozen=True):
    """A type that KV may be stored in.

    Attributes:
        bits: of an element, scales left out.
        group: elements that share a scale and a zero point; 0: all of a tensor do, which is negligible.
        dequantize_ops: vector operations that make a half-precision element of a stored one: conversion and product
            with the scale; where grouped also the zero point, and unpacking where two share a byte.
        least_capability: CUDA compute capability that the kernels need.
        residual_tokens: last tokens of a sequence that stay as they were computed.
    """

    name: str
    bits: int
    group: int = 0
    dequantize_ops: int = 0
    least_capability: float = 0.0
    residual_tokens: int = 0

    def bytes_per_element(self, head_dim: int) -> float:
        """Bytes of an element, its share of the scales of a head of `head_dim` elements included."""
        scales = -(-head_dim // self.group) * GROUP_BYTES if self.group else 0
        return self.bits / 8 + scales / head_dim


_E4M3 = KVDtype("fp8_e4m3", 8, dequantize_ops=2, least_capability=8.9)
KV_DTYPES: dict[str, KVDtype] = {
    # vLLM refuses bfloat16 below 8.0, Triton has e4m3 (`fp8e4nv`) from 8.9 on (vLLM issues 7714 and 26431).
    "bfloat16": KVDtype("bfloat16", 16, least_capability=8.0),
    "fp8": _E4M3,
    "fp8_e4m3": _E4M3,
    "fp8_e5m2": KVDtype("fp8_e5m2", 8, dequantize_ops=2),
    "int8": KVDtype("int8", 8, group=64, dequantize_ops=3),
    "int4": KVDtype("int4", 4, group=64, dequantize_ops=4),
    "kivi2": KVDtype("kivi2", 2, group=32, dequantize_ops=4, residual_tokens=128),
}
"""What `--kv-cache-dtype` may name beside `auto`. vLLM has all but the integers and KIVI's."""


def kv_dtype(name: str, hardware: HardwareSpec) -> KVDtype:
    """The type of that name. UserError where there is none, or the GPU cannot hold it."""
    found = KV_DTYPES.get(name)
    if found is None:
        raise UserError(f"--kv-cache-dtype: {name!r} is not known: use auto or one of {', '.join(KV_DTYPES)}")
    capability = hardware.compute_capability
    if capability is not None and capability < found.least_capability:
        smaller = (key for key, other in KV_DTYPES.items() if other.bits < 16 and other.least_capability <= capability)
        others = ["auto", *smaller]
        raise UserError(
            f"--kv-cache-dtype {name}: {found.name} needs compute capability {found.least_capability}, "
            f"{hardware.name} has {capability}: use {', '.join(others[:-1])} or {others[-1]}"
        )
    return found


class KVLayers(msgspec.Struct, frozen=True, kw_only=True):
    """A class of like layers.

    Attributes:
        num_layers: layers that attend.
        num_stored: those of them with KV of their own; the others read theirs.
        window: most tokens that they attend to, the query's own included; None: `share` of all.
        last_token_only: a prompt runs through these layers with its last token only (YOCO's cross-decoder).
        share: of the context's tokens, those that a decode attends to where there is no window.
        kept_share: likewise, those that memory keeps.
        index_share: of each token's KV, what is stored beside it and read by every decode, to find which to attend to.
        keeps_all: memory keeps the whole context though a window of it is attended to.
        prompts_see_all: the window is decodes' alone.
    """

    num_layers: int
    num_stored: int
    window: int | None = None
    last_token_only: bool = False
    share: float = 1.0
    kept_share: float = 1.0
    index_share: float = 0.0
    keeps_all: bool = False
    prompts_see_all: bool = False

    @property
    def prompt_window(self) -> int | None:
        """Most tokens that a token of a prompt attends to, itself included; None: all."""
        return None if self.prompts_see_all else self.window

    @property
    def context_share(self) -> float:
        """What a decode reads of each token of its context, beside those within the window."""
        return self.index_share + (self.share if self.window is None else 0.0)

    @property
    def keeps_window(self) -> bool:
        """Whether memory forgets what is beyond the window."""
        return self.window is not None and not self.keeps_all


class KeptOfPrompt(msgspec.Struct, frozen=True):
    """What memory keeps of a prompt once it has been computed; all that is generated stays.

    Attributes:
        budget: most tokens; None: `dropped_share` of them go.
        dropped_share: of a prompt's tokens.
    """

    budget: int | None = None
    dropped_share: float = 0.0

    def tokens(self, prompt_tokens: int) -> int:
        """How many of so many."""
        if self.budget is not None:
            return min(prompt_tokens, self.budget)
        return max(1, int(prompt_tokens * (1 - self.dropped_share)))


class KVFormat(msgspec.Struct, frozen=True):
    """The classes of a model's layers and what one token's KV costs in one of them, per GPU of a group.

    Attributes:
        layers: the classes, in the order of their first layers; at most one window among them.
        token_layer_bytes: one token's KV in one layer, scales included.
        flops_per_token_read: of a decode per token that a layer reads, where they matter beside the bytes (MLA).
        dequantize_ops_per_token_read: vector operations likewise.
        residual_bytes: that a decode reads of a sequence whatever its context, in all layers.
    """

    layers: tuple[KVLayers, ...]
    token_layer_bytes: float
    flops_per_token_read: float = 0.0
    dequantize_ops_per_token_read: float = 0.0
    residual_bytes: float = 0.0

    @property
    def window(self) -> int | None:
        """The window of the layers that have one; None where none has."""
        return next((layers.window for layers in self.layers if layers.window is not None), None)

    @property
    def num_full_readers(self) -> int:
        """Layers that read the whole context."""
        return sum(layers.num_layers for layers in self.layers if layers.window is None)

    @property
    def num_window_readers(self) -> int:
        """Layers that read a window."""
        return sum(layers.num_layers for layers in self.layers if layers.window is not None)

    @property
    def context_reads(self) -> float:
        """Layers' worth of KV that a decode reads of each token of its context, windows left out."""
        return sum(layers.num_layers * layers.context_share for layers in self.layers)

    @property
    def index_reads(self) -> float:
        """Of `context_reads`, what is read to find the tokens that are attended to."""
        return sum(layers.num_layers * layers.index_share for layers in self.layers)

    @property
    def is_dense(self) -> bool:
        """Whether every layer reads the whole context, once."""
        return self.window is None and all(layers.context_share == 1.0 for layers in self.layers)

    @property
    def keeps_all(self) -> bool:
        """Whether all layers keep all of their own KV."""
        return all(n.num_stored == n.num_layers and n.kept_share == 1.0 and not n.keeps_window for n in self.layers)

    @property
    def num_full_stored(self) -> int:
        """Layers that keep the KV of the whole context."""
        return sum(layers.num_stored for layers in self.layers if not layers.keeps_window)

    @property
    def num_window_stored(self) -> int:
        """Layers that keep the KV of a window."""
        return sum(layers.num_stored for layers in self.layers if layers.keeps_window)


def window_pairs(cached: int, num_new: int, window: int) -> int:
    """Query-context pairs of `num_new` tokens after `cached` ones, each of which sees the last `window` with itself."""
    growing = min(num_new, max(0, window - cached))
    return growing * cached + growing * (growing + 1) // 2 + (num_new - growing) * window


class KVGroups(msgspec.Struct, frozen=True):
    """Groups of layers that one block serves, as vLLM's hybrid KV cache manager makes them.

    All groups hold `layers_per_group` layers, the last of a class fewer: blocks are of one size, and the rest is waste.
    """

    num_full: int
    num_window: int
    layers_per_group: int

    @property
    def num_groups(self) -> int:
        """Of both kinds."""
        return self.num_full + self.num_window


def hybrid_groups(kv: KVFormat) -> KVGroups:
    """Groups of a model with full and windowed layers (vLLM's `kv_cache_utils`, uniform page size)."""
    return like_groups(kv.num_full_stored, kv.num_window_stored)


def like_groups(full: int, window: int) -> KVGroups:
    """Groups of so many layers of two classes, of which the second has a window or keeps a state.

    A group has as many layers as the rarer class, or as the other one where that has less than half as many again.
    """
    least, most = sorted((full, window)) if full and window else (full or window,) * 2
    size = most if most * 2 < least * 3 else least
    return KVGroups(-(-full // size), -(-window // size), size)
