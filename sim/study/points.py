"""One run of a study: what decides it, hashed into its key, and the run itself, on whatever machine a worker is."""

import gc
import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from functools import cache
from math import floor
from pathlib import Path
from time import monotonic
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import Struct

from sim.clock.instance import Observer
from sim.engine.plan import IterationPlan, StepTimes
from sim.errors import InvariantError, UserError
from sim.options.policies import parse_policy
from sim.options.scenario import build_scenario
from sim.options.values import flag
from sim.results.result import PER_REQUEST, assemble, result_data
from sim.run.prepare import Setup, prepare
from sim.run.runs import Run
from sim.run.simulate import build_run, execute
from sim.run.traffic import requests_of
from sim.study.shared_trace import SharedTrace
from sim.systems import DEFAULT_POLICY
from sim.systems.base import Policy
from traces.errors import TraceError

PACKAGES = Path(__file__).parents[2]
CODE = ("sim/**/*.py", "sim/**/*.json", "traces/**/*.py", "traces/**/*.json")
"""What decides a run beside its options. Profiles are hashed with the runs that use them."""
BESIDE = ("sim/study/", "sim/results/figures/")
ALONE = ("sim/study/points.py", "sim/study/shared_trace.py")
"""Folders of the code that decide nothing of a run, and what in them does."""
ARRAYS = (*PER_REQUEST, "itls", "per_request")
GC_THRESHOLD = 100_000
"""As the command line has it: workers are processes of their own."""


class Task(Struct, frozen=True):
    """A run as a worker needs it: options by field, and seconds after which it is given up."""

    key: str
    options: dict[str, Any]
    trace: str | None
    """Hash of the trace, by which workers have it; None: generated traffic, or a trace that they read themselves."""
    max_seconds: float | None = None
    until: "tuple[Most, ...]" = ()
    """Bounds with one of which missed for sure the run may end: nothing else is asked of it."""


class Most(Struct, frozen=True):
    """A bound on a percentile of some time of each request, as `RequestLog` keeps it."""

    times: Literal["ttft_s", "tpot_s", "e2el_s"]
    percent: float
    bound_s: float

    def misses(self, count: int) -> int:
        """Of so many requests at most, how many beyond the bound put the percentile beyond it.

        Percentiles lie between two requests (numpy's `linear`): the lower of these has to be beyond the bound.
        """
        return count - floor((count - 1) * self.percent / 100.0)


class Outcome(Struct, frozen=True):
    """How a run ended: what result.json holds but for its arrays, or why there is no result."""

    key: str
    result: dict[str, Any] | None = None
    error: str | None = None
    max_seconds: float | None = None
    """The limit that it ran into, where it did."""
    missed_s: float | None = None
    """When the run was ended since it was sure to miss a bound, s of simulated time."""


class OutOfTimeError(Exception):
    """A run took longer than it may."""


class _MissedError(Exception):
    """A run is sure to miss a bound, as was known at a moment of it."""

    def __init__(self, at_s: float) -> None:
        super().__init__()
        self.at_s = at_s


def policy_of(options: Mapping[str, Any]) -> tuple[str, Policy]:
    """The policy of a run, and its label. UserError where there is none such."""
    texts = options.get("policy", DEFAULT_POLICY)
    return parse_policy(texts if isinstance(texts, str) else texts[0], options)


def setup_of(options: Mapping[str, Any]) -> Setup:
    """What the options of a run resolve to. UserError where they are bad."""
    label, policy = policy_of(options)
    return prepare(build_scenario({name: value for name, value in options.items() if name != "policy"}), label, policy)


@cache
def code_hash() -> str:
    """SHA-256 (hex) of the simulator's code and data files."""
    digest = hashlib.sha256(f"numpy {np.__version__}".encode())
    for pattern in CODE:
        for path in sorted(PACKAGES.glob(pattern)):
            name = path.relative_to(PACKAGES).as_posix()
            if name in ALONE or not name.startswith(BESIDE):
                digest.update(f"{name}\0".encode() + path.read_bytes())
    return digest.hexdigest()


@cache
def file_hash(path: str) -> str:
    """SHA-256 (hex) of a file. UserError where it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{flag('trace')}: cannot read {path} ({error.strerror})") from error


def key_of(setup: Setup) -> str:
    """SHA-256 (hex) of everything that decides a run: code, options, and the content of every file they name."""
    scenario, policy = asdict(setup.scenario), setup.policy
    trace = scenario.pop("trace")
    pools = [setup] if setup.decode is None else [setup, setup.decode]
    content = {
        "code": code_hash(),
        "policy_code": _module_hash(type(policy)),
        "label": setup.label,
        "scenario": scenario,
        "trace": None if trace is None else file_hash(trace),
        "policy": [type(policy).__name__, {f.name: repr(getattr(policy, f.name)) for f in fields(policy)}],
        "engines": [
            [
                pool.profile.content_hash,
                pool.engine_profile.content_hash if pool.engine_profile else None,
                repr(pool.model),
                repr(pool.hardware),
            ]
            for pool in pools
        ],
    }
    return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()


@cache
def _module_hash(kind: type) -> str:
    """Of a preset that another package brings; ours are in `code_hash`."""
    path = getattr(sys.modules[kind.__module__], "__file__", None)
    return file_hash(path) if path else kind.__module__


def perform(task: Task, trace: SharedTrace | None) -> Outcome:
    """Run one task. What is wrong with this run alone is in the outcome; an interrupt and a full machine are raised."""
    gc.set_threshold(GC_THRESHOLD, 50, 50)
    try:
        setup = setup_of(task.options)
        run = build_run(setup, requests_of(setup, trace))
        if task.max_seconds is not None:
            _give_up_after(run, task.max_seconds)
        if task.until and setup.scenario.num_prompts is not None:
            _end_once_missed(run, task.until, setup.scenario.num_prompts)
        execute(run)
    except (UserError, TraceError) as error:
        return Outcome(task.key, error=str(error))
    except _MissedError as missed:
        return Outcome(task.key, missed_s=missed.at_s)
    except OutOfTimeError:
        text = f"took more than --max-seconds {task.max_seconds:g}; allow more, or make the point smaller"
        return Outcome(task.key, error=text, max_seconds=task.max_seconds)
    except (InvariantError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
        # A bug of ours in one run, or of a part from another package, must not take the others with it.
        return Outcome(task.key, error=f"{type(error).__name__}: {error}; run it alone to see where")
    if run.interrupted:
        raise KeyboardInterrupt
    if run.error:
        return Outcome(task.key, error=run.error)
    data = {name: value for name, value in result_data(assemble(run)).items() if name not in ARRAYS}
    data["arrival_span_s"] = arrival_span_s(run)
    return Outcome(task.key, msgspec.to_builtins(data))


def _give_up_after(run: Run, seconds: float) -> None:
    """Have every engine look at the clock after each of its plans."""
    end_s = monotonic() + seconds

    def look(plan: IterationPlan, start_s: float, times: StepTimes) -> None:
        if monotonic() > end_s:
            raise OutOfTimeError

    _watch(run, look)


def _end_once_missed(run: Run, bounds: Sequence[Most], count: int) -> None:
    """Have the run of so many requests end as soon as those that have ended miss one of the bounds for sure."""
    log = run.log
    left = [bound.misses(count) for bound in bounds]
    seen = [0] * len(left)

    def look(plan: IterationPlan, start_s: float, times: StepTimes) -> None:
        for place, bound in enumerate(bounds):
            found = getattr(log, bound.times)
            if len(found) == seen[place]:
                continue
            left[place] -= sum(time_s > bound.bound_s for time_s in found[seen[place] :])
            seen[place] = len(found)
            if left[place] <= 0:
                raise _MissedError(start_s)

    _watch(run, look)


def _watch(run: Run, look: Observer) -> None:
    """Have all engines tell their plans to one more."""
    for instance in run.instances:
        instance.observer = look if instance.observer is None else _both(instance.observer, look)


def _both(first: Observer, second: Observer) -> Observer:
    def look(plan: IterationPlan, start_s: float, times: StepTimes) -> None:
        first(plan, start_s, times)
        second(plan, start_s, times)

    return look


def arrival_span_s(run: Run) -> float | None:
    """First arrival to last, s; None where the requests were not kept."""
    if run.log.requests is None:
        return None
    times = [row.arrival_s for row in run.log.requests]
    return max(times) - min(times) if times else 0.0
