"""Replicas behind a router: each is an engine, jumps change nothing, no request is lost; `Member` at its bounds."""

from dataclasses import replace
from random import Random

import pytest
import simpy
from clock_small import FLAT, GAPS_S, jumped_and_stepped
from clusters import simulate_replicas
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.testing import limits, linear_machine, requests, simulate
from kvtwin.testing.conformance import TOLERANCE_S, hosts_of, limits_of
from kvtwin.testing.engines import build_engine
from sim.clock.arrivals import Arrivals
from sim.clock.closed_loop import ClosedLoop
from sim.clock.cluster import Cluster
from sim.clock.member import Member
from sim.cost.pricing import Lanes
from sim.engine.sequence import Sequence
from sim.errors import InvariantError, UserError
from sim.options.policies import parse_policy
from sim.systems import POLICIES as PRESET_NAMES
from sim.systems.vllm055 import VllmRecompute
from sim.systems.vllm_v1 import VllmV1
from sim.topology import ROUTERS, make_router
from sim.topology.prefix_tree import PrefixTree
from sim.topology.routers import (
    FewestWaitingTokens,
    LeastLoaded,
    PowerOfTwo,
    PrefixAffinity,
    RoundRobin,
    SessionAffinity,
)  # fmt: skip
from sim.topology.weighed import Dynamo, LlmD
from traces.errors import TraceError
from traces.request import Request

POLICIES = ["vllm-recompute", "vllm-swap", "layerkv", "layerkv:decode=stream", "sarathi", "fastserve"]
POLICIES += ["vllm-v1:cpu-chunks=20,blocks-per-chunk=2,offload-outputs=true", "vllm-v1:async-scheduling=true"]
POLICIES += ["vllm-v1:async-scheduling=true,cpu-chunks=20,offload-outputs=true,store-s-per-block=0.01"]
ROWS = st.lists(
    st.tuples(st.sampled_from(["", "a", "b", "c"]), GAPS_S, st.integers(1, 150), st.integers(1, 40)),
    min_size=1,
    max_size=30,
)


def drawn(rows) -> list[Request]:
    at_s, found = 0.0, []
    for i, (session, gap_s, prompt, output) in enumerate(rows):
        at_s += gap_s
        found.append(Request(i, at_s, prompt, output, session, prefix_ids(session, i, prompt), 16))
    return found


def prefix_ids(session: str, number: int, prompt: int) -> tuple[int, ...]:
    """Blocks of 16 tokens: four that all prompts of a session begin with, then the prompt's own."""
    shared, own = 1000 * (ord(session) if session else 0), 1_000_000 + 1000 * number
    return tuple((shared if session and i < 4 else own) + i for i in range(-(-prompt // 16)))


def test_a_request_goes_to_the_engine_with_fewest_in_flight_when_it_arrives():
    # 0 and 1 fill both engines. 1 ends at 0.2: at 0.15 the first engine is as loaded as the second and gets 2, at 0.25
    # the second is idle and gets 3.
    rows = requests((0.0, 10, 50), (0.0, 10, 2), (0.15, 10, 50), (0.25, 10, 2))
    for jump in (True, False):
        outcome = simulate_replicas(
            [VllmRecompute()] * 2, LeastLoaded(), rows, limits(), machine=linear_machine(**FLAT), jump=jump
        )
        assert outcome.places() == {0: 0, 1: 1, 2: 0, 3: 1}
        # 2 waits for the iteration from 0.1 to 0.2, is prefilled until 0.3 and makes the others wait.
        assert outcome.by_id()[2].first_token_s == pytest.approx(0.3)
        assert outcome.by_id()[0].finish_s == pytest.approx(5.1)
        assert outcome.by_id()[3].finish_s == pytest.approx(0.45)


def test_a_place_that_frees_at_one_engine_sends_the_next_request_to_another():
    # Two in flight. 1 ends on the second engine at 0.2, a boundary of both; 2 goes to the first by turn.
    rows = requests((0.0, 10, 30), (0.0, 10, 2), (0.0, 10, 3))
    outcome = simulate_replicas(
        [VllmRecompute()] * 2, RoundRobin(), ClosedLoop(rows, 2), limits(), machine=linear_machine(**FLAT)
    )
    assert outcome.places() == {0: 0, 1: 1, 2: 0}
    assert outcome.by_id()[2].request.arrival_s == pytest.approx(0.2)
    assert outcome.by_id()[2].finish_s == pytest.approx(0.5)


def test_turns_of_a_session_stay_together():
    rows = [Request(i, 0.1 * i, 10, 2, f"session {i % 7}") for i in range(70)]
    places = simulate_replicas([VllmRecompute()] * 4, SessionAffinity(), rows, limits()).places()
    for session in range(7):
        assert len({place for i, place in places.items() if i % 7 == session}) == 1
    assert len(set(places.values())) > 1


class Loaded:
    """A view of an engine."""

    def __init__(self, num_in_flight: int, waiting_tokens: int = 0) -> None:
        self.num_in_flight, self.waiting_tokens = num_in_flight, waiting_tokens
        self.num_waiting, self.tokens_in_flight, self.running_until_s = num_in_flight, 0, 0.0
        self.kv_usage, self.kv_tokens, self.cached_tokens = 0.0, 160, 0

    def prompt_tokens_of(self, request: Request) -> tuple[int, int]:
        return request.prompt_tokens - self.cached_tokens, request.prompt_tokens - self.cached_tokens


def test_routers_choose_from_views_alone():
    request, views = Request(0, 0.0, 10, 2), [Loaded(3, 10), Loaded(1, 500), Loaded(1, 0), Loaded(9, 0)]
    assert LeastLoaded().route(request, views) == 1
    assert FewestWaitingTokens().route(request, views) == 2
    turn = RoundRobin()
    assert [turn.route(request, views) for _ in range(6)] == [0, 1, 2, 3, 0, 1]
    drawn_twice = [[router.route(request, views) for _ in range(200)] for router in (PowerOfTwo(5), PowerOfTwo(5))]
    assert drawn_twice[0] == drawn_twice[1]
    # The worst of four is never the better of two; the others are, the two best more often.
    assert set(drawn_twice[0]) == {0, 1, 2}
    assert drawn_twice[0].count(0) < min(drawn_twice[0].count(1), drawn_twice[0].count(2))
    assert PowerOfTwo(1).route(request, views[:1]) == 0


def test_a_prompt_goes_where_most_of_it_was_sent_unless_that_engine_is_far_more_loaded():
    router, views = PrefixAffinity(), [Loaded(0), Loaded(0), Loaded(0)]

    def sent(*ids: int, tokens: int | None = None) -> int:
        return router.route(Request(0, 0.0, tokens or 16 * len(ids), 2, "", ids, 16), views)

    assert sent(1, 2, 3, 4) == 0
    views[0].num_in_flight = 1
    assert sent(1, 2, 9, 9) == 0
    # One block of four is 0.25 of the prompt, not more than 0.3; then two engines have had it, one of them more.
    assert sent(1, 8, 8, 8) == 1
    views[1].num_in_flight = 2
    assert sent(1, 7) == 0
    assert sent(1, 8, 8, 6) == 1
    # An id means its prefix: 2 after 5 is another block than 2 after 1.
    assert sent(5, 2, 3, 4) == 2
    # 64 more than the least is not too many, 65 is, where it is more than half as many again.
    views[1].num_in_flight = 64
    views[2].num_in_flight = 0
    assert sent(1, 8, 8, 8) == 1
    views[1].num_in_flight = 65
    assert sent(1, 8, 8, 8) == 2
    views[0].num_in_flight, views[1].num_in_flight, views[2].num_in_flight = 300, 365, 301
    assert sent(1, 8, 8, 5) == 2
    assert PrefixAffinity(balance_abs=10).route(Request(0, 0.0, 32, 2, "", (1, 8), 16), views) == 0


def test_llm_d_adds_up_queue_memory_and_prefix():
    views, router = [Loaded(0), Loaded(4), Loaded(2)], LlmD(0)
    views[0].kv_usage, views[1].kv_usage, views[2].kv_usage = 0.9, 0.5, 0.0
    first = Request(0, 0.0, 64, 2, "", (1, 2, 3, 4), 16)
    # By hand: 2 x (queue 1, 0, 1/2) + 2 x (free 0.1, 0.5, 1), and no engine was sent any of it.
    assert router.costs(first, views) == pytest.approx([-2.2, -1.0, -3.0])
    assert router.route(first, views) == 2
    # The third had three of the next one's four blocks: 3 x 0.75 more.
    assert router.costs(Request(1, 0.0, 64, 2, "", (1, 2, 3, 9), 16), views)[2] == pytest.approx(-3.0 - 2.25)
    # It has room for ten blocks of 16 tokens, and forgets the first it was sent.
    for place in range(2):
        views[place].num_waiting = 100
    assert router.route(Request(2, 0.0, 160, 2, "", tuple(range(10, 20)), 16), views) == 2
    assert router.costs(first, views)[2] == pytest.approx(-4.0)


def test_llm_d_compares_the_first_4096_tokens():
    views, router = [Loaded(0), Loaded(0)], LlmD(0)
    views[0].kv_tokens = views[1].kv_tokens = 1 << 20
    chosen = router.route(Request(0, 0.0, 8192, 2, "", tuple(range(16)), 512), views)
    again = Request(1, 0.0, 8192, 2, "", (*range(8), *range(100, 108)), 512)
    assert router.costs(again, views)[chosen] == pytest.approx(-7.0)


def test_dynamo_takes_the_least_work():
    views, router = [Loaded(0, 100), Loaded(0, 0), Loaded(0, 0)], Dynamo(0)
    views[0].cached_tokens, views[1].kv_usage, views[2].kv_usage = 48, 0.5, 0.25
    request = Request(0, 0.0, 64, 2)
    # By hand, in tokens: 100 wait and 16 are computed, 0 + 100 + 16 in use; 64, and 80 + 64; 64, and 40 + 64.
    assert router.costs(request, views) == [232, 208, 168]
    assert Dynamo(0, overlap=0.0).costs(request, views) == [116, 144, 104]
    assert {Dynamo(seed).route(request, [Loaded(0), Loaded(0)]) for seed in range(20)} == {0, 1}


@pytest.mark.parametrize(
    ("router", "words", "said"),
    [
        ("llm-d", ("queue:1", "prefix:0.5"), None),
        ("round-robin", ("queue:1",), "round-robin weighs nothing"),
        ("dynamo", ("queue:1",), "NAME one of overlap"),
        ("llm-d", ("kv:x",), "WEIGHT from 0 to 1e\\+06"),
        ("llm-d", ("kv:-1",), "WEIGHT from 0 to 1e\\+06"),
        ("llm-d", ("kv:1", "kv:2"), "given twice"),
    ],
)
def test_weights_of_routers(router, words, said):
    if said is None:
        made = make_router(router, 0, words)
        assert isinstance(made, LlmD)
        assert made.weights == {"queue": 1.0, "kv": 2.0, "prefix": 0.5}
        return
    with pytest.raises(UserError, match=f"--router-weights: .*{said}"):
        make_router(router, 0, words)


@pytest.mark.parametrize("make", [LlmD, Dynamo])
def test_what_routers_see_of_memory_does_not_hang_on_jumps(make):
    limit = replace(limits(), enable_prefix_caching=True)

    def places(jump: bool) -> dict[int, int]:
        rows = [Request(i, 0.37 * i, 40, 25, "", (i % 5, 9 + i % 3, 30 + i), 16) for i in range(60)]
        routed = simulate_replicas([VllmV1()] * 3, make(7), rows, limit, jump=jump)
        assert len(routed.places()) == 60
        return routed.places()

    found = places(True)
    assert found == places(False)
    assert len(set(found.values())) == 3


def test_prefix_affinity_without_prefixes_is_an_error():
    with pytest.raises(TraceError, match=r"request 3: has no hash_ids, which --router prefix-affinity needs"):
        PrefixAffinity().route(Request(3, 0.0, 10, 2), [Loaded(0), Loaded(0)])


@pytest.mark.parametrize("seed", range(5))
def test_the_tree_finds_the_longest_prefix_of_any_engine(seed):
    rng, tree, had = Random(seed), PrefixTree(), [[] for _ in range(3)]
    for _ in range(60):
        ids = tuple(rng.choices(range(3), k=rng.randrange(6)))
        common = [max((shared(ids, other) for other in sent), default=0) for sent in had]
        length, places = tree.longest(ids)
        assert length == max(common)
        assert not length or places == [place for place in range(3) if common[place] == length]
        place = rng.randrange(3)
        tree.add(ids, place)
        had[place].append(ids)


def shared(ids: tuple[int, ...], others: tuple[int, ...]) -> int:
    return next(
        (i for i, (one, other) in enumerate(zip(ids, others, strict=False)) if one != other), min(len(ids), len(others))
    )


@pytest.mark.parametrize(("policy", "jump"), [(policy, i % 2 > 0) for i, policy in enumerate(POLICIES)])
def test_a_cluster_of_one_is_the_engine_alone(policy, jump):
    kind = parse_policy(policy, {})[1]
    rows = requests(*[(0.05 * i, 20 + 13 * i % 150, 5 + 7 * i % 50) for i in range(60)])
    limit = limits(40, 200, max_model_len=512)
    alone = simulate(kind, rows, limit, jump=jump).by_id()
    outcome = simulate_replicas([kind], RoundRobin(), rows, limit, jump=jump)
    assert {key: (s.first_token_s, s.finish_s) for key, s in outcome.by_id().items()} == {
        key: (s.first_token_s, s.finish_s) for key, s in alone.items()
    }


PRESETS = [name for name in PRESET_NAMES if parse_policy(name, {})[1].names["stage"] != "hand-over"]
"""Those that need no pools; `test_clock_pools`, `_mooncake` and `_memserve` have the others."""


@pytest.mark.parametrize("policy", PRESETS)
@settings(max_examples=8, deadline=None)
@given(rows=ROWS, gpu=st.integers(10, 40), cached=st.booleans())
def test_every_preset_serves_beside_its_like_and_shares_prefixes(policy, rows, gpu, cached):
    """Three engines in turn: as three runs of a third of the requests, whichever ends, jumped or stepped."""
    kind, arrivals = parse_policy(policy, {})[1], drawn(rows)
    limit = limits_of(kind, limits(gpu, 30, max_model_len=256), 8, None)
    limit = replace(limit, enable_prefix_caching=cached and kind.can_cache_prefixes)
    one, _ = jumped_and_stepped(
        lambda source, jump: simulate_replicas([kind] * 3, RoundRobin(), source, limit, jump=jump), arrivals, cut=True
    )
    for place in range(3):
        for key, seq in simulate(kind, arrivals[place::3], limit).by_id().items():
            found = one.by_id()[key]
            assert (one.places()[key], found.status) == (place, seq.status)
            assert found.num_cached_tokens == seq.num_cached_tokens
            assert found.first_token_s == pytest.approx(seq.first_token_s, abs=TOLERANCE_S)
            assert found.finish_s == pytest.approx(seq.finish_s, abs=TOLERANCE_S)


@pytest.mark.parametrize(
    ("name", "policy"),
    [(name, policy) for i, name in enumerate(ROUTERS) for j, policy in enumerate(POLICIES) if (i + j) % 3 == 0],
)
@settings(max_examples=15, deadline=None)
@given(rows=ROWS, replicas=st.integers(1, 4), gpu=st.integers(10, 24), most=st.sampled_from([None, 3]), data=st.data())
def test_jumping_changes_nothing_and_no_request_is_lost(name, policy, rows, replicas, gpu, most, data):
    kind, arrivals, limit = parse_policy(policy, {})[1], drawn(rows), limits(gpu, 30, max_model_len=256)
    limit = replace(limit, enable_prefix_caching=name == "prefix-affinity" and kind.can_cache_prefixes)
    machine = linear_machine(limit.block_bytes, host=data.draw(st.sampled_from(hosts_of(kind))))
    jumped_and_stepped(
        lambda source, jump: simulate_replicas(
            [kind] * replicas, ROUTERS[name](7), source, limit, machine=machine, jump=jump
        ),
        arrivals,
        most,
    )


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
