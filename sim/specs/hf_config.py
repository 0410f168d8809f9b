"""Hugging Face `config.json` to `ModelSpec`. Fails closed: what is not understood is refused by name.

A reader that divides hidden_size by heads is wrong by 2x on Qwen3-0.6B and by 25x on DeepSeek-V3; so the architecture
must be one of `FAMILIES`, and a field whose name speaks of KV, heads, layers or windows must be known or empty.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sim.errors import UserError
from sim.specs.gated_delta_net import GatedDeltaNetSpec
from sim.specs.hf_families import FAMILIES, REFUSED, WRAPPERS, Family
from sim.specs.hf_fields import INDEXER, KNOWN_SHAPES, Fields
from sim.specs.hf_layers import gdn_layers, read_gdn, read_kv_layers, read_mla, read_moe
from sim.specs.hf_mamba2 import by_known_names
from sim.specs.json_file import read_json_object
from sim.specs.model_spec import MlaSpec, ModelSpec, MoeSpec
from sim.specs.quantization import Projection, Quantization

DTYPE_BYTES = {"float16": 2.0, "bfloat16": 2.0, "float32": 2.0, "half": 2.0}
"""vLLM serves float32 checkpoints in float16 (`--dtype auto`)."""

DEQUANTIZE_OPS = 2.0
"""Vector operations per element of a checkpoint's own KV format: conversion, and product with the scale."""


def read_hf_config(path: Path | str, name: str | None = None) -> ModelSpec:
    """The language model a Hugging Face config describes.

    Args:
        path: a `config.json`, or the folder that holds one; an `hf_quant_config.json` beside it is read too.
        name: the spec's name; by default the folder's, or the file's where it is not called config.json.

    Raises:
        UserError: unreadable file, or an architecture, field or quantisation that cannot be sized with certainty.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    outer = read_json_object(path)
    if outer.get("model_type") == "bloom":
        outer = _bloom(outer)
    fields, family = _language_model(outer, path)
    if family.mamba2:
        fields = Fields(by_known_names(outer, path), path)
    fields.refuse_unknown(KNOWN_SHAPES | INDEXER if family.indexer else KNOWN_SHAPES)
    return _spec(fields, family, Quantization(_quantization(outer, fields, path), path), name or _name(path))


def _language_model(outer: dict[str, Any], path: Path) -> tuple[Fields, Family]:
    """The fields of the language model (nested `text_config` or the top level) and its family."""
    inner = outer.get("text_config")
    types = [outer.get("model_type")]
    if isinstance(inner, dict):
        types.append(inner.get("model_type"))
    for kind in reversed(types):
        if isinstance(kind, str) and kind in REFUSED:
            raise UserError(f"{path}: field model_type = {kind!r} cannot be sized: {REFUSED[kind]}: use another model")
    if outer.get("is_encoder_decoder"):
        raise UserError(f"{path}: field is_encoder_decoder = true: only decoder-only models can be sized")
    if not isinstance(inner, dict):
        return Fields(outer, path), _family(types[0], path)
    if not isinstance(types[0], str) or types[0] not in WRAPPERS:
        raise UserError(
            f"{path}: field model_type = {types[0]!r} with a text_config is not a known multimodal architecture: "
            f"known: {', '.join(sorted(WRAPPERS))}; or give the text_config as a file of its own"
        )
    merged = dict(inner)
    for field in ("tie_word_embeddings", "dtype", "torch_dtype"):
        if field in outer:
            merged.setdefault(field, outer[field])
    return Fields(merged, path), _family(types[1], path)


BLOOM_NAMES = {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_embed": "hidden_size"}


def _bloom(config: dict[str, Any]) -> dict[str, Any]:
    """BLOOM's config by the usual names: an MLP of 4 h, no limit to positions (ALiBi) but the length trained on."""
    found = {BLOOM_NAMES.get(field, field): value for field, value in config.items() if value is not None}
    hidden = found.get("hidden_size")
    if isinstance(hidden, int):
        found.setdefault("intermediate_size", 4 * hidden)
    found.setdefault("max_position_embeddings", found.get("seq_length", 2048))
    return found


def _family(model_type: object, path: Path) -> Family:
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    raise UserError(
        f"{path}: field model_type = {model_type!r} is not an architecture this reader can size: "
        f"known: {', '.join(sorted(FAMILIES))}"
    )


def _quantization(outer: dict[str, Any], fields: Fields, path: Path) -> dict[str, Any] | None:
    """The quantisation the config names itself, else the one in the `hf_quant_config.json` beside it."""
    config = outer.get("quantization_config") or fields.get("quantization_config")
    beside = path.with_name(path.name.replace("config.json", "hf_quant_config.json"))
    if config is None and beside != path and beside.is_file():
        config = read_json_object(beside).get("quantization")
    if config is not None and not isinstance(config, dict):
        raise UserError(f"{path}: field quantization_config = {config!r}: expected an object or null")
    return config


def _name(path: Path) -> str:
    if path.name == "config.json":
        return path.resolve().parent.name
    return path.stem.removesuffix("_config")


def _spec(fields: Fields, family: Family, quantization: Quantization, name: str) -> ModelSpec:
    kind, layers, hidden = fields.get("model_type"), fields.count("num_hidden_layers"), fields.count("hidden_size")
    heads = fields.count("num_attention_heads")
    mla = read_mla(fields, family)
    kv_heads = heads if mla else fields.count("num_key_value_heads", default=heads)
    head_dim = _head_dim(fields, hidden, heads, mla)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"does not divide {heads} attention heads")
    moe = read_moe(fields, family, layers)
    kv_layers = read_kv_layers(fields, family, layers)
    plain = _dtype_bytes(fields)
    gdn = read_gdn(fields, family, layers, plain)
    # Of no layer where all have experts.
    unused = moe.moe_intermediate_size if gdn and moe and moe.num_moe_layers == layers else None
    width = fields.count("ffn_dim" if "ffn_dim" in fields else "intermediate_size", unused)
    gated = gdn is not None and fields.flag("attn_output_gate", default=family.gdn)
    kv_bytes = quantization.kv_bytes(plain)
    states = gdn_layers(fields, family, layers)
    attending = [i for i in range(layers) if i not in states]
    attention = _attention(attending, hidden, heads, kv_heads, head_dim, mla, gated=gated)
    if gdn:
        attention += _delta_net(states, hidden, gdn)
    spec = ModelSpec(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=width,
        gated_mlp=family.gated_mlp,
        vocab_size=fields.count("vocab_size"),
        tie_word_embeddings=_tied(fields),
        max_position_embeddings=fields.count("max_position_embeddings"),
        dtype_bytes=plain,
        kv_dtype_bytes=kv_bytes,
        attention_dtype_bytes=quantization.mean_bytes(attention, plain),
        mlp_dtype_bytes=quantization.mean_bytes(_dense(fields.size("mlp_layers") or layers, moe), plain),
        expert_dtype_bytes=quantization.mean_bytes(_experts(layers, moe), plain),
        qkv_bias=_bias(fields, family.qkv_bias),
        output_bias=_bias(fields, family.output_bias),
        mlp_bias=fields.flag("mlp_bias", default=family.layer_norm and fields.flag("enable_bias", default=True)),
        norm_params_per_layer=_norms(fields, family, hidden, heads, kv_heads, head_dim, mla),
        # BLOOM has another norm after its embeddings.
        final_norm_params=hidden * (2 if family.layer_norm else 1) * (2 if kind == "bloom" else 1),
        # OPT's table has two rows more than positions (the padding offset).
        position_rows=fields.count("max_position_embeddings") + 2 if kind == "opt" else 0,
        output_gate=gated,
        mla=mla,
        moe=moe,
        gdn=gdn,
        kv_layers=kv_layers,
        quantization=quantization.format,
        kv_dequantize_ops=DEQUANTIZE_OPS if kv_bytes < plain else 0.0,
        adapted=family.adapted,
        windows_apart=family.windows_apart,
    )
    if kind == "opt":
        _check_opt(fields, hidden)
    return spec


def _head_dim(fields: Fields, hidden: int, heads: int, mla: MlaSpec | None) -> int:
    if mla:
        return mla.qk_nope_head_dim + mla.qk_rope_head_dim
    explicit = fields.count("head_dim", default=0)
    if not explicit and hidden % heads:
        raise fields.error("head_dim", f"is absent and {heads} heads do not divide hidden_size {hidden}: give it")
    return explicit or hidden // heads


def _dtype_bytes(fields: Fields) -> float:
    """Bytes of an unquantised weight; absent means float32 on disk and float16 when served."""
    name = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    if isinstance(name, str) and name.removeprefix("torch.") in DTYPE_BYTES:
        return DTYPE_BYTES[name.removeprefix("torch.")]
    raise UserError(f"{fields.path}: field dtype = {name!r} cannot be sized: known: {', '.join(sorted(DTYPE_BYTES))}")


def _tied(fields: Fields) -> bool:
    # Architectures whose configs leave the field out where it holds its default.
    default = fields.get("model_type") in ("opt", "bloom", "gemma", "gemma2", "gemma3_text")
    return fields.flag("tie_word_embeddings", default=default)


def _bias(fields: Fields, rule: object) -> bool:
    if fields.get("model_type") == "opt":
        return fields.flag("enable_bias", default=True)
    if fields.get("model_type") in ("internlm", "internlm2"):
        return fields.flag("bias", default=fields.get("model_type") == "internlm")
    return fields.flag("attention_bias", default=False) if rule == "config" else bool(rule)


def _norms(
    fields: Fields, family: Family, hidden: int, heads: int, kv_heads: int, head_dim: int, mla: MlaSpec | None
) -> int:
    """Elements of the norms of one layer, of its sinks, and of its indexer what is never quantised."""
    total = family.norms * hidden * (2 if family.layer_norm else 1) + (heads if family.sinks else 0)
    if family.qk_norm == "head" or (family.qk_norm == "config" and fields.flag("use_qk_norm", default=False)):
        total += 2 * head_dim
    elif family.qk_norm == "all":
        total += (heads + kv_heads) * head_dim
    if mla:
        total += mla.kv_lora_rank + (mla.q_lora_rank or 0)
        if mla.indexer:
            total += mla.indexer.other_params(hidden)
    return total


def _check_opt(fields: Fields, hidden: int) -> None:
    """OPT-350M alone projects its embeddings and norms after the layer: not this shape."""
    if fields.count("word_embed_proj_dim", default=hidden) != hidden:
        raise fields.error("word_embed_proj_dim", f"differs from hidden_size {hidden}: such a model cannot be sized")
    if not fields.flag("do_layer_norm_before", default=True):
        raise fields.error("do_layer_norm_before", "must be true: such a model cannot be sized")


def _attention(
    layers: Iterable[int], hidden: int, heads: int, kv_heads: int, head_dim: int, mla: MlaSpec | None, *, gated: bool
) -> list[Projection]:
    """Projections of attention in these layers, named as checkpoints name them; `q_proj` has the output gate's rows."""
    if mla is None:
        queries = hidden * heads * head_dim
        sizes = {"q_proj": 2 * queries if gated else queries, "o_proj": queries}
        sizes |= dict.fromkeys(("k_proj", "v_proj"), hidden * kv_heads * head_dim)
    else:
        sizes = {
            "kv_a_proj_with_mqa": hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim),
            "kv_b_proj": mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim),
            "o_proj": heads * mla.v_head_dim * hidden,
        }
        if mla.q_lora_rank:
            sizes |= {"q_a_proj": hidden * mla.q_lora_rank, "q_b_proj": mla.q_lora_rank * heads * head_dim}
        else:
            sizes["q_proj"] = hidden * heads * head_dim
        if mla.indexer:
            sizes |= mla.indexer.projections(hidden, mla.q_lora_rank or 0)
    return [(f"model.layers.{i}.self_attn.{name}", size) for i in layers for name, size in sizes.items()]


def _delta_net(layers: Iterable[int], hidden: int, gdn: GatedDeltaNetSpec) -> list[Projection]:
    """Projections of layers that keep a state, as checkpoints of Qwen 3.5 and Mamba2 name them."""
    if gdn.scan_tokens:
        inputs = hidden * (gdn.conv_width + gdn.value_width + gdn.num_gates)
        sizes = {"in_proj": inputs, "out_proj": hidden * gdn.value_width}
        return [(f"model.layers.{i}.mamba.{name}", size) for i in layers for name, size in sizes.items()]
    sizes = {
        "in_proj_qkv": hidden * gdn.conv_width,
        "in_proj_z": hidden * gdn.value_width,
        "in_proj_a": hidden * gdn.num_value_heads,
        "in_proj_b": hidden * gdn.num_value_heads,
        "out_proj": hidden * gdn.value_width,
    }
    return [(f"model.layers.{i}.linear_attn.{name}", size) for i in layers for name, size in sizes.items()]


def _dense(layers: int, moe: MoeSpec | None) -> list[Projection]:
    """The dense MLPs: the first layers where others have experts."""
    dense = layers - (moe.num_moe_layers if moe else 0)
    return [(f"model.layers.{i}.mlp.down_proj", 1) for i in range(dense)]


def _experts(layers: int, moe: MoeSpec | None) -> list[Projection]:
    """Routed and shared experts of the layers that have them, weighed by their widths."""
    if moe is None:
        return []
    routed, shared = moe.num_experts * moe.moe_intermediate_size, moe.shared_intermediate_size
    prefixes = [f"model.layers.{i}.mlp" for i in range(layers - moe.num_moe_layers, layers)]
    return [(f"{prefix}.experts.0.down_proj", routed) for prefix in prefixes] + [
        (f"{prefix}.shared_experts.down_proj", shared) for prefix in prefixes if shared
    ]
