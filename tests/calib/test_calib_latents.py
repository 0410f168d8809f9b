"""Kernels of latent attention: terms by hand, planted constants found again, what the importer takes."""

import numpy as np
import pytest
from calibration_tables import as_other_attention_s
from msgspec import structs
from parquet_small import put

from calib.importers.aiconfigurator_latents import import_latents
from calib.latents import EAGER_S, KVPrice, LatentSample, LatentTerms, attention_model, fit_latents, predict_latent_s
from sim.cost.profile import LATENT_UNITS, load_profile
from sim.cost.roofline import RooflineCost
from sim.specs.hardware import load_hardware

HARDWARE = load_hardware("h100")
PLANTED = dict(zip(LATENT_UNITS, (7e14, 6e14, 150.0, 1.2e12, 1e-5), strict=True))

PROFILE = load_profile("h100-imported").without(LATENT_UNITS)


def sample(**changes) -> LatentSample:
    fields = {"phase": "decode", "fp8": 0, "num_heads": 16, "batch": 32, "context_tokens": 1000, "latency_s": 1e-3}
    return LatentSample(**fields | changes)


def planted(noise: float = 0.01) -> list[LatentSample]:
    """All but decodes over FP8 weights were timed operation by operation, 40 us longer."""
    samples = [
        sample(phase=phase, fp8=fp8, num_heads=heads, batch=batch, context_tokens=context, eager=eager)
        for phase, sizes in (("decode", (1, 16, 128, 512)), ("prefill", (1, 8)))
        for fp8, eager in ((0, 1), (1, int(phase == "prefill")))
        for heads in (8, 32, 128)
        for batch in sizes
        for context in (64, 1024, 4096, 16384)
    ]
    kv = KVPrice(1152 / PROFILE.value("kv_bytes_per_s"), PROFILE.value("roofline_exponent"))
    seconds = predict_latent_s(PLANTED | {EAGER_S: 4e-5}, LatentTerms.of(samples, PROFILE, HARDWARE), kv)
    seconds *= 1 + noise * np.random.default_rng(1).standard_normal(len(samples))
    return [structs.replace(s, latency_s=float(t)) for s, t in zip(samples, seconds, strict=True)]


def test_terms_by_hand():
    """DeepSeek V3: latents of 512 and 64, queries of 128 and 64, values of 128."""
    samples = [sample(), sample(phase="prefill", num_heads=128, batch=2, context_tokens=100)]
    terms = LatentTerms.of(samples, PROFILE, HARDWARE)
    assert list(terms.joined_bytes) == [32 * 16 * 576 * 2 * 2, 200 * 128 * 576 * 2 * 2]
    assert (list(terms.decodes), list(terms.context_tokens)) == ([32, 0], [32_000, 0])
    # Sixteen heads take a tile of 64.
    assert list(terms.token_flops) == [2 * 64 * (2 * 512 + 64), 2 * 128 * (2 * 512 + 64)]
    assert list(terms.prefill_flops) == [0, 2 * 128 * (192 + 128) * 2 * 100 * 101 / 2]
    price = RooflineCost(attention_model(16, fp8=False), HARDWARE, PROFILE, 1)
    assert terms.known_s[0] == price.products_s(32) + price.overhead_s


def test_the_model_of_a_sample_is_one_layers_attention():
    model, fp8 = attention_model(16, fp8=False), attention_model(16, fp8=True)
    projections = 7168 * 1536 + 1536 * 16 * 192 + 7168 * 576 + 512 * 16 * 256 + 16 * 128 * 7168
    # The MLP's width is one, not none.
    assert model.linear_flops_per_token == 2 * (projections + 3 * 7168)
    assert (model.quantised_flops_share, fp8.quantised_flops_share) == (0.0, pytest.approx(1.0, abs=3e-4))
    assert fp8.linear_weight_bytes == pytest.approx((projections + 3 * 7168) * (1 + 4 / 128**2))


def test_planted_constants_are_found_again_without_what_no_server_runs():
    fit = fit_latents(planted(), PROFILE, HARDWARE)
    assert set(fit.fit.estimates) == set(LATENT_UNITS)
    for name, value in PLANTED.items():
        assert fit.fit.values[name] == pytest.approx(value, rel=0.1)
    assert np.abs(fit.own).mean() < 0.012
    assert np.abs(fit.unseen).mean() < 0.015


def test_priced_as_other_attention_by_hand():
    """Reading 576 elements of two bytes at 1e14 B/s beside 2 x 16 x (2 x 512 + 64) FLOPs at 1e10 a second."""
    rates = {"kv_bytes_per_s": 1e14, "attention_flops_per_s": 1e10, "kv_padding_tokens": 10.0, "roofline_exponent": 1.0}
    constants = {n: structs.replace(PROFILE.constants[n], value=v) for n, v in rates.items()}
    profile = structs.replace(PROFILE, constants=PROFILE.constants | constants)
    samples = [sample(), sample(phase="prefill", num_heads=128, batch=2, context_tokens=100)]
    decode_s, prefill_s = as_other_attention_s(samples, profile, HARDWARE)
    small, large = (RooflineCost(attention_model(heads, fp8=False), HARDWARE, profile, 1) for heads in (16, 128))
    token_s = 2 * 16 * (2 * 512 + 64) / 1e10 + 1152 / 1e14
    assert decode_s == pytest.approx(small.products_s(32) + small.overhead_s + 32 * (1000 + 10) * token_s)
    pairs_s = 2 * 100 * 101 / 2 * 2 * 128 * (192 + 128) / 1e10
    assert prefill_s == pytest.approx(large.products_s(200) + large.overhead_s + pairs_s)


# -- the tables --------------------------------------------------------------------------------------------------------


def row(**changes):
    base = {
        "kernel_source": "FLASH_ATTN_MLA", "kv_cache_dtype": "bfloat16", "gemm_type": "bfloat16", "num_heads": 16,
        "batch_size": 32, "isl": 1, "step": 1000, "latency": 1.0,
    }  # fmt: skip
    return base | changes


def imported(tmp_path, decodes, prefills, system="h100_sxm"):
    for version, rows in (("0.9.0", [[row(latency=9.0)]] * 2), ("0.10.0", [decodes, prefills])):
        for name, found in zip(("generation", "context"), rows, strict=True):
            put(tmp_path / system, f"mla/vllm/{version}/mla_{name}_module_perf.parquet", found)
    return import_latents(tmp_path / system)


def test_rows_are_one_layer_in_milliseconds_of_the_newest_engine(tmp_path):
    prompt = row(kernel_source="FLASH_ATTN", gemm_type="fp8_block", batch_size=2, isl=2048, step=0, latency=2.5)
    found, kernels = imported(tmp_path, [row()], [prompt])
    assert kernels == "attention of DeepSeek V3, vLLM 0.10.0"
    prefill = sample(phase="prefill", fp8=1, batch=2, context_tokens=2048, latency_s=2.5e-3, eager=1)
    assert found == [prefill, sample(eager=1)]


def test_sglangs_decodes_have_the_product_beside_their_module(tmp_path):
    """0.5 ms of attention and 0.02 ms of the product of as many tokens; of other kernels and products none."""
    modules = [row(kernel_source=kernel, isl=700, step=0, latency=0.5) for kernel in ("fa3", "flashinfer")]
    modules.append(row(kernel_source="fa3", batch_size=3, isl=700, step=0, latency=0.5))
    gemms = [
        {"gemm_dtype": dtype, "m": 32, "n": 2048, "k": k, "latency": latency}
        for dtype, k, latency in (("fp8_block", 7168, 0.02), ("bfloat16", 7168, 9.0), ("fp8_block", 2048, 9.0))
    ]
    put(tmp_path / "h100_sxm", "mla/sglang/0.5.10/wideep_generation_mla_perf.parquet", modules)
    put(tmp_path / "h100_sxm", "gemm/sglang/0.5.14/gemm_perf.parquet", gemms)
    found, kernels = imported(tmp_path, [row()], [row()])
    assert kernels == "attention of DeepSeek V3, vLLM 0.10.0 and decodes of SGLang 0.5.10"
    assert found[1:] == [sample(fp8=1, context_tokens=700, latency_s=5.2e-4)]


@pytest.mark.parametrize("changes", [{"kernel_source": "FLASHMLA"}, {"kv_cache_dtype": "fp8"}, {"num_heads": 4}])
def test_what_of_the_tables_is_not_taken(tmp_path, changes):
    """Prompts that vLLM computes with the kernels of decodes neither."""
    found, _ = imported(tmp_path, [row(**changes), row()], [row(), row(kernel_source="FLASH_ATTN", isl=2048)])
    assert [s.phase for s in found] == ["prefill", "decode"]


def test_other_kernels_than_hoppers_are_not_taken(tmp_path):
    assert imported(tmp_path, [row()], [row()], system="b200_sxm")[0] == []
    assert import_latents(tmp_path / "h200_sxm")[0] == []
