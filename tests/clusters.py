"""Small clusters, as `kvtwin.testing.engines` has small engines."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import simpy

from kvtwin.testing.engines import Machine, build_engine, linear_machine
from sim.clock.arrivals import Arrivals
from sim.clock.assembly import member_class, mixed_pools, routers_of, turns_of
from sim.clock.cluster import Cluster
from sim.clock.conducted import Prices, conductor_of
from sim.clock.hand_overs import HandOvers
from sim.clock.instance import Observer
from sim.clock.member import Member
from sim.clock.pipeline import Pipeline, VirtualEngine
from sim.cost.pricing import Lanes
from sim.engine.itl import GapCollector
from sim.engine.limits import Limits, Role
from sim.engine.sequence import Sequence as Seq
from sim.parts.stage.hand_over_options import MixedPoolOptions
from sim.run.prepare import Setup
from sim.run.runs import Recording
from sim.run.simulate import SimulatedRun, build_run, execute_all
from sim.systems.base import Policy
from sim.systems.builder import STORED
from sim.systems.mooncake.preset import ConductorOptions
from sim.topology.pipelines import to_pipelines
from sim.topology.routers import Router
from traces.request import Request

HAND_OVER_S_PER_TOKEN = 1e-4
"""Between the stages of a pipeline."""


@dataclass
class ClusterOutcome:
    """What a small cluster left: its engines, and which requests ended where."""

    members: list[Member]
    ended: list[tuple[Seq, int]] = field(default_factory=list)

    def by_id(self) -> dict[int, Seq]:
        """The sequences that ended, by their requests' ids."""
        return {seq.request.request_id: seq for seq, _ in self.ended}

    def places(self) -> dict[int, int]:
        """Where each request ended."""
        return {seq.request.request_id: place for seq, place in self.ended}


def simulate_pools(
    policy: Policy,
    arrivals: Iterable[Request] | Arrivals,
    limit: Limits,
    *,
    prefill: int = 1,
    decode: int = 1,
    bytes_per_s: float = 1e9,
    decode_limit: Limits | None = None,
    router: Router | None = None,
    machine: Machine | None = None,
    jump: bool = True,
    checked: bool | None = None,
    stages: tuple[int, int] = (1, 1),
    observer: Observer | None = None,
) -> ClusterOutcome:
    """Run `prefill` engines that hand over to `decode` engines, whose limits and pipelines' stages may differ.

    `observer` hears of every plan of all of them. Engines are `checked` where they jump: those that step are compared
    with them.
    """
    checked = jump if checked is None else checked
    machine = machine or linear_machine(limit.block_bytes)
    source = arrivals if isinstance(arrivals, Arrivals) else Arrivals(arrivals)
    outcome = ClusterOutcome([])
    env, gaps = simpy.Environment(), GapCollector()
    for number in range(prefill + decode):
        role: Role = "prefill" if number < prefill else "decode"
        own = limit if role == "prefill" or decode_limit is None else decode_limit
        count = stages[role == "decode"]
        _add_engine(outcome, env, policy, own, machine, gaps, source, count, jump=jump, checked=checked, role=role)
    for member in outcome.members:
        member.observer = observer
    front = range(prefill * stages[0])
    decoders = range(len(front), len(outcome.members))
    options, pools = policy.options(MixedPoolOptions), None
    if options.mixed_pool:
        router = pools = mixed_pools(outcome.members, prefill, options.max_pending_tokens)
        front = decoders = range(len(outcome.members))
    front_router, decode_router = routers_of(policy)
    hand_overs = HandOvers(
        outcome.members,
        decoders,
        to_pipelines(decode_router, stages[1]),
        pools=pools,
        bytes_per_s=bytes_per_s,
        block_bytes=limit.block_bytes,
        layers=machine.model.num_layers,
        next_places={place: turns for place in decoders if (turns := turns_of(outcome.members[place]))},
    )
    if router is None and policy.names["memory"] == STORED:
        router = _conductor(policy, outcome.members, prefill, limit, decode_limit or limit, machine, bytes_per_s)
    to = to_pipelines(router or front_router, stages[0])
    cluster = Cluster(env, outcome.members, source, to, front, hand_overs)
    env.run(until=env.process(cluster.serve()))
    return outcome


def _conductor(
    policy: Policy,
    members: list[Member],
    prefill: int,
    limit: Limits,
    decode_limit: Limits,
    machine: Machine,
    bytes_per_s: float,
) -> Router:
    prices = Prices(
        machine.cost,
        machine.cost,
        limit,
        decode_limit.num_gpu_blocks * decode_limit.block_size,
        layers=machine.model.num_layers,
        s_per_token=limit.block_bytes / limit.block_size / bytes_per_s,
        members=members,
    )
    options = policy.options(ConductorOptions)
    return conductor_of(options, prices, members[:prefill], members[prefill:])


def simulate_replicas(
    policies: Sequence[Policy],
    router: Router,
    arrivals: Iterable[Request] | Arrivals,
    limit: Limits,
    *,
    machine: Machine | None = None,
    jump: bool = True,
    checked: bool | None = None,
    stages: int = 1,
    observer: Observer | None = None,
) -> ClusterOutcome:
    """Run one engine for each policy behind a router, a pipeline of `stages` each; see `simulate_pools`."""
    checked = jump if checked is None else checked
    machine = machine or linear_machine(limit.block_bytes)
    source = arrivals if isinstance(arrivals, Arrivals) else Arrivals(arrivals)
    env, outcome, gaps = simpy.Environment(), ClusterOutcome([]), GapCollector()
    for policy in policies:
        _add_engine(outcome, env, policy, limit, machine, gaps, source, stages, jump=jump, checked=checked)
    for member in outcome.members:
        member.observer = observer
    env.run(until=env.process(Cluster(env, outcome.members, source, to_pipelines(router, stages)).serve()))
    return outcome


def _add_engine(
    outcome: ClusterOutcome,
    env: simpy.Environment,
    policy: Policy,
    limit: Limits,
    machine: Machine,
    gaps: GapCollector,
    source: Arrivals,
    stages: int,
    *,
    jump: bool,
    checked: bool,
    role: Role = "both",
) -> None:
    """A member, or the virtual engines of a pipeline with `limit` each."""
    pipeline = Pipeline(machine.cost, stages, HAND_OVER_S_PER_TOKEN) if stages > 1 else None
    layers, ended = machine.model.num_layers, source.ended if source.hears_ends else None
    for _ in range(stages):
        place = len(outcome.members)

        def end(seq: Seq, place: int = place) -> None:
            outcome.ended.append((seq, place))

        engine = build_engine(policy, limit, replace(machine, role=role), end, checked=checked, gaps=gaps)
        args = env, engine, machine.cost, Lanes(keep_intervals=True)
        if pipeline is None:
            hidden = machine.model.hidden_bytes_per_token_layer
            member = member_class(engine)(
                *args, layers=layers, block_bytes=limit.block_bytes, hidden_bytes=hidden, jump=jump, ended=ended
            )
        else:
            member = VirtualEngine(
                *args, pipeline=pipeline, place=place, layers=layers, block_bytes=limit.block_bytes, ended=ended
            )
        outcome.members.append(member)


def run_with_pauses(setup: Setup) -> tuple[SimulatedRun, list[tuple[float, float]]]:
    """60 requests, crowded, with pauses in which engines run out of them, one before the other; all are served.

    Returns the run, and when each batch began and ended, s.
    """
    random, at_s, requests, seen = Random(7), 0.0, [], []
    for i in range(60):
        at_s += random.choice([0.0, 0.002, 0.01, 1.0])
        requests.append(Request(i, at_s, random.randint(1, 1200), random.randint(1, 40)))
    run = build_run(setup, requests, keep=Recording(watch=lambda plan, at_s, times: seen.append((at_s, times.end_s))))
    execute_all(run)
    assert run.log.completed == 60
    assert run.log.output_tokens == sum(request.output_tokens for request in requests)
    return run, seen
