"""`calibrate`: measure a machine point by point; a killed run resumes with the same arguments."""

import hashlib
import json
import re
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfile
from time import perf_counter
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from calib.measure.log import Header, Measured, Note, PointLog, Skipped
from calib.measure.plan import Plan, make_plan
from calib.measure.provenance import comments, provenance
from calib.measure.timing import Rule
from calib.samples import Sample, write_samples
from gpu_runtime.cli import check_installed
from sim.errors import UserError
from sim.files import make_folder, write_atomically
from sim.run.prepare import DTYPE_BYTES
from sim.specs.json_file import find_file
from sim.specs.model_spec import ModelSpec
from sim.specs.models import BUILT_IN, built_in_models, load_model
from sim.version import VERSION

if TYPE_CHECKING:
    from calib.measure.bench import Bench
    from calib.measure.readings import Readings

LOG, SAMPLES, PROVENANCE, CONFIGS = "points.jsonl", "samples.csv", "provenance.json", "configs"
"""Files of the output folder, and the subfolder for copies of models' configs."""
RULES = {True: Rule(budget_s=0.1, steady_s=0.1), False: Rule()}
"""By whether the run is quick."""
HURRY_S = {True: 40.0, False: 480.0}
"""Points that would begin later than their share of this are measured as little as their rule allows: under a minute,
under ten."""


@dataclass(frozen=True)
class _Model:
    """A model to time: its name in samples, its spec, its config's file and whether that is built in."""

    name: str
    spec: ModelSpec
    config: Path
    built_in: bool


def device_name(device: str) -> str:
    """The name CUDA gives the first GPU, or the processor's. UserError where there is no such device."""
    _check_device(device)
    from calib.measure import machine  # noqa: PLC0415

    return machine.device_name(device)


def calibrate(
    device: str,
    models: Sequence[str],
    out: Path,
    *,
    quick: bool,
    dtype: str | None = None,
    seed: int = 0,
    ops: Sequence[str] | None = None,
    lock_mhz: int | None = None,
) -> list[Sample]:
    """Measure layers, copies and overlaps; write `samples.csv`, `provenance.json` and `points.jsonl` to a folder.

    Args:
        device: "cuda" (the first GPU, and all for all-reduces) or "cpu".
        models: built-in names or paths of config.json, whose layer shapes are timed.
        out: the folder; what an earlier run with the same settings has measured there is not measured again.
        quick: fewer shapes and repeats.
        dtype: of weights and KV cache; None: bfloat16 or float16 on CUDA, whichever it computes, float32 on a CPU.
        seed: of random weights, inputs and block tables.
        ops: measure only these keys of `OPS`; None: all.
        lock_mhz: graphics clock at which the first GPU is held while measuring; 0: its default; None: none is locked.

    Raises:
        UserError: no such device, no torch, a model the runtime does not compute, a folder with other measurements.
    """
    _check_device(device)
    if not 0 <= seed < 1 << 63:
        raise UserError(f"--seed: {seed} is not between 0 and 2**63 - 1")
    found = _models(models)
    import torch  # noqa: PLC0415

    from calib.measure import machine  # noqa: PLC0415
    from gpu_runtime.live import default_dtype  # noqa: PLC0415

    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    kind: torch.dtype = getattr(torch, dtype or default_dtype(device))
    settings = machine.device_facts(place) | {
        "kvtwin": VERSION,
        "dtype": str(kind).removeprefix("torch."),
        "models": ", ".join(f"{model.name} ({_sha256(model.config)[:12]})" for model in found),
        "grid": "quick" if quick else "full",
        "seed": str(seed),
        "ops": ", ".join(ops) if ops else "all",
    }
    make_folder(out, "--out")
    begun, limits = machine.now_utc(), machine.capacity_of(place)
    with (
        machine.locked_clocks(place, lock_mhz) as clocks,
        closing(PointLog(out / LOG, Header(settings | {"clocks": clocks}, limits, begun))) as log,
    ):
        _keep_configs(found, out)
        specs = {model.name: model.spec for model in found}
        plan = make_plan(specs, log.header.limits, quick=quick, element_bytes=kind.itemsize, ops=ops)
        if any(not log.has(point) for point in plan.points):
            from calib.measure.bench import Bench  # noqa: PLC0415
            from calib.measure.readings import Readings  # noqa: PLC0415

            log.add(Note(machine.now_utc(), machine.state_under_load(place, kind)))
            # A stream of its own, as the runtime's copies have: the default one takes no batched copies.
            with torch.cuda.stream(torch.cuda.Stream(place) if place.type == "cuda" else None):
                bench = Bench(plan, specs, log.header.limits, place, kind, seed)
                _measure(bench, plan, log, Readings(place), quick)
            log.add(Note(machine.now_utc(), machine.state_under_load(place, kind)))
        return _write(log, plan, device, out)


def _check_device(device: str) -> None:
    check_installed(("torch", "psutil"), "gpu")
    from gpu_runtime.live import check_device  # noqa: PLC0415 - torch is slow to import

    check_device(device)


def _models(names: Sequence[str]) -> list[_Model]:
    """The models by the names they will have in samples; one given twice counts once."""
    from gpu_runtime.model.config import DecoderConfig  # noqa: PLC0415

    found: dict[str, _Model] = {}
    for given in dict.fromkeys(names):
        spec, config = load_model(given), find_file(given, BUILT_IN, "model")
        config = config / "config.json" if config.is_dir() else config
        built_in = given.lower() in built_in_models()
        name = given.lower() if built_in else f"{CONFIGS}/{re.sub(r'[^A-Za-z0-9._-]', '-', spec.name)}.json"
        if {spec.attention_dtype_bytes, spec.mlp_dtype_bytes, spec.kv_dtype_bytes} != {spec.dtype_bytes}:
            raise UserError(f"{config}: is quantised, and the runtime computes unquantised models: give another config")
        DecoderConfig.from_spec(spec)
        other = found.get(name)
        if other and _sha256(other.config) != _sha256(config):
            raise UserError(f"--model: {other.config} and {config} have the same name {spec.name!r}: rename one folder")
        found[name] = _Model(name, spec, config, built_in)
    return list(found.values())


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _keep_configs(models: Sequence[_Model], out: Path) -> None:
    """Copies of given configs, so that the samples' `model` is found from their folder."""
    for model in models:
        if not model.built_in:
            (out / CONFIGS).mkdir(exist_ok=True)
            if (out / model.name).resolve() != model.config.resolve():
                copyfile(model.config, out / model.name)


def rule_of(spent_s: float, done: float, *, quick: bool) -> Rule:
    """How a point is measured after `spent_s` and this share of the points: those late are hurried, wherever they are.

    Hurrying only what comes last would leave whole steps, and what is fitted to them, with the fewest repeats.
    """
    return RULES[quick] if spent_s <= HURRY_S[quick] * done else RULES[quick].hurried()


def _measure(bench: "Bench", plan: Plan, log: PointLog, readings: "Readings", quick: bool) -> None:
    from calib.measure.clocks import Unmeasurable  # noqa: PLC0415

    begun = perf_counter()
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    console = Console(stderr=True, force_jupyter=False)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=len(plan.points))
        left = [point for point in plan.points if not log.has(point)]
        for point in plan.points:
            progress.update(task, description=point.label)
            if not log.has(point):
                rule = rule_of(perf_counter() - begun, left.index(point) / len(left), quick=quick)
                try:
                    with readings.during() as states:
                        repeats_s = bench.measure(point, rule)
                    log.add(Measured(point, repeats_s, states))
                except Unmeasurable as reason:
                    log.add(Skipped(point, str(reason)))
            progress.advance(task)


def _write(log: PointLog, plan: Plan, device: str, out: Path) -> list[Sample]:
    """The results, from the log alone: the same log gives the same files."""
    kind = DTYPE_BYTES[log.header.settings["dtype"]]
    measured = [point.sample(log.measured[point]) for point in plan.points if point in log.measured]
    samples = [msgspec.structs.replace(s, dtype_bytes=kind) if s.model else s for s in measured]
    facts = provenance(log, plan, device)
    by_reason: dict[str, list[str]] = {}
    for entry in facts["skipped"]:
        by_reason.setdefault(entry["reason"], []).append(entry["point"])
    for reason, labels in by_reason.items():
        print(f"skipped ({reason}): {'; '.join(labels)}", file=sys.stderr)
    for warning in facts["warnings"]:
        print(f"warning: {warning}", file=sys.stderr)
    write_atomically(out / PROVENANCE, json.dumps(facts, indent=2).encode() + b"\n")
    write_samples(out / SAMPLES, samples, comments(facts))
    return samples
