"""Kernels of routed experts: planted constants found again, what of the tables is taken."""

from types import SimpleNamespace

import numpy as np
import pytest
from experts_report import as_dense_s, experts_table, simulated_s
from msgspec import structs
from parquet_small import put

from calib.experts import WEIGHT_BYTES, ExpertSample, ExpertTerms, fit_experts, predict_expert_s
from calib.importers.aiconfigurator_experts import _ExpertsMet, import_experts
from sim.cost.profile import EXPERT_NAMES, EXPERT_UNITS, expert_names, load_profile
from sim.cost.roofline import RooflineCost
from sim.specs.hardware import load_hardware
from sim.specs.models import load_model

PLANTED = {
    "": dict(zip(EXPERT_UNITS, (6e14, 3e12, 1.5, 2e12, 3e-5), strict=True)),
    "fp8": dict(zip(EXPERT_UNITS, (9e14, 2.9e12, 2.5, 1e12, 5e-5), strict=True)),
}
SHAPES = ((2048, 768, 8, 128), (4096, 1536, 8, 128), (4096, 14336, 2, 8))


def sample(tokens=64, shape=SHAPES[0], tp=1, quantization="", routing="balanced", **other) -> ExpertSample:
    hidden, width, k, experts = shape
    fields = {
        "quantization": quantization, "tokens": tokens, "hidden_size": hidden, "intermediate_size": width, "tp": tp,
        "experts_per_token": k, "num_experts": experts, "gated": 1, "routing": routing,
        "experts_met": float(min(experts, tokens * k)), "latency_s": 1e-3,
    }  # fmt: skip
    return ExpertSample(**fields | other)


def planted(quantization: str, shapes=SHAPES, noise=0.01) -> list[ExpertSample]:
    samples = [
        sample(tokens, shape, tp, quantization)
        for shape in shapes
        for tp in (1, 2, 8)
        for tokens in (1, 4, 16, 64, 256, 512, 1024, 4096, 16384)
    ]
    random = np.random.default_rng(1)
    seconds = predict_expert_s(PLANTED[quantization], ExpertTerms.of(samples))
    seconds *= 1 + noise * random.standard_normal(len(samples))
    return [structs.replace(s, latency_s=float(t)) for s, t in zip(samples, seconds, strict=True)]


def test_terms_by_hand():
    (terms,) = [ExpertTerms.of([sample(tokens=3, tp=2, quantization="fp8", experts_met=20.0)])]
    weights = 3 * 2048 * 384
    assert terms.flops == 24 * 2 * weights
    assert terms.met_bytes == 20 * weights * (1 + 4 / 128**2)
    # In and out: 2048 to 768, 768 to 384, 384 to 2048, and 2048 into the sum; two bytes each.
    assert terms.activation_bytes == 24 * (2048 + 768 + 768 + 384 + 384 + 2048 + 2048) * 2
    ungated = ExpertTerms.of([sample(tokens=3, gated=0)])
    assert ungated.flops == 24 * 2 * 2 * 2048 * 768
    assert ungated.activation_bytes == 24 * (2048 + 768 + 768 + 768 + 768 + 2048 + 2048) * 2


def test_planted_constants_are_found_again_by_type():
    fits = fit_experts([*planted("fp8"), *planted("")])
    assert [fit.samples[0].quantization for fit in fits] == ["", "fp8"]
    for fit in fits:
        names = expert_names(fit.samples[0].quantization)
        assert set(fit.fit.estimates) == set(names.values())
        for name, value in PLANTED[fit.samples[0].quantization].items():
            estimate = fit.fit.estimates[names[name]]
            assert estimate.low <= value <= estimate.high
            assert estimate.value == pytest.approx(value, rel=0.15)
        assert np.abs(fit.own).mean() < 0.012
        assert np.abs(fit.unseen).mean() < 0.015
        key = "expert_mape" if not fit.samples[0].quantization else "fp8_expert_mape"
        assert fit.residuals == {
            key: pytest.approx(np.abs(fit.own).mean(), abs=1e-5),
            f"unseen_model_{key}": pytest.approx(np.abs(fit.unseen).mean(), abs=1e-5),
        }


def test_a_shape_that_is_left_out_is_not_seen():
    """One shape twice as slow shows in its own error, and hardly in the others'."""
    samples = [s if s.shape != sample().shape else structs.replace(s, latency_s=2 * s.latency_s) for s in planted("")]
    (fit,) = fit_experts(samples)
    slow = np.array([s.shape == sample().shape for s in samples])
    assert fit.unseen[slow].mean() == pytest.approx(-0.5, abs=0.03)


def test_of_one_shape_sizes_of_groups_are_left_out():
    samples = planted("", SHAPES[:1])
    (fit,) = fit_experts(samples)
    assert list(fit.residuals) == ["expert_mape", "unseen_model_expert_mape"]
    assert 0 < fit.residuals["expert_mape"] < fit.residuals["unseen_model_expert_mape"] < 0.02
    (fit,) = fit_experts([s for s in samples if s.tp == 1])
    assert len(fit.unseen) == 0
    assert list(fit.residuals) == ["expert_mape"]


# -- the tables --------------------------------------------------------------------------------------------------------


def row(**changes):
    base = {
        "moe_dtype": "bfloat16", "kernel_source": "vllm_triton", "num_tokens": 64, "hidden_size": 4096,
        "inter_size": 1536, "topk": 8, "num_experts": 128, "moe_tp_size": 1, "moe_ep_size": 1,
        "distribution": "balanced", "latency": 1.25,
    }  # fmt: skip
    return base | changes


def imported(tmp_path, rows, system="h100_sxm"):
    for version, found in (("0.9.0", [row(latency=9.0)]), ("0.10.0", rows)):
        put(tmp_path / system, f"moe/vllm/{version}/moe_perf.parquet", found)
    return import_experts(tmp_path / system)


def test_a_row_is_one_layer_in_milliseconds_of_the_newest_engine(tmp_path):
    (found,), kernels = imported(tmp_path, [row(moe_tp_size=4)])
    assert kernels == "FusedMoE of vLLM 0.10.0"
    assert found == sample(shape=(4096, 1536, 8, 128), tp=4, experts_met=128.0, latency_s=1.25e-3)


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({}, True),
        ({"moe_dtype": "fp8"}, False),
        ({"moe_dtype": "w4a16_mxfp4", "kernel_source": "vllm_gptossmxfp4moe_marlin"}, True),
        ({"moe_dtype": "w4a16_mxfp4", "kernel_source": "vllm_compressedtensorsw4a4mxfp4moe_marlin"}, False),
        ({"moe_dtype": "nvfp4", "kernel_source": "vllm_nvfp4moe_flashinfer_trtllm_monolithic"}, True),
        ({"moe_dtype": "nvfp4", "kernel_source": "vllm_nvfp4moe_flashinfer_cutlass"}, False),
        ({"moe_ep_size": 2}, False),
        ({"num_tokens": 20_480}, False),
        ({"distribution": "power_law_1.01"}, False),
        ({"hidden_size": 7168, "inter_size": 2048, "num_experts": 256}, False),
        # 8 experts of 4.7 MB each stay in an L2 cache of 50 MB; 16 of 18.9 MB do not.
        ({"num_tokens": 1, "moe_tp_size": 8}, False),
        ({"num_tokens": 2, "moe_tp_size": 2}, True),
    ],
)
def test_what_of_the_table_is_taken(tmp_path, changes, taken):
    found, _ = imported(tmp_path, [row(**changes)])
    assert len(found) == taken


def test_experts_met_of_a_power_law_are_fewer_and_the_same_each_time(tmp_path):
    rows = [row(distribution="power_law_1.2", num_tokens=n) for n in (1, 16, 64, 4096)]
    found, _ = imported(tmp_path, rows)
    met = [s.experts_met for s in found]
    assert met[0] == 8
    assert 8 < met[1] < 128 * (1 - (1 - 8 / 128) ** 16)
    assert met == sorted(met)
    assert met[-1] <= 128
    assert import_experts(tmp_path / "h100_sxm")[0] == found


# -- what of experts is counted, at its edges --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "topk", "draws", "met"),
    [
        # More choices than experts, shares of 1 to 0.8 a token: 20 over five of 8 and one of 1 are 3.9 and 0.49.
        (10, 2, [1, 1, 1, 1, 1, 0], 5),
        # Over four and one they are 4.8 and 0.6.
        (10, 2, [1, 1, 1, 1, 0], 5),
        # As many as experts, shares of 0.01 to 2: four get two each.
        (2, 4, [1, 1, 1, 1, 0, 0, 0, 0], 4),
        # None gets a token twice: of 6 two take 2 each, and two go to others.
        (2, 3, [1, 1, 0, 0, 0, 0, 0, 0], 4),
        # All shares are rounded to 0, or to 1, and there is one choice too few for all.
        (1, 2, [1, 1, 1, 1], 2),
        (1, 3, [1, 1, 1, 1], 3),
    ],
)
def test_experts_met_by_hand(monkeypatch, tokens, topk, draws, met):
    """A power law of 2, where a share is one over a number drawn evenly: the least at 0, the most at 1."""
    spread = _ExpertsMet()
    monkeypatch.setattr(spread, "_random", SimpleNamespace(random=lambda count: np.array(draws, float)[:count]))
    assert spread._count(tokens, len(draws), topk, 2.0) == met


# -- the report --------------------------------------------------------------------------------------------------------


def test_the_table_compares_both_prices():
    profile = load_profile("h100-imported")
    samples = planted("", noise=0.0)
    (fit,) = fit_experts(samples)
    planted_s = np.array([s.latency_s for s in samples])
    # 64 tokens of 2 of 8 experts meet all; 1 of 8 of 128 meets 8.
    same = np.array([(s.tokens == 1) or s.tokens >= 512 for s in samples])
    assert simulated_s(fit, samples)[same] == pytest.approx(planted_s[same], rel=1e-3)
    (line,) = experts_table({"h100": (profile, [fit])}).splitlines()[2:]
    dense = as_dense_s(profile, samples) / planted_s - 1
    assert f"| {100 * np.abs(dense).mean():.1f} % ({100 * dense.mean():+.0f}) |" in line
    assert f"| **{100 * np.abs(fit.unseen).mean():.1f} %** |" in line


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "minimax-m2.5", "minimax-m2.5-nvfp4"])
def test_as_dense_is_what_a_profile_without_constants_says(name):
    """Where experts are all that a model has, but for attention, the two agree."""
    gpu = "b200" if "nvfp4" in name else "h100"
    model, profile = load_model(name), load_profile(f"{gpu}-imported")
    # What lies between products elsewhere is free then.
    bare = profile.without(EXPERT_NAMES | {"elementwise_launch_s", "elementwise_bytes_per_s"})
    quantization = model.expert_quantization
    assert model.moe is not None
    assert quantization is not None
    moe = structs.replace(model.moe, fp32_router=False)
    wide = structs.replace(model, num_heads=1, num_kv_heads=1, head_dim=1, moe=moe)
    shape = (model.hidden_size, moe.moe_intermediate_size, moe.experts_per_token, moe.num_experts)
    for tokens in (64, 16384):
        found = as_dense_s(bare, [sample(tokens, shape, quantization=quantization)])
        whole_s = RooflineCost(wide, load_hardware(gpu), bare, 1).linear_s(tokens) / model.num_layers
        assert found == pytest.approx(whole_s, rel=0.1)


def test_bytes_of_weights_are_those_of_checkpoints():
    assert WEIGHT_BYTES[""] == load_model("qwen3-30b-a3b").expert_dtype_bytes
    assert WEIGHT_BYTES["fp8"] == load_model("minimax-m2.5").expert_dtype_bytes
    assert WEIGHT_BYTES["nvfp4"] == load_model("minimax-m2.5-nvfp4").expert_dtype_bytes
    assert WEIGHT_BYTES["mxfp4"] == load_model("gpt-oss-120b").expert_dtype_bytes
