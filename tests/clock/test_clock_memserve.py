"""MemServe: which engine caches what of a conversation, what travels, and which is asked."""

from dataclasses import replace

import pytest
from clock_small import FLAT, assert_whole, jumped_and_stepped
from clusters import ClusterOutcome, simulate_pools
from conversations import conversations
from hypothesis import HealthCheck, given, settings

from kvtwin.testing import limits, linear_machine
from kvtwin.testing.conformance import Workload
from sim.options.policies import parse_policy
from sim.systems.memserve.preset import MemServe
from sim.topology.routers import PromptTrees
from traces.generators import generate
from traces.request import Request

FIRST = Request(0, 0.0, 40, 10, "talk", (1, 2, 3), 16, (4,))
SECOND = Request(1, 1.5, 64, 3, "talk", (1, 2, 3, 4), 16, (5,))


def run(*arrivals: Request, caching="return", cached: bool = True, jump: bool = True, **more) -> ClusterOutcome:
    """Every iteration takes 0.1 s, and so does each block on a link."""
    limit = replace(limits(gpu=20, max_model_len=320), enable_prefix_caching=cached)
    return simulate_pools(
        MemServe(caching=caching), arrivals, limit, bytes_per_s=10.0, machine=linear_machine(**FLAT), jump=jump, **more
    )


def counted(outcome: ClusterOutcome, name: str) -> int:
    return sum(member.engine.scheduler.counters.policy.get(name, 0) for member in outcome.members)


@pytest.mark.parametrize("jump", [True, False])
@pytest.mark.parametrize(
    ("caching", "hit", "sent"),
    [
        # 40 + 10 tokens: KV of 49, three full blocks; the third is half prompt, half answer. Of the second prompt's
        # four blocks three can be hit; the last token has to be computed.
        ("return", 48, 3 + 1),
        ("both", 32, 3 + 1),
        ("prefill", 32, 3 + 4),
    ],
)
def test_a_second_turn_finds_the_first_on_either_side(caching, hit, sent, jump):
    outcome = run(FIRST, SECOND, caching=caching, jump=jump)
    assert outcome.by_id()[1].num_cached_tokens == hit
    assert counted(outcome, "handed_over_blocks") == sent
    assert counted(outcome, "returned_blocks") == (1 if caching == "return" else 0)
    # Prefill 0.1 s, copies 0.1 s a block, then the other tokens.
    assert outcome.by_id()[0].finish_s == pytest.approx(0.1 + 0.3 + 0.9)
    assert outcome.by_id()[1].finish_s == pytest.approx(1.5 + 0.1 + 0.1 * (sent - 3) + 0.2)
    assert_whole(outcome, [FIRST, SECOND])


def test_without_caches_it_is_pools_alone():
    outcome = run(FIRST, SECOND, cached=False)
    assert outcome.by_id()[1].num_cached_tokens == 0
    assert counted(outcome, "handed_over_blocks") == 3 + 4


def test_an_answer_on_its_way_back_is_not_there_yet():
    """FIRST ends at 1.3, its answer's block is back at 1.4."""
    assert run(FIRST, SECOND._replace(arrival_s=1.35)).by_id()[1].num_cached_tokens == 32
    assert run(FIRST, SECOND._replace(arrival_s=1.41)).by_id()[1].num_cached_tokens == 48


def test_what_comes_back_and_finds_no_room_is_dropped():
    """Another prompt holds all of the prefill engine's blocks while its KV waits for the decode engine's."""
    big = Request(2, 1.25, 16 * 20 - 2, 2)
    outcome = run(FIRST, big, SECOND._replace(arrival_s=9.0))
    assert counted(outcome, "returned_blocks") == 0
    assert_whole(outcome, [FIRST, SECOND, big])


@pytest.mark.parametrize(("blocks", "returned"), [(17, 1), (18, 0)])
def test_what_comes_back_may_take_the_last_block(blocks, returned):
    """20 blocks: beside the third one that comes back, the first two are cached and have to stay."""
    big = Request(2, 1.25, 16 * blocks, 2)
    outcome = run(FIRST, big, SECOND._replace(arrival_s=9.0))
    assert counted(outcome, "returned_blocks") == returned
    assert_whole(outcome, [FIRST, SECOND, big])


def test_prompts_follow_their_prefixes_to_both_kinds_of_engines():
    other = Request(2, 0.0, 40, 10, "other", (7, 8, 9), 16, (10,))
    turns = [FIRST, other, SECOND._replace(arrival_s=3.0), other._replace(request_id=3, arrival_s=3.0)]
    outcome = run(*turns, prefill=2, decode=2)
    places = outcome.places()
    assert places[0] == places[1] != places[2] == places[3]
    assert [outcome.by_id()[i].num_cached_tokens for i in (1, 3)] == [48, 32]


class View:
    num_in_flight = 0


def test_ties_and_prompts_without_names_go_to_the_least_loaded():
    views = [View(), View()]
    views[0].num_in_flight = 2
    trees = PromptTrees()
    assert trees.route(FIRST, views) == 1
    views[1].num_in_flight = 5
    assert trees.route(SECOND, views) == 1
    assert trees.route(Request(3, 0.0, 5, 5), views) == 0


TEXTS = ["memserve", *("memserve:" + more for more in ("caching=both", "caching=prefill", "layer-wise=true"))]
TEXTS += ["memserve:batching=sarathi"]


@pytest.mark.parametrize("text", TEXTS)
def test_no_request_is_lost_and_jumps_change_nothing(text):
    policy = parse_policy(text, {})[1]

    @settings(max_examples=15, deadline=None, suppress_health_check=(HealthCheck.too_slow,))
    @given(workload=conversations(policy))
    def over(workload: Workload):
        limit = replace(workload.limits, enable_prefix_caching=True, num_cpu_blocks=0)
        jumped_and_stepped(
            lambda source, jump: simulate_pools(
                policy, source, limit, prefill=2, decode=2, bytes_per_s=300.0, machine=workload.machine, jump=jump
            ),
            workload.arrivals,
        )

    over()


def test_conversations_are_answered_sooner_and_less_travels():
    """The paper's claim, step by step; what it must not show is a gain for prompts that share nothing."""
    talks = list(generate("sessions", num_prompts=120, request_rate=3.0, input_len=200, output_len=60, seed=1))
    limit = replace(limits(gpu=2000, max_model_len=8192), enable_prefix_caching=True)
    ttft_s, sent = {}, {}
    for caching in ("", "prefill", "both", "return"):
        policy = MemServe(caching=caching or "prefill")
        own = replace(limit, enable_prefix_caching=bool(caching))
        outcome = simulate_pools(policy, talks, own, bytes_per_s=1e3, checked=False)
        ended = [seq for seq, _ in outcome.ended]
        ttft_s[caching] = sum(seq.first_token_s - seq.request.arrival_s for seq in ended) / len(ended)
        sent[caching] = counted(outcome, "handed_over_blocks")
    assert ttft_s[""] > ttft_s["prefill"] > ttft_s["return"]
    assert sent[""] == sent["prefill"] > sent["both"] == sent["return"]
    alone = [request._replace(hash_ids=(), hash_block_tokens=0, output_hash_ids=()) for request in talks]
    one, other = (
        simulate_pools(MemServe(), alone, replace(limit, enable_prefix_caching=cached), bytes_per_s=1e3, checked=False)
        for cached in (True, False)
    )
    assert {key: seq.finish_s for key, seq in one.by_id().items()} == pytest.approx(
        {key: seq.finish_s for key, seq in other.by_id().items()}
    )
