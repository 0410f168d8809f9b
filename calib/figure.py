"""Figures of a fit (measured against fitted, residuals, intervals) and of two profiles side by side."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from calib.fit import FitReport
from calib.holdout import is_decode
from calib.report import readable
from sim.cost.forms import build_cost
from sim.cost.profile import UNITS, Profile
from sim.engine.plan import IterationPlan
from sim.results.figures.style import COLOURS, FAINT, dress, new_figure, plain_text, set_title
from sim.specs.hardware import load_hardware
from sim.specs.models import load_model

TITLE_WIDTH = 62


def draw_fit(report: FitReport) -> Figure:
    """Four panels: prompts, decodes, residuals over time, and constants with their intervals."""
    figure = new_figure(12.0, 8.6)
    axes = figure.subplots(2, 2)
    models = sorted({s.model for s in report.samples})
    _draw_prompts(axes[0][0], report, models)
    _draw_decodes(axes[0][1], report, models)
    _draw_residuals(axes[1][0], report)
    _draw_intervals(axes[1][1], report)
    subject = f"{report.profile.name} ({report.profile.status}), {len(report.samples)} samples"
    figure.suptitle(plain_text(subject), fontsize=8.5, color=FAINT, x=0.01, ha="left")
    return figure


def _draw_prompts(ax: Axes, report: FitReport, models: Sequence[str]) -> None:
    """Single prompts without context: points measured, lines fitted, one colour a model.

    Of several operations or sizes of group the one with most of them, so that a line goes through like samples.
    """
    for i, model in enumerate(models):
        alone = [
            j
            for j, s in enumerate(report.samples)
            if s.model == model and s.is_prompt and s.batch_size == 1 and not s.context_tokens
        ]
        kinds = Counter((report.samples[j].op, report.samples[j].tp) for j in alone)
        kind = max(kinds, key=kinds.__getitem__, default=None)
        chosen = [j for j in alone if (report.samples[j].op, report.samples[j].tp) == kind]
        _points_and_line(ax, report, chosen, [report.samples[j].tokens for j in chosen], COLOURS[i % 7], model)
    _dress_logs(ax, "tokens of one prompt", "ms per layer", legend=bool(models))
    set_title(ax, "Prompts: measured (dots) and fitted (lines)", TITLE_WIDTH)


def _draw_decodes(ax: Axes, report: FitReport, models: Sequence[str]) -> None:
    """Decodes of the model with most of them, by batch, over the context of a sequence."""
    counts = [(sum(s.is_decode and s.model == m for s in report.samples), m) for m in models]
    model = max(counts)[1] if counts else ""
    batches = sorted({s.batch_size for s in report.samples if s.is_decode and s.model == model})
    least_tp = min((s.tp for s in report.samples if s.is_decode and s.model == model), default=1)
    places = sorted({round(q * (len(batches) - 1)) for q in np.linspace(0, 1, 5)}) if batches else []
    shown = [batches[place] for place in places]
    for i, batch in enumerate(shown):
        chosen = [
            j
            for j, s in enumerate(report.samples)
            if s.model == model and s.is_decode and s.batch_size == batch and s.tp == least_tp
        ]
        chosen.sort(key=lambda j: report.samples[j].context_tokens)
        contexts = [report.samples[j].context_tokens for j in chosen]
        _points_and_line(ax, report, chosen, contexts, COLOURS[i], f"batch {batch}")
    _dress_logs(ax, "context tokens of a sequence", "ms per layer", legend=bool(shown))
    set_title(ax, f"Decodes of {model}, likewise", TITLE_WIDTH)


def _dress_logs(ax: Axes, x: str, y: str, *, legend: bool = True) -> None:
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    if legend:
        ax.legend(fontsize=8, frameon=False)
    dress(ax, x, y)


def _points_and_line(
    ax: Axes, report: FitReport, chosen: Sequence[int], x: Sequence[int], colour: str, label: str
) -> None:
    if not chosen:
        return
    order = np.argsort(x)
    index = np.array(chosen)[order]
    layers = np.array([report.samples[j].num_layers for j in index])
    at = np.array(x)[order]
    ax.plot(at, report.predicted_s[index] / layers * 1e3, color=colour, lw=1.3, label=plain_text(label))
    ax.plot(at, report.measured_s[index] / layers * 1e3, "o", color=colour, ms=3.5, mew=0)


def _draw_residuals(ax: Axes, report: FitReport) -> None:
    decodes = is_decode(report.samples)
    layers = np.array([s.num_layers for s in report.samples])
    for phase, colour, label in ((~decodes, COLOURS[0], "prompts"), (decodes, COLOURS[1], "decodes")):
        if phase.any():
            x, y = (report.measured_s / layers)[phase] * 1e3, 100 * report.errors[phase]
            ax.plot(x, y, "o", color=colour, ms=2.6, mew=0, alpha=0.6, label=label)
    ax.axhline(0.0, color=FAINT, lw=0.8)
    for limit in (-10, 10):
        ax.axhline(limit, color=FAINT, lw=0.7, ls=":")
    ax.set_xscale("log")
    ax.legend(fontsize=8, frameon=False)
    dress(ax, "measured ms per layer", "predicted over measured, %")
    inside = float(np.mean(np.abs(report.errors) <= 0.1))
    set_title(ax, f"Residuals: {100 * inside:.0f} % of samples within 10 %", TITLE_WIDTH)


def _draw_intervals(ax: Axes, report: FitReport) -> None:
    """Half-widths of the 95 % intervals, relative to the values."""
    units = UNITS[report.profile.form]
    names = [n for n in units if n in report.estimates and not report.estimates[n].at_limit]
    for row, name in enumerate(reversed(names)):
        estimate = report.estimates[name]
        low, high = (100 * (bound / estimate.value - 1) for bound in (estimate.low, estimate.high))
        ax.plot([low, high], [row, row], color=COLOURS[0], lw=2.4, solid_capstyle="butt")
        ax.plot([0.0], [row], "o", color=COLOURS[0], ms=5)
    shown = [plain_text(f"{n}  {readable(report.estimates[n].value, units[n])}") for n in reversed(names)]
    ax.set_yticks(range(len(names)), shown, fontsize=8)
    ax.set_ylim(-0.6, len(names) - 0.4)
    ax.axvline(0.0, color=FAINT, lw=0.8)
    dress(ax, "95 % interval, % of the value")
    set_title(ax, "Constants and their intervals", TITLE_WIDTH)


def draw_diff(first: Profile, second: Profile, model_name: str) -> Figure:
    """Two profiles: ratio of each constant, and what both predict for a model's prompts and decodes."""
    figure = new_figure(12.0, 4.6)
    axes = figure.subplots(1, 3)
    _draw_ratios(axes[0], first, second)
    model = load_model(model_name)
    tokens = 2 ** np.arange(5, 15)
    batches = 2 ** np.arange(0, 9)
    for i, profile in enumerate((first, second)):
        hardware = load_hardware(profile.gpu)
        cost = build_cost(model, hardware, profile, 1, 16 * model.kv_bytes_per_token())
        prompts_ms = [1e3 * cost.iteration_s(_prompt(int(n))) for n in tokens]
        decodes_ms = [1e3 * cost.decode_run(int(b), int(b) * 1024)[0] for b in batches]
        label = plain_text(f"{profile.name} ({profile.status})")
        axes[1].plot(tokens, prompts_ms, color=COLOURS[i], lw=2.2 - i, label=label)
        axes[2].plot(batches, decodes_ms, color=COLOURS[i], lw=2.2 - i, label=label)
    for ax, x in ((axes[1], "tokens of one prompt"), (axes[2], "sequences, each with 1,024 tokens of context")):
        _dress_logs(ax, x, "ms per iteration")
    set_title(axes[1], f"{model_name}: prompt", 40)
    set_title(axes[2], f"{model_name}: decode", 40)
    return figure


def _prompt(tokens: int) -> IterationPlan:
    plan = IterationPlan()
    plan.prefill_tokens, plan.num_sampled_prefills = tokens, 1
    plan.prefill_pairs, plan.prefill_squares = tokens * (tokens + 1) // 2, tokens * tokens
    return plan


def _draw_ratios(ax: Axes, first: Profile, second: Profile) -> None:
    names = [n for n in first.constants if n in second.constants and first.constants[n].value > 0]
    for row, name in enumerate(reversed(names)):
        ratio = second.constants[name].value / first.constants[name].value
        ax.barh(row, ratio - 1.0, left=1.0, color=COLOURS[1], height=0.6)
    ax.set_yticks(range(len(names)), list(reversed(names)))
    ax.axvline(1.0, color=FAINT, lw=0.8)
    dress(ax, "second over first")
    set_title(ax, f"{second.name} over {first.name}", 24)
