"""Architectures the Hugging Face reader understands, and why it refuses others it knows of."""

from typing import Literal

import msgspec


class Family(msgspec.Struct, frozen=True):
    """What a `model_type` leaves unsaid in its config.

    Attributes:
        qkv_bias: biases on Q, K, V: yes, no, or as `attention_bias` (InternLM: `bias`) says.
        output_bias: bias on the output projection, likewise.
        qk_norm: norms of queries and keys: per head (d elements each), over all heads (n d elements each), or per head
            where `use_qk_norm` says so.
        layer_norm: LayerNorm with bias (2 h elements) in place of RMSNorm (h elements).
        moe: experts of `intermediate_size` ("mixtral") or `moe_intermediate_size` ("fine"); None: dense only.
        fp32_router: as `MoeSpec.fp32_router` has it.
        sliding_by_default: a `sliding_window` counts even where `use_sliding_window` is absent.
        window_pattern: every so many-th layer attends to all, the others have the window; None: as the config says.
        norms: norms of h elements in a layer.
        windows_apart: as `ModelSpec.windows_apart` has it.
        sinks: a learned logit for each query head in the softmax of attention, which takes no KV.
        expert_bias: biases on the projections of routed experts.
        gdn: layers that are not full attention keep the state of Gated DeltaNet.
        mamba2: they keep Mamba2's; `sim.specs.hf_mamba2` has their fields by Gated DeltaNet's names.
        indexer: latent attention to the tokens that an indexer chooses.
        adapted: what vLLM 0.33 gives adapters beside, as `ModelSpec.adapted` has it.
    """

    qkv_bias: bool | Literal["config"] = "config"
    output_bias: bool | Literal["config"] = "config"
    qk_norm: Literal["head", "all", "config"] | None = None
    layer_norm: bool = False
    gated_mlp: bool = True
    mla: bool = False
    moe: Literal["mixtral", "fine"] | None = None
    shared_gate: bool = False
    router_bias: bool = False
    fp32_router: bool = False
    sliding_by_default: bool = True
    window_pattern: int | None = None
    norms: int = 2
    windows_apart: bool = False
    sinks: bool = False
    expert_bias: bool = False
    gdn: bool = False
    mamba2: bool = False
    indexer: bool = False
    adapted: Literal["", "projections", "all"] = ""


QWEN3 = Family(qk_norm="head", sliding_by_default=False, adapted="all")
QWEN3_MOE = Family(qk_norm="head", moe="fine", sliding_by_default=False)
QWEN3_5 = Family(qk_norm="head", moe="fine", shared_gate=True, sliding_by_default=False, gdn=True)
FAMILIES: dict[str, Family] = {
    "llama": Family(adapted="all"),
    "mistral": Family(qkv_bias=False, output_bias=False, adapted="projections"),
    "mixtral": Family(qkv_bias=False, output_bias=False, moe="mixtral"),
    "phi3": Family(qkv_bias=False, output_bias=False),
    "gemma": Family(adapted="projections"),
    "gemma2": Family(window_pattern=2, norms=4, adapted="projections"),
    "gemma3_text": Family(window_pattern=6, norms=4, qk_norm="head", adapted="projections"),
    "opt": Family(qkv_bias=True, output_bias=True, layer_norm=True, gated_mlp=False, adapted="projections"),
    "internlm": Family(adapted="all"),
    "internlm2": Family(),
    "bloom": Family(qkv_bias=True, output_bias=True, layer_norm=True, gated_mlp=False),
    "qwen2": Family(qkv_bias=True, output_bias=False, sliding_by_default=False, adapted="projections"),
    "qwen2_moe": Family(qkv_bias=True, output_bias=False, moe="fine", shared_gate=True, sliding_by_default=False),
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_next": QWEN3_5,
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5,
    "qwen3_vl_text": QWEN3,
    "qwen3_vl_moe_text": QWEN3_MOE,
    "mimo": Family(qkv_bias="config", output_bias=False, sliding_by_default=False),
    "minimax_m2": Family(
        qkv_bias=False, output_bias=False, qk_norm="all", moe="mixtral", router_bias=True, fp32_router=True
    ),
    "gpt_oss": Family(moe="mixtral", router_bias=True, windows_apart=True, sinks=True, expert_bias=True),
    "glm4": Family(output_bias=False, norms=4),
    "glm4_moe": Family(output_bias=False, qk_norm="config", moe="fine", router_bias=True),
    "deepseek_v2": Family(mla=True, moe="fine"),
    "deepseek_v3": Family(mla=True, moe="fine", router_bias=True),
    "deepseek_v32": Family(mla=True, moe="fine", router_bias=True, indexer=True),
    "glm_moe_dsa": Family(mla=True, moe="fine", router_bias=True, indexer=True),
    "nemotron_h": Family(gated_mlp=False, moe="fine", router_bias=True, norms=1, sliding_by_default=False, mamba2=True),
    "bamba": Family(sliding_by_default=False, mamba2=True),
    "granitemoehybrid": Family(moe="fine", sliding_by_default=False, mamba2=True),
    "glm4_moe_lite": Family(mla=True, moe="fine", router_bias=True),
    "kimi_k2": Family(mla=True, moe="fine", router_bias=True),
}

WRAPPERS = frozenset({"qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "kimi_k25", "llava", "mistral3", "gemma3"})
"""Multimodal models whose language model, under `text_config`, attends as its own `model_type` says."""

_LINEAR = "its linear-attention layers keep a state that is not Gated DeltaNet's"
_MAMBA = "its Mamba layers keep a state that is not Mamba2's, or stand beside attention"
_SPARSE = "its sparse-attention indexer keeps a second cache per token"
_SLIDING = "its sliding-window layers differ from the others in more than the window, or keep sinks"
_ENCODER = "an encoder-decoder keeps cross-attention KV"
_SHARED = "layers share KV, so not every layer has its own"

REFUSED: dict[str, str] = {
    "mamba": _MAMBA,
    "mamba2": _MAMBA,
    "jamba": _MAMBA,
    "falcon_h1": _MAMBA,
    "zamba2": _MAMBA,
    "kimi_linear": _LINEAR,
    "rwkv": _LINEAR,
    "minimax": _LINEAR,
    "recurrent_gemma": _LINEAR,
    "minimax_m3": _SPARSE,
    "minimax_m3_vl": _SPARSE,
    "deepseek_v4": "its KV is compressed at a different ratio in each layer",
    "deepseek_ref": "its KV is compressed at a different ratio in each layer",
    "gemma4_text": _SLIDING,
    "gemma3n_text": _SHARED,
    "mimo_v2_flash": _SLIDING,
    "step3p7": _SLIDING,
    "llama4_text": "layers with chunked attention bound their KV, so bytes per token depend on the length",
    "nemotron-nas": "layers differ in KV heads and some have no attention (block_configs)",
    "mllama_text_model": "cross-attention layers keep KV of the image, not of each token",
    "t5": _ENCODER,
    "bart": _ENCODER,
    "whisper": _ENCODER,
}
