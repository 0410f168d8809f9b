"""The rate of FP8 products: fitted to matrix products of quantised layers, once the 16-bit constants are known.

T = ridge(linear FLOPs / F_FP8, linear bytes / H) + layers c, with an exponent of its own: H and c are those of the same
GPU's 16-bit products, so that samples of both tell two constants more and change none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from calib.holdout import mean
from calib.robust import Array, Fit, Parameter, fit_relative
from calib.roofline import MOST_EXPONENT, fastest, ridge_s, with_exponent
from calib.samples import Sample
from calib.terms import Terms, terms_of
from sim.errors import UserError
from sim.specs.models import ModelSpec

EXPONENT = "fp8_roofline_exponent"


@dataclass(frozen=True)
class Fp8Fit:
    """`fp8_flops_per_s` and its exponent, and their errors, on the samples and on a model left out."""

    fit: Fit
    residuals: dict[str, float]


def fit_fp8(
    samples: Sequence[Sample], models: Mapping[str, ModelSpec], constants: Mapping[str, float]
) -> Fp8Fit | None:
    """Fit them to samples of `quantization` fp8 beside the other constants; None where there is no sample.

    UserError for whole layers: what their attention reads is of another type.
    """
    if not samples:
        return None
    for sample in samples:
        if sample.op != "linear":
            raise UserError(f"samples: op {sample.op!r} of quantization fp8 cannot be priced: time op 'linear'")
    terms, measured = terms_of(samples, models), np.array([s.latency_s for s in samples])
    fit = _fit(terms, measured, constants)
    names = np.array([s.model for s in samples])
    errors = {"fp8_mape": mean(np.abs(_predict_s(fit.values, terms, constants) / measured - 1))}
    if len(set(names)) > 1:
        apart = []
        for name in sorted(set(names)):
            unseen = names == name
            found = _fit(terms[~unseen], measured[~unseen], constants).values
            apart.append(mean(np.abs(_predict_s(found, terms[unseen], constants) / measured[unseen] - 1)))
        errors["unseen_model_fp8_mape"] = mean(apart)
    return Fp8Fit(fit, {name: round(error, 5) for name, error in errors.items()})


def _predict_s(values: Mapping[str, float], terms: Terms, constants: Mapping[str, float]) -> Array:
    memory_s = (terms.weight_bytes + terms.activation_bytes) / constants["hbm_bytes_per_s"]
    products_s = ridge_s(terms.linear_flops / values["fp8_flops_per_s"], memory_s, values[EXPONENT])
    return products_s + terms.layers * constants["layer_overhead_s"]


def _fit(terms: Terms, measured_s: Array, constants: Mapping[str, float]) -> Fit:
    parameters = {
        "fp8_flops_per_s": Parameter(fastest(terms.linear_flops, measured_s)),
        "overlap": Parameter(0.4, 1 / MOST_EXPONENT, 1.0, log=False),
    }
    found = fit_relative(
        lambda v: _predict_s({**v, EXPONENT: 1.0 / v["overlap"]}, terms, constants), measured_s, parameters
    )
    return Fit(with_exponent(found.estimates, EXPONENT), found.scatter)
