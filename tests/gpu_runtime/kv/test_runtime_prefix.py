"""A prefix cache changes no token: whatever is hit, evicted and hit again, outputs are those of each request alone."""

from dataclasses import replace
from hashlib import sha256

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_small import SMALL, Runner
from runtime_turns import converse
from runtime_variants import TREES, policy_of

from gpu_runtime.kv.stored import FLOAT8
from gpu_runtime.model.decoder import Decoder
from gpu_runtime.tokens.token_ids import hash_blocks
from gpu_runtime.tokens.trace_prompts import TracePrompts
from kvtwin.testing import live, requests, simulate
from kvtwin.testing.live import ALIKE, alike, tight_limits
from traces.request import Request

CACHING = ["vllm-v1", "vllm-v1:scheduling-policy=priority", "vllm-recompute", "sarathi", "fastgen"]


def limits_of(policy, *, caches=True, **sizes):
    return replace(tight_limits(policy, **sizes), enable_prefix_caching=caches)


@pytest.mark.parametrize(("variant", "chunked"), [(variant, i % 2 > 0) for i, variant in enumerate(CACHING)])
def test_tokens_are_equal_with_and_without_a_cache(variant, chunked):
    policy, arrivals = policy_of(variant), alike(requests(*ALIKE))
    plain, cached, ample = (
        live.serve(policy, arrivals, limits_of(policy, caches=caches, gpu=gpu, chunked=chunked))
        for caches, gpu in ((False, 18), (True, 18), (True, 200))
    )
    assert plain.tokens == cached.tokens == ample.tokens
    assert len(live.check_tokens(cached, arrivals)) == len(arrivals)
    counters = cached.counters
    assert counters.preemptions and counters.prefix_hit_tokens and counters.prefix_rehit_tokens
    assert cached.scheduler.memory.num_evicted
    # Where nothing is evicted, all but the first of a kind hit what they share, but for those that came beside it.
    assert ample.counters.prefix_hit_tokens > counters.prefix_hit_tokens
    assert ample.counters.prefix_query_tokens == sum(request.prompt_tokens for request in arrivals)
    assert not plain.counters.prefix_query_tokens


ROWS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.0, 0.01, 0.02]), st.integers(1, 30), st.integers(1, 24)), min_size=2, max_size=12
).map(sorted)


def serve_alike(variant, rows, kinds, common, **sizes):
    policy = policy_of(variant)
    arrivals = [r._replace(priority=r.request_id % 3) for r in alike(requests(*rows), kinds, common)]
    live.check_tokens(live.serve(policy, arrivals, limits_of(policy, **sizes)), arrivals)


@settings(max_examples=30, deadline=None)
@given(
    variant=st.sampled_from([*CACHING, *TREES, "vllm-v1:scheduling-policy=priority,memory=radix"]),
    rows=ROWS, gpu=st.integers(17, 40), seqs=st.sampled_from([2, 5]), chunked=st.booleans(), kinds=st.integers(1, 3),
    common=st.integers(1, 8),
)  # fmt: skip
def test_no_workload_finds_a_token_that_a_cache_changes(**drawn):
    serve_alike(**drawn)


@pytest.mark.parametrize("variant", TREES)
def test_two_may_start_with_a_block_that_one_of_them_gives_back_in_the_step(variant):
    rows = [(0.0, 4, 21), (0.0, 5, 2), (0.0, 25, 11), (0.0, 26, 22), (0.0, 28, 1), (0.01, 16, 20), (0.01, 23, 13)]
    rows += [(0.02, 5, 2), (0.02, 20, 8)]
    serve_alike(variant, rows, kinds=2, common=5, gpu=26, seqs=5, chunked=True)


@pytest.mark.parametrize("variant", ["vllm-v1", "vllm-recompute", "sarathi", *TREES])
def test_what_tokens_say_is_what_the_trace_says(variant):
    """Named by their content, blocks are hit and evicted as in a simulation that knows the trace's names alone."""
    policy, arrivals = policy_of(variant), alike(requests(*ALIKE))
    limit = limits_of(policy, gpu=24, chunked=True)
    there = []
    simulate(policy, arrivals, limit, jump=False, observe=lambda _: lambda *facts: there.append(decided(*facts)))
    here = []

    class Noting(live.CheckedDevice):
        def execute(self, plan):
            here.append(decided(plan, 0.0, None))
            return super().execute(plan)

    live.serve(policy, arrivals, limit, kind=Noting)
    assert [decision for decision in here if any(decision)] == there


def decided(plan, start_s, times):
    chunks = [(chunk.seq.request.request_id, chunk.num_new, chunk.num_cached, chunk.origin) for chunk in plan.chunks]
    return chunks, [seq.request.request_id for seq in plan.decodes]


def test_whoever_comes_in_the_same_iteration_hits_what_it_computes():
    """vLLM v1 hashes a block when it is scheduled: the pass writes all KV of a layer before attention reads any."""
    arrivals = [r._replace(prompt_tokens=20, hash_ids=(1, 2, 3, 4, 5)) for r in alike(requests(*[(0.0, 20, 5)] * 4))]
    policy = policy_of("vllm-v1")
    served = live.serve(policy, arrivals, limits_of(policy, gpu=60))
    first = served.plans[0][0]
    assert [(chunk.num_new, chunk.num_cached) for chunk in first.chunks] == [(20, 0), (4, 16), (4, 16), (4, 16)]
    assert len(live.check_tokens(served, arrivals)) == 4


@pytest.mark.parametrize("most", [4, 8])
@pytest.mark.parametrize("variant", ["vllm-v1", "vllm-recompute"])
def test_what_shares_with_one_that_failed_computes_it_again(variant, most, monkeypatch):
    """Whatever has more tokens in one pass runs out of memory. Its blocks are hit all the same, and hold nothing."""
    right, policy, arrivals = Decoder.forward, policy_of(variant), alike(requests(*ALIKE), kinds=1)

    def small_memory(self, token_ids, *rest, **named):
        if len(token_ids) > most:
            raise torch.OutOfMemoryError("tried to allocate too much")
        return right(self, token_ids, *rest, **named)

    monkeypatch.setattr(Decoder, "forward", small_memory)
    served = live.serve(policy, arrivals, limits_of(policy, gpu=200, chunked=True))
    monkeypatch.undo()
    live.check_tokens(served, arrivals)
    assert any("out of memory" in seq.error for seq in served.ended)


# -- conversations -------------------------------------------------------------------------------------------------


def turns():
    """Two turns of 10 + 12 and 26 + 5 tokens in blocks of 4; the second goes on from the first's answer."""
    ids = tuple(range(50, 57))
    first = Request(0, 0.0, 10, 12, "s", ids[:3], 4, ids[3:6])
    return [first, Request(1, 0.0, 26, 5, "s", ids[:7], 4, ())]


@pytest.mark.parametrize("variant", ["vllm-v1", "vllm-recompute"])
@pytest.mark.parametrize("caches", [False, True])
def test_the_next_turn_goes_on_from_what_was_really_said(variant, caches):
    policy = policy_of(variant)
    held = converse(policy, limits_of(policy, caches=caches, gpu=60), turns())
    # Of the answer's twelve tokens the second prompt names all; two more are its own.
    assert held.asked[1][:22] == held.asked[0] + held.said[0]
    # 21 of the first turn's 22 tokens have KV: five blocks.
    assert held.ended[1].num_cached_tokens == (20 if caches else 0)


def test_prompts_hold_the_same_tokens_where_they_have_the_same_names():
    prompts = TracePrompts(1000, 3)
    one = prompts(Request(0, 0.0, 11, 1, "", (7, 8), 4))
    two = prompts(Request(1, 0.0, 9, 1, "", (7, 9), 4))
    huge = prompts(Request(2, 0.0, 8, 1, "", (8, (1 << 64) + 7), 4))
    assert one[:4] == two[:4] == huge[4:]
    assert one[4:8] == huge[:4]
    assert one[4:8] != two[4:8] and one[8:] != two[8:]
    assert TracePrompts(1000, 4)(Request(0, 0.0, 8, 1, "", (7, 8), 4)) != one[:8]
    assert all(0 <= token < 1000 for token in one)
    # Without names of blocks the tokens are the request's own.
    assert (
        prompts(Request(5, 0.0, 6, 1)) == TracePrompts(1000, 3)(Request(5, 1.0, 6, 2)) != prompts(Request(6, 0.0, 6, 1))
    )


def test_hashes_are_chained_over_full_blocks():
    first = sha256(bytes(32) + b"".join(token.to_bytes(8, "little") for token in (5, 6))).digest()
    second = sha256(first + b"".join(token.to_bytes(8, "little") for token in (5, 6))).digest()
    assert hash_blocks([5, 6, 5, 6, 7], 2) == [first, second]
    assert hash_blocks([5, 6], 2, first) == [second]
    assert hash_blocks([5], 2) == []


@pytest.mark.parametrize("dtype", [torch.float32, *FLOAT8])
def test_logits_behind_a_cached_prefix(dtype):
    """The rest of a prompt reads what another has stored. In 8 bits it is rounded; logits move by less than keys do."""
    runner = Runner(Decoder.random(SMALL, device="cpu", dtype=torch.float32, seed=0), SMALL.num_layers, kv_dtype=dtype)
    prompt = [(7 * i) % 101 for i in range(40)]
    whole = runner.step({0: prompt})[0][24:]
    runner.tokens[1], runner.tables[1] = prompt[:24], [runner.tables[0][0][:6]]
    behind = runner.step({1: prompt[24:]})[1]
    error = float((behind - whole).square().mean().sqrt() / whole.std())
    bound = {torch.float32: 1e-5, FLOAT8[0]: 2**-4, FLOAT8[1]: 2**-3}[dtype]
    assert error < bound
    assert (error > 1e-4) == (dtype in FLOAT8)
