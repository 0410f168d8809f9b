"""Quantised weights and FP8 KV: planted constants come back, and the 16-bit ones stay as they are."""

import msgspec
import numpy as np
import pytest
from calib_small import A100, BASE, HARDWARE, THREE, noise, planted, shapes, spec, terms, timed

from calib import quantized
from calib.fit import fit_profile
from calib.quantized import fit_quantised
from calib.roofline import complete, ridge_s
from calib.samples import Sample
from sim.cost.model import CostModel
from sim.cost.profile import ROOFLINE_UNITS, Constant, Profile, load_profile
from sim.cost.roofline import RooflineCost
from sim.errors import UserError
from sim.specs.hardware import load_hardware
from sim.specs.kv_format import KV_DTYPES

MODELS = {name: spec(name) for name in THREE}
TOKENS = (1, 8, 64, 128, 256, 512, 1024, 4096, 16384)
PRODUCTS = {
    "fp8_flops_per_s": 4e14,
    "fp8_roofline_exponent": 2.0,
    "fp8_quantize_bytes_per_s": 8e11,
    "fp8_layer_overhead_s": 5e-5,
}
KV = {"fp8_kv_bytes_per_s": 1.4e12, "fp8_kv_padding_tokens": 90.0, "fp8_kv_layer_overhead_s": 3e-6}
ATTENTION_S = 1e-5
"""What of a layer's overhead attention is."""


def linear(tps=(1, 4)):
    return [
        Sample(op="linear", latency_s=1.0, model=name, tp=tp, new_tokens=n, quantization="fp8")
        for name in THREE
        for tp in tps
        for n in TOKENS
    ]


def layers(kv_cache_dtype="", quantization="fp8"):
    return [
        msgspec.structs.replace(s, quantization=quantization, kv_cache_dtype=kv_cache_dtype)
        for s in shapes(op="products")
    ]


def exactly(samples, constants=A100, **changed):
    """The samples with the times that these constants give, by the formula written out."""
    v = complete(constants) | PRODUCTS | KV | changed
    found, seconds = terms(samples), np.zeros(len(samples))
    for i, s in enumerate(samples):
        fp8, kv, one = bool(s.quantization), "fp8_kv" if s.kv_cache_dtype else "kv", found[np.array([i])]
        rate, exponent, overhead = (
            ("fp8_flops_per_s", "fp8_roofline_exponent", "fp8_layer_overhead_s")
            if fp8
            else ("flops_per_s", "roofline_exponent", "layer_overhead_s")
        )
        memory_s = (one.weight_bytes + one.activation_bytes) / v["hbm_bytes_per_s"]
        read = one.kv_bytes + v[f"{kv}_padding_tokens"] * one.padding_bytes
        seconds[i] = (
            ridge_s(one.linear_flops / v[rate], memory_s, v[exponent])
            + one.quantized_bytes / v["fp8_quantize_bytes_per_s"]
            + one.attention_flops / v["attention_flops_per_s"]
            + read / v[f"{kv}_bytes_per_s"]
            + v[overhead]
            + (v["fp8_kv_layer_overhead_s"] if s.kv_cache_dtype else 0.0)
            - (ATTENTION_S if s.op == "linear" else 0.0)
        ).item()
    return timed(samples, seconds)


def values(found):
    return {name: e.value for fit in found.fits for name, e in fit.estimates.items()}


def test_weights_of_a_byte_are_read_and_activations_of_two():
    """Llama-2 70B on four GPUs; inputs of products are read in two bytes and written in one: 8,192 into attention and
    into the MLP, 2,048 out of 16 heads, 7,168 of the MLP."""
    given = {"op": "linear", "latency_s": 1.0, "model": "llama-2-70b", "tp": 4, "new_tokens": 10}
    found = terms([Sample(**given), Sample(**given, quantization="fp8")])
    assert found.weight_bytes[1] == pytest.approx(found.weight_bytes[0] / 2)
    assert found.activation_bytes[1] == pytest.approx(found.activation_bytes[0])
    assert found.linear_flops[1] == pytest.approx(found.linear_flops[0])
    assert found.quantized_bytes == pytest.approx([0.0, 3 * 10 * (2 * 8192 + 2048 + 7168)])


def test_fp8_kv_is_a_byte_an_element_in_reading_and_padding():
    given = {"op": "products", "latency_s": 1.0, "model": "llama-2-7b", "new_tokens": 1, "context_tokens": 99}
    found = terms([Sample(**given), Sample(**given, kv_cache_dtype="fp8")])
    assert (found.kv_bytes[1], found.padding_bytes[1]) == (found.kv_bytes[0] / 2, found.padding_bytes[0] / 2)
    assert found.weight_bytes[1] == found.weight_bytes[0]


def test_exact_products_alone_give_rates_and_exponent_back_and_leave_the_overhead():
    same = {"fp8_layer_overhead_s": A100["layer_overhead_s"] + ATTENTION_S}
    found = fit_quantised(exactly(linear(), **same), MODELS, complete(A100))
    told = {name: value for name, value in PRODUCTS.items() if name != "fp8_layer_overhead_s"}
    assert values(found) == pytest.approx(told, rel=1e-4)
    assert found.residuals == pytest.approx({"fp8_linear_mape": 0.0, "unseen_model_fp8_linear_mape": 0.0}, abs=1e-4)


@pytest.mark.parametrize("quantization", ["fp8", ""])
def test_exact_layers_give_every_constant_back(quantization):
    """FP8 KV under 16-bit weights too."""
    samples = exactly([*linear(), *layers(), *layers("fp8", quantization)])
    found = fit_quantised(samples, MODELS, complete(A100))
    assert values(found) == pytest.approx(PRODUCTS | KV, rel=1e-3)
    phases = ("fp8_linear", "fp8_prefill", "fp8_decode", "fp8_kv_prefill", "fp8_kv_decode")
    assert found.residuals.keys() == {f"{start}{phase}_mape" for phase in phases for start in ("", "unseen_model_")}
    assert max(found.residuals.values()) < 1e-4


def test_noisy_samples_hold_the_constants_within_their_intervals():
    samples = exactly([*linear(), *layers(), *layers("fp8")])
    factors = noise(np.random.default_rng(3), len(samples))
    samples = timed(samples, [s.latency_s * f for s, f in zip(samples, factors, strict=True)])
    found = fit_quantised(samples, MODELS, complete(A100))
    estimates = {name: e for fit in found.fits for name, e in fit.estimates.items()}
    for name, true in (PRODUCTS | KV).items():
        assert estimates[name].low < true < estimates[name].high, name
    assert estimates["fp8_flops_per_s"].high < 1.1 * estimates["fp8_flops_per_s"].low
    assert 0.01 < found.residuals["fp8_decode_mape"] < 0.06
    assert found.residuals == {name: round(error, 5) for name, error in found.residuals.items()}
    two = [s for s in samples if s.model != "llama-2-70b"]
    assert len({s.model for s in two}) == 2
    residuals = fit_quantised(two, MODELS, complete(A100)).residuals
    for phase in ("linear", "prefill", "decode"):
        own, unseen = (residuals[f"{start}fp8_{phase}_mape"] for start in ("", "unseen_model_"))
        assert own < unseen < 3 * own


def test_sizes_off_the_ridge_have_factors_and_leave_the_constants():
    """Products of 64, 256 and 1,024 rows take twice as long: rates come back, since factors are found with them."""
    none = {"fp8_quantize_bytes_per_s": 1e30, "fp8_layer_overhead_s": ATTENTION_S}
    same = {"fp8_layer_overhead_s": A100["layer_overhead_s"] + ATTENTION_S}
    whole, products = exactly(linear(), **same), exactly(linear(), **none)
    slow = {64, 256, 1024}
    seconds = [s.latency_s + (s.new_tokens in slow) * p.latency_s for s, p in zip(whole, products, strict=True)]
    found = fit_quantised(timed(whole, seconds), MODELS, complete(A100))
    assert dict(found.factors["fp8"]) == pytest.approx({n: 2.0 if n in slow else 1.0 for n in TOKENS}, rel=0.05)
    told = {name: value for name, value in PRODUCTS.items() if name != "fp8_layer_overhead_s"}
    assert values(found) == pytest.approx(told, rel=0.05)
    assert found.residuals["unseen_model_fp8_linear_mape"] < 0.02


@pytest.mark.parametrize("linear_factors", [None, [(1, 1.2)]])
def test_factors_of_16_bits_do_not_stand_in_where_own_ones_do_not_pay(monkeypatch, linear_factors):
    """Samples that lean and that factors predict no better: those of 16 bits are of other kernels."""
    monkeypatch.setattr(quantized, "leans", lambda *_, **__: True)
    same = {"fp8_layer_overhead_s": A100["layer_overhead_s"] + ATTENTION_S}
    found = fit_quantised(exactly(linear(), **same), MODELS, complete(A100), linear_factors)
    assert found.factors == ({"fp8": [(1, 1.0)]} if linear_factors else {})
    assert values(found)["fp8_flops_per_s"] == pytest.approx(PRODUCTS["fp8_flops_per_s"], rel=1e-4)


def test_nvfp4_is_fitted_beside_fp8_with_constants_of_its_own():
    """Exact samples of both: each format's constants come back, whatever the other's."""
    fp8 = [*linear(), *layers()]
    nvfp4 = [msgspec.structs.replace(s, quantization="nvfp4") for s in fp8]
    faster = {f"nvfp4_{name.removeprefix('fp8_')}": value for name, value in PRODUCTS.items()}
    faster |= {"nvfp4_flops_per_s": 2.5 * PRODUCTS["fp8_flops_per_s"], "nvfp4_layer_overhead_s": 5e-5}
    as_fp8 = {f"fp8_{name.removeprefix('nvfp4_')}": value for name, value in faster.items()}
    seconds = [s.latency_s for s in exactly(nvfp4, **as_fp8)]
    found = fit_quantised([*exactly(fp8), *timed(nvfp4, seconds)], MODELS, complete(A100))
    assert values(found) == pytest.approx(PRODUCTS | faster, rel=1e-3)
    assert {"nvfp4_linear_mape", "nvfp4_prefill_mape", "nvfp4_decode_mape"} <= found.residuals.keys()


def test_nvfp4_over_fp8_kv_is_refused():
    (sample, *_) = layers("fp8")
    with pytest.raises(UserError, match="nvfp4 weights over FP8 KV are not fitted: time them over KV of 16 bits"):
        fit_quantised([msgspec.structs.replace(sample, quantization="nvfp4")], MODELS, complete(A100))


def test_they_change_no_other_constant(tmp_path):
    samples = planted(shapes())
    given = {"name": "mine", "status": "measured", "provenance": {}}
    fp8 = exactly([*linear(), *layers(), *layers("fp8")])
    plain, both = (fit_profile(s, tmp_path, HARDWARE, BASE, **given) for s in (samples, [*samples, *fp8]))
    assert both.profile.constants.keys() - plain.profile.constants.keys() == (PRODUCTS | KV).keys()
    for name, constant in plain.profile.constants.items():
        assert both.profile.constants[name] == constant
    for name, true in (PRODUCTS | KV).items():
        assert both.profile.value(name) == pytest.approx(true, rel=0.02)
    assert both.samples == plain.samples
    assert plain.profile.residuals is not None
    assert both.profile.residuals is not None
    assert all("fp8" in name for name in both.profile.residuals.keys() - plain.profile.residuals.keys())


def priced(profile: Profile, model: str, *, tp: int = 1, fp8_kv: bool = False) -> CostModel:
    found = spec(model).with_quantization("fp8")
    return RooflineCost(found.with_kv_dtype(KV_DTYPES["fp8"]) if fp8_kv else found, load_hardware("h100"), profile, tp)


@pytest.mark.parametrize("fp8_kv", [False, True])
@pytest.mark.parametrize("tp", [1, 4])
def test_runs_are_priced_as_samples_are(fp8_kv: bool, tp: int):
    """A decode of 32 sequences over 1,000 tokens each; what lies between products and the head is free here."""
    shipped = load_profile("h100-imported")
    given = A100 | PRODUCTS | KV | {"elementwise_launch_s": 0.0, "elementwise_bytes_per_s": 1e30}
    constants = {n: Constant(v, None, ROOFLINE_UNITS[n], "a test") for n, v in given.items()}
    constants = shipped.constants | constants
    profile = msgspec.structs.replace(shipped, constants=constants, linear_factors=None, fp8_linear_factors=None)
    sample = Sample(
        op="products", latency_s=1.0, model="llama-2-70b", tp=tp, num_layers=80, batch_size=32, new_tokens=1,
        context_tokens=999, quantization="fp8", kv_cache_dtype="fp8" if fp8_kv else "",
    )  # fmt: skip
    (expected,) = exactly([msgspec.structs.replace(sample, num_layers=1)])
    cost = priced(profile, "llama-2-70b", tp=tp, fp8_kv=fp8_kv)
    beside_s = cost.all_reduce_s(32) + cost.head_s(32)
    assert cost.decode_run(32, 32 * 1000)[0] - beside_s == pytest.approx(80 * expected.latency_s)


def test_without_a_rate_of_its_own_fp8_kv_is_read_as_16_bits_are():
    bare = load_profile("h100-imported")
    kept = {name: constant for name, constant in bare.constants.items() if not name.startswith("fp8_kv")}
    without = msgspec.structs.replace(bare, constants=kept)
    small, plain = (priced(without, "llama-2-70b", fp8_kv=fp8_kv) for fp8_kv in (True, False))
    assert small.decode_s_per_context_token == pytest.approx(plain.decode_s_per_context_token / 2, rel=0.01)
    assert small.overhead_s == plain.overhead_s < priced(bare, "llama-2-70b", fp8_kv=True).overhead_s
