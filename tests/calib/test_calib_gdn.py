"""Kernels of Gated DeltaNet: terms by hand, planted constants found again, what the importer takes."""

import numpy as np
import pytest
from msgspec import structs
from parquet_small import put

from calib.gdn import GdnSample, GdnTerms, fit_gdn, predict_gdn_s
from calib.importers.aiconfigurator_gdn import import_gdn
from sim.cost.profile import GDN_UNITS
from sim.specs.hardware import load_hardware

HARDWARE = load_hardware("h100")
PLANTED = dict(zip(GDN_UNITS, (2.5e12, 6e-6, 2e7, 100.0, 150.0, 2e12, 8e-6), strict=True))


def sample(**changes) -> GdnSample:
    fields = {"phase": "decode", "num_key_heads": 16, "num_value_heads": 32, "batch": 256, "new_tokens": 1}
    return GdnSample(**fields | {"latency_s": 1e-3} | changes)


def planted(noise: float = 0.01) -> list[GdnSample]:
    samples = [
        sample(num_key_heads=heads // 2, num_value_heads=heads, batch=batch)
        for heads in (4, 16, 64)
        for batch in (1, 4, 64, 256, 1024)
    ] + [
        sample(phase="prefill", num_key_heads=heads // 2, num_value_heads=heads, batch=batch, new_tokens=tokens)
        for heads in (4, 16, 64)
        for batch in (1, 4, 32)
        for tokens in (1, 64, 1024, 16384)
    ]
    seconds = predict_gdn_s(PLANTED, GdnTerms.of(samples))
    seconds *= 1 + noise * np.random.default_rng(1).standard_normal(len(samples))
    return [structs.replace(s, latency_s=float(t)) for s, t in zip(samples, seconds, strict=True)]


def test_terms_by_hand():
    """Sixteen key and 32 value heads of 128: the convolution runs over 2 x 2,048 + 4,096 elements."""
    samples = [sample(batch=2), sample(phase="prefill", num_value_heads=32, batch=3, new_tokens=100)]
    terms = GdnTerms.of(samples)
    state, inputs, width = 32 * 128 * 128 * 4, 3 * 8192 * 2, 8192 * 2
    assert terms.decode_bytes[0] == 2 * (2 * (state + inputs) + 3 * width + 4096 * 2)
    assert (list(terms.is_decode), terms.conv_bytes[1], terms.heads[1]) == ([1, 0], 300 * 2 * width, 32)
    decode_s, prefill_s = predict_gdn_s(PLANTED, terms)
    assert decode_s == pytest.approx(6e-6 + terms.decode_bytes[0] / 2.5e12)
    # 96 heads fit beside one another: the longest prompt counts.
    assert prefill_s == pytest.approx(8e-6 + 250 / 2e7 + 300 * 2 * width / 2e12)
    (longer_s,) = predict_gdn_s(PLANTED, GdnTerms.of([structs.replace(samples[1], batch=6)]))
    assert longer_s == pytest.approx(8e-6 + 6 * 250 * 32 / 100 / 2e7 + 600 * 2 * width / 2e12)


def test_states_that_a_cache_may_hold_are_left_out():
    """Two megabytes a sequence: one takes time, 123 fill 258 MB, those between may come from the L2 cache."""
    kept = [batch for batch in (1, 2, 64, 122, 123, 1024) if sample(batch=batch).is_fitted]
    assert kept == [123, 1024]
    assert sample(num_key_heads=1, num_value_heads=4, batch=3).is_fitted
    assert sample(phase="prefill", batch=2).is_fitted


def test_planted_constants_are_found_again():
    fit = fit_gdn(planted(), HARDWARE)
    assert set(fit.fit.estimates) == set(GDN_UNITS)
    for name, value in PLANTED.items():
        assert fit.fit.values[name] == pytest.approx(value, rel=0.1)
    assert np.abs(fit.own).mean() < 0.012
    assert np.abs(fit.unseen).mean() < 0.02
    prefill = np.array([s.phase == "prefill" for s in fit.samples])
    assert fit.residuals == {
        "gdn_prefill_mape": pytest.approx(np.abs(fit.own[prefill]).mean(), abs=1e-5),
        "unseen_heads_gdn_prefill_mape": pytest.approx(np.abs(fit.unseen[prefill]).mean(), abs=1e-5),
        "gdn_decode_mape": pytest.approx(np.abs(fit.own[~prefill]).mean(), abs=1e-5),
        "unseen_heads_gdn_decode_mape": pytest.approx(np.abs(fit.unseen[~prefill]).mean(), abs=1e-5),
    }
    assert fit.residuals == {name: round(error, 5) for name, error in fit.residuals.items()}


# -- the tables --------------------------------------------------------------------------------------------------------

KERNELS = {
    "context": ("causal_conv1d_fn", "chunk_gated_delta_rule_flashinfer"),
    "generation": ("causal_conv1d_update", "fused_recurrent_gated_delta_rule_packed_decode"),
}


def rows(phase, latencies, **changes):
    base = {
        "phase": phase, "batch_size": 2, "seq_len": 1, "num_k_heads": 16, "head_k_dim": 128, "num_v_heads": 32,
        "head_v_dim": 128, "d_conv": 4,
    } | changes  # fmt: skip
    return [base | {"kernel_source": k, "latency": t} for k, t in zip(KERNELS[phase], latencies, strict=True)]


def imported(tmp_path, found):
    for version, table in (("0.9.0", rows("generation", (9.0, 9.0))), ("0.10.0", found)):
        put(tmp_path, f"linear_attention/vllm/{version}/gdn_perf.parquet", table)
    return import_gdn(tmp_path)


def test_a_sample_is_both_kernels_and_the_median_of_models_that_share_a_shape(tmp_path):
    decodes = [row for times in ((0.5, 2.0), (0.6, 9.0), (0.7, 3.0)) for row in rows("generation", times)]
    found, kernels = imported(tmp_path, [*decodes, *rows("context", (1.0, 4.0), seq_len=64)])
    assert kernels == "Gated DeltaNet of Qwen 3.5, vLLM 0.10.0"
    prefill = sample(phase="prefill", batch=2, new_tokens=64, latency_s=5e-3)
    assert sorted(found, key=lambda s: s.phase) == [sample(batch=2, latency_s=3.6e-3), prefill]


def test_other_kernels_and_heads_are_not_taken(tmp_path):
    small = rows("generation", (1.0, 1.0), head_k_dim=64)
    taken = rows("generation", (1.0, 1.0)) + rows("context", (1.0, 1.0))
    assert len(imported(tmp_path, taken + small)[0]) == 2
    triton = [row | {"kernel_source": row["kernel_source"].replace("flashinfer", "triton")} for row in taken]
    assert imported(tmp_path, triton) == ([], "none in the tables that the terms fit")
    assert import_gdn(tmp_path / "elsewhere") == ([], "none in the tables")
