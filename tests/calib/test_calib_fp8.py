"""FP8 products: planted constants come back, and the 16-bit ones stay as they are."""

import msgspec
import numpy as np
import pytest
from calib_small import A100, BASE, HARDWARE, THREE, noise, planted, shapes, spec, terms, timed

from calib.fit import fit_profile
from calib.fp8 import fit_fp8
from calib.roofline import complete, ridge_s
from calib.samples import Sample
from sim.errors import UserError

MODELS = {name: spec(name) for name in THREE}
TOKENS = (1, 8, 64, 128, 256, 512, 1024, 4096, 16384)


def fp8(rate=4e14, exponent=2.0, constants=A100):
    """Products of quantised layers that take exactly what these constants say."""
    samples = [
        Sample(op="linear", latency_s=1.0, model=name, new_tokens=n, quantization="fp8")
        for name in THREE
        for n in TOKENS
    ]
    found = terms(samples)
    memory_s = (found.weight_bytes + found.activation_bytes) / constants["hbm_bytes_per_s"]
    seconds = ridge_s(found.linear_flops / rate, memory_s, exponent) + constants["layer_overhead_s"]
    return timed(samples, seconds)


def test_weights_of_a_byte_are_read_and_activations_of_two():
    plain, quantised = (
        terms([Sample(op="linear", latency_s=1.0, model="llama-2-7b", new_tokens=7, quantization=q)])
        for q in ("", "fp8")
    )
    assert quantised.weight_bytes == pytest.approx(plain.weight_bytes / 2)
    assert quantised.activation_bytes == pytest.approx(plain.activation_bytes)
    assert quantised.linear_flops == pytest.approx(plain.linear_flops)


def test_exact_samples_give_the_rate_and_the_exponent_back():
    found = fit_fp8(fp8(), MODELS, complete(A100))
    assert found is not None
    assert found.fit.values == pytest.approx({"fp8_flops_per_s": 4e14, "fp8_roofline_exponent": 2.0}, rel=1e-4)
    assert found.residuals == pytest.approx({"fp8_mape": 0.0, "unseen_model_fp8_mape": 0.0}, abs=1e-4)


def test_noisy_samples_hold_the_rate_within_its_interval():
    factors = noise(np.random.default_rng(3), len(fp8()))
    samples = timed(fp8(), [s.latency_s * f for s, f in zip(fp8(), factors, strict=True)])
    found = fit_fp8(samples, MODELS, complete(A100))
    assert found is not None
    rate = found.fit.estimates["fp8_flops_per_s"]
    assert rate.low < 4e14 < rate.high < 1.1 * rate.low
    assert 0.01 < found.residuals["fp8_mape"] < 0.06


def test_no_samples_no_fit():
    assert fit_fp8([], MODELS, complete(A100)) is None


def test_they_change_no_other_constant(tmp_path):
    samples = planted(shapes())
    given = {"name": "mine", "status": "measured", "provenance": {}}
    plain, both = (fit_profile(s, tmp_path, HARDWARE, BASE, **given) for s in (samples, [*samples, *fp8()]))
    added = both.profile.constants.keys() - plain.profile.constants.keys()
    assert added == {"fp8_flops_per_s", "fp8_roofline_exponent"}
    for name, constant in plain.profile.constants.items():
        assert both.profile.constants[name] == constant
    assert both.profile.value("fp8_flops_per_s") == pytest.approx(4e14, rel=0.02)
    assert both.samples == plain.samples
    assert plain.profile.residuals is not None
    assert both.profile.residuals is not None
    assert both.profile.residuals.keys() - plain.profile.residuals.keys() == {"fp8_mape", "unseen_model_fp8_mape"}


def test_whole_layers_are_refused():
    (sample, *_) = fp8()
    with pytest.raises(UserError, match="op 'layers' of quantization fp8 cannot be priced: time op 'linear'"):
        fit_fp8([msgspec.structs.replace(sample, op="layers")], MODELS, complete(A100))
