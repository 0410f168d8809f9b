"""Pensieve: which chunk gives way, what a turn computes of a conversation with gaps, and what comes from the host."""

from dataclasses import replace

import pytest
from conversations import conversations
from hypothesis import HealthCheck, given, settings
from test_systems_cachedattention import turn

from kvtwin.testing import limits, linear_machine, requests, simulate
from kvtwin.testing.conformance import check_one
from kvtwin.testing.conformance import run as run_workload
from kvtwin.testing.engines import Outcome
from sim.cost.host import Host
from sim.engine.changes import Place
from sim.engine.sequence import Sequence
from sim.kv.index.retained_chunks import ChunkStore
from sim.options.policies import parse_policy
from sim.systems.pensieve import Pensieve
from traces.generators import generate
from traces.request import Request

PREFILL = (0.0, 1e-3, 0.0)


def run(*arrivals: Request, policy=None, prefill=PREFILL, copy_s=3e-4, host=0, jump=True) -> Outcome:
    """Six blocks of 16 tokens on the GPU, four layers."""
    machine = linear_machine(prefill=prefill, decode=(1e-3, 0.0, 0.0), swap_s_per_block=copy_s)
    limit = replace(limits(gpu=6, host=host, max_model_len=97), enable_prefix_caching=True)
    return simulate(policy or Pensieve(), arrivals, limit, machine=machine, jump=jump)


A = turn(0, 0.0, (1, 2, 3, 4))
WIDE = Request(1, 1.0, 64, 1)
"""Four blocks, for two of which A's have to go."""
BACK = turn(2, 2.0, (1, 2, 3, 4, 5))


def test_what_is_cheap_for_its_age_goes_first():
    """Chunks at places 0, 1, 2 cost 1, 2, 3 s. At 4 s those of one conversation are 4 s old, of another 2 s."""
    store, owner = ChunkStore(0, lambda place: 1.0 + place), Sequence(Request(0, 0.0, 1, 1))
    store.now(0.0)
    for place in range(3):
        assert store.put(10 + place, place, owner)
    store.now(2.0)
    assert store.put(20, 0, owner)
    store.now(4.0)
    # Age over cost: 4, 2, 4/3 and 2; of equal ones the earlier place goes.
    left = []
    for _ in range(4):
        before = set(store.chunks)
        store.evict(1)
        left += before.difference(store.chunks)
    assert left == [10, 20, 11, 12]


@pytest.mark.parametrize("jump", [True, False])
def test_the_end_of_a_conversation_is_kept_and_its_beginning_computed_again(jump):
    outcome = run(A, WIDE, BACK, prefill=(0.0, 1e-3, 1e-5), jump=jump)
    # Of A's blocks the first two went: 32 tokens from 0 and 16 from 64 on are computed.
    plan = next(plan for plan, _, _ in outcome.plans if plan.chunks and plan.chunks[0].seq.request is BACK)
    assert [(chunk.num_new, chunk.num_cached) for chunk in plan.chunks] == [(32, 0), (16, 64)]
    assert plan.prefill_pairs == sum(range(1, 33)) + sum(range(65, 81))
    assert plan.prefill_squares == 32**2 + 16**2
    back = outcome.by_id()[2]
    assert back.first_token_s == pytest.approx(2.0 + 0.048 + 1e-5 * (32**2 + 16**2))
    assert back.num_cached_tokens == 32
    assert outcome.scheduler.counters.policy["refilled_tokens"] == 32


def test_what_is_hit_behind_a_chunk_has_its_place_from_the_first():
    """Chunks of a block: the first computes A's first block again, A's third and fourth are hit behind the gap."""
    policy = parse_policy("vllm-v1:memory=retained", {})[1]
    machine = linear_machine(prefill=(0.0, 1e-3, 1e-5), decode=(1e-3, 0.0, 0.0))
    limit = replace(limits(gpu=6, host=0, max_model_len=97), enable_prefix_caching=True, max_num_batched_tokens=16)
    outcome = simulate(policy, (A, WIDE, BACK), limit, machine=machine)
    plans = [plan for plan, _, _ in outcome.plans if plan.chunks and plan.chunks[0].seq.request is BACK]
    assert [(plan.chunks[0].num_new, plan.chunks[0].num_cached) for plan in plans] == [(16, 0), (16, 16), (16, 64)]
    assert [change.num_blocks for change in plans[0].changes if isinstance(change, Place)] == [4]


def test_copies_start_before_blocks_run_out():
    """Six blocks, of which A leaves four: two are free. At half of six, one more is to have a copy: A's first."""
    outcome = run(A, policy=Pensieve(swap_out_threshold=0.5), host=10)
    moves = [(move.first_token, move.end_token) for plan, _, _ in outcome.plans for move in plan.beside]
    assert moves == [(0, 16)]
    assert outcome.scheduler.counters.tiers["host"].stored_blocks == 1


def test_the_host_drops_the_cheapest_for_its_age_too():
    """All is copied that has room. A has four of five places on the host, and of six on the GPU.

    D takes the last place, then that of A's first chunk, which left the GPU for D. Its third finds none.
    """
    d = turn(3, 1.0, (11, 12, 13))
    all_of_it = Request(1, 1.5, 96, 1)
    outcome = run(A, d, all_of_it, BACK, policy=Pensieve(swap_out_threshold=1.0), host=5)
    back = outcome.by_id()[2]
    assert back.num_cached_tokens == 48
    assert outcome.scheduler.counters.policy["refilled_tokens"] == 16
    # At its end the chunks that it computed, A's first and its own, take D's places.
    tier = outcome.scheduler.counters.tiers["host"]
    assert (tier.stored_blocks, tier.evicted_blocks) == (4 + 2 + 2, 1 + 2)


def test_whoever_is_computed_again_finds_what_is_left_of_its_own():
    rows = requests((0.0, 40, 40), (0.0, 40, 40))
    outcome = run(*rows)
    assert outcome.scheduler.counters.preemptions
    assert outcome.scheduler.counters.prefix_rehit_tokens
    assert all(chunk.key < 1 << 64 for chunk in outcome.scheduler.memory.store.chunks.values())


def test_turns_of_conversations_are_answered_sooner():
    """The paper's claim, against the same batches without what it keeps."""
    talks = list(generate("sessions", num_prompts=120, request_rate=3.0, input_len=200, output_len=60, seed=1))
    limit = limits(gpu=250, host=5000, max_model_len=8192)
    kept, again = (
        simulate(parse_policy(text, {})[1], talks, replace(limit, enable_prefix_caching=cached), checked=False).log
        for text, cached in (("pensieve", True), ("pensieve:memory=paged", False))
    )
    assert kept.latencies()["mean_ttft_ms"] < 0.7 * again.latencies()["mean_ttft_ms"]
    assert kept.output_tokens == again.output_tokens


def test_single_turns_gain_nothing():
    """What it must not show: no beginning is another's, and nothing runs out."""
    rows = requests(*((0.05 * i, 20 + 7 * i, 5 + i) for i in range(40)))
    limit = limits(gpu=600, max_model_len=512)
    ends = [
        {seq.request.request_id: seq.finish_s for seq in simulate(parse_policy(text, {})[1], rows, limit).ended}
        for text in ("pensieve", "pensieve:memory=paged")
    ]
    assert ends[0] == ends[1]


TEXTS = ["pensieve", "pensieve:swap-out-threshold=0.7", "pensieve:swap-out-threshold=0", "sarathi:memory=retained"]
TEXTS += ["vllm-v1:memory=retained,swap-out-threshold=0.5", "pensieve:batching=unified,async-scheduling=true"]


@pytest.mark.parametrize("text", TEXTS)
def test_conversations_keep_to_what_every_system_must(text):
    policy = parse_policy(text, {})[1]

    @settings(max_examples=25, deadline=None, suppress_health_check=(HealthCheck.too_slow,))
    @given(workload=conversations(policy))
    def over(workload):
        check_one(policy, workload)
        check_tokens(run_workload(policy, workload))

    over()


def check_tokens(outcome: Outcome) -> None:
    """Each prompt's tokens are computed once, or were there; and pairs are those of the positions."""
    computed: dict[Sequence, list[tuple[int, int]]] = {}
    for plan, _, _ in outcome.plans:
        spans = [(chunk.num_cached, chunk.num_cached + chunk.num_new) for chunk in plan.chunks]
        for chunk, span in zip(plan.chunks, spans, strict=True):
            computed.setdefault(chunk.seq, []).append(span)
        assert plan.prefill_pairs == sum(sum(range(begin + 1, end + 1)) for begin, end in spans)
    # Of what was preempted there is more.
    if not outcome.scheduler.counters.preemptions:
        for seq, spans in computed.items():
            assert spans == sorted(spans)
            places = [position for begin, end in spans for position in range(begin, end)]
            assert len(places) == len(set(places))
            assert len(places) + seq.num_cached_tokens == seq.request.prompt_tokens


def test_what_leaves_twice_arrives_twice():
    """Request 8 is preempted twice while its first copy is under way: the same blocks of it leave again."""
    rows = requests(
        (0.45, 40, 3), (0.45, 11, 4), (0.45, 8, 6), (0.48, 1, 3), (0.49, 12, 3), (0.52, 1, 6), (0.56, 12, 10),
        (0.6, 10, 4), (0.63, 12, 4),
    )  # fmt: skip
    rows[-1] = rows[-1]._replace(hash_ids=(7, 2001, 2002), hash_block_tokens=4, output_hash_ids=(2003,))
    machine = linear_machine(decode=(1 / 64, 0.0, 0.0), swap_s_per_block=0.05, host=Host(0.0205, 1e-5, True))
    limit = replace(limits(11, 8, block_size=4, max_model_len=64), enable_prefix_caching=True)
    moves = []
    outcome = simulate(
        Pensieve(swap_out_threshold=0.6), rows, limit, machine=machine,
        observe=lambda scheduler: lambda plan, start_s, times: moves.extend(plan.beside),
    )  # fmt: skip
    assert len(set(moves)) == len(moves) - 1
    assert len(outcome.ended) == 9 and outcome.scheduler.gpu.free == 11
