"""From samples to a `Profile`: every constant fitted that the samples can tell, the others carried over and marked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from calib.copies import COPY_COSTS, all_reduce_points, fault_of_copies, fit_all_reduce, fit_copies, fit_host_memcpy
from calib.holdout import (
    PHASES,
    Fitted,
    Holdout,
    Region,
    errors_of,
    is_better,
    leans,
    leave_one_model_out,
    leave_rows_out,
    mean_holdout,
    misses,
    regions,
    scores,
    small_predicts_large,
)
from calib.kernel_fit import KernelFit
from calib.longest import fit_longest
from calib.papers import PaperConstant, eq3_alpha, paper_constants
from calib.quantized import fit_quantised
from calib.robust import Array, Estimate, Fit
from calib.roofline import complete, fit_linear_factors, fit_roofline
from calib.samples import Sample
from calib.terms import Terms, load_models, terms_of
from sim.cost.kernels import Point
from sim.cost.profile import ROOFLINE_UNITS, Constant, FittedRange, Profile, product_name
from sim.errors import UserError
from sim.specs.hardware import HardwareSpec
from sim.specs.quantization import PRODUCT_FORMATS

FITTED_OPS = ("layers", "products", "linear", "elementwise", "step", "lm_head", "recompute")
"""Operations that the roofline explains."""
FIXED = (
    "allreduce_bytes_per_s", "allreduce_latency_s", "allreduce_chunk_s", "allreduce_launch_s", "attention_tile_tokens",
    "attention_slots", "attention_padding_tokens", "attention_roofline_exponent", "attention_idle_tile_s",
    "kv_padding_waves", "longest_kv_bytes_per_s",
    "elementwise_bytes_per_s", "elementwise_launch_s",
)  # fmt: skip
"""Constants that count as the base has them where the samples do not tell them."""
MOST_ERROR = 0.25
"""Mean error of a phase beyond which tables of others are refused."""
LEAST_SIZES = 3
LEAST_TOKENS_SPAN = 4.0
LEAST_BATCH_SPAN = 4.0
LEAST_CONTEXT_SPAN = 4.0


@dataclass(frozen=True)
class FitReport:
    """A fitted profile and all that says how far to trust it.

    Attributes:
        samples, terms, measured_s, predicted_s: what the roofline was fitted to, and what it gives; shapes (samples,).
        estimates: fitted constants with their intervals.
        by_model, by_rows, small_to_large: held-out errors; of rows where products of a single model have factors.
        papers: the papers' own constants.
        carried: constants the samples say nothing about, taken from the base profile.
    """

    profile: Profile
    samples: list[Sample]
    terms: Terms
    measured_s: Array
    predicted_s: Array
    estimates: dict[str, Estimate]
    regions: list[Region]
    by_model: dict[str, Holdout]
    small_to_large: Holdout
    papers: list[PaperConstant]
    carried: list[str]
    by_rows: dict[str, Holdout] = field(default_factory=dict)

    @property
    def errors(self) -> Array:
        """Predicted / measured - 1, shape (samples,)."""
        return self.predicted_s / self.measured_s - 1


def fit_profile(
    samples: Sequence[Sample],
    folder: Path,
    hardware: HardwareSpec,
    base: Profile,
    *,
    name: str,
    status: Literal["measured", "imported"],
    provenance: Mapping[str, str],
) -> FitReport:
    """Fit a profile of form `roofline`.

    Args:
        samples: of one device; rows with `beside` are not fitted.
        folder: where models given as paths are looked for.
        hardware: the GPU, for its peak FLOP/s and PCIe rate.
        base: profile of the same form whose constants stand in where the samples say nothing.
        name, status, provenance: of the new profile.

    Raises:
        UserError: samples too few, or of too few sizes, to tell the constants apart; it names what is missing.
    """
    models = load_models(samples, folder)
    unlike = [s for s in samples if s.longest_context_tokens]
    samples = [s for s in samples if not s.longest_context_tokens]
    timed = with_graphs([s for s in samples if s.op in FITTED_OPS and not s.beside])
    chosen = [s for s in timed if not s.is_quantised]
    check_enough(chosen)
    terms, measured = terms_of(chosen, models), np.array([s.latency_s for s in chosen])
    estimates: dict[str, Estimate] = {}
    scatter: dict[str, float] = {}

    def take(*fits: Fit | None) -> None:
        for fit in fits:
            if fit is not None:
                estimates.update(fit.estimates)
                scatter.update(dict.fromkeys(fit.estimates, fit.scatter))

    copies, copies_fault = _copies(samples)
    take(fit_all_reduce(samples), copies, fit_host_memcpy(samples))
    fixed = {name: _value(name, estimates, base) for name in FIXED} | {"l2_bytes": hardware.l2_bytes or 0.0}
    fit = fit_roofline(terms, measured, fixed=fixed, own_engine=status == "measured")
    take(fit)
    check_told(estimates)
    constants = complete({**fixed, **fit.values})
    # The host's, and no model's: what is left out shall tell the rest.
    fixed |= {name: fit.values[name] for name in ("eager_layer_s", "pieced_layer_s") if name in fit.values}
    held = Fitted(chosen, terms, measured, fixed)
    factors, by_model, by_rows = _factors(held, constants)
    errors = errors_of(constants, terms, measured, factors)
    quantized = fit_quantised([s for s in timed if s.is_quantised], models, constants, factors)
    longest = fit_longest(unlike, models, constants, factors)
    take(*quantized.fits, longest.fit)
    for_papers = [s for s in samples if not s.is_quantised and not (copies_fault and s.op in ("h2d", "d2h"))]
    papers = paper_constants(for_papers, models, hardware, constants)
    alpha = eq3_alpha(papers)
    if alpha is not None:
        estimates["alpha"] = alpha
    of_host = {name: fit.values[name] for name in ("step_s_per_sequence",) if name in fit.values}
    large = small_predicts_large(replace(held, fixed=fixed | of_host), factored=factors is not None)
    found = regions(chosen, errors)
    fitted, carried = _constants(estimates, scatter, base, steps=bool(terms.steps.any()))
    profile = Profile(
        name=name,
        gpu=hardware.name,
        status=status,
        form="roofline",
        constants=fitted,
        provenance={**provenance, "base": f"{base.name}, for what the samples do not tell"}
        | ({"copies": f"not fitted, taken from the base: {copies_fault}"} if copies_fault else {}),
        range=range_of(chosen),
        residuals=_residuals(chosen, errors, (by_model, by_rows), large, found)
        | quantized.residuals
        | longest.residuals,
        all_reduce=all_reduce_points(samples) or base.all_reduce,
        linear_factors=factors,
        fp8_linear_factors=quantized.factors.get("fp8"),
        nvfp4_linear_factors=quantized.factors.get("nvfp4"),
    )
    return FitReport(
        profile, chosen, terms, measured, measured * (1 + errors), estimates, found, by_model, large, papers, carried,
        by_rows,
    )  # fmt: skip


def _copies(samples: Sequence[Sample]) -> tuple[Fit | None, str]:
    """The fit of copies, or why they say nothing of the link: all else that was measured is not lost for that."""
    try:
        fit = fit_copies(samples)
    except UserError as error:
        return None, str(error)
    if fit is None:
        return None, ""
    if fault := fault_of_copies(samples, fit):
        return None, fault
    # Costs that were not told are none: the base's belong to its own launch and rates.
    return replace(fit, estimates=dict.fromkeys(COPY_COSTS, Estimate(0.0, None, 0.0, 0.0)) | fit.estimates), ""


def with_kernels(report: FitReport, kernels: KernelFit[Any]) -> FitReport:
    """The report of a fit, and constants of single kernels in place of those that were carried over."""
    found, fit = dict(report.profile.constants), kernels.fit
    for name, estimate in fit.estimates.items():
        found[name] = constant_of(estimate, ROOFLINE_UNITS[name], fit.scatter)
    profile = msgspec.structs.replace(
        report.profile,
        constants={name: found[name] for name in ROOFLINE_UNITS if name in found},
        residuals={**(report.profile.residuals or {}), **kernels.residuals},
    )
    carried = [name for name in report.carried if name not in fit.estimates]
    return replace(report, profile=profile, estimates={**report.estimates, **fit.estimates}, carried=carried)


def _factors(
    what: Fitted, constants: Mapping[str, float]
) -> tuple[list[Point] | None, dict[str, Holdout], dict[str, Holdout]]:
    """Factors of products' tokens where they pay, and errors on models left out, or on rows where there is one only.

    They pay where the fit without them leans or misses what is left out, and predicts that better with them.
    """
    terms, measured = what.terms, what.measured_s
    by_model = leave_one_model_out(what)
    left_out = leave_one_model_out if by_model else leave_rows_out
    alone = by_model or left_out(what)
    if not leans(regions(what.samples, errors_of(constants, terms, measured))) and not misses(alone):
        return None, by_model, {}
    held_out = left_out(what, factored=True)
    if is_better(held_out, alone):
        return fit_linear_factors(constants, terms, measured), *((held_out, {}) if by_model else ({}, held_out))
    return None, by_model, {}


def with_graphs(samples: Sequence[Sample]) -> list[Sample]:
    """Of a shape timed with and without a CUDA graph, the one with: engines replay their decodes from graphs."""
    graphed = {_shape(s) for s in samples if s.graph}
    return [s for s in samples if s.graph or _shape(s) not in graphed]


def _shape(s: Sample) -> tuple[object, ...]:
    shape = s.op, s.model, s.tp, s.num_layers, s.batch_size, s.new_tokens, s.context_tokens
    return *shape, s.quantization, s.kv_cache_dtype, s.decodes, s.decode_context_tokens


def check_enough(samples: Sequence[Sample]) -> None:
    """UserError that names everything missing, unless the samples can tell the roofline's constants apart."""
    if not samples:
        raise UserError(f"samples: none of {', '.join(FITTED_OPS)} that ran alone: measure prompts and decodes")
    prompts = [s.tokens for s in samples if s.is_prompt]
    decodes = [s for s in samples if s.is_decode]
    missing = [
        *_missing("prompts", "tokens", prompts, LEAST_TOKENS_SPAN),
        *_missing("decodes", "sequences", [s.batch_size for s in decodes], LEAST_BATCH_SPAN),
        *_missing("decodes", "context tokens", [s.context_tokens for s in decodes], LEAST_CONTEXT_SPAN),
    ]
    if missing:
        raise UserError(f"samples: too few to tell compute, memory and overhead apart: {'; '.join(missing)}")


def _missing(phase: str, quantity: str, values: Sequence[int], span: float) -> list[str]:
    sizes = sorted(set(values))
    if len(sizes) >= LEAST_SIZES and sizes[-1] >= span * sizes[0]:
        return []
    have = "none" if not sizes else f"{len(sizes)} size{'s' * (len(sizes) > 1)} ({sizes[0]} to {sizes[-1]})"
    return [f"{phase} by {quantity}: {have}, needed are {LEAST_SIZES} or more spanning a factor of {span:g}"]


def check_told(estimates: Mapping[str, Estimate]) -> None:
    """UserError that names the rates which the samples leave open: times that hardly depend on them."""
    for name, estimate in estimates.items():
        if name.endswith("_per_s") and not estimate.told:
            raise UserError(
                f"samples: they do not tell {name}: {estimate.value:.3g}, 95 % interval {estimate.low:.3g} to "
                f"{estimate.high:.3g}: measure longer prompts, larger batches or larger copies"
            )


def check_plausible(report: FitReport, hardware: HardwareSpec) -> None:
    """UserError where a fit cannot be this GPU's, or explains its samples too badly to price anything with."""
    peaks = {
        "flops_per_s": hardware.fp16_flops_per_s,
        **{product_name(kind, "flops_per_s"): hardware.product_flops_per_s(kind) for kind in PRODUCT_FORMATS},
        "attention_flops_per_s": hardware.fp16_flops_per_s,
        "hbm_bytes_per_s": hardware.hbm_bytes_per_s,
    }
    for name, peak in peaks.items():
        value = report.profile.value(name)
        if value > peak:
            raise UserError(
                f"samples: {name} = {value:.3g} is above the peak of {hardware.name}, {peak:.3g}: they are of another "
                "GPU, model, number of GPUs or type of weights than said"
            )
    for phase in PHASES:
        error = (report.profile.residuals or {}).get(f"{phase}_mape", 0.0)
        if error > MOST_ERROR:
            raise UserError(
                f"samples: the fit misses them by {100 * error:.0f} % ({phase}), more than {100 * MOST_ERROR:.0f} %: "
                "they are no iterations of one GPU and engine; look for mixed machines, waiting or other units"
            )


def range_of(samples: Sequence[Sample]) -> FittedRange:
    """What the samples covered: tokens of a prompt iteration; sequences and context tokens of a decode iteration."""
    prompts = [s.tokens for s in samples if s.is_prompt]
    decodes = [s for s in samples if s.is_decode]
    batches = [s.batch_size for s in decodes]
    contexts = [s.batch_size * (s.context_tokens + 1) for s in decodes]
    return FittedRange(
        tokens=(min(prompts), max(prompts)),
        batch=(min(batches), max(batches)),
        context_tokens=(min(contexts), max(contexts)),
    )


def _value(name: str, estimates: Mapping[str, Estimate], base: Profile) -> float:
    return estimates[name].value if name in estimates else base.value(name)


def _constants(
    estimates: dict[str, Estimate], scatter: Mapping[str, float], base: Profile, *, steps: bool
) -> tuple[dict[str, Constant], list[str]]:
    """All constants of the form, and the names of those carried over from `base`; `steps`: whole steps were timed."""
    found: dict[str, Constant] = {}
    carried: list[str] = []
    for name, unit in ROOFLINE_UNITS.items():
        estimate = estimates.get(name)
        if name == "beta" and "d2h_bytes_per_s" in estimates:
            found[name] = Constant(1.0, None, unit, "by definition: d2h_bytes_per_s is the rate reached")
        elif name == "attention_flops_per_s" and estimate is None:
            value = estimates["flops_per_s"]
            found[name] = Constant(
                value.value, value.stderr, unit, "taken as flops_per_s: no prompt long enough to tell attention apart"
            )
        elif name == "step_overhead_s" and estimate is None and steps:
            found[name] = Constant(
                0.0, None, unit, "part of layer_overhead_s: all steps had as many layers, which tells no step apart"
            )
        elif estimate is None and name not in base.constants:
            # Told neither by the samples nor by the base: absent, which `OPTIONAL` gives a meaning.
            continue
        elif estimate is None:
            carried.append(name)
            old = base.constants[name]
            found[name] = Constant(old.value, old.stderr, unit, f"carried over from {base.name}: {old.source}")
        else:
            found[name] = constant_of(estimate, unit, scatter.get(name))
    return found, carried


def constant_of(estimate: Estimate, unit: str, scatter: float | None) -> Constant:
    """As a profile has it, with its interval and the scatter of a fit."""
    stderr = estimate.stderr if estimate.stderr is not None and np.isfinite(estimate.stderr) else None
    return Constant(estimate.value, stderr, unit, _source(estimate, scatter))


def _source(estimate: Estimate, scatter: float | None) -> str:
    if estimate.at_limit:
        return "fitted: at the limit of what it may be, so without an interval"
    interval = f"95 % interval {estimate.low:.6g} to {estimate.high:.6g}"
    if scatter is None:
        return f"fitted: {interval}"
    return f"fitted jointly: {interval}; points scatter by {100 * scatter:.1f} % about the fit"


def _residuals(
    samples: Sequence[Sample],
    errors: Array,
    unseen: tuple[Mapping[str, Holdout], Mapping[str, Holdout]],
    large: Holdout,
    found: Sequence[Region],
) -> dict[str, float]:
    of_models, of_rows = map(mean_holdout, unseen)
    own = scores(samples, errors, np.ones(len(samples), dtype=bool))
    left_out = {"": own, "unseen_model_": of_models, "unseen_rows_": of_rows, "unseen_size_": large}
    values = {f"{what}{phase}_mape": getattr(error, phase) for what, error in left_out.items() for phase in PHASES}
    values["largest_region_bias"] = max((abs(region.bias) for region in found if region.is_pass), default=float("nan"))
    return {name: round(value, 5) for name, value in values.items() if np.isfinite(value)}
