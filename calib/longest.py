"""What decodes of unlike contexts take beyond like ones, fitted once all else is known, none of which it changes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from calib.holdout import Mask, errors_of, mean
from calib.robust import Fit, Parameter, fit_relative
from calib.roofline import predict_s
from calib.samples import Sample
from calib.terms import terms_of
from sim.cost.kernels import Point
from sim.cost.roofline import SPLIT_BELOW
from sim.specs.models import ModelSpec

RATE = "longest_kv_bytes_per_s"


@dataclass(frozen=True)
class LongestFit:
    """The fit, None where no sample tells it; errors on decodes and on mixed rows, on these and on a model left out."""

    fit: Fit | None = None
    residuals: dict[str, float] = field(default_factory=dict)


def fit_longest(
    samples: Sequence[Sample],
    models: Mapping[str, ModelSpec],
    constants: Mapping[str, float],
    factors: Sequence[Point] | None,
) -> LongestFit:
    """The rate at which the longest context is read, from decodes by themselves that the kernel does not split.

    Args:
        samples: of unlike contexts.
        models, constants, factors: specs of the samples' models; the roofline's constants and factors.
    """
    if not samples or not constants["attention_slots"]:
        return LongestFit()
    terms, measured = terms_of(samples, models), np.array([s.latency_s for s in samples])
    alone = terms.row_flops == 0
    tells = alone & (terms.kv_heads * terms.decodes >= SPLIT_BELOW * constants["attention_slots"])
    if not tells.any():
        return LongestFit()
    start = Parameter(constants["kv_bytes_per_s"] / constants["attention_slots"])

    def fitted(chosen: Mask) -> Fit:
        of = terms[chosen]
        return fit_relative(lambda rate: predict_s({**constants, **rate}, of, factors), measured[chosen], {RATE: start})

    def errors(name: str, fit: Fit, chosen: Mask) -> dict[str, float]:
        absolute = np.abs(errors_of({**constants, **fit.values}, terms, measured, factors))
        phases = {f"{name}_decode_mape": absolute[chosen & alone], f"{name}_mixed_mape": absolute[chosen & ~alone]}
        return {phase: round(mean(found), 5) for phase, found in phases.items() if len(found)}

    fit, names = fitted(tells), np.array([s.model for s in samples])
    residuals = errors("longest", fit, np.ones(len(samples), dtype=bool))
    unseen: dict[str, list[float]] = {}
    for name in sorted(set(names)):
        others = tells & (names != name)
        if others.any():
            for phase, error in errors("unseen_model_longest", fitted(others), names == name).items():
                unseen.setdefault(phase, []).append(error)
    residuals |= {phase: round(mean(found), 5) for phase, found in unseen.items()}
    return LongestFit(fit, residuals)
