"""From a scenario to a finished run: traffic, limits, engine, clock, results. What `kvtwin run` calls."""

import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Protocol, TypedDict

import simpy

from sim.clock.cluster import Cluster
from sim.clock.driver import Instance, Observer
from sim.clock.member import Member
from sim.cost.forms import build_cost
from sim.cost.model import CostModel
from sim.cost.pricing import Lanes
from sim.cost.profile import Profile, load_profile
from sim.engine.engine import Engine
from sim.engine.itl import GapCollector
from sim.engine.limits import Deployment, Limits
from sim.engine.scheduler import Scheduler
from sim.engine.sequence import Sequence
from sim.results.metrics import Goodput, RequestLog, TableSink
from sim.results.parts import Machine
from sim.results.schema import Backend
from sim.results.series import SAMPLE_LIMIT, Series
from sim.scenario import Scenario
from sim.specs.hardware import HardwareSpec, load_hardware
from sim.specs.memory import kv_cache_blocks
from sim.specs.models import ModelSpec, load_model
from sim.systems.base import Asked, Policy
from sim.topology import DEFAULT_ROUTER, ROUTERS
from sim.traffic import arrivals_of
from traces.errors import TraceError
from traces.request import Request

GIB = 1 << 30
LEAST_SAMPLES = 500
"""Rows of its time series that an engine keeps at least, however many there are."""
DTYPE_BYTES = {"half": 2.0, "float16": 2.0, "bfloat16": 2.0, "float32": 4.0}


@dataclass(frozen=True)
class Setup:
    """What a scenario resolves to for one policy."""

    scenario: Scenario
    policy: Policy
    label: str
    model: ModelSpec
    hardware: HardwareSpec
    profile: Profile
    limits: Limits
    cost: CostModel
    warnings: list[str] = field(default_factory=list)


def prepare(scenario: Scenario, label: str, policy: Policy) -> Setup:
    """Resolve names, size the pools as vLLM does and check the limits against each other."""
    warnings: list[str] = []
    model = load_model(scenario.model)
    if scenario.dtype != "auto":
        model = model.with_dtype(DTYPE_BYTES[scenario.dtype])
    hardware = load_hardware(scenario.gpu)
    profile = load_profile(scenario.profile, hardware)
    max_model_len = scenario.max_model_len or model.max_position_embeddings
    if max_model_len > model.max_position_embeddings:
        warnings.append(
            f"--max-model-len {max_model_len} is beyond the {model.max_position_embeddings} positions of {model.name}"
        )
    asked = Asked(
        max_model_len, scenario.max_num_seqs, scenario.max_num_batched_tokens, scenario.enable_chunked_prefill
    )
    engine = policy.engine_limits(asked)
    warnings += engine.warnings
    Goodput.parse(list(scenario.goodput))
    swap_space = scenario.swap_space
    if swap_space is None:
        # By default a policy takes at most half of the host's memory.
        swap_space = min(policy.default_swap_space_gib, hardware.host_memory_bytes / GIB / scenario.tp / 2)
    pool = kv_cache_blocks(
        model,
        hardware,
        tensor_parallel_size=scenario.tp,
        gpu_memory_utilization=scenario.gpu_memory_utilization,
        block_size=scenario.block_size,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_seqs=engine.max_num_seqs,
        swap_space_bytes_per_gpu=swap_space * GIB,
        num_gpu_blocks_override=scenario.num_gpu_blocks_override,
    )
    host_blocks = scenario.num_cpu_blocks_override
    limits = Limits(
        num_gpu_blocks=pool.num_gpu_blocks,
        num_cpu_blocks=pool.num_cpu_blocks if host_blocks is None else host_blocks,
        block_size=scenario.block_size,
        block_bytes=pool.block_bytes,
        max_model_len=max_model_len,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        enable_chunked_prefill=engine.enable_chunked_prefill,
    )
    cost = build_cost(model, hardware, profile, scenario.tp, pool.block_bytes, scenario.cost_form)
    return Setup(scenario, policy, label, model, hardware, profile, limits, cost, warnings)


class HasIterations(Protocol):
    """An instance on either clock."""

    iterations: int


@dataclass(kw_only=True)
class EngineParts:
    """One engine of a run, the same on both clocks, and what all engines of the run share."""

    setup: Setup
    scheduler: Scheduler
    engine: Engine
    lanes: Lanes
    series: Series | None = None
    log: RequestLog
    """Of all engines, as `gaps` and `detailed` are."""
    gaps: GapCollector
    detailed: dict[int, list[float]] | None = None
    """Times of every token by request id, s, where they are kept."""


@dataclass(kw_only=True)
class Run:
    """A run under way or finished, on either clock: everything a result is made from."""

    engines: list[EngineParts]
    instances: list[HasIterations]
    """Those that drive the engines."""
    interrupted: bool = False
    error: str | None = None
    backend: Backend = "kvtwin-sim"
    machine: Machine | None = None
    """What executed the run, where anything real did."""
    trace_events: list[dict[str, object]] = field(default_factory=list)
    """Chrome trace events of others than our lanes, in microseconds of the run's clock."""

    @property
    def setup(self) -> Setup:
        """What the scenario resolved to, for the first engine."""
        return self.engines[0].setup

    @property
    def log(self) -> RequestLog:
        """The requests that ended."""
        return self.engines[0].log

    @property
    def gaps(self) -> GapCollector:
        """The gaps between tokens."""
        return self.engines[0].gaps

    @property
    def detailed(self) -> dict[int, list[float]] | None:
        """Times of every token by request id, s, where they are kept."""
        return self.engines[0].detailed


@dataclass(kw_only=True)
class SimulatedRun(Run):
    """A run on the virtual clock."""

    env: simpy.Environment
    serve: Callable[[], Generator[simpy.Event, None, None]]


@dataclass(frozen=True)
class Keep:
    """What a run keeps beside its statistics: intervals of the lanes, a time series, every token's time."""

    timeline: bool = False
    series: bool = False
    detailed: bool = False


def build_engine(setup: Setup, table: TableSink | None, keep: Keep) -> EngineParts:
    """Put together the one engine of a run, as both clocks have it."""
    goodput = Goodput.parse(list(setup.scenario.goodput)) if setup.scenario.goodput else None
    detailed: dict[int, list[float]] | None = {} if keep.detailed else None
    log = RequestLog(table, goodput)
    return _engine(setup, keep, log, GapCollector(), detailed, log.end, SAMPLE_LIMIT)


def build_engines(setup: Setup, table: TableSink | None, keep: Keep) -> list[EngineParts]:
    """Put together the engines of a cluster, which share their books."""
    first = build_engine(setup, table, keep)
    count = setup.scenario.num_engines
    shared = first.log, first.gaps, first.detailed
    limit = max(LEAST_SAMPLES, SAMPLE_LIMIT // count)
    return [_engine(setup, keep, *shared, partial(first.log.end, where=(i,)), limit) for i in range(count)]


def _engine(
    setup: Setup,
    keep: Keep,
    log: RequestLog,
    gaps: GapCollector,
    detailed: dict[int, list[float]] | None,
    on_end: Callable[[Sequence], None],
    samples: int,
) -> EngineParts:
    scenario = setup.scenario
    deployment = Deployment(setup.model, setup.hardware, scenario.tp, setup.cost, setup.profile)
    scheduler = setup.policy.scheduler(setup.limits, gaps, deployment)
    lanes = Lanes(keep_intervals=keep.timeline)
    if detailed is not None:
        scheduler.record_tokens(detailed)
    return EngineParts(
        setup=setup,
        scheduler=scheduler,
        engine=Engine(scheduler, setup.policy.length_predictor(scenario.seed), on_end),
        lanes=lanes,
        series=Series(scheduler, lanes, samples) if keep.series or keep.timeline else None,
        log=log,
        gaps=gaps,
        detailed=detailed,
    )


def build_run(
    setup: Setup,
    requests: Iterable[Request],
    *,
    table: TableSink | None = None,
    keep: Keep = Keep(),
    jump: bool = True,
) -> SimulatedRun:
    """Put engines and what drives them together; `execute` sets it going."""
    env, scenario = simpy.Environment(), setup.scenario
    arrivals = arrivals_of(scenario, requests)
    if scenario.num_engines == 1:
        parts = build_engine(setup, table, keep)
        instance = Instance(env, parts.engine, setup.cost, arrivals, parts.lanes, **_driven(parts, jump))
        return SimulatedRun(engines=[parts], instances=[instance], env=env, serve=instance.serve)
    engines = build_engines(setup, table, keep)
    ended = arrivals.ended if arrivals.hears_ends else None
    members = [
        Member(env, parts.engine, parts.setup.cost, parts.lanes, ended=ended, **_driven(parts, jump))
        for parts in engines
    ]
    cluster = Cluster(env, members, arrivals, ROUTERS[scenario.router or DEFAULT_ROUTER](scenario.seed))
    return SimulatedRun(engines=engines, instances=[*members], env=env, serve=cluster.serve)


def _driven(parts: EngineParts, jump: bool) -> "_Driven":
    series = parts.series
    return {
        "layers": parts.setup.model.num_layers,
        "block_bytes": parts.setup.limits.block_bytes,
        "jump": jump,
        "observer": series.observe if series is not None else None,
    }


class _Driven(TypedDict):
    layers: int
    block_bytes: float
    jump: bool
    observer: Observer | None


def execute(run: SimulatedRun) -> SimulatedRun:
    """Run to the end.

    An interrupt (Ctrl-C) or a trace that turns out bad half-way ends the run early; what is finished stays valid, and
    `interrupted` or `error` says so.
    """
    serving, stop = run.env.process(run.serve()), run.env.event()
    try:
        with _interrupt_as(stop):
            run.env.run(until=serving | stop)
        run.interrupted = not serving.triggered
    except KeyboardInterrupt:
        run.interrupted = True
    except TraceError as error:
        run.error = str(error)
    return run


@contextmanager
def _interrupt_as(stop: simpy.Event) -> Iterator[None]:
    """Ctrl-C ends the run between two events, so that no request is counted by half; a second one ends it at once."""
    usual = signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not usual:
        yield
        return

    def interrupt(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, usual)
        stop.succeed()

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
