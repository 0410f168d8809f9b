"""Write the tables of docs/calibration.md anew, from the samples that ship with the imported and measured profiles.

    python benchmarks/calibration_tables.py [NAME ...]

Every block between `<!-- NAME -->` and `<!-- end -->` is replaced, or those named; the text around them stays. Takes
minutes, `experts`, `latents` and `gdn` alone seconds.
"""

import re
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from calib.cli import DATA  # noqa: E402
from calib.experts import EXPERT_DATA, fit_experts, read_expert_samples  # noqa: E402
from calib.experts_report import error, experts_table, signed  # noqa: E402
from calib.factors import LEANS  # noqa: E402
from calib.figure import draw_fit  # noqa: E402
from calib.fit import FitReport, fit_profile  # noqa: E402
from calib.gdn import GDN_DATA, fit_gdn, read_gdn_samples  # noqa: E402
from calib.holdout import Holdout, leave_one_model_out, leave_rows_out, mean_holdout  # noqa: E402
from calib.latents import LATENT_DATA, as_other_attention_s, fit_latents, read_latent_samples  # noqa: E402
from calib.papers import PaperConstant  # noqa: E402
from calib.report import (  # noqa: E402
    forms_table,
    percent,
    readable,
    size_table,
    table,
    worst_region,
)
from calib.samples import read_samples  # noqa: E402
from sim.cost.profile import LATENT_UNITS, load_profile, product_name  # noqa: E402
from sim.results.figures.style import save_figure  # noqa: E402
from sim.specs.hardware import load_hardware  # noqa: E402
from sim.specs.quantization import PRODUCT_FORMATS  # noqa: E402

DOCUMENT = ROOT / "docs" / "calibration.md"
FIGURES = ROOT / "docs" / "figures"
CONSTANTS = (
    "flops_per_s", "attention_flops_per_s", "attention_tile_tokens", "attention_slots", "attention_padding_tokens",
    "attention_roofline_exponent", "hbm_bytes_per_s", "kv_bytes_per_s", "kv_padding_tokens", "kv_padding_waves",
    "longest_kv_bytes_per_s", "fp8_flops_per_s", "fp8_roofline_exponent", "fp8_quantize_bytes_per_s",
    "fp8_layer_overhead_s", "nvfp4_flops_per_s", "nvfp4_roofline_exponent",
    "nvfp4_layer_overhead_s", "fp8_kv_bytes_per_s", "fp8_kv_padding_tokens", "fp8_kv_layer_overhead_s",
    "elementwise_bytes_per_s", "elementwise_launch_s", "roofline_exponent",
    "layer_overhead_s", "allreduce_bytes_per_s", "allreduce_latency_s", "allreduce_chunk_s", "allreduce_launch_s",
)  # fmt: skip
SHOWN_TOKENS = (1, 32, 128, 129, 256, 257, 272, 512, 513, 1024, 1025, 2048, 8192, 32768)
"""Sizes whose factors are listed; profiles have all of them."""


def fits() -> list[FitReport]:
    """Every shipped set of samples, fitted again."""
    found = []
    for path in sorted(DATA.glob("*.csv.gz")):
        shipped = load_profile(path.name.removesuffix(".csv.gz"))
        assert shipped.status != "derived"
        base = load_profile(f"{shipped.gpu}-derived")
        found.append(
            fit_profile(
                read_samples(path),
                path.parent,
                load_hardware(shipped.gpu),
                base,
                name=shipped.name,
                status=shipped.status,
                provenance=shipped.provenance,
            )
        )
    return found


def errors(reports: Sequence[FitReport]) -> str:
    """Held-out errors of each profile, prefill / decode, and mixed where there is any; without factors and with."""
    rows = []
    for report in reports:
        own, name = report.profile.residuals or {}, report.profile.name
        worst = [
            max(((getattr(part, phase), name) for name, part in report.by_model.items() if getattr(part, phase) > 0),
                default=(float("nan"), "one model"))
            for phase in ("prefill", "decode")
        ]  # fmt: skip
        phases = ("prefill", "decode", "mixed") if "mixed_mape" in own else ("prefill", "decode")
        unseen = _errors_of(mean_holdout(report.by_model or report.by_rows), phases)
        alone, whole = "-", f"**{unseen}**{'' if report.by_model else ' of rows'}"
        if report.profile.linear_factors is not None:
            left_out = leave_one_model_out if report.by_model else leave_rows_out
            alone = _errors_of(mean_holdout(left_out(report.samples, report.terms, report.measured_s)), phases)
        else:
            alone, whole = whole, "-"
        rows.append(
            (
                f"`{name}`",
                str(len(report.samples)),
                " / ".join(percent(own[f"{phase}_mape"]) for phase in phases),
                alone,
                whole,
                " / ".join(f"{percent(error)} ({name})" for error, name in worst),
                worst_region(report),
            )
        )
    header = ("on its samples", "left out: roofline alone", "left out: with factors", "worst model")
    return table(("profile", "samples", *header, "largest bias of a region"), rows)


def _errors_of(found: Holdout, phases: Sequence[str]) -> str:
    return " / ".join(percent(getattr(found, phase)) for phase in phases)


def factors(reports: Sequence[FitReport]) -> str:
    """What matrix products take over their roofline at some sizes, of 16 bits and of each format."""
    kinds = [
        (f"{report.profile.gpu}{f', {kind.upper()}' if kind else ''}", points)
        for report in reports
        for kind in ("", *PRODUCT_FORMATS)
        if (points := getattr(report.profile, product_name(kind, "linear_factors")))
    ]
    rows = []
    for tokens in SHOWN_TOKENS:
        found = (dict(points).get(tokens) for _, points in kinds)
        rows.append((f"{tokens:,}", *("-" if factor is None else f"{factor:.2f}" for factor in found)))
    return table(("tokens", *(name for name, _ in kinds)), rows)


def constants(reports: Sequence[FitReport]) -> str:
    """Fitted constants with 95 % intervals."""
    rows = []
    for name in CONSTANTS:
        cells = [f"`{name}`"]
        for report in reports:
            if name not in report.estimates:
                cells.append("-")
                continue
            estimate, unit = report.estimates[name], report.profile.constants[name].unit
            half = (estimate.high - estimate.low) / 2
            shown = readable(estimate.value, unit)
            cells.append(shown if estimate.at_limit else f"{shown} +- {100 * half / estimate.value:.1f} %")
        rows.append(cells)
    return table(("constant", *(report.profile.gpu for report in reports)), rows)


def quantised_table(reports: Sequence[FitReport]) -> str:
    """Errors of quantised weights and FP8 KV by phase: on the samples, and in bold on a model left out; rates over 16
    bits'."""
    rows = []
    for report, kind in product(reports, PRODUCT_FORMATS):
        own, value = report.profile.residuals or {}, report.profile.value
        if f"{kind}_decode_mape" not in own:
            continue
        cells = [f"`{report.profile.name}`", kind.upper()]
        cells.append(f"{value(product_name(kind, 'flops_per_s')) / value('flops_per_s'):.2f}")
        kv = kind == "fp8"
        cells.append(f"{value('fp8_kv_bytes_per_s') / value('kv_bytes_per_s'):.2f}" if kv else "-")
        phases = (f"{kind}_linear", f"{kind}_prefill", f"{kind}_decode", "fp8_kv_prefill", "fp8_kv_decode")
        for phase in phases[: len(phases) if kv else 3]:
            cells.append(f"{percent(own[f'{phase}_mape'])}, **{percent(own[f'unseen_model_{phase}_mape'])}**")
        rows.append((*cells, *["-"] * (0 if kv else 2)))
    header = ("profile", "format", "FLOP/s over 16 bits", "KV bytes/s", "products alone", "prefill", "decode")
    return table((*header, "prefill, FP8 KV", "decode, FP8 KV"), rows)


def papers(reports: Sequence[FitReport]) -> str:
    """The papers' constants in both forms, value and error."""
    rows = []
    keys = list(dict.fromkeys((c.equation, c.form, c.constant) for report in reports for c in report.papers))
    for equation, form, constant in keys:
        cells = [equation, form, constant]
        for report in reports:
            found = [c for c in report.papers if (c.equation, c.form, c.constant) == (equation, form, constant)]
            cells.append(_paper_cell(found))
        rows.append(cells)
    return table(("equation", "form", "constant", *(report.profile.gpu for report in reports)), rows)


def _paper_cell(found: Sequence[PaperConstant]) -> str:
    if not found or found[0].estimate is None:
        return "not measured"
    return f"{readable(found[0].estimate.value, found[0].unit)}, error {percent(found[0].mape)}"


def regions(reports: Sequence[FitReport]) -> str:
    """Regions that lean, of every profile."""
    rows = [
        (
            f"`{report.profile.name}`",
            region.name,
            str(region.count),
            f"{100 * region.bias:+.1f} %",
            percent(region.mape),
        )
        for report in reports
        for region in report.regions
        if abs(region.bias) > LEANS
    ]
    return table(("profile", "region", "samples", "bias", "error"), rows)


def experts() -> str:
    """Kernels of routed experts: their price as dense matrices, and by constants of their own."""
    found = {}
    for path in sorted(EXPERT_DATA.glob("*.csv.gz")):
        profile = load_profile(path.name.removesuffix(".csv.gz"))
        found[profile.gpu] = profile, fit_experts(read_expert_samples(path))
    return experts_table(found)


def latents() -> str:
    """Kernels of latent attention: their price as other attention, and by constants of their own."""
    rows = []
    for path in sorted(LATENT_DATA.glob("*.csv.gz")):
        profile = load_profile(path.name.removesuffix(".csv.gz"))
        without, hardware = profile.without(LATENT_UNITS), load_hardware(profile.gpu)
        fit = fit_latents(read_latent_samples(path), without, hardware)
        measured = np.array([s.latency_s for s in fit.samples])
        other = as_other_attention_s(fit.samples, without, hardware) / measured - 1
        heads = np.array([s.num_heads for s in fit.samples])
        for phase in ("decode", "prefill"):
            chosen = np.array([s.phase == phase for s in fit.samples])
            by_heads = [(n, fit.unseen[chosen & (heads == n)]) for n in sorted(set(heads))]
            rows.append(
                (
                    f"{profile.gpu}, {phase}",
                    f"{chosen.sum():,}",
                    signed(other[chosen]),
                    f"**{percent(error(fit.unseen[chosen]))}**",
                    " / ".join(signed(errors) for _, errors in by_heads),
                )
            )
    sizes = " / ".join(str(count) for count in sorted(set(heads)))
    return table(("GPU, phase", "samples", "as other attention", "left out", f"left out, {sizes} heads"), rows)


def gdn() -> str:
    """Kernels of Gated DeltaNet by constants of their own."""
    rows = []
    for path in sorted(GDN_DATA.glob("*.csv.gz")):
        profile = load_profile(path.name.removesuffix(".csv.gz"))
        samples = read_gdn_samples(path)
        fit = fit_gdn(samples, load_hardware(profile.gpu))
        heads = np.array([s.num_value_heads for s in fit.samples])
        for phase in ("decode", "prefill"):
            chosen = np.array([s.phase == phase for s in fit.samples])
            of_heads = [fit.unseen[chosen & (heads == n)] for n in (2, 8, 32, 64)]
            cells = percent(error(fit.own[chosen])), f"**{percent(error(fit.unseen[chosen]))}**"
            rows.append((f"{profile.gpu}, {phase}", f"{chosen.sum():,}", *cells, " / ".join(map(signed, of_heads))))
    return table(("GPU, phase", "samples", "fitted", "left out", "left out, 2 / 8 / 32 / 64 heads"), rows)


TABLES: dict[str, Callable[[Sequence[FitReport]], str]] = {
    "errors": errors,
    "constants": constants,
    "factors": factors,
    "quantised": quantised_table,
    "forms": forms_table,
    "sizes": size_table,
    "papers": papers,
    "regions": regions,
}
KERNELS: dict[str, Callable[[], str]] = {"experts": experts, "latents": latents, "gdn": gdn}
"""Blocks that have samples of their own."""


def main(names: Sequence[str]) -> None:
    """Replace blocks of the document, by default all of them, and draw the figures it shows."""
    chosen = names or [*TABLES, *KERNELS]
    reports = fits() if set(chosen) - set(KERNELS) else []
    text = DOCUMENT.read_text(encoding="utf-8")
    for name in chosen:
        block = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not block.search(text):
            raise SystemExit(f"{DOCUMENT}: has no block <!-- {name} --> ... <!-- end -->")
        content = KERNELS[name]() if name in KERNELS else TABLES[name](reports)
        text = block.sub(lambda found, content=content: f"{found[1]}{content}\n{found[2]}", text)
    DOCUMENT.write_text(text, encoding="utf-8")
    for report in reports:
        save_figure(FIGURES / f"calibration-{report.profile.name}.png", draw_fit(report))
    print(f"wrote {DOCUMENT} and {len(reports)} figures")


if __name__ == "__main__":
    main(sys.argv[1:])
