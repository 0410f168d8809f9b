"""The commands `calibrate` and `profile`."""

import argparse
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from calib.importers.cli import add_imports
from calib.profile_files import (
    DATA,
    KERNEL_FILES,
    Status,
    add_out,
    add_target,
    base_profile,
    derived_name,
    fit_samples,
    profile_name,
    write_report,
)
from sim.cost.profile import UNITS, Profile, default_profile, load_profile, product_name, shipped_profiles
from sim.errors import UserError
from sim.files import out_folder, write_atomically
from sim.options.flags import add_flags
from sim.options.scenario import SHAPING, Outputs
from sim.run.folders import owning
from sim.specs.hardware import HardwareSpec, built_in_hardware, gpu_called, load_hardware
from sim.specs.quantization import PRODUCT_FORMATS

SAMPLES_FILE = "samples.csv"
FORMS = ("roofline", "linear")
NOT_OF_A_SERVER = ("out", "gpu", "profile", *(f.name for f in fields(Outputs)), *SHAPING)
"""Flags of `run` that fitting to a server's run has under another name, or has no use for."""


def add_profile(parser: argparse.ArgumentParser) -> None:
    """Mount the commands of `profile`; each leaf sets `run`, from the parsed arguments to the exit status."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    listing = commands.add_parser("list", help="list the shipped profiles")
    listing.set_defaults(run=run_list)
    show = commands.add_parser("show", help="show a profile: constants, errors, range and where it comes from")
    show.add_argument("profile", help="name of a shipped profile, of a GPU (its default), or a file")
    show.add_argument("--samples", type=Path, metavar="FILE", help="samples it was fitted to (default: shipped)")
    show.add_argument("--figure", type=Path, metavar="FILE.png", help="draw measured against fitted")
    show.set_defaults(run=run_show)
    diff = commands.add_parser("diff", help="compare two profiles constant by constant")
    diff.add_argument("first")
    diff.add_argument("second")
    diff.add_argument("--model", default="llama-2-7b", help="model whose iterations both predict (%(default)s)")
    diff.add_argument("--figure", type=Path, metavar="FILE.png", help="draw the ratios and the predictions")
    diff.set_defaults(run=run_diff)
    _add_fit(commands)
    add_imports(commands, run_fit)
    _add_derive(commands)


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of `calibrate`."""
    parser.description = (
        "Time the runtime's own layers, copies and whole steps, then fit a profile. A killed run resumes with the same "
        "command. Needs the extra `gpu` (torch)."
    )
    parser.add_argument("--device", required=True, choices=("cuda", "cpu"))
    parser.add_argument(
        "--model", action="append", required=True, help="name or config.json whose layer shapes to time; repeatable"
    )
    parser.add_argument("--quick", action="store_true", help="fewer shapes and repeats: under a minute")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="of weights and KV cache")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights and inputs (%(default)s)")
    parser.add_argument(
        "--lock-clocks",
        type=int,
        nargs="?",
        const=0,
        metavar="MHZ",
        help="hold the GPU's graphics clock while measuring (nvidia-smi -lgc, as root), by default at the one that the "
        "driver computes at, and release it at the end; without the flag no setting is touched",
    )
    parser.add_argument("--gpu", metavar="NAME", help="spec of the GPU (default: told by its name), or a file")
    parser.add_argument("--base", metavar="PROFILE", help="profile to complete what cannot be measured here")
    parser.add_argument("--name", help="name of the profile (default: <gpu>-measured)")
    parser.add_argument(
        "--form",
        choices=FORMS,
        help="roofline (default on CUDA), or the linear coefficients of one model (default on a CPU, whose attention "
        "follows no roofline)",
    )
    parser.add_argument(
        "--out", type=out_folder, required=True, metavar="DIR", help="folder for samples, profile and report"
    )
    parser.set_defaults(run=run_calibrate)


def _add_fit(commands: Any) -> None:  # noqa: ANN401
    parser = commands.add_parser("fit", help="fit a profile to samples, or to a server's run", description=_FIT_HELP)
    parser.add_argument("samples", type=Path, nargs="*", metavar="SAMPLES.csv", help="several are fitted together")
    parser.add_argument(
        "--bench",
        type=Path,
        metavar="RESULT",
        help="a server's run: JSON of `vllm bench serve`, or a table of requests",
    )
    parser.add_argument(
        "--constants", nargs="+", metavar="NAME", help="what to fit to --bench, at most 4 (default: what it tells)"
    )
    parser.add_argument("--experts", type=Path, metavar="FILE.csv.gz", help="samples of routed experts' kernels")
    parser.add_argument("--latents", type=Path, metavar="FILE.csv.gz", help="samples of latent attention (MLA)")
    parser.add_argument("--gdn", type=Path, metavar="FILE.csv.gz", help="samples of Gated DeltaNet")
    add_target(parser)
    parser.add_argument("--form", choices=FORMS, default="roofline", help="what to fit to samples (%(default)s)")
    # The engine's, as `run` has them; the base profile is where the fit starts.
    parser.later(partial(add_flags, without=NOT_OF_A_SERVER), ("--bench",))
    parser.set_defaults(run=run_fit, status="measured")


_FIT_HELP = (
    "Fit to measured operating points: CSV with the columns op, latency_s, model, batch_size, new_tokens, "
    "context_tokens, num_bytes ... (docs/calibration.md). Or, with --bench, to what a server did: say the model, the "
    "GPU and the engine as `kvtwin run` takes them. Writes the profile and a report."
)


def _add_derive(commands: Any) -> None:  # noqa: ANN401
    parser = commands.add_parser("derive", help="assume a profile for a GPU from a sibling's")
    parser.add_argument("--gpu", required=True, metavar="NAME", help="spec of the GPU, by name or file")
    parser.add_argument("--sibling", required=True, metavar="PROFILE", help="profile whose shares are taken over")
    parser.add_argument(
        "--memory-sibling", metavar="PROFILE", help="profile whose shares of the bandwidth are taken over"
    )
    parser.add_argument(
        "--base",
        metavar="PROFILE",
        help="profile with the GPU's own PCIe and all-reduce constants (default: the GPU's derived, else the sibling)",
    )
    parser.add_argument("--compute-share", type=float, help="share of the peak FLOP/s, if not the sibling's")
    parser.add_argument("--reason", default="", help="why that share")
    add_out(parser)
    parser.set_defaults(run=run_derive)


def run_list(arguments: argparse.Namespace) -> int:
    """Print the shipped profiles."""
    profiles = [load_profile(name) for name in shipped_profiles()]
    width = max(len(profile.name) for profile in profiles)
    for profile in profiles:
        used = "  (default)" if default_profile(profile.gpu).name == profile.name else ""
        print(f"{profile.name:{width}}  {profile.status:8}  {_errors_text(profile)}{used}")
    return 0


def _errors_text(profile: Profile) -> str:
    residuals = profile.residuals or {}
    found = []
    for phase in ("prefill", "decode"):
        unseen, own = residuals.get(f"unseen_model_{phase}_mape"), residuals.get(f"{phase}_mape")
        error = own if unseen is None else unseen
        if error is not None:
            found.append(f"{phase} {100 * error:.1f} %{' on unseen models' if unseen is not None else ''}")
    return ", ".join(found) or "no measured errors"


def run_show(arguments: argparse.Namespace) -> int:
    """Print a profile; draw it where its samples are at hand."""
    from calib.report import readable, table  # noqa: PLC0415

    name = arguments.profile.lower()
    # A GPU's name stands for its default profile, as in --gpu.
    profile = load_profile(gpu=name) if name in built_in_hardware() else load_profile(arguments.profile)
    print(f"{profile.name}: {profile.gpu}, {profile.status}, form {profile.form}, {profile.content_hash[:12]}\n")
    rows = []
    for name, constant in profile.constants.items():
        error = "-" if constant.stderr is None else readable(constant.stderr, constant.unit)
        rows.append((name, readable(constant.value, constant.unit), error, constant.source))
    print(table(("constant", "value", "standard error", "source"), rows))
    for title, values in (("provenance", profile.provenance), ("residuals", profile.residuals or {})):
        print(f"\n{title}:" + ("" if values else " none"))
        for key, value in values.items():
            print(f"  {key}: {value}")
    for gpus, points in (profile.all_reduce or {}).items():
        (least, _), (most, _) = points[0], points[-1]
        print(f"\nall-reduces on {gpus} GPUs: {len(points)} points measured, {least:,.0f} to {most:,.0f} bytes")
    for kind in ("", *PRODUCT_FORMATS):
        if points := getattr(profile, product_name(kind, "linear_factors")):
            print(f"\n{kind.upper()}{' ' * bool(kind)}matrix products over their roofline, by tokens:")
            print("  " + ", ".join(f"{tokens:,}: {factor:.3f}" for tokens, factor in points))
    limits = profile.range
    if limits is not None:
        print("\nrange seen:")
        for field in ("tokens", "batch", "context_tokens"):
            pair = getattr(limits, field)
            if pair is not None:
                print(f"  {field}: {pair[0]:g} to {pair[1]:g}")
    if arguments.figure is not None:
        _draw_profile(profile, arguments.samples, arguments.figure)
    return 0


def _draw_profile(profile: Profile, samples: Path | None, path: Path) -> None:
    from calib.figure import draw_fit  # noqa: PLC0415
    from sim.results.figures.style import save_figure  # noqa: PLC0415

    source = samples or DATA / f"{profile.name}.csv.gz"
    if samples is None and not source.exists():
        raise UserError(f"--figure: the samples of {profile.name} are not shipped: name them with --samples FILE")
    status: Status = "measured" if profile.status == "measured" else "imported"
    report = fit_samples([source], load_hardware(profile.gpu), None, profile.name, status, profile.form)
    print(f"\nwrote {save_figure(path, draw_fit(report))}")


def run_diff(arguments: argparse.Namespace) -> int:
    """Print two profiles side by side."""
    from calib.report import readable, table  # noqa: PLC0415

    first, second = load_profile(arguments.first), load_profile(arguments.second)
    if first.form != second.form:
        raise UserError(
            f"{first.name} is of form {first.form}, {second.name} of form {second.form}: compare like forms"
        )
    rows = []
    for name in UNITS[first.form]:
        constant, other = first.constants.get(name), second.constants.get(name)
        ratio = f"{other.value / constant.value:.3f}" if constant and other and constant.value else "-"
        values = (readable(one.value, one.unit) if one else "-" for one in (constant, other))
        if constant or other:
            rows.append((name, *values, ratio))
    print(table(("constant", first.name, second.name, "second / first"), rows))
    if arguments.figure is not None:
        from calib.figure import draw_diff  # noqa: PLC0415
        from sim.results.figures.style import save_figure  # noqa: PLC0415

        print(f"wrote {save_figure(arguments.figure, draw_diff(first, second, arguments.model))}")
    return 0


def run_fit(arguments: argparse.Namespace) -> int:
    """Fit a file of samples, or a server's run."""
    bench = getattr(arguments, "bench", None)
    if (bench is None) != bool(arguments.samples):
        raise UserError(
            f"SAMPLES.csv and --bench RESULT: {'neither is' if bench is None else 'both are'} given; give one"
        )
    if bench is not None:
        from calib.server.cli import fit_bench  # noqa: PLC0415

        return fit_bench(arguments)
    if getattr(arguments, "constants", None) is not None:
        raise UserError("--constants: goes with --bench; samples tell all constants that they can")
    hardware = load_hardware(arguments.gpu)
    name = profile_name(arguments, hardware, arguments.status)
    kernels = {kind: path for kind in KERNEL_FILES if (path := getattr(arguments, kind, None))}
    report = fit_samples(
        arguments.samples, hardware, arguments.base, name, arguments.status, arguments.form, kernels=kernels
    )
    return write_report(report, arguments.out)


def run_derive(arguments: argparse.Namespace) -> int:
    """Write a derived profile."""
    from calib.derive import derive_profile  # noqa: PLC0415

    hardware, sibling = load_hardware(arguments.gpu), load_profile(arguments.sibling)
    # A GPU that nothing is shipped for has no base but the sibling.
    is_known = arguments.base is not None or derived_name(hardware) in shipped_profiles()
    profile = derive_profile(
        hardware,
        sibling,
        base_profile(arguments.base if is_known else arguments.sibling, hardware),
        compute_share=arguments.compute_share,
        reason=arguments.reason,
        memory=load_profile(arguments.memory_sibling) if arguments.memory_sibling else None,
    )
    path = arguments.out / f"{profile.name}.json"
    with owning(arguments.out):
        write_atomically(path, profile.to_json())
    print(f"wrote {path}")
    return 0


def run_calibrate(arguments: argparse.Namespace) -> int:
    """Measure, then fit."""
    from calib.measure.run import calibrate  # noqa: PLC0415

    hardware = load_hardware(arguments.gpu) if arguments.gpu else hardware_of(arguments.device)
    out, models = arguments.out, arguments.model
    name = profile_name(arguments, hardware, "measured")
    form = arguments.form or ("linear" if arguments.device == "cpu" and len(models) == 1 else "roofline")
    with owning(out):
        calibrate(
            arguments.device,
            models,
            out,
            quick=arguments.quick,
            dtype=arguments.dtype,
            seed=arguments.seed,
            lock_mhz=arguments.lock_clocks,
        )
        return write_report(fit_samples([out / SAMPLES_FILE], hardware, arguments.base, name, "measured", form), out)


def hardware_of(device: str) -> HardwareSpec:
    """The spec of the machine's GPU, by the name CUDA gives it."""
    if device == "cpu":
        return load_hardware("cpu")
    from calib.measure.run import device_name  # noqa: PLC0415

    return load_hardware(gpu_called(device_name(device)))
