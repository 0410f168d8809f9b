"""Prefill and decode pools: KV moves once, is held on both sides until it has, and no request is lost."""

import random
from dataclasses import replace

import pytest
from clock_small import FLAT, ROWS, assert_whole, drawn, jumped_and_stepped
from clusters import ClusterOutcome, simulate_pools
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.testing import limits, linear_machine, requests
from kvtwin.testing.conformance import hosts_of
from sim.engine.sequence import Status
from sim.options.policies import parse_policy
from sim.parts.stage.pull import Pull
from sim.systems.distserve import DistServe
from sim.systems.splitwise import Splitwise

BESIDE = DistServe(blocking_pull=False)
"""Decode engines compute while they pull."""
POLICIES = [
    "distserve", "distserve:blocking-pull=false", "distserve:eviction=recompute", "vllm-recompute:stage=hand-over",
    "distserve:waiting-share=0.5", "distserve:layer-wise=true", "splitwise",
]  # fmt: skip
POLICIES += ["sarathi:stage=hand-over,eviction=swap"]
POLICIES += ["vllm-v1:stage=hand-over", "vllm-v1:stage=hand-over,async-scheduling=true"]
POLICIES += [f"vllm-v1:stage=hand-over,async-scheduling=true,{more}=true" for more in ("blocking-pull", "layer-wise")]
POLICIES += ["vllm-v1:stage=nixl", "vllm-v1:stage=nixl,async-scheduling=true"]
TIERED = ["splitwise:memory=tiered", "vllm-recompute:memory=tiered,stage=hand-over", "ragcache:stage=hand-over",
          "splitwise:memory=tiered,disk-space=1", "cacheblend:stage=hand-over",
          *(f"{kept},swap-out-threshold=1" for kept in ("splitwise:memory=retained", "pensieve:stage=hand-over",
                                                      "pensieve:batching=unified,stage=nixl"))]  # fmt: skip
"""Prompts that were handed over are kept on the host of the engine that prefilled them."""
POLICIES += [
    "orca:stage=hand-over",
    "distserve:memory=reserved",
    "vattention:stage=hand-over",
    "splitwise:memory=mapped",
]
POLICIES += ["distserve:order=priority,eviction=recompute", "splitwise:order=shortest-prefill", "distserve:order=lpm"]


def links_busy_s(outcome: ClusterOutcome, name: str) -> float:
    return sum(member.lanes.links[name].busy_s for member in outcome.members if name in member.lanes.links)


@pytest.mark.parametrize("jump", [True, False])
def test_a_request_is_prefilled_copied_and_decoded(jump):
    # 40 tokens are 3 blocks of 16; at 1 byte a block and 10 bytes/s the copy takes 0.3 s: 0.1 to 0.4. Four more tokens
    # take 0.4 s. The request of one token ends where it is prefilled, from 0.1 to 0.2.
    rows = requests((0.0, 40, 5), (0.05, 40, 1))
    outcome = simulate_pools(DistServe(), rows, limits(), bytes_per_s=10.0, machine=linear_machine(**FLAT), jump=jump)
    assert outcome.places() == {0: 1, 1: 0}
    first, second = outcome.by_id()[0], outcome.by_id()[1]
    assert (first.first_token_s, first.finish_s) == pytest.approx((0.1, 0.8))
    assert (second.first_token_s, second.finish_s) == pytest.approx((0.2, 0.2))
    (link,) = outcome.members[0].lanes.links.values()
    assert link.name == "link out"
    assert [interval[:2] for interval in link.intervals or ()] == [pytest.approx((0.1, 0.4))]
    assert outcome.members[1].lanes.links["link in"].busy_s == pytest.approx(0.3)
    assert outcome.members[0].engine.scheduler.counters.policy == {"handed_over": 1, "handed_over_blocks": 3}


@pytest.mark.parametrize("jump", [True, False])
def test_the_engine_that_decodes_has_the_first_token_under_nixl(jump):
    # Prefilled by 0.1, and 3 blocks of 16 copied by 0.4; the prompt's last token, computed again, samples the first of
    # five at 0.5. TTFT has the copy in it, and nothing of the token that was dropped is left.
    nixl = parse_policy("vllm-v1:stage=nixl", {})[1]
    machine = linear_machine(**FLAT)
    outcome = simulate_pools(nixl, requests((0.0, 40, 5)), limits(), bytes_per_s=10.0, machine=machine, jump=jump)
    (seq,) = outcome.by_id().values()
    assert (seq.first_token_s, seq.finish_s, seq.num_generated) == pytest.approx((0.5, 0.9, 5))


def test_what_the_engine_that_decodes_has_cached_is_not_sent():
    # The second prompt is the first one again: of its 4 blocks the engine that decodes has 3, its last token aside.
    rows = [r._replace(hash_ids=(1, 2, 3, 4), hash_block_tokens=16) for r in requests((0.0, 64, 3), (5.0, 64, 3))]
    cached = replace(limits(), enable_prefix_caching=True)
    nixl = parse_policy("vllm-v1:stage=nixl", {})[1]
    outcome = simulate_pools(nixl, rows, cached, bytes_per_s=10.0, machine=linear_machine(**FLAT))
    sent, again = outcome.members[0].lanes.links["link out"].intervals or ()
    assert (sent.end_s - sent.start_s, again.end_s - again.start_s) == pytest.approx((0.4, 0.1))
    assert_whole(outcome, rows)


@pytest.mark.parametrize("name", ["vllm-v1:stage=nixl", "memserve"])
def test_an_engine_keeps_no_books_of_what_it_handed_over(name):
    """It would hold ever more of them, and look at them all whenever it catches up."""
    cached = replace(limits(), enable_prefix_caching=True)
    outcome = simulate_pools(parse_policy(name, {})[1], requests((0.0, 64, 3), (5.0, 40, 2)), cached)
    assert not [memory.holdings for m in outcome.members if (memory := m.engine.scheduler.memory).holdings]


def test_a_landing_copy_ends_a_jump_of_the_decode_engine():
    # 0 decodes from 0.1 + 0.1 on in steps of 0.1 s; 1's copy lands at 0.4 while 0 is in the middle of 50 tokens.
    rows = requests((0.0, 16, 50), (0.15, 32, 3))
    for jump in (True, False):
        outcome = simulate_pools(BESIDE, rows, limits(), bytes_per_s=10.0, machine=linear_machine(**FLAT), jump=jump)
        assert outcome.by_id()[0].finish_s == pytest.approx(0.2 + 4.9)
        # Prefilled from 0.15 to 0.25; heard of at 0.3; copied until 0.5; tokens at 0.6 and 0.7.
        assert outcome.by_id()[1].finish_s == pytest.approx(0.7)


def test_links_carry_one_copy_at_a_time():
    # Two prefill engines are done at 0.1; the decode engine's link takes 0.1 s a block, one copy after the other.
    rows = requests((0.0, 16, 3), (0.0, 16, 3))
    outcome = simulate_pools(BESIDE, rows, limits(), prefill=2, bytes_per_s=10.0, machine=linear_machine(**FLAT))
    (interval, other) = outcome.members[2].lanes.links["link in"].intervals or ()
    assert (*interval[:2], *other[:2]) == pytest.approx((0.1, 0.2, 0.2, 0.3))
    assert sorted(seq.finish_s for seq, _ in outcome.ended) == pytest.approx([0.4, 0.5])


@pytest.mark.parametrize("jump", [True, False])
def test_layers_are_sent_while_later_ones_are_computed(jump):
    # Four layers, 0.1 s for a prompt. A fast link (16 bytes/s, a block of 1 byte 0.0625 s) has sent three of them by
    # 0.1 and needs a quarter of a block's time more; a slow one (5 bytes/s) starts at 0.025 and needs 0.2 s.
    for bytes_per_s, landed_s in ((16.0, 0.1 + 0.0625 / 4), (5.0, 0.025 + 0.2)):
        outcome = simulate_pools(
            Splitwise(), requests((0.0, 16, 2)), limits(), bytes_per_s=bytes_per_s, machine=linear_machine(**FLAT),
            jump=jump,
        )  # fmt: skip
        assert outcome.by_id()[0].finish_s == pytest.approx(landed_s + 0.1)


def test_a_full_decode_pool_holds_prefills_up():
    # Each needs 2 blocks and grows to 3; vLLM wants one more free, so that the decode engine holds one at a time. The
    # prefill engine holds two: the fourth prompt starts when the second has left, as the first ends at 1.1.
    rows = requests(*[(0.0, 32, 11)] * 4)
    small = limits(4, 0, tokens=32, max_model_len=32)
    outcome = simulate_pools(DistServe(), rows, small, machine=linear_machine(**FLAT))
    assert_whole(outcome, rows)
    seqs = [outcome.by_id()[i] for i in range(4)]
    assert [seq.finish_s for seq in seqs] == pytest.approx([1.1, 2.1, 3.1, 4.1])
    assert [seq.first_token_s for seq in seqs] == pytest.approx([0.1, 0.2, 0.3, 1.2])


@pytest.mark.parametrize(("share", "second_s"), [(0.24, 0.3), (0.25, 0.3), (0.26, 0.1)])
def test_what_waits_to_decode_holds_less_than_its_share_when_another_is_pulled(share, second_s, monkeypatch):
    """Two prompts of 2 blocks, prefilled beside each other until 0.1; a copy takes 0.2 s. Of the decode engine's 8
    blocks a quarter is what the first holds until it has landed."""
    pulled, pull = {}, Pull._pull

    def noted(self, seq):
        pulled[seq.request.request_id] = self.scheduler.now_s
        pull(self, seq)

    monkeypatch.setattr(Pull, "_pull", noted)
    policy = DistServe(blocking_pull=False, waiting_share=share)
    rows = requests((0.0, 32, 2), (0.0, 32, 2))
    outcome = simulate_pools(
        policy, rows, limits(), prefill=2, bytes_per_s=10.0, machine=linear_machine(**FLAT), decode_limit=limits(8)
    )
    assert_whole(outcome, rows)
    assert pulled == pytest.approx({0: 0.1, 1: second_s})
    assert [outcome.by_id()[i].finish_s for i in (0, 1)] == pytest.approx([0.4, 0.6])


@pytest.mark.parametrize("name", ["distserve:batching=sarathi", "splitwise", "memserve", "mooncake"])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), seqs=st.integers(2, 4), gpu=st.sampled_from([30, 50]), tokens=st.integers(9, 32))
def test_what_is_computed_again_in_chunks_has_a_seat(name, seed, seqs, gpu, tokens):
    """`CheckedEngine` counts the sequences of an iteration: no more than there are seats."""
    rng = random.Random(seed)
    rows = sorted((2 * rng.random(), rng.randint(1, 60), rng.randint(1, 60)) for _ in range(12))
    limit = limits(gpu=gpu, host=40, block_size=4, seqs=seqs, tokens=tokens, chunked=True, max_model_len=200)
    outcome = simulate_pools(parse_policy(name, {})[1], requests(*rows), limit, decode=2)
    assert_whole(outcome, requests(*rows))


def test_a_prompt_that_the_decode_engine_can_never_hold_is_ignored():
    rows = requests((0.0, 100, 5), (0.0, 10, 5), (0.1, 100, 1))
    outcome = simulate_pools(DistServe(), rows, limits(20), decode_limit=limits(3))
    assert_whole(outcome, rows)
    assert {i: seq.status for i, seq in outcome.by_id().items()} == {
        0: Status.IGNORED, 1: Status.FINISHED, 2: Status.FINISHED,
    }  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=20, deadline=None)
@given(
    rows=ROWS,
    pools=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    blocks=st.tuples(st.integers(6, 24), st.integers(6, 24)),
    seats=st.sampled_from([1, 3, 256]),
    host=st.sampled_from([0, 5, 40]),
    speed=st.sampled_from([10.0, 300.0, 1e9]),
    most=st.sampled_from([None, 3]),
    data=st.data(),
)
def test_jumping_changes_nothing_and_memory_is_conserved(policy, rows, pools, blocks, seats, host, speed, most, data):
    arrivals, kind = drawn(rows), parse_policy(policy, {})[1]
    chunked = policy.startswith("sarathi")
    limit, decode_limit = (
        limits(count, host, max_model_len=256, seqs=seats, chunked=chunked, tokens=512) for count in blocks
    )
    machine = linear_machine(limit.block_bytes, host=data.draw(st.sampled_from(hosts_of(kind))))
    one, other = jumped_and_stepped(
        lambda source, jump: simulate_pools(
            kind, source, limit, prefill=pools[0], decode=pools[1], decode_limit=decode_limit, bytes_per_s=speed,
            machine=machine, jump=jump,
        ),
        arrivals,
        most,
    )  # fmt: skip
    for outcome in (one, other):
        assert links_busy_s(outcome, "link in") == pytest.approx(links_busy_s(outcome, "link out"))
        sent = sum(m.engine.scheduler.counters.policy["handed_over_blocks"] for m in outcome.members)
        assert links_busy_s(outcome, "link in") == pytest.approx(sent / speed)


def named(rows, kinds):
    """Requests whose prompts begin with the four blocks of their kind."""
    return [
        r._replace(hash_ids=tuple((100 * kind if i < 4 else 1000 * (r.request_id + 1)) + i
                                  for i in range(-(-r.prompt_tokens // 16))), hash_block_tokens=16)
        for r, kind in zip(rows, kinds, strict=True)
    ]  # fmt: skip


@pytest.mark.parametrize("policy", TIERED)
def test_what_was_handed_over_comes_back_from_the_host_where_it_was_prefilled(policy):
    """Five blocks keep one of the first prompt beside the second; the third, the first again, hits it and loads two.

    CacheBlend's memory hits what is on the host alone: three blocks, of which it computes one again. Pensieve's gives
    up the first blocks of a prompt first, and loads these three.
    """
    is_kept = "swap-out" in policy
    on_gpu = 0 if is_kept or policy.startswith("cacheblend") else 16
    loaded = 48 if is_kept else 32
    rows = named(requests((0.0, 64, 3), (5.0, 64, 3), (10.0, 64, 3)), (1, 2, 1))
    machine = linear_machine(prefill=(0.01, 0.0, 1e-4), decode=(0.1, 0.0, 0.0))
    outcome = simulate_pools(parse_policy(policy, {})[1], rows, limits(5, 20, max_model_len=512), machine=machine)
    assert [outcome.by_id()[i].num_cached_tokens for i in range(3)] == [0, 0, loaded + on_gpu]
    tier = outcome.members[0].engine.scheduler.counters.tiers["host"]
    assert (tier.stored_blocks, tier.num_loads, tier.hit_tokens) == (8, 1, loaded)


@pytest.mark.parametrize("policy", TIERED)
@settings(max_examples=25, deadline=None)
@given(
    rows=ROWS,
    kinds=st.lists(st.integers(0, 3), min_size=25, max_size=25),
    pools=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    blocks=st.tuples(st.integers(10, 24), st.integers(6, 24)),
    host=st.sampled_from([0, 5, 40]),
    speed=st.sampled_from([10.0, 300.0, 1e9]),
)
def test_jumping_changes_nothing_where_hosts_keep_what_was_handed_over(policy, rows, kinds, pools, blocks, host, speed):
    arrivals, kind = drawn(rows), parse_policy(policy, {})[1]
    limit, decode_limit = (limits(count, host, max_model_len=256, tokens=512) for count in blocks)
    jumped_and_stepped(
        lambda source, jump: simulate_pools(
            kind, source, limit, prefill=pools[0], decode=pools[1], decode_limit=decode_limit, bytes_per_s=speed,
            jump=jump,
        ),
        named(arrivals, kinds[: len(arrivals)]),
        None,
    )  # fmt: skip


def test_what_is_pulled_has_room_for_its_longest_context():
    """Four blocks each of eight, whatever its KV takes: the third of three is pulled when another ends."""
    policy, short = parse_policy("orca:stage=hand-over", {})[1], limits(max_model_len=64)
    rows = requests(*(3 * [(0.0, 10, 20)]))
    outcome = simulate_pools(policy, rows, short, decode_limit=replace(short, num_gpu_blocks=8))
    first_s, second_s, third_s = (outcome.by_id()[i].finish_s for i in range(3))
    assert second_s == pytest.approx(first_s, rel=0.1) and third_s > 1.8 * first_s
    assert sum(m.engine.scheduler.counters.policy["handed_over_blocks"] for m in outcome.members) == 3


def test_what_is_pulled_is_mapped_where_it_decodes():
    """Three blocks of 16 tokens come; the next request has the pages that they left."""
    policy = parse_policy("vattention:stage=hand-over", {})[1]
    rows = requests((0.0, 40, 3), (9.0, 40, 3))
    outcome = simulate_pools(policy, rows, limits(chunked=True, max_model_len=64, tokens=512))
    assert [member.engine.scheduler.counters.policy["mapped_blocks"] for member in outcome.members] == [3, 3]


def test_what_is_pulled_needs_all_its_blocks_although_some_could_be_hit():
    """A sequence computed again where it decodes has blocks that others hit; theirs are sent nevertheless."""
    rows = [
        r._replace(hash_ids=(1, 2, 3, 4 + r.request_id), hash_block_tokens=16)
        for r in requests(*((0.05 * i, 60, 20 + 15 * (i % 3)) for i in range(12)))
    ]
    for blocks in range(8, 24):
        limit = replace(limits(gpu=blocks), enable_prefix_caching=True)
        outcome = simulate_pools(Splitwise(), rows, limits(), decode_limit=limit)
        assert sorted(outcome.by_id()) == list(range(12))
        assert not any(seq.error for seq, _ in outcome.ended)
