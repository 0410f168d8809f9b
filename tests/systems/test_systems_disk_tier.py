"""The disk below the host: what is read from it and when, what waits, and what gives way."""

from dataclasses import replace

import pytest
from conversations import conversations
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_systems_cachedattention import A, B, C, turn

from kvtwin.testing import limits, linear_machine, simulate
from kvtwin.testing.conformance import check_one
from kvtwin.testing.engines import Outcome
from sim.kv.tiered_options import GIB
from sim.options.policies import parse_policy
from sim.systems.cachedattention import CachedAttention

BLOCK_US = 5000.0


def disk(num_blocks: int = 100, block_us: float = BLOCK_US, *, look_ahead: bool = True) -> CachedAttention:
    """A disk of a few blocks of one byte, 5 ms each and 1 ms before each copy."""
    return CachedAttention(
        disk_space=(num_blocks + 0.5) / GIB, disk_latency_us=1000.0, disk_block_us=block_us, look_ahead=look_ahead
    )


def run(policy: CachedAttention, *arrivals, host: int = 6, gpu: int = 6, jump: bool = True) -> Outcome:
    """Six blocks on the GPU and on the host, a millisecond a prompt token, 0.3 ms a copied block, four layers."""
    machine = linear_machine(prefill=(0.0, 1e-3, 0.0), decode=(1e-3, 0.0, 0.0), swap_s_per_block=3e-4)
    limit = replace(limits(gpu=gpu, host=host, max_model_len=97), enable_prefix_caching=True)
    return simulate(policy, arrivals, limit, machine=machine, jump=jump)


def tiers(outcome: Outcome) -> tuple[int, int]:
    found = outcome.scheduler.counters.tiers
    return found["host"].hit_tokens, found["disk"].hit_tokens


@pytest.mark.parametrize("jump", [True, False])
@pytest.mark.parametrize(
    ("block_us", "seconds", "hits"),
    [
        # 1 + 4 x 5 ms for the disk, then 16 ms of computation behind the first layer's copy, 1.2 / 4 ms.
        (5000.0, 0.021 + 0.0163, (0, 64)),
        (15000.0, 0.061 + 0.0163, (0, 64)),
        # 1 + 4 x 16 ms and 16.3 ms would be 81.3; computing all of it takes 80.
        (16000.0, 0.080, (0, 0)),
    ],
)
def test_a_prompt_waits_for_the_disk_unless_computing_is_sooner(block_us, seconds, hits, jump):
    """B's six blocks push A's four out of the host; C comes when no other is there."""
    outcome = run(disk(block_us=block_us), A, B, C, jump=jump)
    assert outcome.by_id()[2].first_token_s == pytest.approx(2.0 + seconds, abs=1e-9)
    assert tiers(outcome) == hits
    used = outcome.scheduler.counters.tiers["disk"]
    assert used.saved_s == pytest.approx(0.080 - seconds, abs=1e-9)
    assert (used.stored_blocks, used.evicted_blocks, used.lost_s) == (4 + 6 + 1, 0, 0.0)


LONG = turn(3, 2.0, (), 1)._replace(prompt_tokens=96, hash_ids=(), hash_block_tokens=0)
"""All blocks of the GPU for 96 ms, and no names."""


@pytest.mark.parametrize("jump", [True, False])
def test_what_waits_has_its_prefix_fetched_meanwhile(jump):
    """C arrives at 2.001 and waits for LONG until 2.096: by then its four blocks are on the host."""
    outcome = run(disk(), A, B, LONG, C._replace(arrival_s=2.0), jump=jump)
    assert outcome.by_id()[2].first_token_s == pytest.approx(2.096 + 0.0163, abs=1e-9)
    assert tiers(outcome) == (64, 0)
    assert outcome.scheduler.counters.policy["prefetched_blocks"] == 4


def test_without_looking_ahead_it_waits_for_the_disk_then():
    outcome = run(disk(look_ahead=False), A, B, LONG, C._replace(arrival_s=2.0))
    assert outcome.by_id()[2].first_token_s == pytest.approx(2.096 + 0.021 + 0.0163, abs=1e-9)
    assert tiers(outcome) == (0, 64)


def test_what_is_admitted_during_its_fetch_waits_for_the_rest_of_it():
    """40 ms a block: the fetch begins at 2.0 and ends at 2.161; LONG's end, at 2.096, lets C in.

    By price (161 ms as if the fetch had just begun) that is slower than computing, 80 ms.
    """
    outcome = run(disk(block_us=40000.0), A, B, LONG, C._replace(arrival_s=2.0))
    assert outcome.by_id()[2].first_token_s == pytest.approx(2.096 + 0.080, abs=1e-9)
    # 11 ms a block: 45 ms and 16.3 ms are less than 80. It had ended at 2.045.
    short = LONG._replace(prompt_tokens=32, output_tokens=1)
    outcome = run(disk(block_us=11000.0), A, B, short, C._replace(arrival_s=2.0), gpu=6)
    # `short` and C do not fit together; C is let in at 2.032 and waits until 2.045.
    assert outcome.by_id()[2].first_token_s == pytest.approx(2.045 + 0.0163, abs=1e-9)
    assert tiers(outcome) == (64, 0)


def test_what_a_sequence_waits_for_gives_way_last_on_the_host():
    """A (older) and D fill a host of eight. E ends while LONG and C wait, and its four blocks are to be saved."""
    d, e = turn(4, 1.0, (21, 22, 23, 24)), turn(5, 1.9, (31, 32, 33, 34), 2)
    late = C._replace(arrival_s=1.91)
    hits = {}
    for look_ahead in (True, False):
        outcome = run(disk(look_ahead=look_ahead), A, d, e, LONG._replace(arrival_s=1.905), late, host=8)
        hits[look_ahead] = tiers(outcome)
        if look_ahead:
            # Nothing had to be fetched: D gave way.
            assert outcome.scheduler.counters.policy.get("prefetched_blocks", 0) == 0
    assert hits == {True: (64, 0), False: (0, 64)}


def test_the_disk_keeps_what_is_wanted_too_and_loses_the_longest_unused():
    outcome = run(disk(6), A, B, C)
    # B's six push A's four out of a disk of six.
    assert tiers(outcome) == (0, 0)
    assert outcome.scheduler.counters.tiers["disk"].evicted_blocks >= 4


@pytest.mark.parametrize(
    "text",
    [
        "cachedattention:disk-space=1e-7,disk-block-us=1000",
        "cachedattention:disk-space=3e-8,disk-block-us=3000,disk-latency-us=20000",
        "cachedattention:disk-space=0",
        "sarathi:memory=tiered,disk-space=1e-7,disk-block-us=1000",
        "vllm-v1:memory=tiered,disk-space=5e-8,disk-block-us=100",
    ],
)
def test_conversations_keep_to_what_every_system_must(text):
    policy = parse_policy(text, {})[1]

    @settings(max_examples=25, deadline=None, suppress_health_check=(HealthCheck.too_slow,))
    @given(workload=conversations(policy))
    def over(workload):
        check_one(policy, replace(workload, limits=replace(workload.limits, enable_prefix_caching=True)))

    over()


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), disk_blocks=st.sampled_from([0, 100]))
def test_names_of_what_is_gone_are_forgotten_and_no_hit_with_them(data, disk_blocks):
    policy = disk(disk_blocks) if disk_blocks else CachedAttention(disk_space=0.0)
    workload = data.draw(conversations(policy))
    found = []
    for fewest in (0, 10**9):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sim.kv.index.block_chain.FEWEST_LINKS", fewest)
            outcome = simulate(policy, workload.arrivals, workload.limits, machine=workload.machine)
        hits = {name: tier.hit_tokens for name, tier in outcome.scheduler.counters.tiers.items()}
        found.append((hits, [(seq.request.request_id, seq.finish_s) for seq in outcome.ended]))
    assert found[0] == found[1]


def test_names_do_not_pile_up(monkeypatch):
    """400 prompts of 4 blocks that no other has: 6 of them fit on the GPU, 20 on the host, 30 on the disk."""
    monkeypatch.setattr("sim.kv.index.block_chain.FEWEST_LINKS", 0)
    turns = (turn(i, 0.1 * i, tuple(range(4 * i, 4 * i + 4))) for i in range(400))
    outcome = run(disk(30), *turns, host=20)
    # Twice what is kept, and the blocks of one more prompt.
    assert len(outcome.scheduler.memory.backing.chain) <= 2 * (6 + 20 + 30 + 4) + 4
