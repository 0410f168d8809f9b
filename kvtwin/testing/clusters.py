"""Small clusters, as `kvtwin.testing.engines` has small engines."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import simpy

from kvtwin.testing.engines import Machine, build_engine, linear_machine
from sim.clock.arrivals import Arrivals
from sim.clock.cluster import Cluster
from sim.clock.hand_overs import HandOvers
from sim.clock.member import Member
from sim.cost.pricing import Lanes
from sim.engine.itl import GapCollector
from sim.engine.limits import Limits, Role
from sim.engine.sequence import Sequence as Seq
from sim.systems.base import Policy
from sim.topology.routers import FewestWaitingTokens, LeastLoaded, Router
from traces.request import Request


@dataclass
class ClusterOutcome:
    """What a small cluster left: its engines, and who ended where."""

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
    checked: bool = True,
) -> ClusterOutcome:
    """Run `prefill` engines that hand over to `decode` engines, whose limits may differ."""
    machine = machine or linear_machine(limit.block_bytes)
    source = arrivals if isinstance(arrivals, Arrivals) else Arrivals(arrivals)
    outcome = ClusterOutcome([])
    env, gaps = simpy.Environment(), GapCollector()
    for place in range(prefill + decode):
        role: Role = "prefill" if place < prefill else "decode"
        own = limit if role == "prefill" or decode_limit is None else decode_limit
        _add_member(outcome, env, policy, own, machine, gaps, source, jump=jump, checked=checked, role=role)
    decoders = range(prefill, prefill + decode)
    hand_overs = HandOvers(
        outcome.members,
        decoders,
        LeastLoaded(),
        bytes_per_s=bytes_per_s,
        block_bytes=limit.block_bytes,
        layers=machine.model.num_layers,
    )
    cluster = Cluster(env, outcome.members, source, router or FewestWaitingTokens(), range(prefill), hand_overs)
    env.run(until=env.process(cluster.serve()))
    return outcome


def simulate_replicas(
    policies: Sequence[Policy],
    router: Router,
    arrivals: Iterable[Request] | Arrivals,
    limit: Limits,
    *,
    machine: Machine | None = None,
    jump: bool = True,
    checked: bool = True,
) -> ClusterOutcome:
    """Run one engine for each policy behind a router."""
    machine = machine or linear_machine(limit.block_bytes)
    source = arrivals if isinstance(arrivals, Arrivals) else Arrivals(arrivals)
    env, outcome, gaps = simpy.Environment(), ClusterOutcome([]), GapCollector()
    for policy in policies:
        _add_member(outcome, env, policy, limit, machine, gaps, source, jump=jump, checked=checked)
    env.run(until=env.process(Cluster(env, outcome.members, source, router).serve()))
    return outcome


def _add_member(
    outcome: ClusterOutcome,
    env: simpy.Environment,
    policy: Policy,
    limit: Limits,
    machine: Machine,
    gaps: GapCollector,
    source: Arrivals,
    *,
    jump: bool,
    checked: bool,
    role: Role = "both",
) -> None:
    place = len(outcome.members)

    def end(seq: Seq) -> None:
        outcome.ended.append((seq, place))

    engine = build_engine(policy, limit, replace(machine, role=role), end, checked=checked, gaps=gaps)
    member = Member(
        env,
        engine,
        machine.cost,
        Lanes(keep_intervals=True),
        layers=machine.model.num_layers,
        block_bytes=limit.block_bytes,
        jump=jump,
        ended=source.ended if source.hears_ends else None,
    )
    outcome.members.append(member)
