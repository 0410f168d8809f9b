"""How far a fit can be trusted: errors on samples it has not seen, and where it leans.

A fit's error on its own samples flatters it. Here models are left out one at a time, and small sizes predict large
ones; regions show a lean that an average would hide.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from calib.factors import LEANS
from calib.robust import Array
from calib.roofline import NO_ALL_REDUCE, complete, fit_linear_factors, fit_roofline, predict_s
from calib.samples import Sample
from calib.terms import Terms
from sim.cost.kernels import Point

Mask = NDArray[np.bool_]

PROMPT_TOKENS = 128
"""Prompts below this many tokens are not scored: they are pure overhead."""
SMALL_SHARE = 0.5
"""Share of each phase's samples, the fastest, that predict the others."""
PHASES = ("prefill", "decode", "mixed")
ROW_FOLDS = 5
"""Parts that samples of one model alone are split into, at random, to be left out."""


@dataclass(frozen=True)
class Region:
    """Samples that have a phase and a size in common."""

    name: str
    count: int
    bias: float
    """Mean of predicted / measured - 1."""
    mape: float

    @property
    def is_pass(self) -> bool:
        """Whether it is of tokens through whole layers, not of a part of them."""
        return not self.name.startswith(("linear", "elementwise"))


@dataclass(frozen=True)
class Holdout:
    """Mean absolute relative errors of prompts, decodes and both together; NaN where there was nothing to score."""

    prefill: float
    decode: float
    count: int
    mixed: float = float("nan")


def is_decode(samples: Sequence[Sample]) -> Mask:
    """Which samples are decodes."""
    return np.array([s.is_decode for s in samples])


def is_scored_prefill(samples: Sequence[Sample]) -> Mask:
    """Which samples are prompts long enough to score."""
    return np.array([s.is_prompt and s.tokens >= PROMPT_TOKENS for s in samples], dtype=bool)


def is_mixed(samples: Sequence[Sample]) -> Mask:
    """Which samples are prompts or chunks with decodes beside them."""
    return np.array([s.is_mixed for s in samples], dtype=bool)


@dataclass(frozen=True)
class Fitted:
    """What a roofline is fitted to: samples, their terms and medians (s), and constants that others tell.

    `without` is as for `fit_roofline`.
    """

    samples: Sequence[Sample]
    terms: Terms
    measured_s: Array
    fixed: Mapping[str, float] = field(default_factory=lambda: NO_ALL_REDUCE)
    without: Collection[str] = ()


def errors_of(
    constants: Mapping[str, float], terms: Terms, measured_s: Array, factors: Sequence[Point] | None = None
) -> Array:
    """Predicted / measured - 1 of every sample."""
    return predict_s(constants, terms, factors) / measured_s - 1


def leave_one_model_out(what: Fitted, *, factored: bool = False) -> dict[str, Holdout]:
    """Each model predicted by a fit to the others, if those have prompts and decodes; empty where there is only one.

    `factored` says whether products have factors of their tokens.
    """
    models = np.array([s.model for s in what.samples])
    prompts, decodes = is_scored_prefill(what.samples), is_decode(what.samples)
    return {
        str(name): _held_out(what, models == name, factored)
        for name in sorted(set(models))
        if np.any(prompts & (models != name)) and np.any(decodes & (models != name))
    }


def leave_rows_out(what: Fitted, *, factored: bool = False) -> dict[str, Holdout]:
    """Samples predicted by a fit to the others, a part at a time: what can be left out where all are of one model."""
    part = np.random.default_rng(0).permutation(len(what.samples)) % ROW_FOLDS
    return {f"part {i + 1}": _held_out(what, part == i, factored) for i in range(ROW_FOLDS)}


def small_predicts_large(what: Fitted, share: float = SMALL_SHARE, *, factored: bool = False) -> Holdout:
    """The longer prompts and decodes (by measured time, each phase apart) predicted by a fit to the shorter ones."""
    large, seconds, decodes = np.zeros(len(what.samples), dtype=bool), what.measured_s, is_decode(what.samples)
    for phase in (decodes, ~decodes):
        if phase.any():
            large |= phase & (seconds > np.quantile(seconds[phase], share))
    return _held_out(what, large, factored)


def mean_holdout(parts: Mapping[str, Holdout]) -> Holdout:
    """The average over held-out models, each counting the same."""
    means = {
        phase: mean([error for part in parts.values() if not np.isnan(error := getattr(part, phase))])
        for phase in PHASES
    }
    return Holdout(count=sum(part.count for part in parts.values()), **means)


def _held_out(what: Fitted, left_out: Mask, factored: bool) -> Holdout:
    terms, seconds = what.terms[~left_out], what.measured_s[~left_out]
    constants = complete({**what.fixed, **fit_roofline(terms, seconds, what.fixed, without=what.without).values})
    factors = fit_linear_factors(constants, terms, seconds) if factored else None
    return scores(what.samples, errors_of(constants, what.terms, what.measured_s, factors), left_out)


def scores(samples: Sequence[Sample], errors: Array, chosen: Mask) -> Holdout:
    """The errors of those chosen, by phase."""
    phases = (is_scored_prefill(samples), is_decode(samples), is_mixed(samples))
    prefill, decode, mixed = (mean(np.abs(errors[chosen & phase])) for phase in phases)
    return Holdout(prefill, decode, int(chosen.sum()), mixed)


def leans(found: Sequence[Region], *, whole: bool = True) -> bool:
    """Whether a region is priced too high or too low; `whole`: of those of whole passes."""
    return any((region.is_pass or not whole) and abs(region.bias) > LEANS for region in found)


def misses(parts: Mapping[str, Holdout]) -> bool:
    """Whether a phase that was left out is predicted badly."""
    found = mean_holdout(parts)
    return any(getattr(found, phase) > LEANS for phase in PHASES)


def is_better(parts: Mapping[str, Holdout], than: Mapping[str, Holdout]) -> bool:
    """Whether held-out errors are less, all phases together."""
    mine, theirs = (np.nansum([getattr(mean_holdout(one), phase) for phase in PHASES]) for one in (parts, than))
    return bool(mine < theirs)


def mean(values: Sequence[float] | Array) -> float:
    """The mean; NaN of nothing."""
    return float(np.mean(values)) if len(values) else float("nan")


def regions(samples: Sequence[Sample], errors: Array) -> list[Region]:
    """Errors by phase and size: prompts by tokens, decodes by batch and by context tokens, in steps of four-fold."""
    groups: dict[str, list[int]] = {}
    for i, sample in enumerate(samples):
        for name in _regions_of(sample):
            groups.setdefault(name, []).append(i)
    found = []
    for name, members in groups.items():
        part = errors[members]
        found.append(Region(name, len(members), float(np.mean(part)), float(np.mean(np.abs(part)))))
    return sorted(found, key=lambda region: _sort_key(region.name))


def _regions_of(sample: Sample) -> list[str]:
    if sample.op == "lm_head":
        return [f"LM head, rows {_span(sample.batch_size)}"]
    if sample.is_decode:
        context = sample.batch_size * (sample.context_tokens + 1)
        return [f"decode, batch {_span(sample.batch_size)}", f"decode, context tokens {_span(context)}"]
    if sample.op in ("elementwise", "linear"):
        return [f"{sample.op}, tokens {_span(sample.tokens)}"]
    if sample.is_mixed:
        context = sample.decodes * (sample.decode_context_tokens + 1)
        return [f"mixed, tokens {_span(sample.tokens)}", f"mixed, decodes' context tokens {_span(context)}"]
    cached = ", after a context" if sample.context_tokens else ""
    return [f"{'recompute' if sample.op == 'recompute' else 'prefill'}, tokens {_span(sample.tokens)}{cached}"]


def _span(value: int) -> str:
    """The four-fold interval around a value: powers of four."""
    low = 4 ** int(np.floor(np.log(value) / np.log(4) + 1e-9))
    return f"{low:,}-{4 * low - 1:,}"


def _sort_key(name: str) -> tuple[str, int]:
    head, _, span = name.rpartition(" ")
    digits = "".join(c for c in span.partition("-")[0] if c.isdigit())
    if not digits:
        head, _, span = name.partition(", after")
        return _sort_key(head)
    return head, int(digits)
