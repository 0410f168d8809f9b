"""`Run`: engines and what they leave, on either clock; everything a result is made from."""

from collections.abc import Sequence as Seq
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec

from sim.clock.instance import Observer
from sim.cost.pricing import Lanes
from sim.engine.engine import Engine
from sim.engine.itl import GapCollector
from sim.engine.limits import Deployment
from sim.engine.plan import IterationPlan, StepTimes
from sim.engine.scheduler import Scheduler
from sim.engine.sequence import Sequence
from sim.kv.offload_options import OffloadOptions
from sim.results.goodput import Goodput
from sim.results.journal import Journal
from sim.results.metrics import RequestLog, TableSink
from sim.results.schema import Backend
from sim.results.sections import Machine
from sim.results.series import SAMPLE_LIMIT, Series
from sim.run.prepare import Setup

if TYPE_CHECKING:
    from sim.clock.autoscaled import Lifetime

LEAST_SAMPLES = 500
"""Rows of its time series that an engine keeps at least, however many there are."""


class HasIterations(Protocol):
    """An instance on either clock."""

    iterations: int
    observer: Observer | None
    """Hears of every plan."""


class EngineParts(msgspec.Struct, kw_only=True):
    """One engine of a run, the same on both clocks, and what all engines of the run share."""

    setup: Setup
    scheduler: Scheduler
    engine: Engine
    lanes: Lanes
    series: Series | None = None
    journal: Journal | None
    log: RequestLog
    """Of all engines, as `gaps` and `detailed` are."""
    gaps: GapCollector
    detailed: dict[int, list[float]] | None
    """Times of every token by request id, s, where they are kept."""
    watch: Observer | None
    place: int
    prefilled_by: dict[Sequence, int] = msgspec.field(default_factory=dict)
    """Where those came from that another engine prefilled."""

    @property
    def observer(self) -> Observer | None:
        """What hears of every plan."""
        observers: list[Observer] = [kept.observe for kept in (self.series, self.journal) if kept is not None]
        if self.watch is not None:
            observers.append(self.watch)
        if len(observers) < 2:
            return observers[0] if observers else None

        def observe(plan: IterationPlan, start_s: float, times: StepTimes) -> None:
            for hear in observers:
                hear(plan, start_s, times)

        return observe


class Run(msgspec.Struct, kw_only=True):
    """A run under way or finished, on either clock: everything a result is made from."""

    engines: list[EngineParts]
    instances: Seq[HasIterations]
    """Those that drive the engines."""
    interrupted: bool = False
    error: str | None = None
    backend: Backend = "kvtwin-sim"
    machine: Machine | None = None
    """What executed the run, where anything real did."""
    lives: "list[Lifetime] | None" = None
    """From when to when there was each engine, where they come and go."""
    trace_events: list[dict[str, object]] = msgspec.field(default_factory=list)
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


class Recording(msgspec.Struct, frozen=True):
    """What a run keeps beside its statistics: intervals of the lanes, a time series, every token's time."""

    timeline: bool = False
    series: bool = False
    detailed: bool = False
    watch: Observer | None = None
    """Hears of every plan, too."""


def build_engine(setup: Setup, table: TableSink | None, keep: Recording) -> EngineParts:
    """Put together the one engine of a run, as both clocks have it."""
    return _engines([setup], table, keep)[0]


def build_engines(setup: Setup, table: TableSink | None, keep: Recording) -> list[EngineParts]:
    """Put together the engines of a cluster, which share their books."""
    scenario = setup.scenario
    if scenario.autoscale is not None:
        from sim.topology.autoscalers import parse_autoscale  # noqa: PLC0415 - most runs have one engine

        return _engines([setup] * (scenario.replicas or parse_autoscale(scenario.autoscale).min), table, keep)
    if setup.decode is None:
        return _engines([setup] * (scenario.num_engines * setup.num_schedulers), table, keep)
    prefills = (scenario.prefill_replicas or 0) * setup.num_schedulers
    decodes = (scenario.decode_replicas or 0) * setup.decode.num_schedulers
    return _engines([setup] * prefills + [setup.decode] * decodes, table, keep)


def further_engine(engines: list[EngineParts], keep: Recording) -> EngineParts:
    """One more engine like the first, at the end of the list; they share their books."""
    first = engines[0]
    samples = max(LEAST_SAMPLES, SAMPLE_LIMIT // first.setup.scenario.num_engines)
    parts = _engine(first.setup, first.log, first.gaps, first.detailed, keep, samples, len(engines))
    parts.engine.on_end = partial(_log_end, parts)
    engines.append(parts)
    _share([first, parts])
    return parts


def _engines(setups: list[Setup], table: TableSink | None, keep: Recording) -> list[EngineParts]:
    scenario = setups[0].scenario
    log = RequestLog(table, Goodput.parse(scenario.goodput) if scenario.goodput else None)
    gaps = GapCollector()
    detailed: dict[int, list[float]] | None = {} if keep.detailed else None
    samples = max(LEAST_SAMPLES, SAMPLE_LIMIT // max(len(setups), scenario.num_engines))
    found = [_engine(setup, log, gaps, detailed, keep, samples, place) for place, setup in enumerate(setups)]
    if len(setups) > 1 or scenario.autoscale is not None:
        for parts in found:
            parts.engine.on_end = partial(_log_end, parts)
        _share(found)
    return found


def _share(engines: list[EngineParts]) -> None:
    """Let engines that have not begun share the files of the first, where they are to."""
    from sim.systems.sglang.options import SglangOptions  # noqa: PLC0415 - one engine does without

    options = engines[0].setup.policy.options
    # Few runs have files.
    if options(OffloadOptions).storage_shared:
        from sim.kv.tiers.tiering import share_storage  # noqa: PLC0415

        share_storage(parts.scheduler.memory for parts in engines)
    if options(SglangOptions).hicache_storage_shared:
        from sim.systems.sglang.storage import share_storage  # noqa: PLC0415

        share_storage(parts.scheduler.memory for parts in engines)


def _engine(
    setup: Setup,
    log: RequestLog,
    gaps: GapCollector,
    detailed: dict[int, list[float]] | None,
    keep: Recording,
    samples: int,
    place: int,
) -> EngineParts:
    seed = setup.scenario.seed
    ranks = setup.experts.ranks if setup.experts else 1
    deployment = Deployment(setup.model, setup.hardware, setup.tp, setup.cost, setup.profile, setup.role, seed, ranks)
    scheduler = setup.policy.scheduler(setup.limits, gaps, deployment)
    lanes = Lanes(keep_intervals=keep.timeline)
    if detailed is not None:
        scheduler.record_tokens(detailed)
        scheduler.record_decisions()
    series = Series(scheduler, lanes, samples) if keep.series or keep.timeline else None
    engine = Engine(scheduler, setup.policy.length_predictor(seed), log.end)
    engine.on_idle = None if series is None else series.rest
    return EngineParts(
        setup=setup,
        scheduler=scheduler,
        engine=engine,
        lanes=lanes,
        series=series,
        journal=Journal(scheduler, series.time_use) if series is not None and keep.timeline else None,
        log=log,
        gaps=gaps,
        detailed=detailed,
        watch=keep.watch,
        place=place,
    )


def _log_end(parts: EngineParts, seq: Sequence) -> None:
    """Log the end of a sequence with the values of `engine_columns`."""
    where = (parts.place,)
    if parts.setup.role != "both":
        where = (parts.place, parts.prefilled_by.pop(seq, parts.place))
    parts.log.end(seq, where)
