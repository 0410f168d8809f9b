"""The reader against the Hugging Face configs that the package aiconfigurator-core bundles.

Every one must be sized right or refused by name. The expected bytes per token and layer come from the models' papers
and cards: 2 (K and V) x KV heads x head size x bytes, or for latent attention (512 + 64) x bytes.
"""

import importlib.util
from pathlib import Path

import pytest

from sim.errors import UserError
from sim.specs.models import read_hf_config

SPEC = importlib.util.find_spec("aiconfigurator_core")
FOLDER = Path(SPEC.origin).parent / "model_configs" if SPEC and SPEC.origin else None
needs_package = pytest.mark.skipif(
    FOLDER is None, reason="aiconfigurator-core is not installed: pip install 'aiconfigurator-core==0.12.*'"
)

GQA_4_OF_128, GQA_8_OF_128, LATENT = 2 * 4 * 128 * 2, 2 * 8 * 128 * 2, (512 + 64) * 2
GQA_2_OF_256 = 2 * 2 * 256 * 2
SIZED = {
    # name: bytes per token and layer, layers, parameters in billions
    "MiniMaxAI--MiniMax-M2.5": (GQA_8_OF_128, 62, 228.7),
    "MiniMaxAI--MiniMax-M2.7": (GQA_8_OF_128, 62, 228.7),
    "Qwen--Qwen3-0.6B": (GQA_8_OF_128, 28, 0.596),
    "Qwen--Qwen3-1.7B": (GQA_8_OF_128, 28, 1.721),
    "Qwen--Qwen3-235B-A22B": (GQA_4_OF_128, 94, 235.09),
    "Qwen--Qwen3-235B-A22B-FP8": (GQA_4_OF_128, 94, 235.09),
    "Qwen--Qwen3-30B-A3B": (GQA_4_OF_128, 48, 30.53),
    "Qwen--Qwen3-30B-A3B-FP8": (GQA_4_OF_128, 48, 30.53),
    "Qwen--Qwen3-32B": (GQA_8_OF_128, 64, 32.76),
    "Qwen--Qwen3-32B-FP8": (GQA_8_OF_128, 64, 32.76),
    "Qwen--Qwen3-32B-FP8-Static-PerTensor": (GQA_8_OF_128 / 2, 64, 32.76),  # FP8 KV
    "Qwen--Qwen3-8B": (GQA_8_OF_128, 36, 8.191),
    "Qwen--Qwen3-Coder-480B-A35B-Instruct": (GQA_8_OF_128, 62, 480.15),
    "Qwen--Qwen3-VL-235B-A22B-Instruct": (GQA_4_OF_128, 94, 235.09),
    "Qwen--Qwen3-VL-2B-Instruct": (GQA_8_OF_128, 28, 1.721),
    "Qwen--Qwen3-VL-30B-A3B-Instruct": (GQA_4_OF_128, 48, 30.53),
    "Qwen--Qwen3-VL-32B-Instruct": (GQA_8_OF_128, 64, 32.76),
    "Qwen--Qwen3-VL-32B-Thinking": (GQA_8_OF_128, 64, 32.76),
    "Qwen--Qwen3-VL-4B-Instruct": (GQA_8_OF_128, 36, 4.022),
    "Qwen--Qwen3-VL-8B-Instruct": (GQA_8_OF_128, 36, 8.191),
    "Qwen--Qwen3.5-122B-A10B": (GQA_2_OF_256, 48, 122.112),
    "Qwen--Qwen3.5-27B": (2 * GQA_2_OF_256, 64, 26.896),
    "Qwen--Qwen3.5-35B-A3B": (GQA_2_OF_256, 40, 34.661),
    "Qwen--Qwen3.5-397B-A17B": (GQA_2_OF_256, 60, 396.346),
    "XiaomiMiMo--MiMo-7B-Base": (GQA_8_OF_128, 36, 7.62),
    "deepseek-ai--DeepSeek-R1": (LATENT, 61, 671.03),
    "deepseek-ai--DeepSeek-V3": (LATENT, 61, 671.03),
    "meta-llama--Meta-Llama-3.1-405B": (GQA_8_OF_128, 126, 405.85),
    "meta-llama--Meta-Llama-3.1-70B": (GQA_8_OF_128, 80, 70.55),
    "meta-llama--Meta-Llama-3.1-8B": (GQA_8_OF_128, 32, 8.030),
    "mistralai--Mixtral-8x22B-v0.1": (GQA_8_OF_128, 56, 140.62),
    "mistralai--Mixtral-8x7B-v0.1": (GQA_8_OF_128, 32, 46.70),
    "moonshotai--Kimi-K2-Instruct": (LATENT, 61, 1026.4),
    "moonshotai--Kimi-K2.5": (LATENT, 61, 1026.4),
    "nvidia--DeepSeek-V3.1-NVFP4": (LATENT / 2, 61, 671.03),  # FP8 KV, as in the rest of this list
    "nvidia--Kimi-K2.5-NVFP4": (LATENT / 2, 61, 1026.4),
    "nvidia--Kimi-K2.6-NVFP4": (LATENT / 2, 61, 1026.4),
    "nvidia--Kimi-K2.7-Code-NVFP4": (LATENT / 2, 61, 1026.4),
    "nvidia--Llama-3.1-70B-Instruct-FP8": (GQA_8_OF_128 / 2, 80, 70.55),
    "nvidia--MiniMax-M2.5-NVFP4": (GQA_8_OF_128 / 2, 62, 228.7),
    "nvidia--MiniMax-M2.7-NVFP4": (GQA_8_OF_128 / 2, 62, 228.7),
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (2 * 2 * 128 * 2, 29, 31.578),
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4": (2 * 128 * 2, 29, 31.578),
    "nvidia--Nemotron-H-56B-Base-8K": (GQA_8_OF_128, 64, 56.32),
    "nvidia--Qwen3-235B-A22B-NVFP4": (GQA_4_OF_128 / 2, 94, 235.09),
    "nvidia--Qwen3.5-122B-A10B-NVFP4": (GQA_2_OF_256 / 2, 48, 122.112),
    "nvidia--Qwen3.5-397B-A17B-NVFP4": (GQA_2_OF_256 / 2, 60, 396.346),
    "openai--gpt-oss-120b": (2 * 8 * 64 * 2, 36, 116.83),
    "openai--gpt-oss-20b": (2 * 8 * 64 * 2, 24, 20.91),
}
REFUSED = {
    # part of the name: the reason
    "Qwen3.6-": "MIXED_PRECISION",
    "Kimi-K3": "linear-attention",
    "Nemotron-3": "not understood",
    "DeepSeek-V3.2": "sparse-attention",
    "GLM-5": "sparse-attention",
    "MiniMax-M3": "sparse-attention",
    "DeepSeek-V4": "compressed",
    "emma-4": "sliding-window",
    "MiMo-V2": "sliding-window",
    "Step-3.7": "sliding-window",
    "Llama-4": "chunked attention",
    "Nemotron-Super-49B": "layers differ",
}


def configs():
    files = sorted(FOLDER.glob("*_config.json")) if FOLDER else []
    return [path for path in files if not path.name.endswith("_hf_quant_config.json")]


@needs_package
@pytest.mark.parametrize("path", configs(), ids=lambda path: path.name.removesuffix("_config.json"))
def test_every_config_is_sized_right_or_refused_by_name(path):
    name = path.name.removesuffix("_config.json")
    if name in SIZED:
        kv_layer, layers, billions = SIZED[name]
        model = read_hf_config(path)
        assert (model.name, model.num_layers) == (name, layers)
        assert model.kv_bytes_per_token_layer() == kv_layer
        assert model.num_params / 1e9 == pytest.approx(billions, rel=1e-3)
        return
    reasons = [reason for part, reason in REFUSED.items() if part in name]
    assert reasons, f"{name} is in neither table"
    field = "(model_type|quantization_config.quant_algo|moe_latent_size)"
    with pytest.raises(UserError, match=rf"field {field} = .*{reasons[0]}"):
        read_hf_config(path)
