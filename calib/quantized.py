"""Constants of quantised weights and of FP8 KV, fitted once those of 16 bits are known, none of which they change.

Products of weights and inputs in a format f (FP8, NVFP4): T = ridge(linear FLOPs / F_f, linear bytes / H) + quantised
bytes / Q_f + attention + layers c_f. Their inputs are quantised by kernels of their own, which read and write those
bytes. The ridge may have factors of the format's own (`calib.factors`), fitted together with it. Attention over FP8 KV
has a rate and a padding of its own, and costs a layer more than over 16 bits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from calib.factors import factors_at, fit_factors
from calib.holdout import leans, mean, regions
from calib.robust import Array, Fit, Parameter, fit_relative
from calib.roofline import MOST_EXPONENT, attention_s, fastest, products_s, with_exponent
from calib.samples import Sample
from calib.terms import Terms, terms_of
from sim.cost.kernels import Point
from sim.cost.profile import product_name
from sim.errors import UserError
from sim.specs.models import ModelSpec
from sim.specs.quantization import PRODUCT_FORMATS

ATTENTION = "attention_launch_s"
"""What of a layer's overhead is attention's, which products timed alone do not pay. No constant of a profile."""
EXPONENT = "roofline_exponent"
KV_WEIGHTS = "fp8"
"""What weights are where KV is FP8, if they are quantised."""
OPS = ("linear", "products")
UNSEEN = "unseen_model_"


@dataclass(frozen=True)
class QuantisedFit:
    """Fits of what the samples tell, their errors by phase, on the samples and on a model left out, and factors of
    products by their format."""

    fits: list[Fit] = field(default_factory=list)
    residuals: dict[str, float] = field(default_factory=dict)
    factors: dict[str, list[Point]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Timed:
    """Samples of one format of weights, or none, that all read KV of one type; arrays of shape (samples,)."""

    kind: str
    terms: Terms
    measured_s: Array
    attends: NDArray[np.bool_]
    fp8_kv: bool
    factors: Array
    """Of the products, over their roofline."""

    def of(self, chosen: NDArray[np.bool_]) -> "_Timed":
        parts = self.terms[chosen], self.measured_s[chosen], self.attends[chosen], self.fp8_kv, self.factors[chosen]
        return _Timed(self.kind, *parts)

    def times(self, points: Sequence[Point]) -> "_Timed":
        return replace(self, factors=factors_at(points, self.terms.tokens))


def fit_quantised(
    samples: Sequence[Sample],
    models: Mapping[str, ModelSpec],
    constants: Mapping[str, float],
    linear_factors: Sequence[Point] | None = None,
) -> QuantisedFit:
    """Fit the constants of each format's products to samples over 16-bit KV, then those of FP8 KV to the others.

    Args:
        samples: of quantised weights, FP8 KV or both; op `linear` or `products`.
        models: by the names in the samples.
        constants: those of 16 bits, all of them.
        linear_factors: what 16-bit products take over their roofline, by tokens.

    Returns:
        What the samples tell: from products alone (`linear`) no overhead, which then stays that of 16 bits. Factors of
        a format's products where they pay; where they do not, but 16 bits have some, a factor of 1.
    """
    for sample in samples:
        if sample.op not in OPS:
            raise UserError(
                f"samples: op {sample.op!r} in {sample.quantization or 'FP8'} cannot be priced: "
                f"time op {' or '.join(map(repr, OPS))}"
            )
        if sample.kv_cache_dtype and sample.quantization not in ("", KV_WEIGHTS):
            raise UserError(
                f"samples: {sample.quantization} weights over FP8 KV are not fitted: time them over KV of 16 bits"
            )
    known = dict(constants)
    fits: list[Fit] = []
    residuals: dict[str, float] = {}
    factors: dict[str, list[Point]] = {}
    for kind, fp8_kv in (*((kind, False) for kind in PRODUCT_FORMATS), (KV_WEIGHTS, True)):
        chosen = [s for s in samples if bool(s.kv_cache_dtype) == fp8_kv and (fp8_kv or s.quantization == kind)]
        if not chosen:
            continue
        terms = terms_of(chosen, models)
        of_16_bits, own = (factors_at(points, terms.tokens) for points in (linear_factors, factors.get(kind)))
        seconds, attends = np.array([s.latency_s for s in chosen]), np.array([s.op != "linear" for s in chosen])
        over = np.where(terms.quantized_bytes > 0, own, of_16_bits)
        timed = _Timed(kind, terms, seconds, attends, fp8_kv, over)
        fit, _ = _fit(timed, known, factored=False)
        errors, unseen = _errors({**known, **fit.values}, timed), _unseen(chosen, timed, known)
        found = _by_phase(chosen, timed, errors, unseen)
        if not fp8_kv and unseen is not None and leans(regions(chosen, errors), whole=False):
            factored, points = _fit(timed, known, factored=True)
            errors = _errors({**known, **factored.values}, timed.times(points))
            residual = _by_phase(chosen, timed, errors, _unseen(chosen, timed, known, factored=True))
            if _overall(residual) < _overall(found):
                found, fit, factors[kind] = residual, factored, points
            elif linear_factors:
                factors[kind] = [(1, 1.0)]
        residuals |= found
        known |= fit.values
        # Of NVFP4 samples say that quantising inputs is free, beside its launches.
        told = {
            name: estimate
            for name, estimate in fit.estimates.items()
            if name != ATTENTION and (estimate.told or not name.endswith("quantize_bytes_per_s"))
        }
        fits.append(replace(fit, estimates=told))
    return QuantisedFit(fits, residuals, factors)


def _parameters(timed: _Timed, known: Mapping[str, float]) -> dict[str, Parameter]:
    """What the samples can tell, each with a start."""
    if timed.fp8_kv:
        return {
            "fp8_kv_bytes_per_s": Parameter(known["kv_bytes_per_s"]),
            "fp8_kv_padding_tokens": Parameter(64.0, 0.0, log=False),
            "fp8_kv_layer_overhead_s": Parameter(1e-6, 0.0, log=False),
        }
    found = {
        product_name(timed.kind, "flops_per_s"): Parameter(fastest(timed.terms.linear_flops, timed.measured_s)),
        "overlap": Parameter(0.4, 1 / MOST_EXPONENT, 1.0, log=False),
        product_name(timed.kind, "quantize_bytes_per_s"): Parameter(known["hbm_bytes_per_s"]),
    }
    if timed.attends.any():
        found[product_name(timed.kind, "layer_overhead_s")] = Parameter(1e-5, 0.0, log=False)
        if not timed.attends.all():
            found[ATTENTION] = Parameter(1e-5, 0.0, log=False)
    return found


def _predict_s(values: Mapping[str, float], timed: _Timed) -> Array:
    terms, is_quantised = timed.terms, timed.terms.quantized_bytes > 0
    own_overhead_s, quantize_rate = (
        values[product_name(timed.kind, name)] for name in ("layer_overhead_s", "quantize_bytes_per_s")
    )
    if timed.fp8_kv:
        over_kv = {name: values[f"fp8_{name}"] for name in ("kv_bytes_per_s", "kv_padding_tokens")}
        attended_s = attention_s({**values, **over_kv}, terms) + terms.layers * values["fp8_kv_layer_overhead_s"]
    else:
        launch_s = min(values.get(ATTENTION, 0.0), own_overhead_s)
        attended_s = attention_s(values, terms) - terms.layers * ~timed.attends * launch_s
    overhead_s = np.where(is_quantised, own_overhead_s, values["layer_overhead_s"])
    quantized_s = terms.quantized_bytes / quantize_rate
    own = {
        name: np.where(is_quantised, values[product_name(timed.kind, name)], values[name])
        for name in ("flops_per_s", "roofline_exponent")
    }
    ridged_s = products_s({**values, **own}, terms) * timed.factors
    return ridged_s + quantized_s + attended_s + terms.layers * overhead_s


def _fit(timed: _Timed, known: Mapping[str, float], *, factored: bool) -> tuple[Fit, list[Point]]:
    """With factors, these are found together: half of the sizes are far off any ridge. Without, there are no points."""

    def predicted(values: Mapping[str, float], factors: Array = timed.factors) -> Array:
        return _predict_s({**known, **_with_p(values, timed.kind)}, replace(timed, factors=factors))

    parameters, points = _parameters(timed, known), list[Point]()
    if factored:
        found, points = fit_factors(predicted, timed.terms.tokens, timed.measured_s, parameters)
    else:
        found = fit_relative(predicted, timed.measured_s, parameters)
    return replace(found, estimates=with_exponent(found.estimates, product_name(timed.kind, EXPONENT))), points


def _with_p(values: Mapping[str, float], kind: str) -> dict[str, float]:
    if "overlap" not in values:
        return dict(values)
    return {**values, product_name(kind, EXPONENT): 1.0 / values["overlap"]}


def _errors(values: Mapping[str, float], timed: _Timed) -> Array:
    return _predict_s(values, timed) / timed.measured_s - 1


def _unseen(
    samples: Sequence[Sample], timed: _Timed, known: Mapping[str, float], *, factored: bool = False
) -> Array | None:
    """Errors on each model by a fit to the others; None where there is one only."""
    names = np.array([s.model for s in samples])
    models = sorted(set(names))
    if len(models) < 2:
        return None
    errors = np.zeros(len(samples))
    for name in models:
        left_out = names == name
        others, one = timed.of(~left_out), timed.of(left_out)
        fit, points = _fit(others, known, factored=factored)
        errors[left_out] = _errors({**known, **fit.values}, one.times(points) if factored else one)
    return errors


def _by_phase(samples: Sequence[Sample], timed: _Timed, own: Array, unseen: Array | None) -> dict[str, float]:
    """Mean absolute relative errors by phase: on all samples, and on models left out."""
    decodes = np.array([s.is_decode for s in samples])
    phases = {"linear": ~timed.attends, "prefill": timed.attends & ~decodes, "decode": timed.attends & decodes}
    start, found = "fp8_kv" if timed.fp8_kv else timed.kind, {}
    for phase, of_phase in phases.items():
        if of_phase.any():
            found[f"{start}_{phase}_mape"] = round(mean(np.abs(own[of_phase])), 5)
            if unseen is not None:
                found[f"{UNSEEN}{start}_{phase}_mape"] = round(mean(np.abs(unseen[of_phase])), 5)
    return found


def _overall(errors: Mapping[str, float]) -> float:
    return sum(error for name, error in errors.items() if name.startswith(UNSEEN))
