"""`DecoderConfig` agrees with the sizes `sim` knows, and refuses by name what the runtime does not compute."""

import json

import msgspec
import pytest

from gpu_runtime.model.config import MIXTURES, MODEL_TYPES, DecoderConfig, Experts
from gpu_runtime.model.rope_scaling import LinearScaling, Llama3Scaling
from sim.errors import UserError
from sim.specs.models import BUILT_IN, built_in_models, load_model, read_hf_config

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
PLAIN = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 100,
    "max_position_embeddings": 128,
}  # fmt: skip


def test_built_in_models_have_the_shapes_of_their_specs_or_are_refused():
    computed = []
    for name in built_in_models():
        spec = load_model(name)
        kind = json.loads((BUILT_IN / f"{name}.json").read_text())["model_type"]
        if kind not in MODEL_TYPES or spec.kv_layers or spec.moe:
            with pytest.raises(UserError, match=f"{name}.*does not compute"):
                DecoderConfig.from_spec(spec)
            continue
        computed.append(name)
        config = DecoderConfig.from_spec(spec)
        read = DecoderConfig.from_hf(BUILT_IN / f"{name}.json")
        assert (
            msgspec.structs.replace(
                read, rope_theta=config.rope_theta, rope_scaling=None, rms_norm_eps=config.rms_norm_eps
            )
            == config
        )
    assert {"llama-2-7b", "llama-3.1-70b", "qwen2.5-7b", "qwen3-8b", "yi-34b-200k"} <= set(computed)


@pytest.mark.parametrize("kind", [kind for kind in MODEL_TYPES if kind not in MIXTURES])
def test_parameters_counted_from_the_config_are_those_of_the_spec(kind, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PLAIN | {"model_type": kind}))
    config, spec = DecoderConfig.from_hf(tmp_path), read_hf_config(tmp_path)
    assert config.name == spec.name
    assert config == DecoderConfig.from_spec(spec)
    h, d = config.hidden_size, config.head_dim
    layer = (2 * config.q_size + 2 * config.kv_size + 3 * config.intermediate_size) * h + 2 * h
    layer += (config.q_size + 2 * config.kv_size) * config.qkv_bias + 2 * d * config.qk_norm
    assert spec.num_params == 2 * layer + 2 * 100 * h + h


@pytest.mark.parametrize("kind", MIXTURES)
def test_experts_are_counted_and_read_as_the_simulator_has_them(kind, tmp_path):
    counts = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
    counts["num_local_experts" if kind == "mixtral" else "num_experts"] = 5
    fields = PLAIN | counts | {"model_type": kind}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config, spec = DecoderConfig.from_hf(tmp_path), read_hf_config(tmp_path)
    width = 96 if kind == "mixtral" else 24
    assert config.experts == Experts(5, 2, width, kind == "mixtral", kind == "mixtral")
    assert config.num_weights == spec.num_params
    with pytest.raises(UserError, match="does not compute by sizes alone: give --model its"):
        DecoderConfig.from_spec(spec)
    if kind == "qwen3_moe":
        with pytest.raises(UserError, match="1 of 2 layers have experts"):
            DecoderConfig.from_hf(fields | {"mlp_only_layers": [0]})


@pytest.mark.parametrize(
    ("fields", "theta", "scaling"),
    [
        ({}, 10000.0, None),
        ({"rope_theta": 500000}, 500000.0, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}, 2e4, None),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, 10000.0, LinearScaling(2.0)),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, 5e5, Llama3Scaling(8.0, 1.0, 4.0, 8192)),
        ({"rope_parameters": {"rope_theta": 5e5, **LLAMA3}}, 5e5, Llama3Scaling(8.0, 1.0, 4.0, 8192)),
    ],
)
def test_rotary_positions_are_read_in_both_spellings(fields, theta, scaling):
    config = DecoderConfig.from_hf(PLAIN | fields)
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gemma"}, "model_type = 'gemma' is not computed"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"head_dim": None, "model_type": "qwen3"}, "head_dim = None is absent and cannot be derived: give it"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"num_experts": 8}, "num_experts = 8"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type = 'yarn'"),
        ({"rope_scaling": {"type": "linear"}}, "factor = None must be a positive number"),
        ({"rope_scaling": "linear"}, "rope_scaling = 'linear' must be an object"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "must be below high_freq_factor"),
        ({"rope_theta": -1}, "rope_theta = -1 must be a positive number"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"rms_norm_eps": 0}, "rms_norm_eps = 0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3 does not divide"),
        ({"head_dim": 15}, "head_dim = 15 is odd"),
        ({"model_type": "qwen2", "num_key_value_heads": None}, "num_key_value_heads is missing"),
        ({"intermediate_size": None}, "intermediate_size is missing"),
    ],
)
def test_what_the_runtime_does_not_compute_is_refused_by_name(fields, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PLAIN | fields))
    with pytest.raises(UserError, match=f"^{path}: .*{message}"):
        DecoderConfig.from_hf(path)


def test_an_unreadable_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        DecoderConfig.from_hf(tmp_path)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"gated_mlp": False}, "MLP without gate"),
        ({"position_rows": 130}, "learned positions"),
        ({"output_bias": True}, "output projection"),
    ],
)
def test_a_spec_of_another_architecture_is_refused(change, what, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PLAIN))
    with pytest.raises(UserError, match=what):
        DecoderConfig.from_spec(msgspec.structs.replace(read_hf_config(tmp_path), **change))
