"""From a setup to a finished run on the virtual clock: traffic, engines, clock. `sim/results/result` sums it up."""

from collections.abc import Callable, Generator, Iterable
from math import inf

from simpy.core import Environment
from simpy.events import Event

from sim.clock.instance import Instance
from sim.results.metrics import TableSink
from sim.run.interrupts import interrupts_call
from sim.run.prepare import Setup
from sim.run.runs import Recording, Run, build_engines, further_engine
from sim.run.traffic import arrivals_of
from traces.errors import TraceError
from traces.request import Request


class SimulatedRun(Run, kw_only=True):
    """A run on the virtual clock."""

    env: Environment
    serve: Callable[[], Generator[Event, None, None]]


NOTHING = Recording()


def build_run(
    setup: Setup,
    requests: Iterable[Request],
    *,
    table: TableSink | None = None,
    keep: Recording = NOTHING,
    jump: bool = True,
) -> SimulatedRun:
    """Put engines and what drives them together; `execute` sets it going."""
    env, scenario = Environment(), setup.scenario
    engines = build_engines(setup, table, keep)
    log = engines[0].log
    log.front_end_s = setup.front_end[0]
    arrivals = arrivals_of(scenario, requests, *setup.front_end, log.sent_s, setup.num_tokenisers)
    if scenario.autoscale is not None:
        from sim.clock.assembly import build_autoscaled  # noqa: PLC0415 - most runs have one engine

        scaled = build_autoscaled(engines, env, arrivals, lambda: further_engine(engines, keep), jump=jump)
        return SimulatedRun(engines=engines, instances=scaled.members, env=env, serve=scaled.serve, lives=scaled.lives)
    if scenario.num_engines > 1 or setup.pp > 1:
        from sim.clock.assembly import build_cluster  # noqa: PLC0415 - most runs have one engine

        cluster = build_cluster(engines, env, arrivals, jump=jump)
        return SimulatedRun(engines=engines, instances=[*cluster.members], env=env, serve=cluster.serve)
    parts = engines[0]
    instance = Instance(
        env,
        parts.engine,
        setup.cost,
        arrivals,
        parts.lanes,
        layers=setup.model.num_layers,
        block_bytes=setup.limits.block_bytes,
        hidden_bytes=setup.model.hidden_bytes_per_token_layer,
        jump=jump,
        observer=parts.observer,
    )
    return SimulatedRun(engines=[parts], instances=[instance], env=env, serve=instance.serve)


def execute(run: SimulatedRun) -> SimulatedRun:
    """Run to the end.

    An interrupt (Ctrl-C, SIGTERM) or a trace that turns out bad half-way ends the run early; what is finished stays
    valid, and `interrupted` or `error` says so. The first interrupt waits for the end of an event, so that no request
    is counted by half.
    """
    serving, stop = run.env.process(run.serve()), run.env.event()
    # Never comes: an empty queue answers `peek`, which is asked at every iteration, with an exception.
    run.env.timeout(inf)
    try:
        with interrupts_call(stop.succeed):
            run.env.run(until=serving | stop)
        run.interrupted = not serving.triggered
    except KeyboardInterrupt:
        run.interrupted = True
    except TraceError as error:
        run.error = str(error)
    return run


def execute_all(run: SimulatedRun) -> SimulatedRun:
    """Run to the end, for what half a run is no use to: KeyboardInterrupt where it is interrupted."""
    if execute(run).interrupted:
        raise KeyboardInterrupt
    return run
