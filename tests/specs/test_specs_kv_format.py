"""What formats store, read and copy at a position, against numbers worked out by hand; and how configs say them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from sim.errors import UserError
from sim.options.policies import parse_policy
from sim.options.scenario import build_scenario
from sim.run.prepare import prepare
from sim.specs.hardware import load_hardware
from sim.specs.kv_format import KV_DTYPES, KVFormat, KVGroups, KVLayers, hybrid_groups, kv_dtype, window_pairs
from sim.specs.models import built_in_models, load_model, read_hf_config

# Eight layers, two KV heads of 8 elements: 64 bytes a token and layer.
EIGHT = {
    "model_type": "llama", "num_hidden_layers": 8, "hidden_size": 64, "num_attention_heads": 8,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 100, "max_position_embeddings": 512,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def read(tmp_path, **change):
    (tmp_path / "config.json").write_text(json.dumps(EIGHT | change))
    return read_hf_config(tmp_path)


def classes(model):
    return [(c.num_layers, c.num_stored, c.window) for c in model.kv_classes]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, [(8, 8, None)]),
        ({"model_type": "mistral", "sliding_window": 64}, [(8, 8, 64)]),
        ({"sliding_window": 512}, [(8, 8, None)]),
        ({"model_type": "qwen2", "sliding_window": 64, "max_window_layers": 6}, [(8, 8, None)]),
        (
            {"model_type": "qwen2", "sliding_window": 64, "max_window_layers": 6, "use_sliding_window": True},
            [(6, 6, None), (2, 2, 64)],
        ),
        ({"model_type": "gemma2", "sliding_window": 64}, [(4, 4, 64), (4, 4, None)]),
        ({"model_type": "gemma3_text", "sliding_window": 64}, [(7, 7, 64), (1, 1, None)]),
        ({"model_type": "gemma3_text", "sliding_window": 64, "sliding_window_pattern": 4}, [(6, 6, 64), (2, 2, None)]),
        (
            {"layer_types": ["sliding_attention", "full_attention"] * 4, "sliding_window": 64},
            [(4, 4, 64), (4, 4, None)],
        ),
        ({"use_cla": True, "cla_share_factor": 2}, [(8, 4, None)]),
        ({"use_cla": True, "cla_share_factor": 3}, [(8, 3, None)]),
        ({"use_cla": False, "cla_share_factor": 2}, [(8, 8, None)]),
        ({"use_cla": True, "cla_share_factor": 2, "sliding_window": 64}, [(8, 4, 64)]),
        ({"num_key_value_layers": 2}, [(8, 2, None)]),
        ({"yoco": True, "sliding_window": 64}, [(4, 4, 64), (4, 1, None)]),
    ],
)
def test_classes_of_layers(tmp_path, change, expected):
    assert classes(read(tmp_path, **change)) == expected


def stored_bytes(kv: KVFormat, position: int) -> float:
    """Of a sequence, before whole blocks round up."""
    kept = kv.num_full_stored * position + kv.num_window_stored * min(position, kv.window or position)
    return kv.token_layer_bytes * kept


def read_bytes(kv: KVFormat, position: int) -> float:
    """By the decode of the token at `position`."""
    seen = kv.num_full_readers * position + kv.num_window_readers * min(position, kv.window or position)
    return kv.token_layer_bytes * seen


def test_bytes_at_a_position_by_hand(tmp_path):
    """64 bytes a token and layer; 100 tokens, of which a window of 64 sees 64."""
    gemma = read(tmp_path, model_type="gemma2", sliding_window=64).kv_format()
    assert (stored_bytes(gemma, 100), read_bytes(gemma, 100)) == (64 * 4 * (100 + 64),) * 2
    assert stored_bytes(gemma, 10) == 64 * 8 * 10
    cla = read(tmp_path, use_cla=True, cla_share_factor=2).kv_format()
    # Capacity halves, what a decode reads does not.
    assert (stored_bytes(cla, 100), read_bytes(cla, 100)) == (25_600, 51_200)
    mlkv = read(tmp_path, num_key_value_layers=1).kv_format()
    assert (stored_bytes(mlkv, 100), read_bytes(mlkv, 100)) == (6_400, 51_200)
    yoco = read(tmp_path, yoco=True, sliding_window=64).kv_format()
    # Four layers with a window, one global cache that four layers read.
    assert (stored_bytes(yoco, 100), read_bytes(yoco, 100)) == (64 * (4 * 64 + 100), 64 * (4 * 64 + 4 * 100))


def test_weights_and_work_of_layers_without_their_own_kv(tmp_path):
    """A projection to keys and values has 64 x 32 elements; half of eight layers lack it."""
    plain, cla = read(tmp_path), read(tmp_path, use_cla=True, cla_share_factor=2)
    assert plain.num_params - cla.num_params == 4 * 64 * 32
    assert plain.weight_bytes() - cla.weight_bytes() == 2 * 4 * 64 * 32
    assert plain.linear_flops_per_token - cla.linear_flops_per_token == 2 * 4 * 64 * 32
    assert plain.linear_weight_bytes - cla.linear_weight_bytes == 2 * 4 * 64 * 32
    activations = plain.linear_activation_bytes_per_token() - cla.linear_activation_bytes_per_token()
    assert activations == 2 * 4 * 32
    assert cla.kv_bytes_per_token() == 4 * 64
    biased = read(tmp_path, model_type="qwen2"), read(tmp_path, model_type="qwen2", num_key_value_layers=4)
    assert biased[0].num_params - biased[1].num_params == 4 * (64 * 32 + 32)


def test_half_of_yoco_sees_a_prompts_last_token_only(tmp_path):
    """Upper layers: queries and outputs 2 x 64 x 64, MLP 3 x 64 x 96; lower ones 64 x 32 more, the global one too."""
    model = read(tmp_path, yoco=True, sliding_window=64)
    upper = 4 * (2 * 64 * 64 + 3 * 64 * 96)
    whole = 2 * upper + 5 * 64 * 32
    assert model.linear_flops_per_token == 2 * whole
    assert model.last_token_share == upper / whole
    assert load_model("llama-2-7b").last_token_share == 0.0


# -- types ---------------------------------------------------------------------------------------------------------


def test_bytes_of_types_by_hand():
    """int4: half a byte, and 4 bytes of scale and zero point for each 64 elements; 80 elements have two groups."""
    assert {name: dtype.bytes_per_element(128) for name, dtype in KV_DTYPES.items()} == {
        "bfloat16": 2.0, "fp8": 1.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0, "int8": 1.0625, "int4": 0.5625, "kivi2": 0.375,
    }  # fmt: skip
    assert KV_DTYPES["int4"].bytes_per_element(80) == 0.5 + 8 / 80
    model = load_model("llama-2-7b").with_kv_dtype(KV_DTYPES["int4"])
    assert model.kv_bytes_per_token() == 2 * 32 * 32 * (128 / 2 + 2 * 4)
    assert model.kv_format().dequantize_ops_per_token_read == 4 * 2 * 32 * 128
    # Weights stay as they are.
    assert model.weight_bytes() == load_model("llama-2-7b").weight_bytes()


def test_a_checkpoints_own_fp8_is_dequantised_too(tmp_path):
    scheme = {"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    kv = read(tmp_path, quantization_config=scheme).kv_format()
    assert (kv.token_layer_bytes, kv.dequantize_ops_per_token_read) == (32, 2 * 32)


def test_latents_are_stored_once_and_read_with_the_projections_absorbed():
    """DeepSeek-V2-Lite: 512 + 64 elements; 16 heads with 2 (512 + 64) + 2 x 512 FLOPs for each token read."""
    model = load_model("deepseek-v2-lite")
    kv = model.kv_format()
    assert kv.token_layer_bytes == 1152
    assert kv.flops_per_token_read == 16 * 2 * (512 + 64 + 512)
    # A group of two splits the heads and keeps the latent twice.
    assert (model.kv_format(2).token_layer_bytes, model.kv_format(2).flops_per_token_read) == (1152, 8 * 2 * 1088)
    assert model.with_kv_dtype(KV_DTYPES["fp8"]).kv_format().token_layer_bytes == 576
    with pytest.raises(UserError, match=r"--kv-cache-dtype int4: deepseek-v2-lite keeps latents.*use auto or an fp8"):
        model.with_kv_dtype(KV_DTYPES["int4"])


def test_kivi_keeps_two_bits_and_a_scale_and_its_last_tokens_whole():
    """Llama-2-7B, 262,144 elements a token: 2 bits, and 32 of scale and zero point for 32 elements, 96 KiB of 512. 128
    tokens of a sequence have all 512; a decode finds half of their keys quantised, on average."""
    model = load_model("llama-2-7b").with_kv_dtype(KV_DTYPES["kivi2"])
    assert model.kv_bytes_per_token() == 96 * 1024
    assert model.kv_residual_bytes() == 128 * (512 - 96) * 1024
    assert model.kv_residual_bytes(2) == 64 * (512 - 96) * 1024
    assert model.kv_format().residual_bytes == 96 * (512 - 96) * 1024


def kivi(gpu="a100-80g", **others):
    values = {"workload": "sharegpt", "model": "llama-3.1-8b", "gpu": gpu, "kv_cache_dtype": "kivi2", **others}
    policy = others.pop("policy", "vllm-recompute")
    return prepare(build_scenario({k: v for k, v in values.items() if k != "policy"}), "", parse_policy(policy, {})[1])


def test_last_tokens_take_memory_of_each_seat():
    """32 more seats of 128 tokens, 13 of 16 bits of each, beside what 32 more rows of logits take in 16 bits, too."""

    def given_up(kind):
        few, many = (kivi(max_num_seqs=n, kv_cache_dtype=kind).limits for n in (4, 36))
        return (few.num_gpu_blocks - many.num_gpu_blocks) * few.block_bytes

    block_bytes = kivi().limits.block_bytes
    assert block_bytes == 16 * 128 * 1024 * 3 / 16
    seats = 32 * 128 * 128 * 1024 * 13 / 16
    assert given_up("kivi2") - given_up("auto") == pytest.approx(seats, abs=16 * 128 * 1024)


@pytest.mark.parametrize("gpu", ["a100-80g", "rtx-4090"])
def test_each_decode_reads_its_last_tokens_whatever_the_context(gpu):
    """96 tokens' worth, 13 of 16 bits: as many seconds a decode, though kernels pad so many and no more (RTX 4090)."""
    setup = kivi(gpu)
    cost, rate = setup.cost, setup.profile.value("kv_bytes_per_s")
    padded_s = setup.profile.value("kv_padding_tokens") * cost.full_s_per_token
    for decodes in (1, 200):
        assert cost.padding_s(decodes) == pytest.approx(decodes * (padded_s + 96 * 128 * 1024 * 13 / 16 / rate))


def test_types_that_a_gpu_cannot_hold_are_refused():
    assert kv_dtype("fp8", load_hardware("l20")).name == "fp8_e4m3"
    assert kv_dtype("fp8_e5m2", load_hardware("v100")).bits == 8
    with pytest.raises(
        UserError, match=r"fp8: fp8_e4m3 needs compute capability 8.9, a100-80g has 8.0: use auto, fp8_e5m2"
    ):
        kv_dtype("fp8", load_hardware("a100-80g"))
    with pytest.raises(UserError, match=r"bfloat16: bfloat16 needs compute capability 8.0, t4 has 7.5"):
        kv_dtype("bfloat16", load_hardware("t4"))
    with pytest.raises(UserError, match=r"--kv-cache-dtype: 'fp4' is not known: use auto or one of bfloat16, fp8"):
        kv_dtype("fp4", load_hardware("h100"))
    # Nothing is known of a CPU.
    assert load_hardware("cpu").compute_capability is None
    assert kv_dtype("fp8", load_hardware("cpu")).bits == 8


def test_experts_that_a_batch_meets_by_hand():
    """64 experts, 6 a token: one token meets 6, two 64 (1 - (58/64)^2) = 11.4375, many all of them."""
    model = load_model("deepseek-v2-lite")
    expert = 26 * 3 * 2048 * 1408 * 2
    idle = [(model.linear_weight_bytes - model.linear_weight_bytes_read(n)) / expert for n in (1, 2, 1000)]
    assert idle == pytest.approx([58, 52.5625, 0], abs=1e-9)
    dense = load_model("llama-2-7b")
    assert dense.linear_weight_bytes_read(1) == dense.linear_weight_bytes


# -- groups of layers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("full", "window", "expected"),
    [
        (10, 52, KVGroups(1, 6, 10)),  # Gemma-3-27B: 52 layers in six groups of ten, eight wasted
        (21, 21, KVGroups(1, 1, 21)),
        (12, 13, KVGroups(1, 1, 13)),  # the commoner class where the two are about as many
        (2, 3, KVGroups(1, 2, 2)),
        (0, 32, KVGroups(0, 1, 32)),
    ],
)
def test_layers_are_grouped_as_vllm_groups_them(full, window, expected):
    layers = (KVLayers(num_layers=full, num_stored=full), KVLayers(num_layers=window, num_stored=window, window=64))
    assert hybrid_groups(KVFormat(layers, 1.0)) == expected


# -- properties ----------------------------------------------------------------------------------------------------

layer_classes = st.builds(
    lambda layers, share, window, rest: KVFormat(
        (
            KVLayers(num_layers=layers, num_stored=-(-layers // share), window=window),
            KVLayers(num_layers=rest, num_stored=rest),
        ),
        64.0,
    ),
    st.integers(1, 40),
    st.integers(1, 8),
    st.one_of(st.none(), st.integers(1, 100)),
    st.integers(0, 40),
)


@given(layer_classes, st.integers(0, 300))
def test_nothing_stores_more_than_is_read_or_reads_more_than_there_is(kv, position):
    most = 64.0 * sum(c.num_layers for c in kv.layers) * position
    assert stored_bytes(kv, position) <= read_bytes(kv, position) <= most
    assert kv.num_full_readers + kv.num_window_readers == sum(c.num_layers for c in kv.layers)
    assert kv.num_full_stored + kv.num_window_stored == sum(c.num_stored for c in kv.layers)


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 40))
def test_pairs_of_a_window_are_those_of_each_query(cached, num_new, window):
    assert window_pairs(cached, num_new, window) == sum(min(cached + i + 1, window) for i in range(num_new))


@pytest.mark.parametrize("name", built_in_models())
def test_built_in_models_have_one_window_at_most_and_all_their_layers(name):
    model = load_model(name)
    assert sum(c.num_layers for c in model.kv_classes) == model.num_attention_layers
    assert len({c.window for c in model.kv_classes if c.window}) <= 1


def test_layers_that_borrow_kv_have_no_biases_of_it():
    """Llama-3.1 8B of which 20 layers keep KV: 32 query biases of 4,096 and 20 of 2,048 for keys and values, halved."""
    plain = structs.replace(load_model("llama-3.1-8b"), kv_layers=(KVLayers(num_layers=32, num_stored=20),))
    biased = structs.replace(plain, qkv_bias=True)
    for tp in (1, 2):
        assert biased.weight_bytes(tp) - plain.weight_bytes(tp) == (32 * 4096 + 20 * 2048) / tp * 2
