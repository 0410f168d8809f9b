"""What a fit found, in Markdown: constants, errors, regions, the papers' constants, what each term is worth."""

from collections.abc import Iterable, Sequence
from math import isnan

import numpy as np

from calib.fit import FitReport
from calib.holdout import PROMPT_TOKENS, Holdout, is_decode, mean_holdout, scores

SCALES = (("FLOP/s", 1e12, "TFLOP/s"), ("B/s", 1e9, "GB/s"), ("s", 1e-6, "us"))
"""Units as people read them: SI unit, size of the readable one, its name."""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def readable(value: float, unit: str) -> str:
    """A value with a unit one reads: 2.5e14 FLOP/s is 250 TFLOP/s."""
    for si, scale, name in SCALES:
        if unit == si:
            return f"{value / scale:.4g} {name}"
    return f"{value:.4g}" if unit == "1" else f"{value:.4g} {unit}"


def percent(share: float) -> str:
    """A share in per cent; a dash where there is none."""
    return "-" if isnan(share) else f"{100 * share:.1f} %"


def fit_markdown(report: FitReport) -> str:
    """The whole report on one fit."""
    profile = report.profile
    decodes = int(is_decode(report.samples).sum())
    parts = [
        f"# {profile.name}",
        f"{profile.gpu}, {profile.status}; {len(report.samples)} samples, {decodes} of them decodes. "
        + " ".join(f"{key}: {value}." for key, value in profile.provenance.items()),
        "## Constants",
        constants_table(report),
        "## Errors",
        f"Mean absolute relative error; prefill are prompts of {PROMPT_TOKENS} tokens and more.",
        errors_table(report),
        "## By region",
        regions_table(report),
    ]
    if report.papers:
        parts += ["## The papers' constants", papers_table(report)]
    return "\n\n".join(parts) + "\n"


def constants_table(report: FitReport) -> str:
    """Every constant with its interval, or where it was carried over from."""
    rows = []
    for name, constant in report.profile.constants.items():
        unit, estimate = constant.unit, report.estimates.get(name)
        if estimate is None or name in report.carried:
            rows.append((f"`{name}`", readable(constant.value, unit), "-", constant.source))
        elif estimate.at_limit:
            rows.append((f"`{name}`", readable(constant.value, unit), "-", "fitted, at its limit"))
        else:
            interval = f"{readable(estimate.low, unit)} to {readable(estimate.high, unit)}"
            rows.append((f"`{name}`", readable(constant.value, unit), interval, "fitted"))
    return table(("constant", "value", "95 % interval", "from"), rows)


def errors_table(report: FitReport) -> str:
    """Errors on the samples themselves and on what the fit did not see."""
    own = scores(report.samples, report.errors, np.ones(len(report.samples), dtype=bool))
    rows = [_error_row("the samples fitted", own)]
    if len(report.by_model) > 1:
        rows.append(_error_row("a model left out (mean)", mean_holdout(report.by_model)))
    rows += [_error_row(f"{name} left out", part) for name, part in report.by_model.items()]
    if report.by_rows:
        rows.append(_error_row("a fifth of the samples left out (mean)", mean_holdout(report.by_rows)))
    if report.small_to_large.count:
        rows.append(_error_row("the longer half from the shorter", report.small_to_large))
    return table(("predicting", "prefill", "decode", "mixed", "samples"), rows)


def _error_row(name: str, found: Holdout) -> tuple[str, ...]:
    return name, percent(found.prefill), percent(found.decode), percent(found.mixed), str(found.count)


def regions_table(report: FitReport) -> str:
    """Lean and error by phase and size."""
    rows = [(r.name, str(r.count), f"{100 * r.bias:+.1f} %", percent(r.mape)) for r in report.regions]
    return table(("region", "samples", "bias", "error"), rows)


def papers_table(report: FitReport) -> str:
    """The papers' constants, printed and corrected."""
    rows = []
    for found in report.papers:
        estimate = found.estimate
        value = "-" if estimate is None else readable(estimate.value, found.unit)
        interval = "-"
        if estimate is not None and estimate.low < estimate.high:
            interval = f"{readable(estimate.low, found.unit)} to {readable(estimate.high, found.unit)}"
        row = (found.equation, found.form, found.constant, value, interval, percent(found.mape), str(found.count))
        rows.append(row)
    return table(("equation", "form", "constant", "value", "95 % interval", "error", "samples"), rows)
