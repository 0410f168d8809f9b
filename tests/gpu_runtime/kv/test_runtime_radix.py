"""Content that is kept once, in a radix tree: tokens, ids and token-granular hits, on a device."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_turns import converse
from runtime_variants import TREES, policy_of

from kvtwin.testing import live, requests
from kvtwin.testing.live import ALIKE, alike, tight_limits
from traces.request import Request


@pytest.mark.parametrize(("variant", "chunked"), [*zip(TREES, (False, True, True, False), strict=True)])
def test_tokens_are_equal_with_and_without_a_tree(variant, chunked):
    policy, arrivals = policy_of(variant), alike(requests(*ALIKE))
    plain, cached = (
        live.serve(policy, arrivals, replace(tight_limits(policy, gpu=22, chunked=chunked), enable_prefix_caching=on))
        for on in (False, True)
    )
    assert plain.tokens == cached.tokens
    assert len(live.check_tokens(cached, arrivals)) == len(arrivals)
    assert cached.counters.prefix_hit_tokens > 0 == plain.counters.prefix_hit_tokens


def token_limits(policy, **sizes):
    """Blocks of one token, as SGLang's."""
    limit = tight_limits(policy, **sizes)
    return replace(limit, block_size=1, block_bytes=limit.block_bytes / 4, enable_prefix_caching=True)


def test_prompts_share_to_the_token():
    """Eleven and nine tokens of the same twelve: all of the nine but the last, which is computed."""
    one, two = Request(0, 0.0, 11, 4, "", (7, 8, 9), 4), Request(1, 0.0, 9, 4, "", (7, 8, 9), 4)
    three = Request(2, 0.0, 10, 4, "", (7, 8, 6), 4)
    policy = policy_of("radix:schedule-policy=fcfs")
    served = live.serve(policy, [one, two, three], token_limits(policy, gpu=64, seqs=1))
    assert {seq.request.request_id: seq.num_cached_tokens for seq in served.ended} == {0: 0, 1: 8, 2: 8}
    assert len(live.check_tokens(served, [one, two, three])) == 3


@settings(max_examples=15, deadline=None)
@given(
    rows=st.lists(st.tuples(st.just(0.0), st.integers(1, 30), st.integers(1, 24)), min_size=2, max_size=10),
    gpu=st.integers(66, 120), seqs=st.sampled_from([2, 5]), kinds=st.integers(1, 3), common=st.integers(1, 8),
)  # fmt: skip
def test_no_workload_finds_a_token_that_a_tree_of_tokens_changes(rows, gpu, seqs, kinds, common):
    policy, arrivals = policy_of("radix"), alike(requests(*rows), kinds, common)
    live.check_tokens(live.serve(policy, arrivals, token_limits(policy, gpu=gpu, seqs=seqs)), arrivals)


def test_the_next_turn_hits_the_answer_to_the_token():
    ids = tuple(range(50, 57))
    turns = [Request(0, 0.0, 10, 12, "s", ids[:3], 4, ids[3:6]), Request(1, 0.0, 26, 5, "s", ids, 4, ())]
    policy = policy_of("radix")
    held = converse(policy, token_limits(policy, gpu=80), turns)
    # Of 22 tokens the last has no KV.
    assert held.ended[1].num_cached_tokens == 21
    assert held.asked[1][:22] == held.asked[0] + held.said[0]
