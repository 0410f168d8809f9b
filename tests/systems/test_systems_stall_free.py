"""Sarathi-Serve and DeepSpeed-FastGen: by hand, what their papers claim of them, and what they never do.

Every iteration takes 20 ms and 1 ms a computed token.
"""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from systems_steps import by_hand, longest_gap_s, over, token_times, work

from kvtwin.testing import limits
from kvtwin.testing.conformance import Workload, workloads
from sim.systems.base import Policy
from sim.systems.fastgen import FastGen
from sim.systems.sarathi import Sarathi
from sim.systems.vllm055 import VllmRecompute

SIXTEEN = limits(tokens=16, seqs=8, max_model_len=128, chunked=True)
ROWS = ((0.0, 10, 5), (0.0, 40, 2), (0.0, 16, 2), (0.0, 3, 1))
some = settings(max_examples=20, deadline=None, suppress_health_check=(HealthCheck.too_slow,))


def with_room(workload: Workload) -> Workload:
    """The same requests and budget where memory refuses none, and every prompt is computed whole."""
    return replace(workload, limits=replace(workload.limits, num_gpu_blocks=10_000, enable_prefix_caching=False))


def test_sarathi_by_hand() -> None:
    """Chunks of 16 tokens, decodes first, one prompt an iteration: what it leaves of the budget stays unused.

    | from | to | decodes | prompt | ms |
    |---|---|---|---|---|
    | 0 | 30 | | 0: 10 | 20 + 10; 6 tokens are left over |
    | 30 | 66 | 0 | 1: 15 | 20 + 16 |
    | 66 | 102 | 0 | 1: 15 (30) | 20 + 16 |
    | 102 | 133 | 0 | 1: 10 (40) | 20 + 11 |
    | 133 | 169 | 0 (ends), 1 (ends) | 2: 14 | 20 + 16 |
    | 169 | 191 | | 2: 2 (16) | 20 + 2 |
    | 191 | 215 | 2 (ends) | 3: 3 (ends) | 20 + 4 |
    """
    steps, outcome = by_hand(Sarathi(), ROWS, SIXTEEN)
    assert work(steps) == [
        ((), {0: 10}), ((0,), {1: 15}), ((0,), {1: 15}), ((0,), {1: 10}), ((0, 1), {2: 14}), ((), {2: 2}),
        ((2,), {3: 3}),
    ]  # fmt: skip
    assert [step.end_s for step in steps] == pytest.approx([0.030, 0.066, 0.102, 0.133, 0.169, 0.191, 0.215], abs=1e-9)
    times = token_times(outcome)
    assert times["first"] == pytest.approx([0.030, 0.133, 0.191, 0.215], abs=1e-9)
    assert times["finish"] == pytest.approx([0.169, 0.169, 0.215, 0.215], abs=1e-9)


def test_fastgen_by_hand() -> None:
    """The same requests in passes of 16 tokens: the next prompts fill what one leaves.

    | from | to | decodes | prompts | tokens |
    |---|---|---|---|---|
    | 0 | 36 | | 0: 10, 1: 6 | 16 |
    | 36 | 72 | 0 | 1: 15 (21) | 16 |
    | 72 | 108 | 0 | 1: 15 (36) | 16 |
    | 108 | 144 | 0 | 1: 4 (40), 2: 11 | 16 |
    | 144 | 174 | 0 (ends), 1 (ends) | 2: 5 (16), 3: 3 (ends) | 10, none waits |
    | 174 | 195 | 2 (ends) | | 1 |
    """
    steps, outcome = by_hand(FastGen(), ROWS, SIXTEEN)
    assert work(steps) == [
        ((), {0: 10, 1: 6}), ((0,), {1: 15}), ((0,), {1: 15}), ((0,), {1: 4, 2: 11}), ((0, 1), {2: 5, 3: 3}),
        ((2,), {}),
    ]  # fmt: skip
    assert [step.end_s for step in steps] == pytest.approx([0.036, 0.072, 0.108, 0.144, 0.174, 0.195], abs=1e-9)
    times = token_times(outcome)
    assert times["first"] == pytest.approx([0.036, 0.144, 0.174, 0.174], abs=1e-9)
    assert times["finish"] == pytest.approx([0.174, 0.174, 0.195, 0.174], abs=1e-9)


def test_the_last_token_of_a_budget_is_used() -> None:
    """15 and 3 tokens in passes of 16, then beside a decode."""
    steps, _ = by_hand(FastGen(), ((0.0, 15, 2), (0.0, 3, 1)), SIXTEEN)
    assert work(steps) == [((), {0: 15, 1: 1}), ((0,), {1: 2})]


@pytest.mark.parametrize("policy", [Sarathi(), FastGen()])
def test_no_decode_waits_for_a_long_prompt(policy: Policy) -> None:
    """A prompt of 400 tokens comes while request 0 decodes. In chunks it adds 31 tokens to an iteration at most; vLLM
    computes it whole, and the decode stalls for it: 20 + 400 ms, and its own iteration of 22."""
    rows = ((0.0, 10, 60), (0.1, 400, 3))
    chunk = limits(tokens=32, seqs=8, max_model_len=512, chunked=True)
    _, outcome = by_hand(policy, rows, chunk)
    assert longest_gap_s(outcome, 0) == pytest.approx(0.020 + 0.032, abs=1e-9)
    _, stalled = by_hand(VllmRecompute(), rows, limits(max_model_len=512))
    assert longest_gap_s(stalled, 0) == pytest.approx(0.420 + 0.022, abs=1e-9)


def test_sarathi_takes_the_blocks_of_the_whole_prompt_at_admission() -> None:
    """40 tokens are 3 blocks from the first chunk of 16 on."""
    steps, _ = by_hand(Sarathi(), ((0.0, 40, 2),), SIXTEEN)
    assert [step.used_blocks for step in steps] == [3, 3, 3, 3]


def test_sarathi_keeps_the_watermark_free() -> None:
    """200 blocks, 1 % of which stay free: two prompts of 99 blocks fit, one of 100 beside one of 99 does not."""
    limit = limits(gpu=200, tokens=1600, seqs=8, max_model_len=1600, chunked=True)
    steps, _ = by_hand(FastGen(), ((0.0, 99 * 16, 1), (0.0, 99 * 16, 1)), limit)
    assert steps[0].chunks == {0: 1584, 1: 16}
    steps, _ = by_hand(FastGen(), ((0.0, 99 * 16, 1), (0.0, 100 * 16, 1)), limit)
    assert steps[0].chunks == {0: 1584}


def test_what_finds_no_block_preempts_the_tail_which_is_computed_again() -> None:
    """4 blocks of 16 and a watermark of none (1 % of 4). Requests 0 and 1 hold two each (17 to 32 tokens cached).

    | from | to | decodes | prompts | |
    |---|---|---|---|---|
    | 0 | 51 | | 0: 31 | 20 + 31 |
    | 51 | 103 | 0 | 1: 31 | 20 + 32; 0 caches 32 |
    | 103 | 124 | 0 | | 0 needs a third block: 1, the tail, loses its two; it has had one token |
    | 124 | 145 | 0 | | 1 wants two blocks for 32 tokens, one is free |
    | 145 | 166 | 0 (ends) | | |
    | 166 | 218 | | 1: 32 | prompt and first token again, and the second token |
    | 218 | 239 | 1 (ends) | | |
    """
    limit = limits(gpu=4, tokens=64, seqs=8, max_model_len=64, chunked=True)
    steps, outcome = by_hand(Sarathi(), ((0.0, 31, 5), (0.0, 31, 3)), limit)
    assert work(steps) == [
        ((), {0: 31}), ((0,), {1: 31}), ((0,), {}), ((0,), {}), ((0,), {}), ((), {1: 32}), ((1,), {}),
    ]  # fmt: skip
    assert [step.end_s for step in steps] == pytest.approx([0.051, 0.103, 0.124, 0.145, 0.166, 0.218, 0.239], abs=1e-9)
    assert outcome.scheduler.counters.preemptions == outcome.by_id()[1].num_preemptions == 1


@pytest.mark.parametrize("policy", [Sarathi(), FastGen()])
@some
@given(data=st.data())
def test_no_iteration_exceeds_the_budget_and_every_decode_is_in_it(policy: Policy, data: st.DataObject) -> None:
    workload = data.draw(workloads(policy))
    steps, _ = over(policy, workload)
    for step in steps:
        assert step.num_tokens <= workload.limits.max_num_batched_tokens
        assert len(step.decodes) == step.num_members


@some
@given(data=st.data())
def test_sarathi_never_has_two_prompts_in_an_iteration_nor_two_half_done(data: st.DataObject) -> None:
    workload = data.draw(workloads(Sarathi()))
    steps, _ = over(Sarathi(), workload)
    assert all(len(step.chunks) <= 1 for step in steps)
    workload = with_room(workload)
    steps, _ = over(Sarathi(), workload)
    # Where none is preempted, a prompt that has begun is the only one until it is done.
    order = [request_id for step in steps for request_id in step.chunks]
    assert order == sorted(order)


@pytest.mark.parametrize("policy", [Sarathi(), FastGen()])
@some
@given(data=st.data())
def test_the_tokens_of_a_request_come_in_consecutive_iterations(policy: Policy, data: st.DataObject) -> None:
    """Stall-free: where memory suffices, no gap is longer than the one iteration that it is."""
    workload = with_room(data.draw(workloads(policy)))
    steps, outcome = over(policy, workload)
    place = {step.end_s: i for i, step in enumerate(steps)}
    for times in outcome.tokens.values():
        places = [place[at_s] for at_s in times]
        assert places == list(range(places[0], places[0] + len(places)))


@some
@given(data=st.data())
def test_every_pass_of_fastgen_has_exactly_the_budget_while_a_request_waits(data: st.DataObject) -> None:
    """And a prompt is split only where the budget ends: all chunks of a pass but the last complete their prompts."""
    workload = with_room(data.draw(workloads(FastGen())))
    steps, _ = over(FastGen(), workload)
    done: dict[int, int] = {}
    prompts = {request.request_id: request.prompt_tokens for request in workload.arrivals}
    for step in steps:
        for request_id, num_new in step.chunks.items():
            done[request_id] = done.get(request_id, 0) + num_new
        half_done = [request_id for request_id in step.chunks if done[request_id] < prompts[request_id]]
        assert len(half_done) <= 1
        seats_left = workload.limits.max_num_seqs - step.num_members - len(step.chunks)
        if half_done or (step.num_waiting and seats_left > 0):
            assert step.num_tokens == workload.limits.max_num_batched_tokens
