"""FP8 weights of checkpoints: dequantised on a CPU; where they stay FP8, products are those of what they stand for."""

import json
from dataclasses import fields

import pytest
import safetensors.torch as safetensors
import torch
from runtime_small import Runner
from torch.nn.functional import linear

from gpu_runtime.machine import live_memory
from gpu_runtime.model import checkpoint, fp8, weights
from gpu_runtime.model.config import DecoderConfig
from gpu_runtime.model.decoder import Decoder
from gpu_runtime.model.fp8 import FP8, Fp8Matrix, check_fp8, product
from gpu_runtime.model.weights import LayerWeights
from sim.errors import UserError

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64, "vocab_size": 40,
    "max_position_embeddings": 64,
}  # fmt: skip


def compressed(strategy, **changes):
    kind = {"type": "float", "num_bits": 8, "strategy": strategy} | changes
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": kind}},
        "ignore": ["lm_head"],
    }


AUTO_FP8 = {"quant_method": "fp8", "activation_scheme": "static"}


def tensors(strategy, plain=()):
    """A checkpoint's tensors, and what their weights stand for; those `plain` are not quantised."""
    noise, kept, exact = torch.Generator().manual_seed(5), {}, {}
    for name, shape in checkpoint._expected(DecoderConfig.from_hf(CONFIG)):
        value = torch.randn(shape, generator=noise) * (0.1 if len(shape) == 2 else 1.0)
        if not name.startswith("model.layers.") or len(shape) == 1 or name in plain:
            kept[name] = exact[name] = value
            continue
        scale = value.abs().amax(**({"dim": 1, "keepdim": True} if strategy == "channel" else {})) / 448
        kept[name], kept[name + "_scale"] = (value / scale).to(FP8), scale
        exact[name] = kept[name].float() * scale
    return kept, exact


def saved(folder, found, quantization):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps(CONFIG | ({"quantization_config": quantization} if quantization else {}))
    )
    safetensors.save_file(found, str(folder / "model.safetensors"))
    return folder


def meant(matrix):
    """What an FP8 matrix stands for."""
    return matrix.data.float() * matrix.scales


def load(folder):
    return Decoder.from_safetensors(folder, "cpu", torch.float32)


@pytest.fixture
def keeps(monkeypatch):
    """A CPU on which weights stay FP8: torch multiplies there as it documents for CUDA."""
    for module in (fp8, checkpoint, weights, live_memory):
        monkeypatch.setattr(module, "KEPT_ON", ("cpu",))


def test_a_product_is_that_of_tokens_in_fp8_and_of_what_the_weights_stand_for():
    """Each token has a scale of its own: one with large elements takes no digits from the others."""
    hidden, matrix = torch.randn(3, 32) * torch.tensor([[1.0], [1000.0], [0.0]]), torch.randn(48, 32)
    held, bias = Fp8Matrix.of(matrix), torch.randn(48)
    scales = hidden.abs().amax(1, keepdim=True).clamp(min=1e-30) / 448
    tokens = (hidden / scales).to(FP8).float() * scales
    torch.testing.assert_close(product(hidden, held), linear(tokens, meant(held)), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(product(hidden, held, bias), product(hidden, held) + bias)
    exact = linear(hidden, matrix)
    error = (product(hidden, held) - exact).norm(dim=1) / exact.norm(dim=1).clamp(min=1)
    assert error.max() < 0.06


QKV = [f"model.layers.0.self_attn.{which}_proj.weight" for which in "qkv"]


@pytest.mark.parametrize(
    ("quantization", "strategy"),
    [(compressed("channel"), "channel"), (compressed("tensor"), "tensor"), (AUTO_FP8, "tensor")],
)
def test_a_checkpoint_is_what_its_weights_stand_for(quantization, strategy, tmp_path, keeps, monkeypatch):
    found, exact = tensors(strategy)
    found["model.layers.0.mlp.up_proj.input_scale"] = torch.tensor(0.5)
    folder = saved(tmp_path / "fp8", found, quantization)
    held = load(folder)
    assert torch.equal(held.layers[0].weights.qkv.data, torch.cat([found[name] for name in QKV]))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "KEPT_ON", ("cuda",))
        converted = load(folder)
    reference = load(saved(tmp_path / "plain", exact, None))
    for ours, theirs in zip(converted.layers, reference.layers, strict=True):
        for field in fields(LayerWeights):
            one, other = (getattr(layer.weights, field.name) for layer in (ours, theirs))
            assert one is other or torch.equal(one, other), field.name
    steps = [Runner(decoder).step({0: [1, 2, 3], 1: [4]}) for decoder in (held, reference)]
    for seq in (0, 1):
        off = (steps[0][seq] - steps[1][seq]).norm() / steps[1][seq].norm()
        assert 0 < off < 0.1
    assert held.config.num_fp8_weights == 2 * (2 * 32 * (64 + 32) + 3 * 32 * 64)


def test_what_is_quantised_in_part_is_computed_in_16_bits(tmp_path, keeps):
    """`ignore` of a config need not be read: each tensor says its type."""
    found, exact = tensors("channel", plain=QKV[:1])
    layer = load(saved(tmp_path, found, compressed("channel"))).layers[0].weights
    assert torch.equal(layer.qkv, torch.cat([exact[name] for name in QKV]))
    assert isinstance(layer.output, Fp8Matrix)


def test_ranks_have_parts_of_fp8(tmp_path, keeps):
    found, _ = tensors("channel")
    decoder = load(saved(tmp_path, found, compressed("channel")))
    whole = decoder.layers[1].weights
    parts = [whole.part(decoder.config, rank, 2) for rank in range(2)]
    hidden = torch.randn(3, 64)
    summed = sum(linear(half, meant(part.output)) for half, part in zip(hidden.chunk(2, dim=1), parts, strict=True))
    torch.testing.assert_close(summed, linear(hidden, meant(whole.output)))
    gates, ups = meant(whole.gate_up).chunk(2)
    assert torch.equal(meant(parts[1].gate_up), torch.cat((gates[32:], ups[32:])))


def test_random_weights_are_fp8_where_the_config_says_so(keeps):
    config = DecoderConfig.from_hf(CONFIG | {"quantization_config": AUTO_FP8})
    decoder = Decoder.random(config, device="cpu", dtype=torch.float32, seed=1)
    assert isinstance(decoder.layers[0].weights.down, Fp8Matrix) and decoder.dtype == torch.float32


@pytest.mark.parametrize(
    ("quantization", "refusal"),
    [
        (AUTO_FP8 | {"weight_block_size": [128, 128]}, r"weight_block_size \[128, 128\].*expected a scale a matrix"),
        ({"quant_method": "gptq"}, "has quant_method 'gptq'.*expected fp8 or compressed-tensors"),
        (compressed("channel", type="int"), "has config_groups .*'int'.*expected weights of type float"),
        (compressed("group"), "has strategy 'group'.*expected tensor or channel"),
        ({"quant_method": "compressed-tensors"}, "has config_groups None"),
    ],
)
def test_other_quantisations_are_refused(quantization, refusal):
    with pytest.raises(UserError, match=refusal):
        DecoderConfig.from_hf(CONFIG | {"quantization_config": quantization})


@pytest.mark.parametrize(
    ("name", "value", "refusal"),
    [
        (QKV[0] + "_scale", None, "q_proj.weight is FP8 and has no .*weight_scale: add it"),
        (QKV[0] + "_scale", torch.ones(2, 2), r"weight_scale is \[2, 2\], expected one scale or 64"),
    ],
)
def test_weights_without_their_scales_are_refused(name, value, refusal, tmp_path):
    found, _ = tensors("channel")
    found = {n: v for n, v in (found | {name: value}).items() if v is not None}
    with pytest.raises(UserError, match=refusal):
        load(saved(tmp_path, found, compressed("channel")))


def test_gpus_and_shapes_without_fp8_products_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(UserError, match=r"capability 8\.9, this one has 8\.0: take an unquantised"):
        check_fp8("m", {}, torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(UserError, match="multiples of 16, 24 MLP columns"):
        check_fp8("m", {"MLP columns": 24}, torch.device("cuda"))
    check_fp8("m", {"MLP columns": 24}, torch.device("cpu"))
