"""Constants of FP8 weights and of FP8 KV, fitted once those of 16 bits are known, none of which they change.

Products of FP8 weights and activations: T = ridge(linear FLOPs / F_FP8, linear bytes / H) + quantised bytes / Q
+ attention + layers c_FP8. Their inputs are made FP8 by kernels of their own, which read and write those bytes.
Attention over FP8 KV has a rate and a padding of its own, and costs a layer more than over 16 bits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from calib.holdout import mean
from calib.robust import Array, Fit, Parameter, fit_relative
from calib.roofline import MOST_EXPONENT, attention_s, fastest, ridge_s, with_exponent
from calib.samples import Sample
from calib.terms import Terms, terms_of
from sim.errors import UserError
from sim.specs.models import ModelSpec

EXPONENT = "fp8_roofline_exponent"
ATTENTION = "attention_launch_s"
"""What of a layer's overhead is attention's, which products timed alone do not pay. No constant of a profile."""
OPS = ("linear", "products")


@dataclass(frozen=True)
class Fp8Fit:
    """Fits of what the samples tell, and their errors by phase, on the samples and on a model left out."""

    fits: list[Fit] = field(default_factory=list)
    residuals: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Timed:
    """Samples that all read KV of one type; arrays of shape (samples,)."""

    terms: Terms
    measured_s: Array
    attends: NDArray[np.bool_]
    fp8_kv: bool

    def of(self, chosen: NDArray[np.bool_]) -> "_Timed":
        return _Timed(self.terms[chosen], self.measured_s[chosen], self.attends[chosen], self.fp8_kv)


def fit_fp8(samples: Sequence[Sample], models: Mapping[str, ModelSpec], constants: Mapping[str, float]) -> Fp8Fit:
    """Fit FP8's constants: those of products to samples over 16-bit KV, then those of FP8 KV to the others.

    Args:
        samples: of FP8 weights, FP8 KV or both; op `linear` or `products`.
        models: by the names in the samples.
        constants: those of 16 bits, all of them.

    Returns:
        What the samples tell: from products alone (`linear`) no overhead, which then stays that of 16 bits.
    """
    for sample in samples:
        if sample.op not in OPS:
            raise UserError(f"samples: op {sample.op!r} in FP8 cannot be priced: time op {' or '.join(map(repr, OPS))}")
    found, known = Fp8Fit(), dict(constants)
    for fp8_kv in (False, True):
        chosen = [s for s in samples if bool(s.kv_cache_dtype) == fp8_kv]
        if not chosen:
            continue
        seconds, attends = np.array([s.latency_s for s in chosen]), np.array([s.op != "linear" for s in chosen])
        timed = _Timed(terms_of(chosen, models), seconds, attends, fp8_kv)
        fit = _fit(timed, known)
        found.residuals.update(_residuals(chosen, timed, fit, known))
        known |= fit.values
        told = {name: estimate for name, estimate in fit.estimates.items() if name != ATTENTION}
        found.fits.append(Fit(told, fit.scatter))
    return found


def _parameters(timed: _Timed, known: Mapping[str, float]) -> dict[str, Parameter]:
    """What the samples can tell, each with a start."""
    if timed.fp8_kv:
        return {
            "fp8_kv_bytes_per_s": Parameter(known["kv_bytes_per_s"]),
            "fp8_kv_padding_tokens": Parameter(64.0, 0.0, log=False),
            "fp8_kv_layer_overhead_s": Parameter(1e-6, 0.0, log=False),
        }
    found = {
        "fp8_flops_per_s": Parameter(fastest(timed.terms.linear_flops, timed.measured_s)),
        "overlap": Parameter(0.4, 1 / MOST_EXPONENT, 1.0, log=False),
        "fp8_quantize_bytes_per_s": Parameter(known["hbm_bytes_per_s"]),
    }
    if timed.attends.any():
        found["fp8_layer_overhead_s"] = Parameter(1e-5, 0.0, log=False)
        if not timed.attends.all():
            found[ATTENTION] = Parameter(1e-5, 0.0, log=False)
    return found


def _predict_s(values: Mapping[str, float], timed: _Timed) -> Array:
    terms, is_fp8 = timed.terms, timed.terms.quantized_bytes > 0
    if timed.fp8_kv:
        over_kv = {name: values[f"fp8_{name}"] for name in ("kv_bytes_per_s", "kv_padding_tokens")}
        attended_s = attention_s({**values, **over_kv}, terms) + terms.layers * values["fp8_kv_layer_overhead_s"]
    else:
        attended_s = attention_s(values, terms) - terms.layers * ~timed.attends * values.get(ATTENTION, 0.0)
    products_s = ridge_s(
        terms.linear_flops / np.where(is_fp8, values["fp8_flops_per_s"], values["flops_per_s"]),
        (terms.weight_bytes + terms.activation_bytes) / values["hbm_bytes_per_s"],
        np.where(is_fp8, values[EXPONENT], values["roofline_exponent"]),
    )
    overhead_s = np.where(is_fp8, values["fp8_layer_overhead_s"], values["layer_overhead_s"])
    quantized_s = terms.quantized_bytes / values["fp8_quantize_bytes_per_s"]
    return products_s + quantized_s + attended_s + terms.layers * overhead_s


def _fit(timed: _Timed, known: Mapping[str, float]) -> Fit:
    def predicted(values: Mapping[str, float]) -> Array:
        exponent = {EXPONENT: 1.0 / values["overlap"]} if "overlap" in values else {}
        return _predict_s({**known, **values, **exponent}, timed)

    found = fit_relative(predicted, timed.measured_s, _parameters(timed, known))
    return Fit(with_exponent(found.estimates, EXPONENT), found.scatter)


def _residuals(samples: Sequence[Sample], timed: _Timed, fit: Fit, known: Mapping[str, float]) -> dict[str, float]:
    """Mean absolute relative errors by phase: on all samples, and on each model by a fit to the others."""
    names = np.array([s.model for s in samples])

    def errors_of(fit: Fit, chosen: _Timed) -> Array:
        return np.abs(_predict_s({**known, **fit.values}, chosen) / chosen.measured_s - 1)

    own, unseen = errors_of(fit, timed), np.zeros(len(samples))
    models = sorted(set(names))
    for name in models if len(models) > 1 else ():
        left_out = names == name
        unseen[left_out] = errors_of(_fit(timed.of(~left_out), known), timed.of(left_out))
    decodes = np.array([s.is_decode for s in samples])
    phases = {"linear": ~timed.attends, "prefill": timed.attends & ~decodes, "decode": timed.attends & decodes}
    start, found = "fp8_kv" if timed.fp8_kv else "fp8", {}
    for phase, of_phase in phases.items():
        if of_phase.any():
            found[f"{start}_{phase}_mape"] = round(mean(own[of_phase]), 5)
            if len(models) > 1:
                found[f"unseen_model_{start}_{phase}_mape"] = round(mean(unseen[of_phase]), 5)
    return found
