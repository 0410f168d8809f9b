"""Configs of models with Mamba2's layers, by the names that Gated DeltaNet's fields have (`sim.specs.hf_layers`).

Nemotron-H counts mixers and MLPs as layers of their own; a mixer with the MLP after it is one layer here.
"""

from pathlib import Path
from typing import Any

from sim.errors import UserError

NAMES = {
    "num_value_heads": ("mamba_n_heads", "mamba_num_heads"),
    "value_head_dim": ("mamba_d_head", "mamba_head_dim"),
    "num_key_heads": ("mamba_n_groups", "n_groups"),
    "key_head_dim": ("mamba_d_state", "ssm_state_size"),
    "conv_kernel_dim": ("mamba_d_conv", "conv_kernel"),
}
SCAN = "mamba_chunk_size", "chunk_size"
HARMLESS = (
    "attn_layer_indices attn_rotary_emb hybrid_override_pattern layers_block_type mamba_conv_bias mamba_expand "
    "mamba_hidden_act mamba_proj_bias mlp_hidden_act moe_shared_expert_overlap mtp_layers_block_type "
    "residual_in_fp32 time_step_limit time_step_rank use_conv_bias use_mamba_kernels "
)
"""What says nothing further of shapes: heads and their elements say how far a layer expands."""
STATE, ATTENTION = "linear_attention", "full_attention"
KINDS = {"mamba": STATE, "attention": ATTENTION, STATE: STATE, ATTENTION: ATTENTION}
PATTERN = {"M": STATE, "*": ATTENTION}
LETTERS = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}


def by_known_names(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """The config with layers, heads and MLPs as the reader knows them."""
    if config.get("mamba_proj_bias"):
        raise UserError(f"{path}: field mamba_proj_bias = true cannot be sized: use another model")
    dropped = {*HARMLESS.split(), *SCAN, *(name for names in NAMES.values() for name in names)}
    found = {field: value for field, value in config.items() if field not in dropped}
    for ours, theirs in NAMES.items():
        value = _one_of(config, theirs)
        if value is None:
            raise UserError(f"{path}: field {theirs[0]} is missing: give a Hugging Face config with it")
        found[f"linear_{ours}"] = value
    found["mamba_scan_tokens"] = _one_of(config, SCAN) or 256
    if config.get("model_type") == "nemotron_h":
        found |= _nemotron(config, path)
    else:
        found["layer_types"] = _kinds(config, path)
    if config.get("model_type") == "granitemoehybrid":
        found |= {"intermediate_size": config.get("shared_intermediate_size"), "moe_intermediate_size": None}
        if config.get("num_local_experts"):
            found["moe_intermediate_size"] = config.get("intermediate_size")
        else:
            found |= {"shared_intermediate_size": None, "num_experts_per_tok": None}
    return found


def _one_of(config: dict[str, Any], names: tuple[str, ...]) -> object:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _kinds(config: dict[str, Any], path: Path) -> list[str]:
    """What each layer is."""
    named = _one_of(config, ("layer_types", "layers_block_type"))
    if isinstance(named, list):
        if unknown := [kind for kind in named if kind not in KINDS]:
            raise UserError(f"{path}: field layer_types: {unknown[0]!r} is no kind of layer known: {', '.join(KINDS)}")
        return [KINDS[kind] for kind in named]
    attending, layers = config.get("attn_layer_indices"), config.get("num_hidden_layers")
    if not isinstance(attending, list) or not isinstance(layers, int):
        raise UserError(f"{path}: field layer_types is missing: give it, or attn_layer_indices")
    return [ATTENTION if i in attending else STATE for i in range(layers)]


def _nemotron(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Layers of a pattern: `M` Mamba2, `*` attention, `-` an MLP, `E` experts."""
    pattern, named = config.get("hybrid_override_pattern"), config.get("layers_block_type")
    if pattern is None and isinstance(named, list):
        pattern = "".join([LETTERS.get(kind, "?") for kind in named])
    if not isinstance(pattern, str) or not set(pattern) <= {*PATTERN, "-", "E"} or {"-", "E"} <= set(pattern):
        raise UserError(
            f"{path}: field hybrid_override_pattern = {pattern!r} cannot be sized: give one of M, * and either - or E"
        )
    mixers = [PATTERN[one] for one in pattern if one in PATTERN]
    mlps = pattern.count("-") + pattern.count("E")
    if not 0 < mlps <= len(mixers):
        raise UserError(f"{path}: field hybrid_override_pattern: {mlps} MLPs to {len(mixers)} mixers cannot be sized")
    experts = pattern.count("E")
    found: dict[str, Any] = {
        "num_hidden_layers": len(mixers),
        "layer_types": mixers,
        "mlp_layers": mlps,
        "head_dim": config.get("head_dim") or config.get("attention_head_dim"),
        "attention_head_dim": None,
        # vLLM 0.33's default for these models.
        "mamba_ssm_dtype": config.get("mamba_ssm_cache_dtype", "float32"),
        "mamba_ssm_cache_dtype": None,
        "moe_shared_expert_intermediate_size": None,
    }
    if experts:
        found["mlp_layer_types"] = ["sparse"] * experts + ["dense"] * (len(mixers) - experts)
        found["shared_expert_intermediate_size"] = config.get("moe_shared_expert_intermediate_size")
    else:
        found |= dict.fromkeys(("n_routed_experts", "num_experts_per_tok", "n_shared_experts", "moe_intermediate_size"))
    return found
