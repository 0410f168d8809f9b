"""`Member` and `Cluster` at their bounds: ties in time, what wakes which, what is left when all have ended."""

import pytest
import simpy
from clusters import simulate_replicas

from kvtwin.testing import limits, linear_machine, requests
from kvtwin.testing.engines import build_engine
from sim.clock.arrivals import Arrivals
from sim.clock.cluster import Cluster
from sim.clock.member import Member
from sim.cost.pricing import Lanes
from sim.engine.sequence import Sequence
from sim.errors import InvariantError
from sim.systems.vllm055 import VllmRecompute
from sim.topology.routers import LeastLoaded, RoundRobin

EIGHTH = {"prefill": (0.125, 0.0, 0.0), "decode": (0.125, 0.0, 0.0)}
"""Every iteration takes an eighth of a second: sums of them are exact."""


def member_of(env: simpy.Environment) -> Member:
    machine = linear_machine(**EIGHTH)
    engine = build_engine(VllmRecompute(), limits(), machine, lambda seq: None)
    return Member(env, engine, machine.cost, Lanes(), layers=4, block_bytes=65536.0)


def test_a_fact_within_a_tie_leaves_a_settled_boundary_where_it_is():
    member = member_of(simpy.Environment())
    request = requests((0.0, 16, 3))[0]
    assert member.send(request) and member.end_s == 0.0
    assert not member.send(requests((1.0, 16, 3))[0]) and member.end_s == 0.0
    member.settle()
    member.decide()
    assert (member.end_s, member.running_until_s, member.iterations) == (0.125, 0.125, 0)
    member.settle()
    assert (member.iterations, member.running_until_s) == (1, 0.0)
    assert not member.tell(0.125 - 5e-10, Sequence(request)) and member.end_s == 0.125
    member.decide()
    assert (member.end_s, member.num_decisions) == (0.375, 2)


@pytest.mark.parametrize(("apart_s", "place"), [(-2e-9, 0), (-5e-10, 1), (0.0, 1), (5e-10, 1), (2e-9, 1)])
def test_what_arrives_as_an_iteration_ends_is_routed_by_what_it_leaves(apart_s, place):
    """Engine 1 is idle from 0.125 s on. Boundaries 1 ns apart are one; before that both have one in flight."""
    rows = requests((0.0, 16, 3), (0.0, 16, 1), (0.125 + apart_s, 16, 1))
    policies = [VllmRecompute()] * 2
    outcome = simulate_replicas(policies, LeastLoaded(), rows, limits(), machine=linear_machine(**EIGHTH))
    assert outcome.places() == {0: 0, 1: 1, 2: place}


def cluster_of(env: simpy.Environment, rows) -> tuple[Cluster, Member]:
    member = member_of(env)
    return Cluster(env, [member], Arrivals(rows), RoundRobin()), member


@pytest.mark.parametrize("last_s", [0.1875, 0.5, 3.0])
def test_others_on_the_clock_see_the_iterations_that_have_ended(last_s):
    """Arrivals at 0 s and 1 s; two iterations of each."""
    env, seen = simpy.Environment(), []
    cluster, member = cluster_of(env, requests((0.0, 16, 2), (1.0, 16, 2)))

    def look():
        for at_s in (0.0625, 0.1875, last_s):
            yield env.timeout(at_s - env.now)
            seen.append((env.now, member.iterations))

    env.process(look())
    serving = env.process(cluster.serve())
    env.run(until=serving)
    assert (env.now, member.iterations) == (1.25, 4)
    assert seen[:2] == [(0.0625, 0), (0.1875, 1)]
    assert seen[2:] == ([(last_s, 1 if last_s < 0.25 else 2)] if last_s < 1.25 else [])


def test_what_stands_still_with_requests_unfinished_is_an_error():
    env = simpy.Environment()
    cluster, member = cluster_of(env, requests((0.0, 16, 2)))
    member._schedule = lambda now_s: None
    with pytest.raises(InvariantError, match=r"engine 0 stands still at 0 s with requests unfinished"):
        env.run(until=env.process(cluster.serve()))
