"""Bytes and FLOPs of models, against numbers worked out by hand and published parameter counts."""

import pytest

from sim.errors import UserError
from sim.specs import models
from sim.specs.models import built_in_models, load_model

PARAMETERS = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "yi-34b-200k": 34_388_917_248,
    "opt-13b": 12_853_473_280,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-0.6b": 596_049_920,
    "deepseek-v2-lite": 15_706_484_224,
    "mistral-7b-v0.1": 7_241_732_096,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-27b": 27_009_346_304,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "llama-3.1-405b": 405_853_388_800,
    "mixtral-8x7b-v0.1": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "minimax-m2.5": 228_689_764_864,  # its checkpoint counts 13.9 million scales beside
    "minimax-m2.5-nvfp4": 228_689_764_864,
    "deepseek-v3": 671_026_419_200,
    "deepseek-v3.2": 671_877_944_064,  # DeepSeek V3's, and an indexer of 13,959,424 weights a layer
    # Without the layer that predicts tokens: with it Hugging Face counts 110 and 357 billion.
    "glm-4.5-air": 106_852_251_264,
    "glm-4.6": 352_797_829_024,
    "kimi-k2.5": 1_026_408_232_448,
    "nemotron-3-nano-30b-a3b": 31_577_940_288,
    "nemotron-nano-9b-v2": 8_888_227_328,
    "granite-4.0-h-micro": 3_191_396_096,
    "qwen3.5-35b-a3b": 34_660_610_688,  # the language model of transformers, without vision and token prediction
}


def test_every_built_in_has_its_published_parameter_count():
    assert {name: load_model(name).num_params for name in built_in_models()} == PARAMETERS


def test_llama_2_7b_by_hand():
    model = load_model("llama-2-7b")
    layer = 4 * 4096 * 4096 + 3 * 4096 * 11008
    assert model.linear_flops_per_token == 2 * 32 * layer
    assert model.linear_weight_bytes == 2 * 32 * layer
    assert model.head_flops_per_token == 2 * 4096 * 32000
    assert model.head_weight_bytes == 2 * 4096 * 32000
    assert model.attention_flops_per_token_pair == 4 * 32 * 32 * 128
    assert model.weight_bytes() == 2 * 6_738_415_616
    assert load_model("Llama-2-7B") == model


def test_heads_are_split_over_gpus_and_replicated_beyond_their_number():
    model = load_model("llama-3.1-70b")  # 64 heads, 8 KV heads of 128
    assert [model.kv_bytes_per_token_layer(tp) for tp in (1, 2, 4, 8, 16)] == [4096, 2048, 1024, 512, 512]
    assert model.kv_bytes_per_token(4) == 80 * 1024


def test_weights_of_a_group_add_up_to_the_model_but_for_what_is_replicated():
    model = load_model("llama-3.1-70b")
    norms = 2 * (80 * 2 + 1) * 8192
    assert 4 * model.weight_bytes(4) == pytest.approx(model.weight_bytes() + 3 * norms)
    # Beyond 8 GPUs the K and V projections are copied: each GPU of 16 holds an eighth of them.
    kv = 2 * 80 * 2 * 8192 * 1024
    assert 16 * model.weight_bytes(16) == pytest.approx(model.weight_bytes() + 15 * norms + kv)


def test_tied_embeddings_are_counted_once():
    model = load_model("qwen3-0.6b")
    attention = 1024 * 2048 * 2 + 2 * 1024 * 1024  # Q and O to 16 heads of 128; K and V to 8
    layer = attention + 3 * 1024 * 3072 + 2 * 1024 + 2 * 128
    assert model.num_params == 28 * layer + 151_936 * 1024 + 1024
    assert model.kv_bytes_per_token_layer() == 2 * 8 * 128 * 2  # not 2 * 8 * (1024 / 16) * 2


def test_latent_attention_keeps_one_latent_on_every_gpu():
    model = load_model("deepseek-v2-lite")
    assert [model.kv_bytes_per_token_layer(tp) for tp in (1, 2, 8)] == [(512 + 64) * 2] * 3
    assert model.attention_flops_per_token_pair == 2 * 27 * 16 * (128 + 64 + 128)


def test_experts_are_all_stored_but_only_some_compute():
    model = load_model("deepseek-v2-lite")
    attention = 2048 * 16 * 192 + 2048 * 576 + 512 * 16 * 256 + 16 * 128 * 2048
    router = 2048 * 64
    active = 27 * attention + 3 * 2048 * 10944 + 26 * (3 * 2048 * (6 + 2) * 1408 + router)
    stored = 27 * attention + 3 * 2048 * 10944 + 26 * (3 * 2048 * (64 + 2) * 1408 + router)
    assert model.linear_flops_per_token == 2 * active
    assert model.linear_weight_bytes == 2 * stored


@pytest.mark.parametrize(("model", "tp"), [("llama-2-7b", 3), ("llama-2-7b", 0), ("yi-34b-200k", 7)])
def test_groups_that_cannot_split_the_heads_are_refused(model, tp):
    with pytest.raises(UserError, match=f"tensor_parallel_size {tp} .*choose"):
        load_model(model).kv_bytes_per_token(tp)


@pytest.mark.parametrize(
    ("name", "right"), [("lama-2-7b", "llama-2-7b"), ("meta-lama/Llama-2-70b-hf", "llama-2-70b"), ("OPT13b", "opt-13b")]
)
def test_an_unknown_name_gets_the_nearest_right_one_and_the_list(name, right):
    with pytest.raises(UserError, match=f"did you mean '{right}'.*Known: deepseek-v2-lite, .*yi-34b-200k"):
        load_model(name)


@pytest.mark.parametrize("name", ["", "x" * 5000, "a\0b", "/no/such/folder"])
def test_absurd_names_are_refused_in_one_line(name):
    with pytest.raises(UserError, match="neither a built-in name nor an existing path"):
        load_model(name)


def test_a_model_may_be_called_as_on_the_hub(tmp_path, monkeypatch):
    """Where that is a shipped one; a folder of that name comes first, and what others publish is not taken for it."""
    assert load_model("Qwen/Qwen3-32B") == load_model("qwen3-32b")
    assert set(models.HUB.values()) <= set(built_in_models())
    with pytest.raises(UserError, match=r"did you mean 'qwen3-32b'"):
        load_model("somebody/Qwen3-32B-long")
    folder = tmp_path / "Qwen" / "Qwen3-32B"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text((models.BUILT_IN / "qwen3-8b.json").read_text())
    monkeypatch.chdir(tmp_path)
    assert load_model("Qwen/Qwen3-32B").num_layers == load_model("qwen3-8b").num_layers
