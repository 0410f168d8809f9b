"""Latent attention priced by constants of its own kernels: what they replace."""

import pytest

from calib.latents import KVPrice, LatentSample, LatentTerms, attention_model, predict_latent_s
from sim.cost.profile import LATENT_UNITS, load_profile
from sim.cost.roofline import RooflineCost
from sim.specs.hardware import load_hardware
from sim.specs.kv_format import kv_dtype
from sim.specs.models import load_model

HARDWARE = load_hardware("h100")
PROFILE = load_profile("h100-imported")
WITHOUT = PROFILE.without(LATENT_UNITS)


def cost_of(model=None, profile=PROFILE, tp: int = 1) -> RooflineCost:
    return RooflineCost(model or load_model("deepseek-v2-lite"), HARDWARE, profile, tp)


@pytest.mark.parametrize(
    ("heads", "fp8", "batch", "context"), [(16, False, 1, 1), (128, True, 7, 300), (16, True, 256, 9000)]
)
def test_the_simulator_prices_decodes_as_the_fit_explains_them(heads, fp8, batch, context):
    model = attention_model(heads, fp8=fp8)
    sample = LatentSample(phase="decode", fp8=fp8, num_heads=heads, batch=batch, context_tokens=context, latency_s=1.0)
    kv = KVPrice(1152 / PROFILE.value("kv_bytes_per_s"), PROFILE.value("roofline_exponent"))
    assert PROFILE.latents
    (expected_s,) = predict_latent_s(PROFILE.latents, LatentTerms.of([sample], WITHOUT, HARDWARE), kv)
    price = cost_of(model)
    beside_s = price.linear_s(batch) - price.products_s(batch) + price.head_s(batch)
    found_s, _ = price.decode_run(batch, batch * context)
    assert found_s - beside_s == pytest.approx(expected_s)


@pytest.mark.parametrize("tokens", [1, 700, 9000])
def test_and_prompts(tokens):
    model = attention_model(32, fp8=False)
    sample = LatentSample(phase="prefill", fp8=0, num_heads=32, batch=1, context_tokens=tokens, latency_s=1.0)
    kv = KVPrice(1.0, 1.0)
    assert PROFILE.latents
    (expected_s,) = predict_latent_s(PROFILE.latents, LatentTerms.of([sample], WITHOUT, HARDWARE), kv)
    price = cost_of(model)
    beside_s = price.linear_s(tokens) - price.products_s(tokens) + price.head_s(1)
    assert price.prefill_s(tokens) - beside_s == pytest.approx(expected_s)


def test_a_group_shares_heads_down_to_a_tile():
    model = load_model("deepseek-v3")
    prices = {tp: cost_of(model, tp=tp).latents for tp in (1, 2, 8)}
    per_token = {tp: price.decode_s_per_token_read for tp, price in prices.items() if price}
    assert per_token[1] == 2 * per_token[2] == 2 * per_token[8]
    joined = {tp: price.joined_s_per_token for tp, price in prices.items() if price}
    assert joined[1] == 2 * joined[2] == 8 * joined[8]


def test_other_models_profiles_and_kv_do_without():
    latent = load_model("deepseek-v2-lite")
    assert cost_of(latent).latents
    assert cost_of(load_model("llama-3.1-8b")).latents is None
    assert cost_of(latent, WITHOUT).latents is None
    assert cost_of(latent.with_kv_dtype(kv_dtype("fp8", HARDWARE))).latents is None
    for name in ("llama-3.1-8b", "gemma-3-27b"):
        model = load_model(name)
        assert cost_of(model).prefill_s(777) == cost_of(model, WITHOUT).prefill_s(777)
        assert cost_of(model).decode_run(9, 5000) == cost_of(model, WITHOUT).decode_run(9, 5000)
