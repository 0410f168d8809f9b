"""Small clusters, as `kvtwin.testing.engines` has small engines."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import simpy

from kvtwin.testing.engines import Machine, build_engine, linear_machine
from sim.clock.arrivals import Arrivals
from sim.clock.cluster import Cluster
from sim.clock.member import Member
from sim.cost.pricing import Lanes
from sim.engine.itl import GapCollector
from sim.engine.limits import Limits
from sim.engine.sequence import Sequence as Seq
from sim.systems.base import Policy
from sim.topology.routers import Router
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
    for place, policy in enumerate(policies):

        def end(seq: Seq, place: int = place) -> None:
            outcome.ended.append((seq, place))

        engine = build_engine(policy, limit, machine, end, checked=checked, gaps=gaps)
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
    env.run(until=env.process(Cluster(env, outcome.members, source, router).serve()))
    return outcome
