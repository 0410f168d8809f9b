"""Orca and FasterTransformer on reserved memory: by hand, what their papers claim of them, and what they never do.

Every iteration takes 20 ms and 1 ms a computed token. A request reserves max_model_len = 64 tokens, 4 blocks of 16; 8
blocks seat two.
"""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from systems_steps import by_hand, over, token_times, work

from kvtwin.testing import limits
from kvtwin.testing.conformance import workloads
from sim.systems.base import Policy
from sim.systems.fastertransformer import FasterTransformer
from sim.systems.orca import Orca

TWO_SEATS = limits(gpu=8, max_model_len=64)
ROWS = ((0.0, 10, 4), (0.0, 20, 2), (0.0, 5, 3), (0.1, 8, 1))
some = settings(max_examples=20, deadline=None, suppress_health_check=(HealthCheck.too_slow,))


def test_orca_by_hand() -> None:
    """Requests 0 and 1 fill the memory; 2 joins as soon as 1 has left, 3 as soon as 0 has.

    | from | to | decodes | prompts | ms |
    |---|---|---|---|---|
    | 0 | 50 | | 0: 10, 1: 20 | 20 + 30 |
    | 50 | 72 | 0, 1 (ends) | | 20 + 2; no blocks for 2 yet |
    | 72 | 98 | 0 | 2: 5 | 20 + 1 + 5 |
    | 98 | 120 | 0 (ends), 2 | | 20 + 2; 3 comes at 100 |
    | 120 | 149 | 2 (ends) | 3: 8 (ends) | 20 + 1 + 8 |
    """
    steps, outcome = by_hand(Orca(), ROWS, TWO_SEATS)
    assert work(steps) == [((), {0: 10, 1: 20}), ((0, 1), {}), ((0,), {2: 5}), ((0, 2), {}), ((2,), {3: 8})]
    assert [step.end_s for step in steps] == pytest.approx([0.050, 0.072, 0.098, 0.120, 0.149], abs=1e-9)
    times = token_times(outcome)
    assert times["first"] == pytest.approx([0.050, 0.050, 0.098, 0.149], abs=1e-9)
    assert times["finish"] == pytest.approx([0.120, 0.072, 0.149, 0.149], abs=1e-9)


def test_fastertransformer_by_hand() -> None:
    """The same: 2 waits until 0 and 1 have both ended, although 1 leaves its memory at 72 ms.

    | from | to | decodes | prompts | ms |
    |---|---|---|---|---|
    | 0 | 50 | | 0: 10, 1: 20 | 20 + 30 |
    | 50 | 72 | 0, 1 (ends) | | 20 + 2 |
    | 72 | 93 | 0 | | 20 + 1 |
    | 93 | 114 | 0 (ends) | | 20 + 1; 3 comes at 100 |
    | 114 | 147 | | 2: 5, 3: 8 (ends) | 20 + 13 |
    | 147 | 168 | 2 | | 20 + 1 |
    | 168 | 189 | 2 (ends) | | 20 + 1 |
    """
    steps, outcome = by_hand(FasterTransformer(), ROWS, TWO_SEATS)
    assert work(steps) == [
        ((), {0: 10, 1: 20}), ((0, 1), {}), ((0,), {}), ((0,), {}), ((), {2: 5, 3: 8}), ((2,), {}), ((2,), {}),
    ]  # fmt: skip
    assert [step.end_s for step in steps] == pytest.approx([0.050, 0.072, 0.093, 0.114, 0.147, 0.168, 0.189], abs=1e-9)
    times = token_times(outcome)
    assert times["first"] == pytest.approx([0.050, 0.050, 0.147, 0.147], abs=1e-9)
    assert times["finish"] == pytest.approx([0.114, 0.072, 0.189, 0.147], abs=1e-9)


def test_a_short_request_leaves_and_another_joins_while_a_long_one_goes_on_but_not_in_a_batch_of_requests() -> None:
    """Orca's claim against FasterTransformer: request 2 has its tokens before the long request 0 ends, or not at all
    before."""
    rows = ((0.0, 10, 50), (0.0, 10, 2), (0.0, 10, 2))
    _, orca = by_hand(Orca(), rows, TWO_SEATS)
    _, ft = by_hand(FasterTransformer(), rows, TWO_SEATS)
    # 20 + 20 ms of prompts, 22 ms of decode: request 1 leaves at 62 ms. Its seat's next has 10 prompt tokens beside 1.
    assert orca.by_id()[1].finish_s == pytest.approx(0.062, abs=1e-9)
    assert orca.by_id()[2].first_token_s == pytest.approx(0.062 + 0.031, abs=1e-9)
    assert orca.by_id()[2].finish_s < orca.by_id()[0].finish_s
    # Request 0 decodes its other 48 tokens alone first.
    assert ft.by_id()[0].finish_s == pytest.approx(0.062 + 48 * 0.021, abs=1e-9)
    assert ft.by_id()[2].first_token_s == pytest.approx(0.062 + 48 * 0.021 + 0.030, abs=1e-9)


@pytest.mark.parametrize("policy", [Orca(), FasterTransformer()])
@pytest.mark.parametrize(("prompt", "output"), [(16, 16), (1, 2), (40, 24)])
def test_what_a_request_does_not_use_of_its_reservation_is_lost(policy: Policy, prompt: int, output: int) -> None:
    """Internal fragmentation 1 - (prompt + output) / max_model_len, from the first iteration to the last."""
    steps, _ = by_hand(policy, ((0.0, prompt, output),), TWO_SEATS)
    assert {step.used_blocks for step in steps} == {4}
    fragmentation = 1 - (prompt + output) / (steps[-1].used_blocks * 16)
    assert fragmentation == pytest.approx(1 - (prompt + output) / 64)


def test_a_reservation_is_rounded_up_to_whole_blocks() -> None:
    steps, _ = by_hand(Orca(), ((0.0, 8, 2),), limits(gpu=8, max_model_len=65))
    assert {step.used_blocks for step in steps} == {5}


def test_all_of_a_small_pool_may_be_reserved() -> None:
    """No watermark: one seat in as many blocks as one request takes, where vLLM would keep 1 % free of 400."""
    steps, _ = by_hand(Orca(), ((0.0, 8, 2), (0.0, 8, 2)), limits(gpu=400, max_model_len=3200))
    assert steps[0].chunks == {0: 8, 1: 8}
    assert steps[0].used_blocks == 400


@pytest.mark.parametrize("policy", [Orca(), FasterTransformer()])
@some
@given(data=st.data())
def test_nothing_is_ever_preempted(policy: Policy, data: st.DataObject) -> None:
    """Whatever the pool: what is admitted has all that it may ever need."""
    workload = data.draw(workloads(policy))
    steps, outcome = over(policy, workload)
    counters = outcome.scheduler.counters
    assert counters.preemptions == counters.swap_out_blocks == counters.swap_in_blocks == 0
    assert all(seq.num_preemptions == 0 for seq in outcome.ended)
    # Once in, a request takes a token in every iteration until it ends.
    assert all(len(step.decodes) == step.num_members for step in steps if step.decodes)


@some
@given(data=st.data())
def test_orca_decodes_everything_in_every_iteration_and_admits_in_order_of_arrival(data: st.DataObject) -> None:
    workload = data.draw(workloads(Orca()))
    steps, _ = over(Orca(), workload)
    assert all(len(step.decodes) == step.num_members for step in steps)
    admitted = [request_id for step in steps for request_id in step.chunks]
    assert admitted == sorted(admitted)
    # Whole prompts, each once.
    prompts = {request.request_id: request.prompt_tokens for request in workload.arrivals}
    assert all(num_new == prompts[request_id] for step in steps for request_id, num_new in step.chunks.items())
    assert len(admitted) == len(set(admitted))
    assert all(sum(step.chunks.values()) <= workload.limits.max_num_batched_tokens for step in steps)


@some
@given(data=st.data())
def test_fastertransformer_never_admits_while_a_sequence_runs(data: st.DataObject) -> None:
    workload = data.draw(workloads(FasterTransformer()))
    steps, _ = over(FasterTransformer(), workload)
    running: set[int] = set()
    outputs = {request.request_id: request.output_tokens for request in workload.arrivals}
    left: dict[int, int] = {}
    for step in steps:
        if step.chunks:
            assert not running and not step.decodes
        for request_id in (*step.chunks, *step.decodes):
            running.add(request_id)
            left[request_id] = left.get(request_id, outputs[request_id]) - 1
            if not left[request_id]:
                running.discard(request_id)
