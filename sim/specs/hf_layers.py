"""What differs between the layers of a Hugging Face config: latent attention, experts, windows, shared KV."""

from sim.errors import UserError
from sim.specs.gated_delta_net import GatedDeltaNetSpec
from sim.specs.hf_families import Family
from sim.specs.hf_fields import Fields
from sim.specs.indexer import IndexerSpec
from sim.specs.kv_format import KVLayers
from sim.specs.model_spec import MlaSpec, MoeSpec

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_topk")


def read_mla(fields: Fields, family: Family) -> MlaSpec | None:
    """Multi-head latent attention as DeepSeek V2, V3 and V3.2 name its ranks; None where a model has none."""
    if not family.mla:
        return None
    if fields.flag("attention_bias", default=False):
        raise fields.error("attention_bias", "cannot be sized with latent attention: expected false")
    return MlaSpec(
        kv_lora_rank=fields.count("kv_lora_rank"),
        q_lora_rank=fields.size("q_lora_rank") or None,
        qk_nope_head_dim=fields.count("qk_nope_head_dim"),
        qk_rope_head_dim=fields.count("qk_rope_head_dim"),
        v_head_dim=fields.count("v_head_dim"),
        indexer=_indexer(fields) if family.indexer else None,
    )


def _indexer(fields: Fields) -> IndexerSpec:
    """The indexer of every layer, which asks with the latents of queries."""
    fields.count("q_lora_rank")
    return IndexerSpec(
        num_heads=fields.count("index_n_heads"),
        head_dim=fields.count("index_head_dim"),
        top_k=fields.count("index_topk"),
    )


STATE_DTYPE_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0}


def read_gdn(fields: Fields, family: Family, layers: int, dtype_bytes: float) -> GatedDeltaNetSpec | None:
    """Gated DeltaNet as Qwen names its heads; None where every layer attends.

    The state has the type that the config names, else the model's own, as in vLLM.
    """
    kept = gdn_layers(fields, family, layers)
    if not kept:
        return None
    name = fields.get("mamba_ssm_dtype")
    if name is not None and (not isinstance(name, str) or name not in STATE_DTYPE_BYTES):
        raise fields.error("mamba_ssm_dtype", f"cannot be sized: known: {', '.join(STATE_DTYPE_BYTES)}")
    return GatedDeltaNetSpec(
        num_layers=len(kept),
        num_key_heads=fields.count("linear_num_key_heads"),
        num_value_heads=fields.count("linear_num_value_heads"),
        key_head_dim=fields.count("linear_key_head_dim"),
        value_head_dim=fields.count("linear_value_head_dim"),
        conv_kernel=fields.count("linear_conv_kernel_dim"),
        state_dtype_bytes=dtype_bytes if name is None else STATE_DTYPE_BYTES[name],
        scan_tokens=fields.count("mamba_scan_tokens") if family.mamba2 else 0,
        mlp_layers=fields.size("mlp_layers"),
    )


def gdn_layers(fields: Fields, family: Family, layers: int) -> list[int]:
    """Numbers of the layers that keep a state: as `layer_types` says, else all but every so many-th."""
    if not (family.gdn or family.mamba2):
        return []
    kinds = fields.get("layer_types")
    if isinstance(kinds, list):
        found = [i for i, kind in enumerate(kinds) if kind == "linear_attention"]
    else:
        every = fields.count("full_attention_interval")
        found = [i for i in range(layers) if (i + 1) % every]
    if len(found) == layers:
        raise UserError(f"{fields.path}: no layer attends: models whose layers all keep a state cannot be sized")
    return found


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
        fp32_router=family.fp32_router,
        expert_bias=family.expert_bias,
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


def read_kv_layers(fields: Fields, family: Family, layers: int) -> tuple[KVLayers, ...]:
    """Classes of layers that differ in what KV they keep and read; none where every layer keeps and reads all its own.

    In the order of their first layers.

    UserError where the config contradicts itself, or combines what no model does.
    """
    _check_kinds(fields, family, layers)
    window = _window(fields)
    windowed = _windowed(fields, family, layers, window)
    num_windowed = sum(windowed)
    if window and window >= fields.count("max_position_embeddings"):
        # No context outgrows it.
        num_windowed = 0
    if fields.flag("yoco", default=False):
        return _yoco(fields, layers, window, num_windowed)
    share = _share_factor(fields, layers)
    if share > 1 and 0 < num_windowed < layers:
        raise UserError(
            f"{fields.path}: layers that share KV cannot be sized where some have a window and some have none "
            f"(sliding_window = {window}): give all of them one, or none"
        )
    if share == 1 and not num_windowed:
        return ()
    classes = ((layers - num_windowed, None), (num_windowed, window))
    if windowed[0]:
        classes = classes[::-1]
    return tuple(KVLayers(num_layers=n, num_stored=-(-n // share), window=cap) for n, cap in classes if n)


def read_windows(fields: Fields, family: Family, layers: int) -> tuple[int | None, ...]:
    """The window of every layer, tokens, the query's own included; None: all. UserError where layers share KV."""
    classes = read_kv_layers(fields, family, layers)
    if any(kind.num_stored < kind.num_layers for kind in classes):
        raise UserError(f"{fields.path}: layers that share KV are not computed by the runtime: use another model")
    if not classes:
        return (None,) * layers
    window = _window(fields)
    return tuple(window if has_one else None for has_one in _windowed(fields, family, layers, window))


def _check_kinds(fields: Fields, family: Family, layers: int) -> None:
    """UserError unless all layers have softmax attention, or the state that the family's keep."""
    # MiniMax numbers its kinds: 1 is full attention, 0 is linear.
    attention_kinds = fields.get("attn_type_list") or [1]
    if not isinstance(attention_kinds, list) or any(kind != 1 for kind in attention_kinds):
        raise fields.error("attn_type_list", "has linear-attention layers, which cannot be sized: expected all 1")
    kinds = fields.get("layer_types")
    if kinds is None:
        return
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise fields.error("layer_types", f"must name {layers} layers")
    known = {"full_attention", "linear_attention" if family.gdn or family.mamba2 else "sliding_attention"}
    other = sorted({str(kind) for kind in kinds} - known)
    if other:
        raise UserError(f"{fields.path}: field layer_types: {other[0]!r} layers cannot be sized: use another model")


def _window(fields: Fields) -> int:
    """Tokens of the window; 0: none."""
    return fields.one_of(("sliding_window", "sliding_window_size")) or 0


def _windowed(fields: Fields, family: Family, layers: int, window: int) -> list[bool]:
    """Which layers have a window, in the four ways configs say it."""
    kinds, used = fields.get("layer_types"), fields.get("use_sliding_window")
    pattern = fields.one_of(("sliding_window_pattern", "_sliding_window_pattern")) or family.window_pattern
    if isinstance(kinds, list):
        found = [kind == "sliding_attention" for kind in kinds]
        if any(found) and used is False:
            raise fields.error("use_sliding_window", "contradicts layer_types with 'sliding_attention': correct one")
        if pattern and "sliding_window_pattern" in fields and found != _every(pattern, layers):
            raise fields.error("sliding_window_pattern", "contradicts layer_types: keep one of the two")
    elif pattern:
        found = _every(pattern, layers)
    elif not fields.flag("use_sliding_window", family.sliding_by_default):
        found = [False] * layers
    elif window and not family.sliding_by_default:
        first = fields.size("max_window_layers")
        found = [i >= first for i in range(layers)]
    else:
        found = [bool(window)] * layers
    if not window and (any(found) or used is True):
        raise fields.error("sliding_window", "is not set, and layers are said to have a window: give its tokens")
    return found


def _every(pattern: int, layers: int) -> list[bool]:
    """Windows in all but every `pattern`-th layer."""
    return [(i + 1) % pattern != 0 for i in range(layers)]


def _share_factor(fields: Fields, layers: int) -> int:
    """Layers in a row that share one layer's KV: CLA as Hunyuan spells it, MLKV as its authors do."""
    factor = fields.one_of(("cla_share_factor",)) or 1
    if factor > 1 and "use_cla" not in fields:
        raise fields.error(
            "cla_share_factor", "means layers that share KV, but use_cla is not set: set it true or false"
        )
    if not fields.flag("use_cla", default=False):
        factor = 1
    kept = fields.one_of(("num_key_value_layers",))
    if kept is None:
        return factor
    if factor > 1 or fields.flag("swiftkv", default=False):
        raise fields.error(
            "num_key_value_layers", "means MLKV, and cannot be combined with use_cla or swiftkv: keep one"
        )
    if layers % kept:
        raise fields.error("num_key_value_layers", f"does not divide {layers} layers: correct one of them")
    return layers // kept


def _yoco(fields: Fields, layers: int, window: int, num_windowed: int) -> tuple[KVLayers, ...]:
    """Half the layers with a window, then half that read one global cache, which one projection makes."""
    if layers % 2 or not 0 < num_windowed == layers:
        raise UserError(
            f"{fields.path}: field yoco = true needs an even num_hidden_layers (it is {layers}) and a sliding_window "
            f"below max_position_embeddings (it is {window or None}) for the first half: correct them"
        )
    if fields.one_of(EXPERT_COUNTS) or fields.flag("use_cla", False) or "num_key_value_layers" in fields:
        raise fields.error("yoco", "cannot be combined with experts or other ways to share KV: keep one")
    half = layers // 2
    return (
        KVLayers(num_layers=half, num_stored=half, window=window),
        KVLayers(num_layers=half, num_stored=1, last_token_only=True),
    )
