"""CachedAttention: what the host keeps of ended turns, loads layer by layer, and when computing again is better."""

from dataclasses import replace

import pytest

from kvtwin.testing import limits, linear_machine, requests, simulate
from kvtwin.testing.engines import Outcome
from sim.errors import UserError
from sim.options.policies import parse_policy
from sim.systems.cachedattention import CachedAttention
from sim.systems.pensieve import Pensieve
from sim.systems.vllm055 import VllmRecompute
from traces.generators import generate
from traces.request import Request


def turn(request_id: int, arrival_s: float, ids: tuple[int, ...], output: int = 1) -> Request:
    return Request(request_id, arrival_s, 16 * len(ids), output, "", ids, 16)


def run(*arrivals: Request, copy_s: float = 3e-4, host: int = 100, jump: bool = True, policy=None) -> Outcome:
    """Six blocks on the GPU, a millisecond a prompt token, four layers."""
    machine = linear_machine(prefill=(0.0, 1e-3, 0.0), decode=(1e-3, 0.0, 0.0), swap_s_per_block=copy_s)
    limit = limits(gpu=6, host=host, max_model_len=97)
    return simulate(policy or CachedAttention(), arrivals, limit, machine=machine, jump=jump)


A, B, C = turn(0, 0.0, (1, 2, 3, 4)), turn(1, 1.0, (5, 6, 7, 8, 9, 10)), turn(2, 2.0, (1, 2, 3, 4, 11))


@pytest.mark.parametrize("jump", [True, False])
@pytest.mark.parametrize(
    "policy", [CachedAttention(), Pensieve(swap_out_threshold=1.0)], ids=lambda policy: policy.name
)
@pytest.mark.parametrize(
    ("copy_s", "seconds"),
    [
        # Four blocks in 1.2 ms beside 16 ms of computation: the first layer's copy shows, 1.2 / 4 ms.
        (3e-4, 0.016 + 0.0003),
        # In 72 ms: the last layer's computation shows, 16 / 4 ms.
        (0.018, 0.072 + 0.004),
        # In 80 ms: 84 with the last layer, and computing all of it takes 80.
        (0.020, 0.080),
    ],
)
def test_a_layer_is_computed_once_it_is_there(copy_s, seconds, policy, jump):
    outcome = run(A, B, C, copy_s=copy_s, policy=policy, jump=jump)
    assert outcome.by_id()[2].first_token_s == pytest.approx(2.0 + seconds, abs=1e-12)
    tier = outcome.scheduler.counters.tiers["host"]
    loaded = seconds < 0.080
    assert (tier.num_loads, tier.hit_tokens) == ((1, 64) if loaded else (0, 0))
    assert tier.saved_s == pytest.approx(0.080 - seconds)
    assert tier.lost_s == 0.0


def test_a_turns_blocks_are_free_when_they_are_saved():
    """A ends at 64 ms and is saved until 144; B comes at 70 ms and needs all six blocks."""
    outcome = run(A, B._replace(arrival_s=0.07), copy_s=0.020)
    assert outcome.by_id()[1].first_scheduled_s == pytest.approx(0.144, abs=1e-12)
    assert outcome.by_id()[1].first_token_s == pytest.approx(0.144 + 0.096, abs=1e-12)


def test_what_comes_back_while_its_turn_is_saved_hits_it_on_the_gpu():
    outcome = run(A, C._replace(arrival_s=0.07), copy_s=0.020)
    assert outcome.by_id()[2].first_token_s == pytest.approx(0.070 + 0.016, abs=1e-12)
    assert outcome.scheduler.counters.tiers["host"].num_loads == 0


def test_the_longest_unused_gives_way_on_the_host_tails_first():
    """B's six blocks push three of A's four out of a host of seven: C hits what is left, the head."""
    outcome = run(A, B, C, host=7, policy=CachedAttention(disk_space=0.0))
    tier = outcome.scheduler.counters.tiers["host"]
    assert (tier.num_loads, tier.hit_tokens) == (1, 16)
    # C saves the five blocks that it has and the host lacks: four, for which B's tail goes.
    assert (tier.stored_blocks, tier.evicted_blocks) == (4 + 6 + 4, 3 + 4)


def test_turns_of_conversations_are_answered_sooner():
    """The paper's claim; with what is not its claim beside it: outputs take as long."""
    talks = list(generate("sessions", num_prompts=120, request_rate=3.0, input_len=200, output_len=60, seed=1))
    limit = limits(gpu=250, host=5000, max_model_len=8192)
    outcomes = {}
    for policy in (VllmRecompute(), CachedAttention()):
        outcomes[policy.name] = simulate(policy, talks, limit, checked=False)
    again, loaded = outcomes["vllm-recompute"].log, outcomes["cachedattention"].log
    assert loaded.latencies()["mean_ttft_ms"] < 0.7 * again.latencies()["mean_ttft_ms"]
    assert loaded.output_tokens == again.output_tokens


def test_single_turns_gain_nothing():
    """What it must not show: the host cannot help turns that none precedes. Victims hit their own blocks in either."""
    rows = requests(*((0.05 * i, 20 + 7 * i, 5 + i) for i in range(40)))
    limit = replace(limits(gpu=60, max_model_len=512), enable_prefix_caching=True)
    one, other = (simulate(policy, rows, limit) for policy in (VllmRecompute(), CachedAttention()))
    ends = [{seq.request.request_id: seq.finish_s for seq in outcome.ended} for outcome in (one, other)]
    assert ends[0] == pytest.approx(ends[1])
    assert other.scheduler.counters.tiers["host"].stored_blocks == 0


@pytest.mark.parametrize(
    ("memory", "num_blocks", "rows"),
    [
        ("tiered", 11, ((0.0, 1, 10), (0.01, 17, 5), (0.04, 5, 1), (0.04, 6, 11), (0.05, 11, 4))),
        ("documents", 8, ((0.04, 12, 10), (0.04, 16, 8), (0.05, 6, 10), (0.05, 18, 3))),
    ],
)
def test_what_is_preempted_with_its_last_token_in_flight_saves_nothing(memory, num_blocks, rows):
    """Blocks of 4 tokens: its are needed now, not when a copy has ended."""
    rows = requests(*rows)
    rows[1:] = [
        row._replace(hash_ids=(7, *range(1000 * i, 1000 * i + 4))[: -(-row.prompt_tokens // 4)], hash_block_tokens=4)
        for i, row in enumerate(rows[1:])
    ]
    machine = linear_machine(decode=(1 / 64, 0.0, 0.0), swap_s_per_block=0.05)
    limit = replace(limits(num_blocks, 8, block_size=4, max_model_len=64, chunked=True), enable_prefix_caching=True)
    policy = parse_policy(f"vllm-v1:memory={memory},async-scheduling=true", {})[1]
    outcome = simulate(policy, rows, limit, machine=machine)
    assert outcome.scheduler.counters.preemptions > 0
    assert outcome.scheduler.gpu.free == num_blocks
    assert len(outcome.ended) == len(rows)


def test_its_cache_cannot_be_turned_off():
    with pytest.raises(UserError, match="--no-enable-prefix-caching"):
        CachedAttention().prefix_caching(False)
    assert CachedAttention().prefix_caching(None)
