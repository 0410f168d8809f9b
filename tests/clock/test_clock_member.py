"""`Member` and `Cluster` at their bounds: ties in time, what wakes whom, what is left when all have ended."""

import pytest
import simpy

from kvtwin.testing import CheckedEngine, limits, linear_machine, requests
from kvtwin.testing.clusters import simulate_replicas
from kvtwin.testing.engines import build_engine
from sim.clock.arrivals import TIE_S, Arrivals
from sim.clock.cluster import Cluster
from sim.clock.member import Member
from sim.cost.pricing import Lanes
from sim.engine.changes import Move, Tier
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


def test_what_waits_here_is_counted_until_it_has_been_seen():
    """One whose prefix comes first, and one that has been sent."""
    member = member_of(simpy.Environment())
    first, second = requests((0.0, 16, 1), (0.0, 20, 1))
    assert (member.num_waiting, member.num_in_flight, member.tokens_in_flight) == (0, 0, 0)
    assert member.send(first, 0.5) and member.end_s == 0.5
    assert (member.num_waiting, member.waiting_tokens, member.tokens_in_flight) == (1, 0, 16)
    assert member.send(second) and member.end_s == 0.0
    assert (member.num_waiting, member.waiting_tokens, member.num_in_flight, member.tokens_in_flight) == (2, 20, 2, 36)
    for _ in range(4):
        member.settle()
        member.decide()
    assert (member.num_waiting, member.num_in_flight, member.tokens_in_flight) == (0, 0, 0)


def test_facts_a_tie_after_a_boundary_belong_to_it(monkeypatch):
    """A copy, a request whose prefix came first and one that was sent: a nanosecond after it, and no later."""
    ended = []
    monkeypatch.setattr(CheckedEngine, "transfer_done", lambda self, move: ended.append(move.num_blocks))
    seq = Sequence(requests((0.0, 16, 1))[0])
    for later_s, found in ((TIE_S, True), (2.5e-9, False)):
        member = member_of(simpy.Environment())
        for blocks in (1, 2):
            member._finish_at(0.125 + later_s, Move(seq, (), 0, 16, Tier.GPU, Tier.HOST, blocks, 0, True))
        member._tell_ended(0.125)
        assert ended == ([1, 2] if found else [])
        for blocks in (3, 4):
            member._finish_at(0.125 + later_s, Move(seq, (), 0, 16, Tier.GPU, Tier.HOST, blocks, 0, True))
        first, second = requests((0.0, 16, 1), (0.125 + later_s, 20, 1))
        member.send(first, 0.125 + later_s)
        member.send(second)
        assert (member._num_coming, len(member.inbox), member.inbox.tokens) == (1, 1, 20)
        assert member._is_free(0.125) and member.num_decisions == 1
        assert ended == ([1, 2, 3, 4] if found else [])
        assert (member._num_coming, len(member.inbox)) == ((0, 0) if found else (1, 1))
        assert member.engine.scheduler.num_waiting == (2 if found else 0)
        ended.clear()


def test_pulling_without_a_link_is_an_error():
    member, seq = member_of(simpy.Environment()), Sequence(requests((0.0, 16, 1))[0])
    with pytest.raises(InvariantError, match="there is no link"):
        member._pull(Move(seq, (), 0, 16, Tier.PEER, Tier.GPU, 1, 0, True), 0.0)


@pytest.mark.parametrize(("apart_s", "place"), [(-2e-9, 0), (-5e-10, 1), (0.0, 1), (5e-10, 1), (2e-9, 1)])
def test_who_arrives_as_an_iteration_ends_is_routed_by_what_it_leaves(apart_s, place):
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


def test_who_stands_still_with_requests_unfinished_is_an_error():
    env = simpy.Environment()
    cluster, member = cluster_of(env, requests((0.0, 16, 2)))
    member._schedule = lambda now_s: None
    with pytest.raises(InvariantError, match=r"engine 0 stands still at 0 s with requests unfinished"):
        env.run(until=env.process(cluster.serve()))
