"""Checkpoints are read whole and checked by name, shape and type; nothing but safetensors is opened."""

import json

import pytest
import safetensors.torch as safetensors
import torch

from gpu_runtime.live import LiveOptions, load_decoder
from gpu_runtime.model.checkpoint import INDEX
from gpu_runtime.model.decoder import Decoder
from sim.errors import UserError

CONFIG = {
    "model_type": "qwen2", "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 24, "vocab_size": 11, "max_position_embeddings": 32,
}  # fmt: skip
NORM, K_BIAS = "model.norm.weight", "model.layers.1.self_attn.k_proj.bias"


def tensors() -> dict[str, torch.Tensor]:
    shapes = {"model.embed_tokens.weight": (11, 16), "lm_head.weight": (11, 16), NORM: (16,)}
    for layer in ("model.layers.0.", "model.layers.1."):
        shapes |= {layer + f"{norm}_layernorm.weight": (16,) for norm in ("input", "post_attention")}
        for which, rows in (("q", 16), ("k", 8), ("v", 8)):
            shapes[f"{layer}self_attn.{which}_proj.weight"] = (rows, 16)
            shapes[f"{layer}self_attn.{which}_proj.bias"] = (rows,)
        shapes[layer + "self_attn.o_proj.weight"] = (16, 16)
        shapes |= {f"{layer}mlp.{which}_proj.weight": (24, 16) for which in ("gate", "up")}
        shapes[layer + "mlp.down_proj.weight"] = (16, 24)
    noise = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=noise) for name, shape in shapes.items()}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def save(folder, weights, name="model.safetensors"):
    safetensors.save_file(weights, str(folder / name))


def load(folder) -> Decoder:
    return Decoder.from_safetensors(folder, "cpu", torch.float32)


def test_projections_are_fused_in_the_order_q_k_v_and_gate_up(folder):
    weights = tensors()
    save(folder, weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})
    layer = load(folder).layers[1].weights
    parts = [weights[f"model.layers.1.self_attn.{which}_proj.weight"] for which in "qkv"]
    assert torch.equal(layer.qkv, torch.cat(parts))
    assert torch.equal(layer.qkv_bias[16:24], weights[K_BIAS])
    parts = [weights[f"model.layers.1.mlp.{which}_proj.weight"] for which in ("gate", "up")]
    assert torch.equal(layer.gate_up, torch.cat(parts))


def test_a_checkpoint_in_several_files_is_one(folder):
    weights = tensors()
    save(folder, {NORM: weights.pop(NORM)}, "model-00001-of-00002.safetensors")
    save(folder, weights, "model-00002-of-00002.safetensors")
    whole = load(folder)
    names = dict.fromkeys(weights, "model-00002-of-00002.safetensors") | {NORM: "model-00001-of-00002.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    save(folder, weights, "consolidated.safetensors")
    assert torch.equal(load(folder).ends.final_norm, whole.ends.final_norm)


def test_a_run_computes_with_the_checkpoint_that_it_names(folder):
    save(folder, tensors())
    decoder = load_decoder("no such model", "float32", LiveOptions("cpu", folder))
    assert torch.equal(decoder.ends.final_norm, tensors()[NORM])
    assert decoder.config.vocab_size == 11


FILE, Q_NORM = "model.safetensors", "model.layers.0.self_attn.q_norm.weight"
WHOLE = tensors()
WITHOUT = {name: tensor for name, tensor in WHOLE.items() if name != K_BIAS}
UNREADABLE = r"safetensors: not a readable safetensors file"
BROKEN = {
    "a tensor is missing": ({FILE: WITHOUT}, f"tensor {K_BIAS} and 0 others are missing"),
    "misshapen": (
        {FILE: WHOLE | {K_BIAS: torch.zeros(16)}}, rf"tensor {K_BIAS} is F32 \[16\], expected one of .* and \[8\]"
    ),
    "quantised": ({FILE: WHOLE | {K_BIAS: torch.zeros(8, dtype=torch.int8)}}, f"tensor {K_BIAS} is I8"),
    "unknown": ({FILE: WHOLE | {Q_NORM: torch.ones(4)}}, f"tensor {Q_NORM} is not part of the model"),
    "in two files": ({FILE: WHOLE, "other.safetensors": {NORM: WHOLE[NORM]}}, f"tensor {NORM} is in {FILE} too"),
    "a pickle alone": ({"pytorch_model.bin": b"cos\nsystem\n(S'false'\ntR."}, r"no \*.safetensors file"),
    "empty": ({FILE: b""}, UNREADABLE),
    "no checkpoint": ({FILE: b"not a checkpoint at all"}, UNREADABLE),
    "cut short": ({FILE: safetensors.save(WHOLE)[:-100]}, UNREADABLE),
    "an index of a file outside": ({FILE: WHOLE, INDEX: f"../{FILE}"}, "weight_map must name"),
    "an index of a pickle": ({FILE: WHOLE, INDEX: "pytorch_model.bin"}, "weight_map must name"),
    "an index of a file that is not there": ({INDEX: "model-00001-of-00002.safetensors"}, UNREADABLE),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_checkpoint_that_is_none_is_refused(folder, case):
    files, message = BROKEN[case]
    for name, content in files.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        elif name == INDEX:
            (folder / name).write_text(json.dumps({"weight_map": {NORM: content}}))
        else:
            save(folder, content, name)
    with pytest.raises(UserError, match=message):
        load(folder)


def test_a_tied_head_in_the_file_is_not_read(folder):
    (folder / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": True}))
    save(folder, tensors())
    ends = load(folder).ends
    assert ends.head is ends.embedding
