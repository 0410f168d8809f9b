"""The roofline fitted jointly over operations, models and sizes.

    T = ridge(linear FLOPs / F, linear bytes / H) + attention FLOPs / F_attn + KV bytes / H
        + ridge(head FLOPs / F, head bytes / H) + all-reduces + layers c + steps c_step

with ridge(a, b) = (a^p + b^p)^(1/p), as `sim.cost.forms.RooflineCost` prices an iteration.

Every constant has one physical meaning: F and F_attn the FLOP/s that matrix products and attention reach, H the bytes/s
that memory delivers, c what a layer costs beside (launches, norms, gaps), c_step what a step costs beside, p how far
computing and reading overlap within a kernel. `docs/calibration.md` shows what each is worth in held-out error.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from calib.copies import all_reduce_s
from calib.robust import Array, Estimate, Fit, Parameter, fit_relative
from calib.terms import Terms

MOST_EXPONENT = 50.0
"""Beyond this the ridge is a corner: max(compute, memory)."""
LONG_ATTENTION = 0.1
"""Share of a prompt's FLOPs that attention must reach somewhere for its rate to be told from that of the rest."""
NO_ALL_REDUCE = {"allreduce_bytes_per_s": 1e30, "allreduce_latency_s": 0.0}
"""Constants of all-reduces that cost nothing, for samples without any."""
FORMS = {
    "full": "all terms",
    "one rate": "F_attn = F",
    "hard ridge": "p fixed at infinity: max(compute, memory)",
    "no activations": "linear bytes are the weights alone",
    "no overhead": "c = 0",
}
"""The form and what it is without one of its terms; for showing that each term pays."""


def predict_s(constants: Mapping[str, float], terms: Terms) -> Array:
    """Seconds of every sample, shape (samples,), from constants by their names in a profile."""
    flops, memory = constants["flops_per_s"], constants["hbm_bytes_per_s"]
    exponent = constants["roofline_exponent"]
    return (
        ridge_s(terms.linear_flops / flops, (terms.weight_bytes + terms.activation_bytes) / memory, exponent)
        + terms.attention_flops / constants["attention_flops_per_s"]
        + terms.kv_bytes / memory
        + ridge_s(terms.head_flops / flops, terms.head_bytes / memory, exponent)
        + 2 * terms.layers * all_reduce_s(constants, terms.reduced_bytes, terms.gpus)
        + terms.layers * constants["layer_overhead_s"]
        + terms.steps * constants.get("step_overhead_s", 0.0)
    )


def ridge_s(compute_s: Array, memory_s: Array, exponent: float) -> Array:
    """`sim.cost.forms.ridge` over arrays; zero where both parts are."""
    most = np.maximum(compute_s, memory_s)
    ratio = np.divide(np.minimum(compute_s, memory_s), most, out=np.zeros_like(most), where=most > 0)
    return most * (1.0 + ratio**exponent) ** (1.0 / exponent)


def fit_roofline(
    terms: Terms, measured_s: Array, form: str = "full", fixed: Mapping[str, float] = NO_ALL_REDUCE
) -> Fit:
    """The constants that explain the samples best, with their standard errors.

    Args:
        terms: of the samples, each timed alone.
        measured_s: medians, shape (samples,).
        form: a key of `FORMS`.
        fixed: constants of all-reduces, fitted apart; they matter only where whole steps of several GPUs were timed.

    Returns:
        Estimates of flops_per_s, attention_flops_per_s, hbm_bytes_per_s, roofline_exponent, layer_overhead_s and
        step_overhead_s; those the samples say nothing about are left out (attention, where prompts are short; the
        step, where no whole step was timed, or where all had as many layers: then the layers' overhead holds both).
    """
    if form == "no activations":
        terms = without_activations(terms)
    parameters = {
        "flops_per_s": Parameter(_fastest(terms.linear_flops + terms.head_flops, measured_s)),
        "hbm_bytes_per_s": Parameter(_fastest(terms.weight_bytes + terms.kv_bytes + terms.head_bytes, measured_s)),
        "overlap": Parameter(0.4, 1 / MOST_EXPONENT, 1.0, log=False),
        "layer_overhead_s": Parameter(1e-5, 0.0, log=False),
    }
    if form != "one rate" and _has_long_prompts(terms):
        parameters["attention_flops_per_s"] = Parameter(parameters["flops_per_s"].start)
    if _tells_steps_apart(terms):
        parameters["step_overhead_s"] = Parameter(1e-4, 0.0, log=False)
    if form == "hard ridge":
        del parameters["overlap"]
    if form == "no overhead":
        del parameters["layer_overhead_s"]

    def predicted(values: Mapping[str, float]) -> Array:
        return predict_s(complete({**fixed, **values}), terms)

    found = fit_relative(predicted, measured_s, parameters)
    if "attention_flops_per_s" in parameters and not found.estimates["attention_flops_per_s"].told:
        del parameters["attention_flops_per_s"]
        found = fit_relative(predicted, measured_s, parameters)
    estimates = dict(found.estimates)
    if "overlap" in estimates:
        # Searched as 1/p, which has finite limits.
        overlap = estimates.pop("overlap")
        p = 1.0 / overlap.value
        stderr = None if overlap.stderr is None else overlap.stderr * p * p
        estimates["roofline_exponent"] = Estimate(p, stderr, 1.0 / overlap.high, 1.0 / max(overlap.low, 1e-9))
    return Fit(estimates, found.scatter)


def complete(values: Mapping[str, float]) -> dict[str, float]:
    """All constants that `predict_s` needs: fitted ones, and what their absence means for the rest."""
    exponent = values.get("roofline_exponent") or 1.0 / values.get("overlap", 1.0 / MOST_EXPONENT)
    return {
        "attention_flops_per_s": values["flops_per_s"],
        "layer_overhead_s": 0.0,
        "step_overhead_s": 0.0,
        **NO_ALL_REDUCE,
        **values,
        "roofline_exponent": exponent,
    }


def _fastest(amount: Array, measured_s: Array) -> float:
    """A start for a rate: the best any sample reached."""
    return max(float(np.max(amount / measured_s)), 1.0)


def _has_long_prompts(terms: Terms) -> bool:
    total = terms.linear_flops + terms.attention_flops
    share = np.divide(terms.attention_flops, total, out=np.zeros_like(total), where=total > 0)
    return bool(np.max(share, initial=0.0) >= LONG_ATTENTION)


def _tells_steps_apart(terms: Terms) -> bool:
    """Whether a step's overhead can be told from its layers': not if every sample has as many of both."""
    layered = terms.layers > 0
    return len(np.unique(terms.steps[layered] / terms.layers[layered])) > 1


def without_activations(terms: Terms) -> Terms:
    """The same work, counting the weights as all that linear layers read."""
    return replace(terms, activation_bytes=np.zeros_like(terms.activation_bytes))
