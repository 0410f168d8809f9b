"""DeepSeek's sparse attention: sizes and prices by hand, prices beside what vLLM took, and what is refused."""

import json

import msgspec
import pytest
from hypothesis import strategies as st

from kvtwin.testing.conformance import Workload, check
from kvtwin.testing.engines import Machine, requests
from sim.bounds.work import least_work
from sim.cost.profile import load_profile
from sim.cost.roofline import RooflineCost
from sim.engine.plan import WindowTokens
from sim.options.policies import parse_policy
from sim.options.scenario import build_scenario
from sim.run.prepare import Setup, prepare
from sim.specs.hardware import load_hardware
from sim.specs.kv_format import KV_DTYPES
from sim.specs.models import load_model, read_hf_config

DEEPSEEK = load_model("deepseek-v3.2")
GLM_5 = {
    "model_type": "glm_moe_dsa", "num_hidden_layers": 78, "hidden_size": 6144, "num_attention_heads": 64,
    "num_key_value_heads": 64, "head_dim": 64, "qk_head_dim": 256, "intermediate_size": 12288, "vocab_size": 154880,
    "max_position_embeddings": 202752, "tie_word_embeddings": False, "attention_bias": False, "kv_lora_rank": 512,
    "q_lora_rank": 2048, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "index_n_heads": 32,
    "index_head_dim": 128, "index_topk": 2048, "indexer_rope_interleave": True, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
    "moe_layer_freq": 1, "dtype": "bfloat16",
}  # fmt: skip
"""zai-org/GLM-5."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    path = tmp_path_factory.mktemp("glm-5") / "config.json"
    path.write_text(json.dumps(GLM_5))
    return {"deepseek-v3.2": DEEPSEEK, "glm-5": read_hf_config(path)}


def setup(policy: str = "vllm-v1", **options) -> Setup:
    values = {"workload": "sharegpt", "model": "deepseek-v3.2", "gpu": "h200", "tp": 8} | options
    return prepare(build_scenario(values), policy, parse_policy(policy, {})[1])


def test_sizes_are_those_that_are_published(models):
    """FlashMLA: 656 bytes of a latent in FP8, 576 elements else; DeepGEMM: a key of 128 bytes and a scale of 4."""
    assert DEEPSEEK.kv_bytes_per_token(8) == pytest.approx(61 * (2 * 576 + 132))
    assert DEEPSEEK.with_kv_dtype(KV_DTYPES["fp8"]).kv_bytes_per_token() == pytest.approx(61 * (656 + 132))
    assert models["glm-5"].num_params / 1e9 == pytest.approx(744, abs=0.5)
    assert setup().limits.window is not None
    assert setup().limits.enable_prefix_caching


def layer(model, heads: int = 128, fp8_weights: bool = True):
    """The attention of one layer, with so many query heads on its GPU."""
    weight_bytes = DEEPSEEK.attention_dtype_bytes if fp8_weights else 2.0
    return msgspec.structs.replace(
        model, num_layers=1, num_heads=heads, num_kv_heads=heads, moe=None, intermediate_size=1, vocab_size=1,
        attention_dtype_bytes=weight_bytes, mlp_dtype_bytes=weight_bytes, quantization="fp8" if fp8_weights else "",
    )  # fmt: skip


def cost_of(model, gpu: str = "h100") -> RooflineCost:
    return RooflineCost(model, load_hardware(gpu), load_profile(f"{gpu}-imported"), 1)


def test_a_decode_asks_all_keys_and_reads_the_chosen_latents():
    """Three decodes of 9,000 tokens in all, of which 5,000 are among the 2,048 of each; one grows below them."""
    cost, profile = cost_of(layer(DEEPSEEK)), load_profile("h100-imported")
    flops, bandwidth, p = map(profile.value, ("attention_flops_per_s", "kv_bytes_per_s", "roofline_exponent"))
    key_s, latent_s = (
        ((work / flops) ** p + (size / bandwidth) ** p) ** (1 / p)
        for work, size in ((2 * 64 * 128, 132), (2 * 128 * (512 + 576), 1152))
    )
    base_s, _ = cost.decode_run(3, 0, WindowTokens(0, 0))
    first_s, slope_s = cost.decode_run(3, 9000, WindowTokens(5000, 1))
    assert first_s - base_s == pytest.approx(9000 * key_s + 5000 * latent_s)
    assert slope_s == pytest.approx(3 * key_s + latent_s)


def test_a_prompt_asks_every_pair_and_attends_to_the_chosen():
    """Of 3,000 tokens; heads of a GPU are taken in tiles of 64."""
    flops = load_profile("h100-imported").value("attention_flops_per_s")
    chosen, pairs = 2048 * 2049 / 2 + (3000 - 2048) * 2048, 3000 * 3001 / 2
    for heads in (16, 64):
        seconds = (chosen * 2 * 64 * (512 + 576) + pairs * 2 * 64 * 128) / flops
        cost = cost_of(layer(DEEPSEEK, heads))
        assert cost._attention_s(0, 3000, is_sampled=True) == pytest.approx(seconds)
        halves = cost._attention_s(0, 1500, is_sampled=False) + cost._attention_s(1500, 1500, is_sampled=True)
        assert halves == pytest.approx(seconds)


def test_bounds_count_what_prompts_ask():
    found = setup()
    assert isinstance(found.cost, RooflineCost)
    work, _ = least_work(requests((0.0, 5000, 1)), found.limits, found.cost)
    assert work.attention_s[0] == pytest.approx(found.cost._attention_s(0, 5000, is_sampled=True))


def test_decodes_of_fp8_latents_last_as_long_as_flash_mla_says():
    """410 TFLOP/s on H800, and as long as the dense kernel of 16 bits over some 3,000 tokens."""
    cost = cost_of(layer(DEEPSEEK.with_kv_dtype(KV_DTYPES["fp8"])))
    assert cost.window_s_per_token == 0.0
    padding_tokens = load_profile("h100-imported").value("latent_padding_tokens")
    latents_s = cost.padding_s(1) - padding_tokens * cost.full_s_per_token
    seconds = latents_s * 2048 / (2048 + padding_tokens)
    assert 2048 * 2 * 128 * (512 + 576) / seconds == pytest.approx(410e12, rel=0.1)
    dense_s = cost_of(layer(load_model("deepseek-v3"))).full_s_per_token
    assert seconds / dense_s == pytest.approx(3000, rel=0.1)


MEASURED = [
    ("h100", "deepseek-v3.2", True, "bfloat16", 64, "decode", 1, 1024, 0.0002241),
    ("h100", "deepseek-v3.2", False, "fp8", 64, "decode", 1024, 16384, 0.0025385),
    ("h100", "deepseek-v3.2", True, "bfloat16", 8, "decode", 16, 16, 0.0001992),
    ("h100", "deepseek-v3.2", True, "fp8", 64, "decode", 64, 512, 0.0002888),
    ("h100", "deepseek-v3.2", False, "bfloat16", 32, "decode", 1024, 4, 0.0006986),
    ("h100", "deepseek-v3.2", False, "bfloat16", 32, "decode", 512, 4, 0.0004357),
    ("h100", "deepseek-v3.2", False, "bfloat16", 128, "decode", 128, 65536, 0.0009384),
    ("h200", "deepseek-v3.2", True, "fp8", 64, "decode", 1024, 2048, 0.0015834),
    ("h100", "glm-5", True, "bfloat16", 64, "decode", 1, 1024, 0.0002554),
    ("h100", "glm-5", False, "fp8", 32, "decode", 1, 64, 0.0002162),
    ("h100", "glm-5", True, "bfloat16", 8, "decode", 16, 8, 0.000222),
    ("h100", "glm-5", True, "fp8", 64, "decode", 64, 512, 0.000322),
    ("h100", "glm-5", False, "bfloat16", 32, "decode", 1024, 2, 0.0007017),
    ("h100", "glm-5", False, "bfloat16", 32, "decode", 512, 2, 0.0004455),
    ("h100", "glm-5", False, "bfloat16", 128, "decode", 256, 2, 0.000556),
    ("h200", "glm-5", True, "fp8", 32, "decode", 1, 2, 0.0001768),
    ("h200", "deepseek-v3.2", False, "bfloat16", 8, "prefill", 8, 12288, 0.079959),
    ("h100", "deepseek-v3.2", True, "bfloat16", 128, "prefill", 2, 2048, 0.0056729),
    ("h100", "deepseek-v3.2", True, "bfloat16", 8, "prefill", 16, 1536, 0.012028),
    ("h200", "deepseek-v3.2", False, "bfloat16", 32, "prefill", 8, 10240, 0.07674),
    ("h100", "deepseek-v3.2", True, "fp8", 128, "prefill", 1, 2048, 0.0033173),
    ("h200", "deepseek-v3.2", True, "bfloat16", 32, "prefill", 16, 512, 0.0042655),
    ("h200", "deepseek-v3.2", True, "bfloat16", 64, "prefill", 8, 8192, 0.062801),
    ("h100", "deepseek-v3.2", False, "fp8", 128, "prefill", 128, 128, 0.018733),
    ("h100", "glm-5", True, "fp8", 32, "prefill", 8, 1024, 0.0053539),
    ("h200", "glm-5", False, "fp8", 64, "prefill", 16, 512, 0.0062539),
    ("h200", "glm-5", False, "bfloat16", 16, "prefill", 2, 6144, 0.009191),
    ("h200", "glm-5", True, "fp8", 64, "prefill", 1, 10240, 0.010971),
    ("h200", "glm-5", True, "bfloat16", 8, "prefill", 8, 6144, 0.032526),
    ("h200", "glm-5", True, "bfloat16", 8, "prefill", 8, 1536, 0.0055156),
    ("h100", "glm-5", False, "fp8", 128, "prefill", 128, 64, 0.011491),
    ("h200", "glm-5", True, "fp8", 128, "prefill", 128, 1024, 0.16503),
]
"""Drawn by seed of vLLM 0.24's whole attention of a layer (aiconfigurator-core's `dsa_*_module_perf` tables): GPU,
model, weights in FP8, KV, heads, phase, sequences, tokens of each, seconds."""
EAGER_S = {"h100": 5.1e-5, "h200": 4.7e-5}
"""What norms and rotary embedding took longer there than where they are served (`calib.latents`)."""


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_prices_are_near_what_vllm_took(phase, models):
    """Two constants know of 3,650 such times of DeepSeek-V3.2 over KV in 16 bits, none of GLM-5 or KV in FP8."""
    errors = []
    for gpu, name, fp8_weights, kv, heads, _, batch, tokens, measured_s in (m for m in MEASURED if m[5] == phase):
        cost = cost_of(layer(models[name], heads, fp8_weights).with_kv_dtype(KV_DTYPES[kv]), gpu)
        if phase == "decode":
            new, attention_s = batch, cost.full_s_per_token * batch * tokens + cost.padding_s(batch)
            attention_s += cost.window_s_per_token * batch * min(tokens, 2048)
        else:
            new, attention_s = batch * tokens, batch * cost._attention_s(0, tokens, is_sampled=True)
        served_s = cost.products_s(new) + cost.overhead_s + attention_s
        errors.append(abs((served_s + EAGER_S[gpu]) / measured_s - 1))
    assert max(errors) < 0.25
    assert sum(errors) / len(errors) < 0.12


@pytest.mark.parametrize("policy", ["vllm-v1", "vllm-recompute", "sarathi"])
def test_jumped_runs_equal_stepped_ones(policy):
    """Contexts outgrow what is chosen within a jump."""
    found = setup(policy, num_gpu_blocks_override=400, max_model_len=4096)
    machine = Machine(found.model, found.cost, found.profile, found.hardware)
    rows = st.tuples(st.floats(0.0, 3.0), st.integers(1980, 2060), st.integers(1, 90))
    arrivals = st.lists(rows, min_size=1, max_size=5).map(lambda found: requests(*sorted(found)))
    among = st.builds(lambda arrivals: Workload(arrivals, found.limits, machine), arrivals)
    check(parse_policy(policy, {})[1], examples=10, among=among)
