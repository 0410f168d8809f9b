"""`DecoderConfig`: what the live runtime must know of a Llama-family model to compute it."""

from pathlib import Path
from typing import Any

import msgspec

from gpu_runtime.model.fp8 import has_fp8_weights
from gpu_runtime.model.rope_scaling import RopeScaling, read_rope
from sim.errors import UserError
from sim.specs.hf_families import FAMILIES
from sim.specs.hf_fields import KNOWN_SHAPES, Fields
from sim.specs.hf_layers import EXPERT_COUNTS, read_moe, read_windows
from sim.specs.json_file import read_json_object
from sim.specs.model_spec import ModelSpec

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
"""Architectures that `from_hf` accepts."""
QWEN3, MIXTURES = ("qwen3", "qwen3_moe"), ("mixtral", "qwen3_moe")
DEFAULT_EPS = 1e-6
DEFAULT_THETA = 10000.0
"""What all these architectures assume where their config leaves the field out."""


class Experts(msgspec.Struct, frozen=True):
    """The MLPs of every layer, of which each token takes a few.

    Attributes:
        num: of a layer.
        per_token: that a token takes: those that the router's softmax ranks first.
        width: of one.
        renormalised: whether their shares add up to one.
        named_as_mixtral: how a checkpoint calls them; else as Qwen3 does.
    """

    num: int
    per_token: int
    width: int
    renormalised: bool
    named_as_mixtral: bool


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shape and constants of a decoder with RMSNorm, rotary positions, grouped-query attention and SwiGLU.

    Attributes:
        qkv_bias: biases on the Q, K and V projections (Qwen2).
        qk_norm: RMSNorm of every query and key head before the rotation (Qwen3).
        rope_scaling: how rotary frequencies are stretched; None: not at all.
        experts: in place of the MLP, whose `intermediate_size` then has no meaning; None: an MLP.
        fp8: whether the layers' matrices are FP8 (`gpu_runtime.model.fp8`).
        windows: of each layer, tokens; None: it attends to all, as every layer does where there are none.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float = DEFAULT_EPS
    rope_theta: float = DEFAULT_THETA
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    experts: Experts | None = None
    windows: tuple[int | None, ...] = ()
    fp8: bool = False

    def window(self, layer: int) -> int | None:
        """Tokens that a layer's queries attend to, their own included; None: all."""
        return self.windows[layer] if self.windows else None

    @property
    def q_size(self) -> int:
        """Elements of one token's queries."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of one token's keys in one layer (its values are as many)."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_weights(self) -> int:
        """Elements of all weights: of each layer (`weights.LayerWeights`), the final norm, embedding and head."""
        h, q, kv = self.hidden_size, self.q_size, self.kv_size
        experts = self.experts
        mlp = 3 * h * self.intermediate_size if experts is None else experts.num * (3 * h * experts.width + h)
        layer = h * (q + 2 * kv) + h * q + mlp + 2 * h
        layer += self.qkv_bias * (q + 2 * kv) + self.qk_norm * 2 * self.head_dim
        return self.num_layers * layer + h + self.vocab_size * h * (1 if self.tie_word_embeddings else 2)

    def part(self, size: int) -> "DecoderConfig":
        """What each of `size` ranks computes of a layer.

        Raises:
            UserError: heads or widths that they cannot share evenly.
        """
        experts, width = self.experts, self.intermediate_size
        counts = {"attention heads": self.num_heads, "KV heads": self.num_kv_heads}
        counts |= {"MLP columns": width} if experts is None else {"columns of an expert": experts.width}
        for name, count in counts.items():
            if count % size:
                raise UserError(f"--tp {size}: does not divide the {count} {name} of {self.name}: give another")
        return msgspec.structs.replace(
            self,
            num_heads=self.num_heads // size,
            num_kv_heads=self.num_kv_heads // size,
            intermediate_size=width // size if experts is None else width,
            experts=experts and msgspec.structs.replace(experts, width=experts.width // size),
        )

    @property
    def num_fp8_weights(self) -> int:
        """Of these, elements of matrices in FP8, where they are kept so."""
        h, mlp = self.hidden_size, 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * (2 * h * (self.q_size + self.kv_size) + mlp) if self.fp8 else 0

    @classmethod
    def from_hf(cls, config: Path | str | dict[str, Any]) -> "DecoderConfig":
        """The model that a Hugging Face config describes.

        Args:
            config: a `config.json`, the folder with one, or its decoded content.

        Raises:
            UserError: unreadable file, or a field whose meaning the runtime does not compute.
        """
        if isinstance(config, dict):
            return _read(Fields(config, Path("config.json")), "config")
        path = Path(config)
        if path.is_dir():
            path = path / "config.json"
        name = path.resolve().parent.name if path.name == "config.json" else path.stem
        return _read(Fields(read_json_object(path), path), name)

    @classmethod
    def from_spec(cls, spec: ModelSpec) -> "DecoderConfig":
        """The decoder with a spec's shapes; constants that a spec lacks (theta, epsilon) take their defaults.

        Such a decoder is for seeded random weights: its times are the model's, its tokens mean nothing.

        Raises:
            UserError: latent attention, experts, windows, an ungated MLP, learned positions, LayerNorm or other biases.
        """
        head_norms = spec.norm_params_per_layer - 2 * spec.hidden_size
        refused = {
            "multi-head latent attention": spec.mla is not None,
            "layers that keep a state": spec.gdn is not None,
            "an MLP without gate": not spec.gated_mlp,
            "learned positions": spec.position_rows > 0,
            "biases on its output projection": spec.output_bias,
            "biases in its MLP": spec.mlp_bias,
            f"norms of {spec.norm_params_per_layer} elements a layer": head_norms not in (0, 2 * spec.head_dim),
            f"an odd head_dim {spec.head_dim}": spec.head_dim % 2 == 1,
        }
        in_config = {
            "a mixture of experts": spec.moe is not None,
            "sliding windows or layers that share KV": bool(spec.kv_layers),
        }
        for what, found in (refused | in_config).items():
            if found:
                why = " by sizes alone: give --model its config.json, or use" if what in in_config else ": use"
                raise UserError(f"{spec.name}: model has {what}, which the runtime does not compute{why} another model")
        # Fields of both names are the same sizes.
        return msgspec.structs.replace(msgspec.convert(spec, cls, from_attributes=True), qk_norm=head_norms > 0)


def _read(fields: Fields, name: str) -> DecoderConfig:
    kind = fields.get("model_type")
    if kind not in MODEL_TYPES:
        raise fields.error("model_type", f"is not computed by the runtime: use one of {', '.join(MODEL_TYPES)}")
    fields.refuse_unknown(KNOWN_SHAPES)
    _refuse_uncomputed(fields)
    layers, hidden = fields.count("num_hidden_layers"), fields.count("hidden_size")
    windows = read_windows(fields, FAMILIES[kind], layers)
    heads = fields.count("num_attention_heads")
    # Only Llama's absent fields mean what the others spell out; the newer architectures have defaults of their own.
    llama = kind == "llama"
    kv_heads = fields.count("num_key_value_heads", default=heads if llama else None)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"does not divide {heads} attention heads: correct one of them")
    if "head_dim" not in fields and (kind in QWEN3 or hidden % heads):
        raise fields.error("head_dim", "is absent and cannot be derived: give it")
    head_dim = fields.count("head_dim", default=hidden // heads)
    if head_dim % 2:
        raise fields.error("head_dim", "is odd, and rotary positions pair elements: give an even one")
    theta, scaling = read_rope(fields, DEFAULT_THETA)
    return DecoderConfig(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.count("intermediate_size"),
        vocab_size=fields.count("vocab_size"),
        max_position_embeddings=fields.count("max_position_embeddings"),
        rms_norm_eps=_epsilon(fields),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=kind == "qwen2",
        qk_norm=kind in QWEN3,
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
        experts=_read_experts(fields, kind, layers),
        windows=windows if any(windows) else (),
        fp8=has_fp8_weights(fields),
    )


def _read_experts(fields: Fields, kind: str, layers: int) -> Experts | None:
    if kind not in MIXTURES:
        return None
    moe = read_moe(fields, FAMILIES[kind], layers)
    if moe is None or moe.num_moe_layers < layers or moe.shared_intermediate_size:
        raise UserError(
            f"{fields.path}: {moe.num_moe_layers if moe else 0} of {layers} layers have experts, or some are shared: "
            "the runtime computes models whose layers all have experts that tokens choose"
        )
    is_mixtral = kind == "mixtral"
    renormalised = is_mixtral or fields.flag("norm_topk_prob", default=False)
    return Experts(moe.num_experts, moe.experts_per_token, moe.moe_intermediate_size, renormalised, is_mixtral)


def _refuse_uncomputed(fields: Fields) -> None:
    """UserError for what the size reader accepts but the runtime does not compute."""
    if fields.get("hidden_act") not in (None, "silu", "swish"):
        raise fields.error("hidden_act", "is not computed by the runtime: expected silu")
    for field in ("attention_bias", "mlp_bias"):
        # Qwen2 has its biases in any case and ignores the first field.
        if fields.flag(field, default=False) and (field, fields.get("model_type")) != ("attention_bias", "qwen2"):
            raise fields.error(field, "is not computed by the runtime: expected false")
    for field in EXPERT_COUNTS:
        if fields.size(field) and fields.get("model_type") not in MIXTURES:
            raise fields.error(field, "means experts, which the runtime does not compute: use a dense model")


def _epsilon(fields: Fields) -> float:
    value = fields.get("rms_norm_eps")
    if value is None:
        return DEFAULT_EPS
    if not isinstance(value, float) or not 0 < value < 1:
        raise fields.error("rms_norm_eps", "must be a number between 0 and 1")
    return value
