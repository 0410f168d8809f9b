"""What differs between the layers of a Hugging Face config: latent attention, experts, windows."""

from sim.errors import UserError
from sim.specs.hf_families import Family
from sim.specs.hf_fields import Fields
from sim.specs.model_spec import MlaSpec, MoeSpec

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_topk")


def read_mla(fields: Fields) -> MlaSpec:
    """Multi-head latent attention as DeepSeek V2 and V3 name its ranks."""
    if fields.flag("attention_bias", default=False):
        raise fields.error("attention_bias", "cannot be sized with latent attention: expected false")
    return MlaSpec(
        kv_lora_rank=fields.count("kv_lora_rank"),
        q_lora_rank=fields.size("q_lora_rank") or None,
        qk_nope_head_dim=fields.count("qk_nope_head_dim"),
        qk_rope_head_dim=fields.count("qk_rope_head_dim"),
        v_head_dim=fields.count("v_head_dim"),
    )


def read_moe(fields: Fields, family: Family, layers: int) -> MoeSpec | None:
    """Experts, or None for a dense model. Counts stand under any of four names."""
    experts = fields.one_of(EXPERT_COUNTS)
    if experts is None:
        if family.moe == "mixtral":
            raise UserError(f"{fields.path}: field {EXPERT_COUNTS[0]} is missing: a mixture of experts needs its count")
        return None
    if family.moe is None:
        raise UserError(f"{fields.path}: {experts} experts in a dense architecture cannot be sized: check model_type")
    active = fields.one_of(EXPERTS_PER_TOKEN)
    if active is None or active > experts:
        raise UserError(f"{fields.path}: field num_experts_per_tok = {active} must be 1 to {experts}")
    moe_layers = _moe_layers(fields, layers)
    if not moe_layers:
        return None
    width = fields.count("intermediate_size" if family.moe == "mixtral" else "moe_intermediate_size")
    return MoeSpec(
        num_experts=experts,
        experts_per_token=active,
        moe_intermediate_size=width,
        num_moe_layers=moe_layers,
        shared_intermediate_size=_shared_width(fields, width),
        shared_gate=family.shared_gate,
        router_bias=family.router_bias,
    )


def _shared_width(fields: Fields, expert_width: int) -> int:
    """Width of all shared experts together."""
    explicit = fields.one_of(("shared_expert_intermediate_size", "shared_intermediate_size"))
    return explicit or fields.size("n_shared_experts") * expert_width


def _moe_layers(fields: Fields, layers: int) -> int:
    """How many layers have experts, in the three ways configs say it."""
    kinds = fields.get("mlp_layer_types")
    frequency = fields.get("moe_layer_freq")
    if isinstance(frequency, list):
        kinds = ["sparse" if one else "dense" for one in frequency]
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers or any(k not in ("sparse", "dense") for k in kinds):
            raise fields.error("mlp_layer_types", f"must name {layers} layers 'dense' or 'sparse'")
        return kinds.count("sparse")
    first = fields.size("first_k_dense_replace")
    every = fields.one_of(("moe_layer_freq", "decoder_sparse_step")) or 1
    offset = 1 if "decoder_sparse_step" in fields else 0
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise fields.error("mlp_only_layers", "must be a list of layer numbers")
    return sum(1 for i in range(layers) if i >= first and (i + offset) % every == 0 and i not in dense)


def check_layers(fields: Fields, family: Family, layers: int) -> None:
    """UserError unless every layer attends to the whole context: only then are KV bytes proportional to tokens."""
    kinds = fields.get("layer_types")
    # MiniMax numbers its kinds: 1 is full attention, 0 is linear.
    attention_kinds = fields.get("attn_type_list") or [1]
    if not isinstance(attention_kinds, list) or any(kind != 1 for kind in attention_kinds):
        raise fields.error("attn_type_list", "has linear-attention layers, which cannot be sized: expected all 1")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise fields.error("layer_types", f"must name {layers} layers")
        other = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
        if other:
            raise UserError(f"{fields.path}: field layer_types: {other[0]!r} layers cannot be sized: use another model")
    window = fields.size("sliding_window")
    sliding = "sliding_attention" in kinds if kinds else fields.flag("use_sliding_window", family.sliding_by_default)
    if sliding and window and window < fields.count("max_position_embeddings"):
        raise fields.error(
            "sliding_window",
            f"bounds the KV of its layers below max_position_embeddings {fields.count('max_position_embeddings')}: "
            f"lower that to {window} in a copy of the file to size the model for shorter contexts",
        )
