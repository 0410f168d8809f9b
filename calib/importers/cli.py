"""The commands `profile import`."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from calib.profile_files import add_out, add_target, base_profile, fit_samples, profile_name, write_report
from sim.cost.kernels import KernelTables
from sim.errors import UserError
from sim.run.folders import owning
from sim.specs.hardware import load_hardware
from sim.specs.models import load_model

if TYPE_CHECKING:
    from calib.samples import Sample

SAMPLES_HELP = (
    "Fit the roofline to measured operating points: CSV with the columns op, latency_s, model, batch_size, "
    "new_tokens, context_tokens, num_bytes ... (docs/calibration.md). Writes the profile, a report and a figure."
)


def add_imports(commands: Any, run_fit: Callable[[argparse.Namespace], int]) -> None:  # noqa: ANN401
    """Mount a command for each kind of table; `run_fit` takes samples as they are."""
    parser = commands.add_parser("import", help="turn public tables into samples and fit them")
    kinds = parser.add_subparsers(title="tables", metavar="TABLES", required=True)
    tables = kinds.add_parser("aiconfigurator", help="aiconfigurator-core's operator tables (needs pyarrow)")
    tables.add_argument(
        "--system", required=True, help="a100_sxm, l40s, h100_sxm, h200_sxm, b200_sxm, b300_sxm or gb200"
    )
    tables.add_argument("--model", action="append", help="models to compose; repeatable (default: six Llama and Qwen)")
    tables.add_argument("--engine", default="vllm", help="whose attention: vllm, sglang or trtllm (%(default)s)")
    tables.add_argument("--tables", type=Path, metavar="DIR", help="the package's systems/data (default: installed)")
    add_out(tables)
    tables.set_defaults(run=run_import_aiconfigurator, gpu=None, base=None, name=None)
    vidur = kinds.add_parser("vidur", help="Vidur's mlp, attention and all_reduce CSVs")
    vidur.add_argument("--model", required=True, help="whose tables these are")
    vidur.add_argument("--mlp", type=Path, required=True, metavar="CSV")
    vidur.add_argument("--attention", type=Path, metavar="CSV", help="without it, samples of the operators alone")
    vidur.add_argument("--all-reduce", type=Path, metavar="CSV")
    add_target(vidur)
    vidur.set_defaults(run=run_import_vidur)
    serving = kinds.add_parser("llmservingsim", help="a tpN folder of LLMServingSim's profiler")
    serving.add_argument("tables", type=Path, metavar="DIR", help="dense.csv, attention.csv and per_sequence.csv")
    serving.add_argument("--model", required=True, help="whose kernels these are")
    serving.add_argument(
        "--tp", type=int, default=1, metavar="N", help="GPUs that the model was split over (%(default)s)"
    )
    serving.add_argument(
        "--form", choices=("roofline", "table"), default="roofline",
        help="fit a roofline, or take the kernels' times as they are, with the roofline beyond them (%(default)s)",
    )  # fmt: skip
    add_target(serving)
    serving.set_defaults(run=run_import_llmservingsim)
    steps = kinds.add_parser("steps", help="whole steps: prompt_time and token_time in ms (Splitwise's perf_model.csv)")
    steps.add_argument("table", type=Path, metavar="CSV")
    steps.add_argument("--hardware", default="", help="value of the column `hardware` to take")
    steps.add_argument(
        "--model", action="append", required=True, metavar="THEIRS=OURS", help="model of the table; repeatable"
    )
    add_target(steps)
    steps.set_defaults(run=run_import_steps)
    samples = kinds.add_parser("samples", help="a samples CSV measured by others", description=SAMPLES_HELP)
    samples.add_argument("samples", type=Path, nargs="+", metavar="SAMPLES.csv", help="several are fitted together")
    add_target(samples)
    samples.set_defaults(run=run_fit, status="imported", form="roofline")


def run_import_aiconfigurator(arguments: argparse.Namespace) -> int:
    """Compose samples from operator tables and fit them."""
    from calib.importers import aiconfigurator  # noqa: PLC0415
    from calib.importers.aiconfigurator_experts import import_experts  # noqa: PLC0415
    from calib.importers.aiconfigurator_gdn import import_gdn  # noqa: PLC0415
    from calib.importers.aiconfigurator_latents import import_latents  # noqa: PLC0415

    models = arguments.model or aiconfigurator.MODELS
    found = aiconfigurator.import_samples(arguments.system, models, arguments.engine, arguments.tables)
    arguments.gpu = aiconfigurator.SYSTEMS[arguments.system].gpu
    root, files = (arguments.tables or aiconfigurator.package_data()) / arguments.system, {}
    for kind, read in (("experts", import_experts), ("latents", import_latents), ("gdn", import_gdn)):
        samples, kernels = read(root)
        if samples:
            about = {"tables": found[1]["tables"], "system": arguments.system, "kernels": kernels}
            files[kind] = _write_samples(arguments, (samples, about), f"-{kind}")
    return _import(arguments, found, files=files)


def run_import_vidur(arguments: argparse.Namespace) -> int:
    """Compose samples from Vidur's tables and fit them."""
    from calib.importers import vidur  # noqa: PLC0415

    found = vidur.import_samples(arguments.model, arguments.mlp, arguments.attention, arguments.all_reduce)
    if arguments.attention is None:
        # Operators alone tell no profile: they are fitted together with other samples.
        _write_samples(arguments, found)
        return 0
    return _import(arguments, found)


def run_import_llmservingsim(arguments: argparse.Namespace) -> int:
    """Compose samples from kernel times and fit them, or take the kernel times themselves."""
    from calib.importers import llmservingsim  # noqa: PLC0415

    load_model(arguments.model).check_tp(arguments.tp)
    found = llmservingsim.import_samples(arguments.tables, arguments.model, arguments.tp)
    kernels = None
    if arguments.form == "table":
        kernels = llmservingsim.import_tables(arguments.tables, arguments.model, arguments.tp)
    return _import(arguments, found, kernels)


def run_import_steps(arguments: argparse.Namespace) -> int:
    """Take whole steps from a table and fit them."""
    from calib.importers import steps  # noqa: PLC0415

    models: dict[str, str] = {}
    for pair in arguments.model:
        theirs, equals, ours = pair.partition("=")
        if not equals or not theirs or not ours:
            raise UserError(f"--model: {pair!r} is not THEIRS=OURS, for example llama2-70b=llama-2-70b")
        models[theirs] = ours
    return _import(arguments, steps.import_samples(arguments.table, arguments.hardware, models))


def _import(
    arguments: argparse.Namespace,
    found: "tuple[list[Sample], dict[str, str]]",
    kernels: KernelTables | None = None,
    files: Mapping[str, Path] = MappingProxyType({}),
) -> int:
    from calib.fit import check_plausible  # noqa: PLC0415

    hardware = load_hardware(arguments.gpu)
    base_profile(arguments.base, hardware)
    with owning(arguments.out):
        path = _write_samples(arguments, found)
        name = profile_name(arguments, hardware, "imported")
        report = fit_samples([path], hardware, arguments.base, name, "imported", kernels=files)
        check_plausible(report, hardware)
        if kernels is not None:
            profile = msgspec.structs.replace(report.profile, form="table", kernels=kernels)
            report = replace(report, profile=profile)
        return write_report(report, path.parent)


def _write_samples(
    arguments: argparse.Namespace, found: tuple[Sequence[msgspec.Struct], dict[str, str]], kind: str = ""
) -> Path:
    from calib.samples import Sample, write_samples  # noqa: PLC0415

    samples, provenance = found
    name = profile_name(arguments, load_hardware(arguments.gpu), "imported")
    path = arguments.out / f"{name}{kind}.csv.gz"
    with owning(arguments.out):
        about = [f"{key}: {value}" for key, value in provenance.items()]
        write_samples(path, samples, about, type(samples[0]) if samples else Sample)
    print(f"wrote {path} ({len(samples)} samples)")
    return path
