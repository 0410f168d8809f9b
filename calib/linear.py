"""Form `linear`: the coefficients of one model on one machine, from whole iterations.

    prefill p0 + p1 tokens + p2 sum(len^2),   decode d0 + d1 sequences + d2 context tokens,   s per swapped block

No physics, so nothing carries over to another model; but where kernels do not follow a roofline (a CPU's attention
works sequence by sequence), it predicts the machine it was measured on.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from calib.copies import fit_turns
from calib.fit import FitReport, check_enough, constant_of, range_of, with_graphs
from calib.holdout import Holdout, is_decode, mean, regions
from calib.robust import Array, Fit, Parameter, fit_relative
from calib.samples import Sample
from calib.terms import load_models, terms_of
from sim.cost.profile import LINEAR_UNITS, Constant, Profile
from sim.errors import UserError
from sim.specs.hardware import HardwareSpec

BLOCK_TOKENS = 16
"""Tokens of the blocks that `swap_s_per_block` is for."""
FOLDS = 3


def fit_linear_profile(
    samples: Sequence[Sample],
    folder: Path,
    hardware: HardwareSpec,
    *,
    name: str,
    status: Literal["measured", "imported"],
    provenance: Mapping[str, str],
) -> FitReport:
    """Fit a profile of form `linear` to the samples of op `step`.

    Raises:
        UserError: steps of no or several models, of part of a model's layers, or of too few sizes; no copies.
    """
    models = load_models(samples, folder)
    steps = with_graphs([s for s in samples if s.op == "step" and not s.beside and s.tp == 1])
    names = sorted({s.model for s in steps})
    if len(names) != 1:
        raise UserError(f"samples: form linear is of one model, steps are of {', '.join(names) or 'none'}: choose one")
    model = models[names[0]]
    if any(s.num_layers != model.num_layers for s in steps):
        built = steps[0].num_layers
        raise UserError(f"samples: steps of {built} of {model.num_layers} layers: form linear needs whole iterations")
    check_enough(steps)
    copies = fit_turns(samples)
    if copies is None:
        raise UserError("samples: form linear needs copies (h2d or d2h) for swap_s_per_block: measure some")
    measured = np.array([s.latency_s for s in steps])
    fit = _fit(steps, measured)
    kind = steps[0].dtype_bytes or model.dtype_bytes
    block_bytes = BLOCK_TOKENS * model.with_dtype(kind).kv_bytes_per_token()
    rate = min(copies.values[n] for n in ("h2d_bytes_per_s", "d2h_bytes_per_s") if n in copies.values)
    swap_s = copies.values["copy_launch_s"] + block_bytes / rate
    predicted = predict_s(fit.values, steps)
    errors = predicted / measured - 1
    constants = {n: constant_of(estimate, LINEAR_UNITS[n], fit.scatter) for n, estimate in fit.estimates.items()}
    swap_source = f"a contiguous copy of a block of {BLOCK_TOKENS} tokens, {block_bytes:.0f} bytes, at the fitted rate"
    constants["swap_s_per_block"] = Constant(swap_s, None, "s/block", swap_source)
    launch_source = "of each piece, whatever its size, fitted with the rate"
    constants["copy_launch_s"] = Constant(copies.values["copy_launch_s"], None, "s", launch_source)
    unseen = _unseen(steps, measured)
    absolute, decodes = np.abs(errors), is_decode(steps)
    residuals = {"prefill_mape": mean(absolute[~decodes]), "decode_mape": mean(absolute[decodes])}
    residuals |= {"unseen_sample_prefill_mape": unseen.prefill, "unseen_sample_decode_mape": unseen.decode}
    profile = Profile(
        name=name,
        gpu=hardware.name,
        status=status,
        form="linear",
        constants=constants,
        provenance={**provenance, "model": model.name, "caution": "of this model on this machine alone"},
        range=range_of(steps),
        residuals={key: round(value, 5) for key, value in residuals.items()},
    )
    terms = terms_of(steps, models)
    by_sample = {"every third sample": unseen}
    found = regions(steps, errors)
    unseen = Holdout(float("nan"), float("nan"), 0)
    return FitReport(profile, steps, terms, measured, predicted, fit.estimates, found, by_sample, unseen, [], [])


def predict_s(values: Mapping[str, float], steps: Sequence[Sample]) -> Array:
    """Seconds of each iteration, shape (samples,)."""
    tokens = np.array([s.tokens for s in steps], dtype=np.float64)
    squares = np.array([s.batch_size * s.new_tokens**2 for s in steps], dtype=np.float64)
    batch = np.array([s.batch_size for s in steps], dtype=np.float64)
    context = np.array([s.batch_size * (s.context_tokens + 1) for s in steps], dtype=np.float64)
    prefill = values["prefill_base_s"] + values["prefill_s_per_token"] * tokens
    prefill = prefill + values["prefill_s_per_square_token"] * squares
    decode = values["decode_base_s"] + values["decode_s_per_sequence"] * batch
    decode = decode + values["decode_s_per_context_token"] * context
    return np.where(is_decode(steps), decode, prefill)


def _fit(steps: Sequence[Sample], measured: Array) -> Fit:
    decodes = is_decode(steps)
    most_tokens = max(s.tokens for s in steps if not s.is_decode)
    most_squares = max(s.batch_size * s.new_tokens**2 for s in steps if not s.is_decode)
    most_batch = max(s.batch_size for s in steps if s.is_decode)
    most_context = max(s.batch_size * (s.context_tokens + 1) for s in steps if s.is_decode)
    prefill_s, decode_s = measured[~decodes], measured[decodes]
    starts = {
        "prefill_base_s": prefill_s.min() / 2,
        "prefill_s_per_token": prefill_s.max() / most_tokens,
        "prefill_s_per_square_token": prefill_s.max() / most_squares / 10,
        "decode_base_s": decode_s.min() / 2,
        "decode_s_per_sequence": decode_s.max() / most_batch / 2,
        "decode_s_per_context_token": decode_s.max() / most_context / 2,
    }
    parameters = {name: Parameter(float(start), 0.0, log=False) for name, start in starts.items()}
    return fit_relative(lambda values: predict_s(values, steps), measured, parameters)


def _unseen(steps: Sequence[Sample], measured: Array) -> Holdout:
    """Every third prompt and every third decode predicted by a fit to the others, in turn."""
    errors = np.full(len(steps), np.nan)
    decodes = is_decode(steps)
    place = np.where(decodes, np.cumsum(decodes), np.cumsum(~decodes))
    for fold in range(FOLDS):
        out = place % FOLDS == fold
        fit = _fit([s for s, left in zip(steps, out, strict=True) if not left], measured[~out])
        errors[out] = np.abs(predict_s(fit.values, steps) / measured - 1)[out]
    return Holdout(mean(errors[~decodes]), mean(errors[decodes]), len(steps))
