"""Windows and parameters as `transformers` has them: its configs, written as files, read by ours."""

import json

import pytest
import torch
import transformers

from sim.specs.models import BUILT_IN, load_model, read_hf_config

SMALL = {
    "num_hidden_layers": 8, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 100, "max_position_embeddings": 512, "sliding_window": 64,
}  # fmt: skip
CASES = {
    "mistral": ("Mistral", {}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "max_window_layers": 3}),
    "qwen2-off": ("Qwen2", {"use_sliding_window": False, "max_window_layers": 3}),
    "qwen3": ("Qwen3", {"use_sliding_window": True, "max_window_layers": 5}),
    "gemma2": ("Gemma2", {"head_dim": 16}),
    "gemma3": ("Gemma3Text", {"head_dim": 16}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("spelled", ["as transformers writes it", "without layer_types"])
def test_layers_have_the_windows_that_transformers_gives_them(tmp_path, case, spelled):
    kind, change = CASES[case]
    config = getattr(transformers, f"{kind}Config")(**SMALL, **change)
    fields = config.to_dict() | {"dtype": "bfloat16"}
    kinds = fields.get("layer_types")
    if spelled == "without layer_types":
        # Files of older versions have none.
        fields.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model = read_hf_config(tmp_path)
    windowed = 8 if kinds is None else kinds.count("sliding_attention")
    assert model.kv_format().num_window_readers == windowed
    assert model.kv_format().window == (64 if windowed else None)


@pytest.mark.parametrize("name", ["mistral-7b-v0.1", "gemma-2-9b", "gemma-3-27b"])
def test_built_in_models_have_the_parameters_of_their_architecture(name):
    fields = json.loads((BUILT_IN / f"{name}.json").read_text())
    kind = {"mistral": "Mistral", "gemma2": "Gemma2", "gemma3_text": "Gemma3"}[fields.pop("model_type")]
    config = getattr(transformers, f"{kind}{'Text' if kind == 'Gemma3' else ''}Config")(**fields)
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    assert load_model(name).num_params == sum(weights.numel() for weights in model.parameters())
