"""Write the tables of docs/calibration.md and calibration-tables.md anew, from the shipped profiles and samples.

    python validation/calibration_tables.py [NAME ...]

Every block between `<!-- NAME -->` and `<!-- end -->` is replaced, or those named; the text around them stays. Takes
minutes, all but `forms`, `papers` and `regions` alone seconds.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from experts_report import error, experts_table, signed  # noqa: E402

from calib.factors import LEANS  # noqa: E402
from calib.figure import draw_fit  # noqa: E402
from calib.fit import FitReport, fit_profile  # noqa: E402
from calib.holdout import Fitted, Holdout, leave_one_model_out, mean_holdout  # noqa: E402
from calib.kernels import FITS  # noqa: E402
from calib.latents import LatentSample, attention_model  # noqa: E402
from calib.papers import PaperConstant  # noqa: E402
from calib.profile_files import DATA  # noqa: E402
from calib.report import percent, readable, table  # noqa: E402
from calib.robust import Array  # noqa: E402
from calib.samples import read_samples  # noqa: E402
from sim.cost.profile import LATENT_UNITS, Profile, load_profile, product_name  # noqa: E402
from sim.cost.roofline import RooflineCost  # noqa: E402
from sim.results.figures.style import save_figure  # noqa: E402
from sim.specs.hardware import HardwareSpec, load_hardware  # noqa: E402
from sim.specs.quantization import PRODUCT_FORMATS  # noqa: E402

PAGES = tuple(ROOT / "docs" / name for name in ("calibration.md", "calibration-tables.md"))
FIGURES = ROOT / "docs" / "figures"


def profiles() -> list[Profile]:
    """Every shipped profile that has samples."""
    return [load_profile(path.name.removesuffix(".csv.gz")) for path in sorted(DATA.glob("*.csv.gz"))]


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


def errors() -> str:
    """Each profile's errors on layers of 16 bits in per cent: on its samples, left out, on longer ones, and the largest
    bias of a region."""
    rows = []
    for profile in profiles():
        own = profile.residuals or {}
        left_out = "unseen_model" if "unseen_model_prefill_mape" in own else "unseen_rows"
        cells = [_phases(own, f"{part}{{}}_mape") for part in ("", f"{left_out}_", "unseen_size_")]
        cells[1] = f"**{cells[1]}**{'' if left_out == 'unseen_model' else ' of rows'}"
        rows.append((f"`{profile.name}`", *cells, _in_percent(own, "largest_region_bias")))
    header = ("profile", "on its samples", "left out", "longer half from the shorter", "largest bias")
    return table(header, rows)


def kernels() -> str:
    """Errors in per cent, left out, of what has constants of its own: formats, experts, latent attention, DeltaNet."""
    rows = []
    for profile in profiles():
        own = profile.residuals or {}
        if "unseen_model_expert_mape" not in own:
            continue
        kinds = (f"unseen_model_{kind}expert_mape" for kind in ("", "fp8_", "nvfp4_", "mxfp4_", "int4_"))
        rows.append(
            (
                f"`{profile.name}`",
                *(_phases(own, f"unseen_model_{kind}_{{}}_mape") for kind in ("fp8", "fp8_kv", "nvfp4")),
                " / ".join(_in_percent(own, kind) for kind in kinds),
                *(_phases(own, f"unseen_heads_{kind}_{{}}_mape") for kind in ("latent", "gdn")),
            )
        )
    header = ("FP8", "FP8, KV too", "NVFP4", "experts: 16 bits / FP8 / NVFP4 / MXFP4 / int4", "latent", "DeltaNet")
    return table(("profile", *header), rows)


def _phases(own: Mapping[str, float], name: str) -> str:
    """Prefill / decode, and mixed where there is any."""
    found = [_in_percent(own, name.format(phase)) for phase in ("prefill", "decode", "mixed")]
    return "-" if set(found) == {"-"} else " / ".join(found[: 2 if found[2] == "-" else 3])


def _in_percent(own: Mapping[str, float], name: str) -> str:
    return percent(own.get(name, float("nan"))).removesuffix(" %")


def quantised() -> str:
    """Errors of quantised weights and FP8 KV by phase: on the samples, and in bold on a model left out; rates over 16
    bits'."""
    rows = []
    for profile, kind in product(profiles(), PRODUCT_FORMATS):
        own, value = profile.residuals or {}, profile.value
        if f"{kind}_decode_mape" not in own:
            continue
        cells = [f"`{profile.name}`", kind.upper()]
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
    for path in sorted((DATA / "experts").glob("*.csv.gz")):
        profile = load_profile(path.name.removesuffix(".csv.gz"))
        found[profile.gpu] = profile, FITS["experts"](path, profile, load_hardware(profile.gpu))
    return experts_table(found)


def as_other_attention_s(samples: Sequence[LatentSample], profile: Profile, hardware: HardwareSpec) -> Array:
    """Seconds of every sample, shape (samples,), by a profile without constants of these kernels."""
    found = []
    for s in samples:
        price = RooflineCost(attention_model(s.num_heads, fp8=bool(s.fp8)), hardware, profile, 1)
        seconds = price.products_s(s.num_tokens) + price.overhead_s
        if s.phase == "decode":
            seconds += price.full_s_per_token * s.batch * s.context_tokens + price.kv_padding_s * s.batch
        else:
            seconds += price.attention_s_per_pair * s.batch * s.context_tokens * (s.context_tokens + 1) / 2
        found.append(seconds)
    return np.array(found)


def latents() -> str:
    """Kernels of latent attention: their price as other attention, and by constants of their own."""
    rows = []
    for path in sorted((DATA / "latents").glob("*.csv.gz")):
        profile = load_profile(path.name.removesuffix(".csv.gz"))
        without, hardware = profile.without(LATENT_UNITS), load_hardware(profile.gpu)
        (fit,) = FITS["latents"](path, without, hardware)
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
    for path in sorted((DATA / "gdn").glob("*.csv.gz")):
        profile = load_profile(path.name.removesuffix(".csv.gz"))
        (fit,) = FITS["gdn"](path, profile, load_hardware(profile.gpu))
        heads = np.array([s.num_value_heads for s in fit.samples])
        for phase in ("decode", "prefill"):
            chosen = np.array([s.phase == phase for s in fit.samples])
            of_heads = [fit.unseen[chosen & (heads == n)] for n in (2, 8, 32, 64)]
            cells = percent(error(fit.own[chosen])), f"**{percent(error(fit.unseen[chosen]))}**"
            rows.append((f"{profile.gpu}, {phase}", f"{chosen.sum():,}", *cells, " / ".join(map(signed, of_heads))))
    return table(("GPU, phase", "samples", "fitted", "left out", "left out, 2 / 8 / 32 / 64 heads"), rows)


FORMS = {
    "full": ("all terms", ()),
    "one rate": ("F_attn = F", ("attention_flops_per_s",)),
    "KV at the weights' rate": (
        "decodes read KV at H, and no padding", ("kv_bytes_per_s", "kv_padding_tokens", "kv_padding_waves"),
    ),
    "hard ridge": ("p fixed at infinity: max(compute, memory)", ("overlap",)),
    "no activations": ("linear bytes are the weights alone", ()),
    "no overhead": ("c = 0", ("layer_overhead_s",)),
}  # fmt: skip
"""The roofline, and what it is without one of its terms: in words, and parameters that are not fitted."""


def held_out(report: FitReport, form: str) -> Holdout:
    """Errors on models left out, without a term of the roofline and without factors."""
    terms = report.terms
    if form == "no activations":
        terms = replace(terms, activation_bytes=np.zeros_like(terms.activation_bytes))
    without = FORMS[form][1]
    return mean_holdout(leave_one_model_out(Fitted(report.samples, terms, report.measured_s, without=without)))


def forms_table(reports: Sequence[FitReport]) -> str:
    """What each term of the roofline is worth: held-out errors (prefill / decode) with it left out, without factors."""
    reports = [report for report in reports if report.by_model]
    rows = []
    for form, (about, _) in FORMS.items():
        found = [held_out(report, form) for report in reports]
        rows.append([f"{form}: {about}", *(f"{percent(one.prefill)} / {percent(one.decode)}" for one in found)])
    return table(("form", *(report.profile.gpu for report in reports)), rows)


FITTED: dict[str, Callable[[Sequence[FitReport]], str]] = {"forms": forms_table, "papers": papers, "regions": regions}
"""Blocks of fits made anew."""
SHIPPED: dict[str, Callable[[], str]] = {
    "errors": errors,
    "kernels": kernels,
    "quantised": quantised,
    "experts": experts,
    "latents": latents,
    "gdn": gdn,
}
"""Blocks of what profiles have, and of kernels with samples of their own."""


def main(names: Sequence[str]) -> None:
    """Replace blocks of the pages, by default all of them; draw the figures of fits made anew."""
    chosen = names or [*FITTED, *SHIPPED]
    reports = fits() if set(chosen) - set(SHIPPED) else []
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    for name in chosen:
        block = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        page = next((page for page, text in texts.items() if block.search(text)), None)
        if page is None:
            raise SystemExit(f"docs: no page has a block <!-- {name} --> ... <!-- end -->")
        content = SHIPPED[name]() if name in SHIPPED else FITTED[name](reports)
        texts[page] = block.sub(lambda found, content=content: f"{found[1]}{content}\n{found[2]}", texts[page])
    for page, text in texts.items():
        page.write_text(text, encoding="utf-8")
    for report in reports:
        save_figure(FIGURES / f"calibration-{report.profile.name}.png", draw_fit(report))
    print(f"wrote {', '.join(chosen)} and {len(reports)} figures")


if __name__ == "__main__":
    main(sys.argv[1:])
