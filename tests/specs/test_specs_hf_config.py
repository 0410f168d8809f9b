"""The Hugging Face reader sizes what it understands and refuses the rest by name."""

import json

import pytest

from sim.errors import UserError
from sim.specs.hf_families import FAMILIES
from sim.specs.hf_fields import Fields
from sim.specs.hf_layers import read_windows
from sim.specs.models import load_model, read_hf_config

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 8,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 100, "max_position_embeddings": 512,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "attention_dropout": 0.0,
    "rope_theta": 10000.0, "rope_scaling": {"factor": 8.0, "rope_type": "llama3"},
}  # fmt: skip
LATENT = {
    "model_type": "deepseek_v3", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8,
    "num_key_value_heads": 8, "intermediate_size": 96, "vocab_size": 100, "max_position_embeddings": 512,
    "tie_word_embeddings": False, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 4,
    "v_head_dim": 16, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 10, "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16",
}  # fmt: skip
EXPERTS = LLAMA | {"model_type": "qwen3_moe", "num_experts_per_tok": 2, "moe_intermediate_size": 12}

MAMBA2_SHAPES = {
    "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 32, "conv_kernel": 4, "chunk_size": 64,
}  # fmt: skip
MAMBA2 = MAMBA2_SHAPES | {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*-"}
STATES = LLAMA | {
    "model_type": "qwen3_5_text", "head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4, "mamba_ssm_dtype": "float32",
}  # fmt: skip
"""Of two layers one keeps a state: two key heads and four value heads of eight elements."""


def read(tmp_path, config, beside=None):
    folder = tmp_path / "some-model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if beside:
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": beside}))
    return load_model(str(folder))


def test_a_folder_gives_the_model_its_name(tmp_path):
    model = read(tmp_path, LLAMA)
    assert (model.name, model.kv_bytes_per_token_layer()) == ("some-model", 2 * 2 * 8 * 2)
    layer = 2 * 64 * 64 + 2 * 64 * 16 + 3 * 64 * 96 + 2 * 64
    assert model.num_params == 2 * layer + 2 * 100 * 64 + 64


@pytest.mark.parametrize(
    ("change", "kv_layer"),
    [
        ({"num_key_value_heads": None}, 2 * 8 * 8 * 2),
        ({"head_dim": 32}, 2 * 2 * 32 * 2),
        ({"torch_dtype": "float32"}, 2 * 2 * 8 * 2),  # served in half precision
        ({"torch_dtype": None, "dtype": "float16"}, 2 * 2 * 8 * 2),
        ({"sliding_window": 512}, 2 * 2 * 8 * 2),  # no shorter than any context
        ({"sliding_window": 64, "use_sliding_window": False}, 2 * 2 * 8 * 2),
        ({"layer_types": ["full_attention"] * 2}, 2 * 2 * 8 * 2),
    ],
)
def test_fields_that_change_the_kv(tmp_path, change, kv_layer):
    assert read(tmp_path, LLAMA | change).kv_bytes_per_token_layer() == kv_layer


def test_biases_follow_the_config(tmp_path):
    plain, biased = read(tmp_path, LLAMA), read(tmp_path, LLAMA | {"attention_bias": True, "mlp_bias": True})
    assert biased.num_params - plain.num_params == 2 * ((64 + 16 + 16 + 64) + (96 + 96 + 64))


def test_a_language_model_nested_in_a_multimodal_one(tmp_path):
    text = LLAMA | {"model_type": "qwen3_vl_text", "tie_word_embeddings": None, "head_dim": 16}
    text.pop("torch_dtype")
    model = read(tmp_path, {"model_type": "qwen3_vl", "text_config": text, "tie_word_embeddings": True})
    assert model.kv_bytes_per_token_layer() == 2 * 2 * 16 * 2
    assert model.num_kv_heads == 2


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"])
def test_experts_are_counted_under_four_names(tmp_path, name):
    model = read(tmp_path, EXPERTS | {name: 6})
    assert model.moe and (model.moe.num_experts, model.moe.experts_per_token, model.moe.num_moe_layers) == (6, 2, 2)


@pytest.mark.parametrize(
    ("change", "moe_layers"),
    [
        ({"moe_layer_freq": [0, 1]}, 1),
        ({"mlp_layer_types": ["dense", "sparse"]}, 1),
        ({"mlp_only_layers": [0]}, 1),
        ({"decoder_sparse_step": 2}, 1),
        ({"first_k_dense_replace": 1}, 1),
    ],
)
def test_layers_without_experts(tmp_path, change, moe_layers):
    model = read(tmp_path, EXPERTS | {"num_experts": 6} | change)
    assert model.moe and model.moe.num_moe_layers == moe_layers


def test_experts_with_biases_sinks_and_four_bits_by_hand(tmp_path):
    """gpt-oss: windows in every other layer, a sink for each query head, MXFP4 in the experts alone."""
    config = LLAMA | {
        "model_type": "gpt_oss", "attention_bias": True, "num_local_experts": 6, "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 128,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    }  # fmt: skip
    model = read(tmp_path, config)
    attention, biases = 2 * 64 * 64 + 2 * 64 * 16, 64 + 16 + 16 + 64
    experts, expert_biases, router = 6 * 3 * 64 * 96, 6 * (2 * 96 + 64), 64 * 6 + 6
    plain = attention + biases + 2 * 64 + 8 + expert_biases + router
    assert model.num_params == 2 * (plain + experts) + 2 * 100 * 64 + 64
    assert model.weight_bytes() == 2 * (2 * plain + experts * 17 / 32) + 2 * (2 * 100 * 64 + 64)
    # On two GPUs half of what is split; norms, sinks and the router stand on both.
    whole = 2 * (2 * (2 * 64 + 8 + router)) + 2 * 64
    assert model.weight_bytes(2) == (model.weight_bytes() - whole) / 2 + whole
    assert [(layers.num_layers, layers.window) for layers in model.kv_classes] == [(1, 128), (1, None)]
    assert (model.quantization, model.product_quantization) == ("mxfp4", "")


def test_latent_attention_by_hand(tmp_path):
    model = read(tmp_path, LATENT)
    assert model.kv_bytes_per_token_layer(8) == (32 + 4) * 2
    attention = 64 * 24 + 24 * 8 * 20 + 64 * 36 + 32 * 8 * 32 + 8 * 16 * 64
    norms = 2 * 64 + 32 + 24
    experts = 3 * 64 * (6 + 1) * 10 + 64 * 6 + 6  # the router has a bias per expert
    assert model.num_params == 4 * (attention + norms) + 3 * 64 * 96 + 3 * experts + 2 * 100 * 64 + 64


def block_fp8(**more):
    return {"quant_method": "fp8", "weight_block_size": [128, 128], **more}


@pytest.mark.parametrize(
    ("quantization", "attention", "mlp"),
    [
        (block_fp8(), 1 + 4 / 16384, 1 + 4 / 16384),
        (block_fp8(modules_to_not_convert=["self_attn"]), 2, 1 + 4 / 16384),
        (block_fp8(modules_to_not_convert=["model.layers.0.mlp"]), 1 + 4 / 16384, (2 + 1 + 4 / 16384) / 2),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 0.5 + 2.5 / 128, 0.5 + 2.5 / 128),
        ({"quant_method": "awq", "bits": 4, "group_size": -1}, 0.5, 0.5),
        ({"quant_algo": "NVFP4", "ignore": ["model.layers.*.self_attn*"]}, 2, 0.5625),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 0.5625, 0.5625),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float"}}},
            },
            0.5625,
            0.5625,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}}},
            },
            1,
            1,
        ),
        ({"quant_method": "a tool of theirs", "quant_algo": "NVFP4"}, 0.5625, 0.5625),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}},
                "ignore": [r"re:.*mlp\.(gate|up|down)_proj.*"],
            },
            0.5 + 2 / 32,
            2,
        ),
    ],
)
def test_bytes_per_weight_of_quantised_models(tmp_path, quantization, attention, mlp):
    model = read(tmp_path, LLAMA | {"quantization_config": quantization})
    assert (model.attention_dtype_bytes, model.mlp_dtype_bytes) == pytest.approx((attention, mlp))
    # Embeddings and head stay as they were.
    sizes = 2 * (2 * 64 * 64 + 2 * 64 * 16), 2 * 3 * 64 * 96
    rest = 2 * (2 * 100 * 64 + 5 * 64)
    assert model.weight_bytes() == pytest.approx(sizes[0] * attention + sizes[1] * mlp + rest)


def compressed(weights, inputs):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"g": group}}


FLOAT8, INT8 = {"type": "float", "num_bits": 8}, {"type": "int", "num_bits": 8}
FLOAT4, INT4 = {"type": "float", "num_bits": 4}, {"type": "int", "num_bits": 4, "group_size": 128}


@pytest.mark.parametrize(
    ("quantization", "kind", "share"),
    [
        ({"quant_method": "fp8"}, "fp8", 1.0),
        ({"quant_algo": "FP8"}, "fp8", 1.0),
        (compressed(FLOAT8, FLOAT8), "fp8", 1.0),
        ({"quant_algo": "NVFP4"}, "nvfp4", 1.0),
        (compressed(FLOAT4, FLOAT4), "nvfp4", 1.0),
        # Weights alone: they are made 16 bits again before they are multiplied.
        (compressed(FLOAT8, None), "", 0.0),
        (compressed(INT4, INT8), "", 0.0),
        (compressed(INT4, None), "int4", 0.0),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4", 0.0),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, "int4", 0.0),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "", 0.0),
        # Attention is left as it is: 10,240 of 28,672 weights of a layer.
        ({"quant_method": "fp8", "modules_to_not_convert": ["self_attn"]}, "fp8", 1 - 10240 / 28672),
        ({"quant_algo": "NVFP4", "exclude_modules": ["*self_attn*"]}, "nvfp4", 1 - 10240 / 28672),
        (None, "", 0.0),
    ],
)
def test_products_are_quantised_where_weights_and_activations_are(tmp_path, quantization, kind, share):
    model = read(tmp_path, LLAMA | ({"quantization_config": quantization} if quantization else {}))
    assert model.quantization == kind
    assert model.quantised_flops_share == pytest.approx(share)


def test_an_fp8_router_is_no_product():
    """Of a mixture's FLOPs, all but the router's: DeepSeek-V2-Lite's 26 of 2,048 x 64 weights."""
    plain = load_model("deepseek-v2-lite")
    fp8 = plain.with_quantization("fp8")
    assert plain.quantised_flops_share == 0.0
    assert fp8.quantised_flops_share == pytest.approx(1 - 2 * 26 * 2048 * 64 / plain.linear_flops_per_token)


@pytest.mark.parametrize(
    ("kept", "tp", "elements"),
    [
        # 64 into attention and into the MLP, 8 heads of 8 and 96 of the MLP out of them.
        ([], 1, 64 + 64 + 64 + 96),
        ([], 2, 64 + 32 + 64 + 48),
        (["self_attn"], 2, 64 + 48),
        (["mlp"], 1, 64 + 64),
    ],
)
def test_inputs_of_fp8_products_are_read_in_two_bytes_and_written_in_one(tmp_path, kept, tp, elements):
    quantization = {"quant_method": "fp8", "modules_to_not_convert": kept}
    model = read(tmp_path, LLAMA | {"quantization_config": quantization})
    assert model.quantised_input_bytes_per_token(tp) == pytest.approx(2 * 3 * elements)
    assert read(tmp_path, LLAMA).quantised_input_bytes_per_token(tp) == 0.0
    # NVFP4: 4.5 bits are written.
    quantization = {"quant_algo": "NVFP4", "exclude_modules": kept}
    model = read(tmp_path, LLAMA | {"quantization_config": quantization})
    assert model.quantised_input_bytes_per_token(tp) == pytest.approx(2 * 2.5625 * elements)


@pytest.mark.parametrize(
    ("quantization", "kind", "bytes_per_weight"),
    [
        # Kimi K2.5's, and that of NVIDIA's mixtures: the experts alone.
        (compressed({**INT4, "group_size": 32}, None) | {"ignore": ["re:.*self_attn.*"]}, "int4", 0.5625),
        ({"quant_algo": "NVFP4", "exclude_modules": ["*self_attn*"]}, "nvfp4", 0.5625),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4", 0.5 + 2.5 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, None, 1 + 3 / 128),
        # Half of the layers.
        ({"quant_algo": "NVFP4", "exclude_modules": ["model.layers.0*"]}, None, (2 + 0.5625) / 2),
    ],
)
def test_experts_have_the_kernels_of_their_format_where_all_are_in_it(tmp_path, quantization, kind, bytes_per_weight):
    config = {"num_local_experts": 8, "num_experts_per_tok": 2, "model_type": "mixtral"}
    model = read(tmp_path, LLAMA | config | {"quantization_config": quantization})
    assert model.expert_quantization == kind
    assert model.expert_dtype_bytes == pytest.approx(bytes_per_weight)


def test_a_mixture_quantises_the_hidden_state_once_and_each_active_width():
    """DeepSeek-V2-Lite: 2,048 and a latent of 512 into attention, 16 heads of 128 out of it; a dense layer, 26 mixtures
    of six experts of 1,408 and shared ones of 2,816."""
    model = load_model("deepseek-v2-lite").with_quantization("fp8")
    elements = 27 * (2048 + 512 + 16 * 128) + (2048 + 10944) + 26 * (2048 + 6 * 1408 + 2816)
    assert model.quantised_input_bytes_per_token() == pytest.approx(3 * elements)


def test_layers_that_keep_a_state_by_hand(tmp_path):
    model = read(tmp_path, STATES)
    attention = 3 * 64 * 8 * 16 + 2 * 64 * 2 * 16 + 2 * 16
    # Queries, keys, values; output gate; two gates a head; output; convolution; decay and time step; norm of a head.
    delta_net = 64 * 64 + 64 * 32 + 2 * 64 * 4 + 32 * 64 + 64 * 4 + 2 * 4 + 8
    shared = 2 * (3 * 64 * 96 + 2 * 64) + 2 * 100 * 64 + 64
    assert model.num_params == attention + delta_net + shared
    assert model.weight_bytes() == 2 * model.num_params
    assert (model.num_attention_layers, model.num_stored_layers, model.kv_bytes_per_token()) == (1, 1, 2 * 2 * 16 * 2)
    # A state of four bytes an element, and three inputs of the convolution of two.
    assert model.gdn and model.gdn.page_bytes(2) == 4 * 8 * 8 * 4 + 3 * 64 * 2
    assert model.gdn.page_bytes(2, tp=2) == model.gdn.page_bytes(2) / 2
    products = 3 * 64 * 8 * 16 + 2 * 64 * 2 * 16 + 64 * (64 + 32 + 8 + 32) + 2 * 3 * 64 * 96
    assert model.linear_flops_per_token == 2 * products
    assert model.attention_flops_per_token_pair == 4 * 8 * 16
    inner = 64 + 2 * 32 + 2 * 4 + (3 * 8 + 2 * 2) * 16
    assert model.linear_activation_bytes_per_token() == 2 * (6 * 64 + inner + 2 * (64 + 3 * 96))
    between = 2 * 8 * 64 + 2 * 10 * 16 + 2 * 2 * 2 * 16 + 3 * 8 * 16 + 3 * 32 + 2 * 3 * 96
    assert model.elementwise_bytes_per_token() == 2 * between


@pytest.mark.parametrize(
    ("name", "layers", "attending", "params", "page_bytes", "shared_bytes"),
    [
        # Published as 31.6, 8.89 and 3.19 billion parameters.
        ("nemotron-3-nano-30b-a3b", 29, 6, 31.578e9, 2_134_016, 533_504),
        ("nemotron-nano-9b-v2", 31, 4, 8.888e9, 5_316_608, 1_329_152),
        # One group, which each of four GPUs has: 3 (1,024 + 2 * 128) inputs, not 3 * 4,352 / 4.
        ("granite-4.0-h-micro", 40, 4, 3.191e9, 1_074_688, 269_824),
    ],
)
def test_states_of_mamba2_are_as_large_as_vllms(name, layers, attending, params, page_bytes, shared_bytes):
    """vLLM 0.33's `MambaStateShapeCalculator.mamba2_state_shape` gave these bytes on one GPU and on four."""
    model = load_model(name)
    assert (model.num_layers, model.num_attention_layers) == (layers, attending)
    assert model.num_params == pytest.approx(params, rel=5e-4)
    assert model.gdn
    assert [model.gdn.page_bytes(2.0, tp) for tp in (1, 4)] == [page_bytes, shared_bytes]


def test_layers_of_mamba2_by_hand(tmp_path):
    model = read(tmp_path, LLAMA | MAMBA2)
    inner, conv = 8 * 16, 8 * 16 + 2 * 2 * 32
    mamba2 = 64 * (inner + conv + 8) + inner * 64 + conv * 5 + 3 * 8 + inner
    attention = (model.num_heads + model.num_kv_heads) * 2 * 64 * model.head_dim
    mlps = 2 * 2 * 64 * model.intermediate_size
    others = model.num_params - 2 * mamba2 - attention - mlps - 2 * model.vocab_size * 64
    # Norms: of three mixers, of two MLPs, and the last.
    assert others == (3 + 2 + 1) * 64
    assert model.gdn and model.gdn.page_bytes(2.0) == 8 * 16 * 32 * 4 + 3 * conv * 2
    with pytest.raises(UserError, match="8 does not divide 2 groups and 8 heads of Mamba2"):
        model.check_tp(8)


def test_heads_of_states_are_split_over_gpus(tmp_path):
    model = read(tmp_path, STATES)
    with pytest.raises(UserError, match="4 does not divide 2 key heads and 4 value heads of Gated DeltaNet"):
        model.check_tp(4)


def test_projections_of_states_may_stay_unquantised(tmp_path):
    """NVIDIA's checkpoints name modules of the nested language model."""
    kept = ["model.language_model.layers.0.linear_attn*"]
    model = read(tmp_path, STATES | {"quantization_config": block_fp8(ignore=kept)})
    products = 3 * 64 * 8 * 16 + 2 * 64 * 2 * 16
    states = 64 * (64 + 32 + 8 + 32)
    mean = (products * (1 + 4 / 128**2) + states * 2) / (products + states)
    assert model.attention_dtype_bytes == pytest.approx(mean)


def test_the_quantisation_file_beside_the_config_counts_too(tmp_path):
    model = read(tmp_path, LLAMA, beside={"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"})
    assert (model.mlp_dtype_bytes, model.kv_bytes_per_token_layer()) == (1, 2 * 2 * 8)


@pytest.mark.parametrize(
    ("change", "words"),
    [({}, ""), ({"use_cla": True, "cla_share_factor": 2}, "layers that share KV are not computed by the runtime")],
)
def test_the_runtime_computes_layers_that_keep_all_their_own_kv(tmp_path, change, words):
    fields = Fields(LLAMA | change, tmp_path / "config.json")
    family = FAMILIES[(LLAMA | change)["model_type"]]
    if not words:
        assert read_windows(fields, family, 2) == (None, None)
        return
    with pytest.raises(UserError, match=words):
        read_windows(fields, family, 2)


REFUSED = [
    ({"model_type": "falcon_h1"}, ["model_type", "'falcon_h1'", "Mamba"]),
    (MAMBA2 | {"hybrid_override_pattern": "ME-*"}, ["hybrid_override_pattern", "either - or E"]),
    (MAMBA2 | {"hybrid_override_pattern": "M--*-"}, ["3 MLPs to 2 mixers"]),
    (MAMBA2 | {"ssm_state_size": None}, ["field mamba_d_state is missing"]),
    (MAMBA2 | {"mamba_proj_bias": True}, ["mamba_proj_bias"]),
    ({"model_type": "bamba"} | MAMBA2_SHAPES, ["layer_types is missing: give it, or attn_layer_indices"]),
    ({"model_type": "bamba", "layer_types": ["mamba", "moe"]} | MAMBA2_SHAPES, ["'moe' is no kind of layer known"]),
    ({"model_type": "t5"}, ["model_type", "encoder-decoder"]),
    ({"model_type": "gemma3n_text"}, ["layers share KV"]),
    ({"model_type": "minimax_m3"}, ["model_type", "second cache"]),
    ({"model_type": "brand_new"}, ["model_type", "'brand_new'", "known:", "llama"]),
    ({"is_encoder_decoder": True}, ["is_encoder_decoder"]),
    ({"model_type": "other_vl", "text_config": LLAMA}, ["model_type", "'other_vl'", "text_config"]),
    ({"layer_types": ["full_attention", "sliding_attention"]}, ["sliding_window = None", "give its tokens"]),
    (
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64, "use_sliding_window": False},
        ["use_sliding_window = False", "contradicts layer_types"],
    ),
    (
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64, "sliding_window_pattern": 2},
        ["sliding_window_pattern = 2", "contradicts layer_types"],
    ),
    ({"sliding_window": 64, "sliding_window_size": 32}, ["sliding_window", "64", "32", "disagree"]),
    ({"num_key_value_layers": 2, "num_hidden_layers": 3}, ["num_key_value_layers = 2", "divide 3"]),
    ({"num_key_value_layers": 1, "use_cla": True, "cla_share_factor": 2}, ["num_key_value_layers = 1", "use_cla"]),
    (
        {
            "sliding_window": 64,
            "layer_types": ["full_attention", "sliding_attention"],
            "use_cla": True,
            "cla_share_factor": 2,
        },
        ["share KV", "sliding_window = 64"],
    ),
    ({"yoco": True}, ["yoco = true", "sliding_window", "None"]),
    ({"yoco": True, "sliding_window": 64, "num_hidden_layers": 3}, ["yoco = true", "even", "3"]),
    ({"yoco": True, "sliding_window": 64, "num_key_value_layers": 1}, ["yoco = True", "combined"]),
    ({"layer_types": ["full_attention", "linear_attention"]}, ["layer_types", "'linear_attention'"]),
    ({"layer_types": ["full_attention"]}, ["layer_types", "2 layers"]),
    ({"attn_type_list": [0, 1]}, ["attn_type_list"]),
    ({"num_kv_shared_layers": 1}, ["num_kv_shared_layers = 1", "not understood"]),
    ({"cla_share_factor": 2}, ["cla_share_factor = 2"]),
    ({"attention_chunk_size": 8192}, ["attention_chunk_size = 8192"]),
    ({"index_topk": 64}, ["index_topk = 64"]),
    ({"num_experts": 8, "num_experts_per_tok": 2}, ["8 experts", "dense"]),
    ({"hidden_size": 60}, ["head_dim", "60"]),
    ({"num_key_value_heads": 3}, ["num_key_value_heads = 3", "divide"]),
    ({"torch_dtype": "float8_e4m3fn"}, ["dtype", "float8_e4m3fn"]),
    ({"quantization_config": {"quant_method": "quip"}}, ["quantization_config.quant_method", "'quip'"]),
    ({"quantization_config": {"quant_algo": "MIXED_PRECISION"}}, ["quant_algo", "MIXED_PRECISION"]),
    ({"quantization_config": {"quant_method": "modelopt"}}, ["quantization_config.quant_algo", "FP8, NVFP4"]),
    ({"quantization_config": {"quant_method": "gptq", "bits": 5, "group_size": 8}}, ["bits", "2, 3, 4 or 8"]),
    ({"quantization_config": block_fp8(weight_block_size=[128, 0])}, ["weight_block_size", "two positive integers"]),
    ({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {}}}, ["config_groups", "Linear"]),
    (
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 7}}},
            }
        },
        ["config_groups.weights", "num_bits of 2, 3, 4 or 8"],
    ),
    ({"quantization_config": block_fp8(ignore="gate")}, ["ignore", "a list of module names"]),
    (LATENT | {"attention_bias": True}, ["attention_bias", "expected false"]),
    ({"model_type": "opt", "word_embed_proj_dim": 32}, ["word_embed_proj_dim", "differs from hidden_size 64"]),
    ({"model_type": "opt", "do_layer_norm_before": False}, ["do_layer_norm_before", "must be true"]),
    ({"model_type": "mixtral"}, ["num_experts is missing", "needs its count"]),
    (EXPERTS | {"num_experts": 4, "num_experts_per_tok": 5}, ["num_experts_per_tok = 5", "1 to 4"]),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ["group_size", "whole number"]),
    ({"quantization_config": {"quant_method": "gptq", "bits": "x" * 59}}, [f"bits = '{'x' * 56}... cannot"]),
    ({"quantization_config": block_fp8(ignore=["re:("])}, ["ignore", "does not compile"]),
    ({"quantization_config": block_fp8(kv_cache_scheme="int3")}, ["kv_cache_scheme", "int3"]),
    ({"quantization_config": 3}, ["quantization_config = 3", "expected an object or null"]),
    ({"hidden_size": 10**12}, ["hidden_size", "is more than"]),
    (EXPERTS | {"num_experts": 4, "mlp_only_layers": 1}, ["mlp_only_layers", "must be a list of layer numbers"]),
    (STATES | {"layer_types": None}, ["full_attention_interval is missing"]),
    (STATES | {"layer_types": ["linear_attention"] * 2}, ["no layer attends"]),
    (STATES | {"layer_types": ["linear_attention", "sliding_attention"]}, ["layer_types", "'sliding_attention'"]),
    (STATES | {"mamba_ssm_dtype": "float8"}, ["mamba_ssm_dtype = 'float8'", "float32"]),
]


@pytest.mark.parametrize(("change", "words"), REFUSED)
def test_what_is_not_understood_is_refused_by_name(tmp_path, change, words):
    with pytest.raises(UserError) as error:
        read(tmp_path, LLAMA | change)
    message = str(error.value)
    assert "\n" not in message
    assert "config.json" in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"num_experts": 6, "n_routed_experts": 8}, "disagree"),
        ({"num_experts": 1}, "1 to 1"),
        ({"num_experts": 6, "mlp_layer_types": ["dense", {}]}, "mlp_layer_types"),
    ],
)
def test_experts_that_do_not_add_up_are_refused(tmp_path, change, word):
    with pytest.raises(UserError, match=word):
        read(tmp_path, EXPERTS | change)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "not JSON at line 1"),
        ('{"a": 1, "a": 2}', "'a' appears twice"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "not JSON"),
        ("[" * 100_000, "nested"),
        ("[1]", r"holds \[1\], not a JSON object"),
    ],
)
def test_files_that_hold_no_config(tmp_path, text, word):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UserError, match=word):
        read_hf_config(path)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_hf_config(tmp_path / "absent.json")
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(UserError, match="not UTF-8"):
        read_hf_config(tmp_path)


BLOOM_560M = {
    "model_type": "bloom", "n_layer": 24, "n_head": 16, "hidden_size": 1024, "vocab_size": 250880, "seq_length": 2048,
    "apply_residual_connection_post_layernorm": False, "use_cache": True,
}  # fmt: skip
INTERNLM_7B = {
    "model_type": "internlm", "bias": True, "hidden_size": 4096, "intermediate_size": 11008,
    "max_position_embeddings": 2048, "num_attention_heads": 32, "num_hidden_layers": 32, "tie_word_embeddings": False,
    "torch_dtype": "float16", "use_cache": True, "vocab_size": 103168,
}  # fmt: skip


def test_bloom_has_an_mlp_of_four_widths_and_no_table_of_positions(tmp_path):
    """bigscience/bloom-560m has 559,214,592 parameters."""
    model = read(tmp_path, BLOOM_560M)
    assert model.num_params == 559_214_592
    assert (model.num_kv_heads, model.head_dim, model.intermediate_size) == (16, 64, 4096)
    assert (model.position_rows, model.max_position_embeddings, model.tie_word_embeddings) == (0, 2048, True)


def test_internlm_is_a_llama_with_biases_where_it_says_so(tmp_path):
    """Biases on Q, K, V and the output: internlm-7b has them, internlm-20b says `bias: false`."""
    model = read(tmp_path, INTERNLM_7B)
    layer = 4 * 4096 * 4096 + 4 * 4096 + 3 * 4096 * 11008 + 2 * 4096
    assert model.num_params == 32 * layer + 2 * 103168 * 4096 + 4096
    assert not read(tmp_path, INTERNLM_7B | {"bias": False}).qkv_bias
    grouped = read(tmp_path, INTERNLM_7B | {"model_type": "internlm2", "bias": False, "num_key_value_heads": 8})
    assert (grouped.num_kv_heads, grouped.qkv_bias, grouped.output_bias) == (8, False, False)
