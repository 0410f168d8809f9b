"""`run_study`: every run of a study, each kept as it ends, so that what was interrupted goes on where it was."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from sim.errors import UserError
from sim.files import make_folder, write_atomically
from sim.options.scenario import READING
from sim.parts.options import Conditional, refuse_idle
from sim.results.comparison_sentences import engines_differ
from sim.run.prepare import Setup
from sim.study.axes import Study, Value, options_at
from sim.study.backends import Backend, outcomes
from sim.study.points import Most, Outcome, Task, code_hash, file_hash, key_of, setup_of
from sim.study.shared_trace import SharedTrace
from sim.version import VERSION
from traces.errors import TraceError

POINTS = "points"
STUDY_FILE = "study.json"

Told = Callable[[Outcome], None]
"""Hears of every outcome as it comes."""


class Place(Struct, frozen=True):
    """One run of a study: its axes' values, its options by field, and how it ended."""

    point: dict[str, Value]
    repeat: int
    options: dict[str, Any]
    outcome: Outcome
    num_gpus: int = 0
    conditional: tuple[Conditional, ...] = ()


class Means(Struct, frozen=True):
    """How the runs of a study are performed."""

    backend: Backend = "loky"
    address: str | None = None
    jobs: int | None = None
    max_seconds: float | None = None
    """Of a run, after which it is given up; None: never."""
    retry_failed: bool = False
    """Run again what failed before."""


class Store:
    """Outcomes by their keys, a file each, whole or not there; another study's may lie among them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / POINTS
        self.traces: dict[str, SharedTrace | None] = {}
        """What was read of traces, for all runs; None where one is bad."""
        make_folder(self.folder, "--out")

    def get(self, key: str) -> Outcome | None:
        """What is kept under a key; None where nothing is."""
        try:
            return msgspec.json.decode((self.folder / f"{key}.json").read_bytes(), type=Outcome)
        except (OSError, msgspec.MsgspecError):
            # Nothing is kept, or another program's file, or a disk's fault: the run is made again.
            return None

    def outcome_of(self, place: Place) -> Outcome:
        """How a run ended; of one that was refused or not made as it was planned."""
        return place.outcome if place.outcome.error else self.get(place.outcome.key) or place.outcome

    def put(self, outcome: Outcome) -> None:
        """Keep an outcome. UserError where the disk refuses."""
        content = msgspec.json.encode(outcome)
        with told_where(self.folder, "what is finished is kept: make room and give the same command again"):
            write_atomically(self.folder / f"{outcome.key}.json", content)


@contextmanager
def told_where(folder: Path, remedy: str) -> Iterator[None]:
    """Errors of writing into a folder, as the user's."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--out: cannot write into {folder} ({error.strerror or error}); {remedy}") from error


def engines_of_runs_differ(results: Iterable[Mapping[str, Any] | None]) -> str | None:
    """What is to be said first of a study's runs on several engines; None where there is one."""
    ran = (result for result in results if result is not None)
    return engines_differ((result["policy"], result.get("engine_profile", {}).get("name", "")) for result in ran)


def run_study(study: Study, folder: Path, means: Means, begin: Callable[[int], Told] | None = None) -> list[Place]:
    """Perform what of a study is not in `folder` yet; all its runs in order, repeats of a point beside one another.

    Args:
        study: what to run.
        folder: where outcomes are kept.
        means: where and how long.
        begin: is told how many runs are to be made, and returns what is called at the end of each.

    Raises:
        UserError: every run is refused for one reason, the folder cannot be written, or a worker died.
    """
    points, store = study.points, Store(folder)
    asked = {"where": study.where, "fixed": study.fixed, "axes": study.axes, "repeats": study.repeats}
    versions = {"kvtwin": VERSION, "code_sha256": code_hash()}
    text = json.dumps(asked | {"points": len(points), "versions": versions}, indent=1).encode() + b"\n"
    with told_where(folder, "name another folder"):
        write_atomically(folder / STUDY_FILE, text)

    planned = [
        place_of(options_at(study, point, repeat), point, repeat) for point in points for repeat in range(study.repeats)
    ]
    refused = {place.outcome.error for place in planned if place.outcome.error is not None}
    if len(refused) == 1 and all(place.outcome.error is not None for place in planned):
        raise UserError(f"{study.where}: every point is refused: {refused.pop()}")
    refuse_idle(one for place in planned for one in place.conditional)
    perform_missing(planned, store, means, begin)
    return [msgspec.structs.replace(place, outcome=store.outcome_of(place)) for place in planned]


def perform_missing(
    planned: Sequence[Place],
    store: Store,
    means: Means,
    begin: Callable[[int], Told] | None = None,
    until: tuple[Most, ...] = (),
) -> None:
    """Perform the runs that are not kept yet, each key once; `until` as of `Task`."""
    missing: dict[str, Task] = {}
    traces = store.traces
    for place in planned:
        key, trace = place.outcome.key, place.options.get("trace")
        if place.outcome.error is not None or key in missing or not _wanted(store.get(key), means):
            continue
        name = None if trace is None else _read(traces, place.options)
        missing[key] = Task(key, place.options, name, means.max_seconds, until)
    if not missing:
        return
    told = begin(len(missing)) if begin else None
    shared = {name: trace for name, trace in traces.items() if trace is not None}
    where = {"address": means.address, "jobs": means.jobs}
    for outcome in outcomes(list(missing.values()), shared, means.backend, **where):
        store.put(outcome)
        if told:
            told(outcome)


def _wanted(kept: Outcome | None, means: Means) -> bool:
    """Whether a run is to be made: it is not kept, or failed and may do better now."""
    if kept is None:
        return True
    if kept.error is None:
        return False
    longer = kept.max_seconds is not None and (means.max_seconds is None or means.max_seconds > kept.max_seconds)
    return means.retry_failed or longer


def place_of(options: dict[str, Any], point: Mapping[str, Value], repeat: int = 0) -> Place:
    """A run that is still to be performed; where its options are refused, that is its outcome."""
    try:
        setup = setup_of(options)
        return Place(dict(point), repeat, options, Outcome(key_of(setup)), num_gpus(setup), setup.conditional)
    except UserError as error:
        return Place(dict(point), repeat, options, Outcome("", error=str(error)))


def num_gpus(setup: Setup) -> int:
    """GPUs of a deployment."""
    scenario = setup.scenario
    if setup.decode is None:
        return scenario.num_engines * setup.tp * setup.pp
    pools = ((scenario.prefill_replicas, setup), (scenario.decode_replicas, setup.decode))
    return sum((count or 0) * pool.tp * pool.pp for count, pool in pools)


def _read(traces: dict[str, SharedTrace | None], options: Mapping[str, Any]) -> str | None:
    """The name of a run's trace among `traces`, read if it is not there; None where it is bad, as the run will say."""
    reading = {name: options[name] for name in ("trace_format", *READING) if name in options}
    name = f"{file_hash(options['trace'])} {sorted(reading.items())}"
    if name not in traces:
        try:
            traces[name] = SharedTrace.read(setup_of(options).scenario)
        except TraceError:
            traces[name] = None
    return name if traces[name] is not None else None
