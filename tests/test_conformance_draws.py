"""What tests of systems draw are workloads that an engine may meet, crowds and talks among them."""

import conversations
from hypothesis import given
from hypothesis import strategies as st

from kvtwin.testing import conformance
from sim.engine.limits import Limits
from sim.options.policies import parse_policy
from traces.hash_ids import hashes_fit, output_hashes_fit
from traces.request import Request

POLICIES = st.sampled_from(["vllm-v1", "vllm-recompute", "fastertransformer"]).map(
    lambda text: parse_policy(text, {})[1]
)


def check_that_they_may_be(arrivals: list[Request], limit: Limits) -> None:
    """In order, within the context, with names for the blocks that they have; a budget for every seat."""
    assert [request.request_id for request in arrivals] == list(range(len(arrivals)))
    assert [request.arrival_s for request in arrivals] == sorted(request.arrival_s for request in arrivals)
    assert limit.max_num_batched_tokens >= limit.max_num_seqs
    for request in arrivals:
        prompt, output, block = request.prompt_tokens, request.output_tokens, request.hash_block_tokens
        assert prompt > 0 < output
        assert hashes_fit(prompt, request.hash_ids, block)
        assert output_hashes_fit(prompt, output, request.hash_ids, block, request.output_hash_ids)


@given(st.data(), POLICIES)
def test_crowds(data, policy):
    workload = conformance.draw_workload(data.draw, policy)
    check_that_they_may_be(workload.arrivals, workload.limits)


@given(st.data(), POLICIES)
def test_talks_repeat_what_was_said(data, policy):
    """Until the context is full: then one begins anew."""
    workload, said = conversations.draw_conversations(data.draw, policy), dict[str, Request]()
    check_that_they_may_be(workload.arrivals, workload.limits)
    for request in workload.arrivals:
        assert request.prompt_tokens + request.output_tokens <= workload.limits.max_model_len
        before = said.get(request.session_id)
        if before is not None and request.prompt_tokens > (told := before.prompt_tokens + before.output_tokens):
            full = told // 16
            assert request.hash_ids[:full] == (*before.hash_ids, *before.output_hash_ids)[:full]
        said[request.session_id] = request


@given(conformance.bursts)
def test_bursts_are_of_long_requests_at_once_and_short_ones_behind_them(rows):
    long = [row for row in rows if row[1] >= 60]
    assert rows[: len(long)] == long and 3 <= len(long) <= 10 and 3 <= len(rows) - len(long) <= 12
    assert all(row[0] == 0.0 for row in long)
