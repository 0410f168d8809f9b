"""ChunkAttention and BatchLLM on small engines, worked out by hand: what is shared, what is read, what goes first."""

from dataclasses import replace

import pytest

from kvtwin.testing import conformance, limits, roofline_machine, simulate
from kvtwin.testing.engines import DECODE
from sim.kv.radix import RadixMemory
from sim.options.policies import parse_policy
from sim.systems.batchllm.preset import BatchLLM
from sim.systems.chunkattention import ChunkAttention
from sim.systems.vllm055 import VllmRecompute
from traces.request import Request


def shared_limits(gpu, block_size=16, **options):
    return replace(limits(gpu, 0, block_size=block_size, **options), enable_prefix_caching=True)


def prompts(*rows):
    """(arrival_s, prefix number, shared tokens, own tokens, output tokens) rows; traces name single tokens."""
    return [
        Request(
            i, arrival_s, shared + own, output, "",
            (*(10**6 * prefix + n for n in range(shared)), *(10**9 + 10**5 * i + n for n in range(own))), 1,
        )
        for i, (arrival_s, prefix, shared, own, output) in enumerate(rows)
    ]  # fmt: skip


def decodes(outcome):
    """(what decodes, context tokens, shared ones, first seconds, iterations) of every plan that decodes only."""
    return [
        (plan.num_decodes, plan.decode_context_tokens, plan.decode_shared_tokens, times.first_end_s - start_s)
        for plan, start_s, times in outcome.plans
        if plan.num_decodes and not plan.chunks
    ]


# -- ChunkAttention -----------------------------------------------------------------------------------------------


def test_a_chunk_is_read_once_for_all_that_share_it():
    """Three prompts of 150 equal tokens and 10 own: two whole chunks of 64 are common, which two read again.

    The first computes 160; the others arrive meanwhile and compute 160 - 128 each. Then all decode: contexts of 161
    tokens, 256 in all not read again: d0 + 3 d1 + (483 - 256) d2 seconds.
    """
    rows = prompts((0.0, 1, 150, 10, 20), (0.001, 1, 150, 10, 20), (0.001, 1, 150, 10, 20))
    outcome = simulate(ChunkAttention(), rows, shared_limits(100, 64))
    assert [plan.prefill_tokens for plan, _, _ in outcome.plans if plan.chunks] == [160, 64]
    first = decodes(outcome)[0]
    assert first[:3] == (3, 3 * 161, 256)
    d0, d1, d2 = DECODE
    assert first[3] == pytest.approx(d0 + 3 * d1 + (3 * 161 - 256) * d2)


def test_memory_is_freed_with_the_last_sharer():
    """Two share two chunks of three; the last that has them takes them away, and the third computes everything."""
    rows = prompts((0.0, 1, 150, 10, 5), (0.001, 1, 150, 10, 30), (9.0, 1, 150, 10, 5))
    used = []

    def watch(scheduler):
        return lambda plan, start_s, times: used.append(scheduler.gpu.num_blocks - scheduler.gpu.free)

    outcome = simulate(ChunkAttention(), rows, shared_limits(100, 64), observe=watch)
    # 3 blocks each, 2 of them common.
    assert used[:2] == [3, 4]
    assert [outcome.by_id()[i].num_cached_tokens for i in range(3)] == [0, 128, 0]
    assert outcome.scheduler.memory.num_evicted == 0


def test_a_prompt_is_shared_up_to_the_chunk_of_its_last_token():
    """128 equal tokens are two chunks, of which the second has the last token: one is hit."""
    rows = prompts((0.0, 1, 128, 0, 20), (0.001, 1, 128, 0, 20))
    outcome = simulate(ChunkAttention(), rows, shared_limits(100, 64))
    assert outcome.by_id()[1].num_cached_tokens == 64
    # Both have computed the second, one copy of which is kept: both chunks are read once.
    assert decodes(outcome)[0][2] == 128


def test_nothing_shared_is_vllm():
    """And sharing must not show where nothing is shared: the same times as vLLM 0.5.5's, on blocks of a chunk."""
    rows = prompts(*((0.05 * i, i, 100, 10, 20 + i) for i in range(30)))
    limit = shared_limits(30, 64)
    ours = simulate(ChunkAttention(), rows, limit)
    vllm = simulate(VllmRecompute(), rows, replace(limit, enable_prefix_caching=False))
    assert ours.by_id().keys() == vllm.by_id().keys()
    for key, seq in ours.by_id().items():
        assert seq.finish_s == vllm.by_id()[key].finish_s
    assert all(plan.decode_shared_tokens == 0 for plan, _, _ in ours.plans)


@pytest.mark.parametrize("text", ["chunkattention", "batchllm", "sarathi:memory=chunks", "vllm-v1:memory=chunks"])
def test_what_is_read_again_is_counted_as_plans_go(text):
    """By counts, and sequence by sequence."""

    def recounted(workload):
        def watch(scheduler):
            memory = scheduler.memory

            def check(plan, start_s, times):
                if isinstance(memory, RadixMemory) and memory.shares_reads and plan.num_decodes:
                    shared = memory.tree.num_reread_by(memory._prefix(seq).node for seq in plan.decodes)
                    assert plan.decode_shared_tokens == shared * memory.block_size
                    assert plan.decode_shared_tokens < plan.decode_context_tokens

            return check

        simulate(policy, workload.arrivals, workload.limits, machine=workload.machine, observe=watch)

    policy = parse_policy(text, {})[1]
    conformance.over_workloads(policy, recounted, examples=40, shrink=False)


@pytest.mark.parametrize("shared", [1024, 4096])
def test_what_is_read_once_is_computed_for_each(shared):
    """32 share all but 64 tokens of a small Llama on an A100: sum(s_i) tokens are attended to, sum(s_i) - 31 shared
    ones read, and reading falls by less than the number of sharers."""
    cost = roofline_machine("a100-80g", 1.0).cost
    context, again = 32 * (shared + 64), 31 * shared
    read_s = cost.decode_run(32, context)[0] - cost.decode_run(32, 0)[0]
    saved_s = cost.unread_s(again)
    per_token_s = read_s / context
    assert saved_s == pytest.approx(again * (per_token_s - cost.attention_s_per_pair))
    assert 5 < read_s / (read_s - saved_s) < 32


# -- BatchLLM -------------------------------------------------------------------------------------------------------


def starts(outcome):
    found = []
    for plan, _, _ in outcome.plans:
        found += [c.seq.request.request_id for c in plan.chunks if c.seq.request.request_id not in found]
    return found


def batch_limits(gpu, tokens=512):
    return shared_limits(gpu, tokens=tokens, seqs=tokens, chunked=True)


def test_groups_go_together_and_long_answers_first():
    """Prefix 1 (0, 2, 4): 30 tokens to generate for 160 + 3 * 16; prefix 2 (1, 3, 5): 90; alone: 40 for 32."""
    rows = prompts(
        (0.0, 1, 160, 16, 10), (0.0, 2, 160, 16, 30), (0.0, 1, 160, 16, 10),
        (0.0, 2, 160, 16, 30), (0.0, 1, 160, 16, 10), (0.0, 2, 160, 16, 30), (0.0, 3, 0, 32, 40),
    )  # fmt: skip
    outcome = simulate(BatchLLM(), rows, batch_limits(1000))
    assert starts(outcome) == [6, 1, 3, 5, 0, 2, 4]
    # Each prefix is computed once, though its group starts in one iteration.
    assert [outcome.by_id()[i].num_cached_tokens for i in range(7)] == [0, 0, 160, 160, 160, 160, 0]
    assert sum(plan.prefill_tokens for plan, _, _ in outcome.plans) == 2 * (160 + 3 * 16) + 32


def test_an_order_that_knows_all_computes_each_prefix_once_where_others_evict_it():
    """Sixty requests of ten prefixes in turn, 240 tokens each, in 1,280 tokens: by arrival vLLM v1 evicts what comes
    back; planned, all but the first of each group hit."""
    rows = prompts(*((0.0, i % 10, 240, 16, 8) for i in range(60)))
    planned, arrival = (
        simulate(parse_policy(text, {})[1], rows, batch_limits(80)).scheduler.counters.prefix_hit_tokens
        for text in ("batchllm", "vllm-v1")
    )
    assert planned == 50 * 240
    assert arrival < planned / 2


def test_one_level_only():
    """Prompts that share 32 tokens of another group's prefix compute them: (3 - 1) * 160 > 32, so they part."""
    rows = []
    for i in range(6):
        stem = tuple(range(32)) + tuple(1000 * (i % 2 + 1) + n for n in range(160))
        rows.append(Request(i, 0.0, 208, 4, "", (*stem, *(10**6 * (i + 1) + n for n in range(16))), 1))
    outcome = simulate(BatchLLM(), rows, batch_limits(1000))
    assert outcome.scheduler.counters.prefix_hit_tokens == 4 * 192


def test_what_comes_later_is_planned_later():
    """One seat: 0 runs, 1 and 2 were planned with it, 3 has a longer answer and the prefix of 0, and still waits."""
    rows = prompts((0.0, 1, 32, 4, 20), (0.0, 2, 32, 4, 4), (0.0, 3, 32, 4, 3), (0.1, 1, 32, 4, 90))
    limit = replace(batch_limits(1000), max_num_seqs=1)
    assert starts(simulate(BatchLLM(), rows, limit)) == [0, 1, 2, 3]


@pytest.mark.parametrize("jump", [True, False])
def test_a_plan_is_of_those_that_came_first_though_a_batch_runs_to_its_end(jump):
    """0 runs alone until both others are there: 1 came first and is a plan of its own, though 2 has a longer answer."""
    rows = prompts((0.0, 1, 32, 4, 20), (0.1, 2, 32, 4, 4), (0.2, 3, 32, 4, 90))
    policy = parse_policy("batchllm:batching=request-level", {})[1]
    outcome = simulate(policy, rows, shared_limits(1000), jump=jump)
    begins = [[chunk.seq.request.request_id for chunk in plan.chunks] for plan, _, _ in outcome.plans if plan.chunks]
    assert begins == [[0], [1], [2]]
