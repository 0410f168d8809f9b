"""Kernels of routed experts: samples of them, and the constants that explain these.

One sample is one layer's routed experts on one GPU: choosing experts from the router's logits, quantising inputs where
the products are, both products, the activation function between them, and each token's weighted sum. The router's own
product, shared experts and the all-reduce are not in it.

    T = ridge(rows c / F, (experts met) w / H) + rows a / A + launch

rows are tokens times experts per token, c and w an expert's FLOPs a row and bytes, a what a row reads and writes as
input and output of both products and of the activation function, and in the sum. F, H, A, the ridge's p and the launch
are constants of a GPU and a type of weights: kernels of 16 bits, block FP8, NVFP4, MXFP4 and int4 differ in all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from calib.kernel_fit import KernelFit, KernelSample, KernelTerms, errors_of_fit
from calib.robust import Array, Fit, Parameter, fit_relative
from calib.roofline import MOST_EXPONENT, fastest, ridge_s, with_exponent
from sim.cost.model import ACTIVATION_BYTES
from sim.cost.profile import expert_names
from sim.specs.quantization import FORMATS, SCALE_BYTES

WEIGHT_BYTES: dict[str, float] = {
    "": 2.0,
    "fp8": 1.0 + 4 / 128**2,
    "nvfp4": FORMATS["nvfp4"].weight_bytes,
    "mxfp4": FORMATS["mxfp4"].weight_bytes,
    "int4": FORMATS["int4"].weight_bytes + SCALE_BYTES / 32,
}
"""Bytes of a weight by `quantization`, scales included: of FP8 for blocks of 128 by 128 weights, of int4 for 32."""


class ExpertSample(KernelSample, frozen=True, kw_only=True):
    """One operating point.

    Attributes:
        quantization: type of the weights, a key of `WEIGHT_BYTES`.
        tokens: that the router sent; each to `experts_per_token`.
        hidden_size, intermediate_size, num_experts: of the model; on one of `tp` GPUs an expert is 1/tp as wide.
        gated: whether an expert has three matrices, else two.
        routing: how the tokens were spread: `balanced`, or `power_law_ALPHA`.
        experts_met: experts that any token met, a mean over draws.
        latency_s: mean seconds of one layer.
    """

    quantization: str
    tokens: int
    hidden_size: int
    intermediate_size: int
    experts_per_token: int
    num_experts: int
    tp: int
    gated: int
    routing: str
    experts_met: float
    latency_s: float
    what: ClassVar[str] = "experts"
    checked: ClassVar[str] = "quantization, latency_s or experts_met"

    @property
    def is_possible(self) -> bool:
        return self.quantization in WEIGHT_BYTES and self.experts_met > 0 and super().is_possible

    @property
    def shape(self) -> str:
        """The model's shape, as a name: hidden size, width of an expert, experts a token meets and all of them."""
        return f"{self.hidden_size} x {self.intermediate_size}, {self.experts_per_token} of {self.num_experts}"


@dataclass(frozen=True)
class ExpertTerms(KernelTerms):
    """Per sample, of one layer on one GPU of the group; arrays of shape (samples,)."""

    flops: Array
    met_bytes: Array
    activation_bytes: Array

    @classmethod
    def of(cls, samples: Sequence[ExpertSample]) -> "ExpertTerms":
        """The terms of samples."""
        rows = np.array([s.tokens * s.experts_per_token for s in samples], dtype=np.float64)
        hidden = np.array([s.hidden_size for s in samples], dtype=np.float64)
        width = np.array([s.intermediate_size / s.tp for s in samples])
        gates = np.array([1 + s.gated for s in samples])
        weights = (gates + 1) * hidden * width
        weight_bytes = np.array([s.experts_met * WEIGHT_BYTES[s.quantization] for s in samples])
        moved = 3 * hidden + (2 * gates + 2) * width
        return cls(2 * rows * weights, weight_bytes * weights, rows * moved * ACTIVATION_BYTES)


def fit_experts(samples: Sequence[ExpertSample]) -> list[KernelFit[ExpertSample]]:
    """A fit for each type of weights in the samples, with errors on models' shapes left out.

    Where there is one shape only, what one GPU of each size of group has of it is left out instead.
    """
    kinds = ([s for s in samples if s.quantization == quantization] for quantization in WEIGHT_BYTES)
    return [_fit_kind(chosen) for chosen in kinds if chosen]


def _fit_kind(samples: list[ExpertSample]) -> KernelFit[ExpertSample]:
    quantization, seconds = samples[0].quantization, np.array([s.latency_s for s in samples])
    shapes = np.array([s.shape for s in samples])
    if len(set(shapes)) == 1:
        shapes = np.array([str(s.tp) for s in samples])
    fit, own, unseen = errors_of_fit(seconds, ExpertTerms.of(samples), shapes, _fit, predict_expert_s)
    names = expert_names(quantization)
    named = replace(fit, estimates={names[name]: estimate for name, estimate in fit.estimates.items()})
    parts = {f"{quantization}_expert".lstrip("_"): np.ones(len(samples), dtype=bool)}
    return KernelFit(samples, named, own, unseen, "model", parts)


def _fit(terms: ExpertTerms, seconds: Array) -> Fit:
    parameters = {
        "expert_flops_per_s": Parameter(fastest(terms.flops, seconds)),
        "expert_bytes_per_s": Parameter(fastest(terms.met_bytes, seconds)),
        "expert_activation_bytes_per_s": Parameter(2 * fastest(terms.activation_bytes, seconds)),
        "overlap": Parameter(0.6, 1 / MOST_EXPONENT, 1.0, log=False),
        "expert_launch_s": Parameter(2e-5, 0.0, log=False),
    }

    def predicted(values: Mapping[str, float]) -> Array:
        return predict_expert_s({**values, "expert_roofline_exponent": 1.0 / values["overlap"]}, terms)

    found = fit_relative(predicted, seconds, parameters)
    return Fit(with_exponent(found.estimates, "expert_roofline_exponent"), found.scatter)


def predict_expert_s(constants: Mapping[str, float], terms: ExpertTerms) -> Array:
    """Seconds of every sample, shape (samples,), from constants of its type of weights without their prefix."""
    compute_s, read_s = terms.flops / constants["expert_flops_per_s"], terms.met_bytes / constants["expert_bytes_per_s"]
    products_s = ridge_s(compute_s, read_s, constants["expert_roofline_exponent"])
    moved_s = terms.activation_bytes / constants["expert_activation_bytes_per_s"]
    return products_s + moved_s + constants["expert_launch_s"]
