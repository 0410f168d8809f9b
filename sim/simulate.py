"""From a scenario to a finished run: traffic, limits, engine, clock, results. What `kvtwin run` calls."""

import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Protocol

import simpy

from sim.clock.arrivals import Arrivals
from sim.clock.closed_loop import ClosedLoop
from sim.clock.driver import Instance
from sim.cost.forms import build_cost
from sim.cost.model import CostModel
from sim.cost.pricing import Lanes
from sim.cost.profile import Profile, load_profile
from sim.engine.engine import Engine
from sim.engine.itl import GapCollector
from sim.engine.limits import Deployment, Limits
from sim.engine.scheduler import Scheduler
from sim.results.metrics import Goodput, RequestLog, TableSink
from sim.results.parts import Machine
from sim.results.schema import Backend
from sim.results.series import Series
from sim.scenario import Scenario
from sim.specs.hardware import HardwareSpec, load_hardware
from sim.specs.memory import kv_cache_blocks
from sim.specs.models import ModelSpec, load_model
from sim.systems.base import Asked, Policy
from traces import readers, transforms
from traces.errors import TraceError
from traces.request import Request

DEFAULT_WORKLOAD_PROMPTS = 1000
GIB = 1 << 30
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


def traffic(scenario: Scenario) -> Iterable[Request]:
    """The scenario's requests, read or generated as they are needed."""
    requests: Iterable[Request]
    if scenario.trace is not None:
        requests = readers.open_trace(scenario.trace, format=scenario.trace_format, time_unit=scenario.time_unit)
        if scenario.num_prompts is not None:
            requests = transforms.head(requests, scenario.num_prompts)
        if scenario.request_rate is not None:
            requests = transforms.at_request_rate(
                requests, scenario.request_rate, burstiness=scenario.burstiness, seed=scenario.seed
            )
    else:
        requests = _generated(scenario)
    if scenario.clip is not None:
        requests = transforms.clip(requests, scenario.clip)
    if scenario.rate_scale != 1.0:
        requests = transforms.scale_rate(requests, scenario.rate_scale)
    return requests


def _generated(scenario: Scenario) -> Iterator[Request]:
    from traces.generators import generate  # noqa: PLC0415 - numpy is slow to import and replays do not need it

    lengths = {"input_len": scenario.input_len, "output_len": scenario.output_len}
    return generate(
        scenario.workload or "",
        num_prompts=scenario.num_prompts or DEFAULT_WORKLOAD_PROMPTS,
        request_rate=scenario.request_rate,
        burstiness=scenario.burstiness,
        seed=scenario.seed,
        **lengths,
    )


def arrivals_of(scenario: Scenario, requests: Iterable[Request]) -> Arrivals:
    """The requests as they are sent: as they arrive, or in the scenario's closed loop."""
    if scenario.max_concurrency is None and not scenario.closed_sessions:
        return Arrivals(requests)
    return ClosedLoop(requests, scenario.max_concurrency, by_session=scenario.closed_sessions)


class HasIterations(Protocol):
    """An instance on either clock."""

    iterations: int


@dataclass(kw_only=True)
class EngineParts:
    """The parts of a run that are the same on both clocks."""

    setup: Setup
    scheduler: Scheduler
    engine: Engine
    log: RequestLog
    gaps: GapCollector
    lanes: Lanes
    series: Series | None = None
    detailed: dict[int, list[float]] | None = None
    """Times of every token by request id, s, where they are kept."""


@dataclass(kw_only=True)
class Run(EngineParts):
    """A run under way or finished, on either clock: everything a result is made from.

    Built as `Run(**vars(parts), ...)`: its inherited fields are exactly those of the parts.
    """

    instance: HasIterations
    interrupted: bool = False
    error: str | None = None
    backend: Backend = "kvtwin-sim"
    machine: Machine | None = None
    """What executed the run, where anything real did."""
    trace_events: list[dict[str, object]] = field(default_factory=list)
    """Chrome trace events of others than our lanes, in microseconds of the run's clock."""


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
    """Put together what both clocks share."""
    scenario = setup.scenario
    gaps = GapCollector()
    deployment = Deployment(setup.model, setup.hardware, scenario.tp, setup.cost, setup.profile)
    scheduler = setup.policy.scheduler(setup.limits, gaps, deployment)
    goodput = Goodput.parse(list(scenario.goodput)) if scenario.goodput else None
    log = RequestLog(table, goodput)
    lanes = Lanes(keep_intervals=keep.timeline)
    detailed: dict[int, list[float]] | None = {} if keep.detailed else None
    if detailed is not None:
        scheduler.record_tokens(detailed)
    return EngineParts(
        setup=setup,
        scheduler=scheduler,
        engine=Engine(scheduler, setup.policy.length_predictor(scenario.seed), log.end),
        log=log,
        gaps=gaps,
        lanes=lanes,
        series=Series(scheduler, lanes) if keep.series or keep.timeline else None,
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
    """Put an instance together; `execute` sets it going."""
    parts = build_engine(setup, table, keep)
    env, series = simpy.Environment(), parts.series
    instance = Instance(
        env,
        parts.engine,
        setup.cost,
        arrivals_of(setup.scenario, requests),
        parts.lanes,
        layers=setup.model.num_layers,
        block_bytes=setup.limits.block_bytes,
        jump=jump,
        observer=series.observe if series is not None else None,
    )
    return SimulatedRun(**vars(parts), instance=instance, env=env, serve=instance.serve)


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
