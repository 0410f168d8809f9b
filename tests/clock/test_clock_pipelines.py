"""Pipelines: pipeline stages that batches pass through in turn, a loop that launches them, and what joins which."""

from math import inf
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from clock_small import FLAT, ROWS, assert_whole, drawn, jumped_and_stepped
from clusters import HAND_OVER_S_PER_TOKEN, simulate_pools, simulate_replicas
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtwin.testing import limits, linear_machine, requests
from sim.clock.pipeline import Pipeline
from sim.cost.forms import LinearCost
from sim.cost.lanes import Lane
from sim.engine.plan import IterationPlan
from sim.options.policies import parse_policy
from sim.systems.distserve import DistServe
from sim.systems.vllm055 import VllmRecompute
from sim.topology.routers import LeastLoaded, RoundRobin

H = HAND_OVER_S_PER_TOKEN


def test_an_iteration_passes_through_the_stages_and_two_batches_share_them():
    # Alone: 0.05 s at each of two stages, and a hand-over of 10 tokens, then of 1.
    rows = requests((0.0, 10, 3), (0.0, 10, 3))
    machine = linear_machine(**FLAT)
    (alone,) = simulate_replicas([VllmRecompute()], RoundRobin(), rows[:1], limits(), machine=machine, stages=2).ended
    assert alone[0].first_token_s == pytest.approx(0.1 + 10 * H)
    assert alone[0].finish_s == pytest.approx(0.3 + 12 * H)
    # The second is half an iteration behind the first and costs it nothing but the hand-over.
    outcome = simulate_replicas([VllmRecompute()], RoundRobin(), rows, limits(), machine=machine, stages=2)
    assert outcome.places() == {0: 0, 1: 1}
    assert outcome.by_id()[0].first_token_s == pytest.approx(0.1 + 10 * H)
    assert outcome.by_id()[1].first_token_s == pytest.approx(0.15 + 10 * H)
    assert outcome.by_id()[0].finish_s == pytest.approx(0.3 + 12 * H, abs=3 * H)
    assert outcome.by_id()[1].finish_s == pytest.approx(0.35 + 12 * H, abs=3 * H)
    assert [member.lanes.compute.busy_s for member in outcome.members] == pytest.approx([0.3, 0.3])
    assert [member.iterations for member in outcome.members] == [3, 3]


def test_the_host_launches_one_batch_after_the_other():
    machine = linear_machine(**FLAT)
    assert isinstance(machine.cost, LinearCost)
    machine.cost.prelude_base_s = 0.04
    # 0.03 s at each stage. Batches are launched at 0 and 0.04.
    outcome = simulate_replicas(
        [VllmRecompute()], RoundRobin(), requests((0.0, 10, 1), (0.0, 10, 1)), limits(), machine=machine, stages=2
    )
    assert [outcome.by_id()[i].finish_s for i in (0, 1)] == pytest.approx([0.1 + 10 * H, 0.14 + 10 * H])


def test_a_request_joins_the_virtual_engine_with_the_fewest():
    rows = requests((0.0, 10, 30), (0.0, 10, 2), (0.0, 10, 30), (0.5, 10, 2))
    outcome = simulate_replicas(
        [VllmRecompute()] * 2, LeastLoaded(), rows, limits(), machine=linear_machine(**FLAT), stages=2
    )
    # Engines of two: the first request goes to 0, the second to the other engine, the third to 1; then 2, 3 are idle.
    assert outcome.places() == {0: 0, 1: 2, 2: 1, 3: 2}


def test_distserve_joins_whoever_begins_next_and_stands_still_while_it_pulls():
    # Prefilled at 0.1, 0.2 and 0.3 (one prompt an iteration), 0.05 s of copy each. 0 decodes from 0.15: 0.25, ...
    rows = requests((0.0, 16, 30), (0.0, 16, 30), (0.0, 16, 3))
    small = limits(100, tokens=16, max_model_len=16)
    outcome = simulate_pools(
        DistServe(), rows, small, bytes_per_s=20.0, machine=linear_machine(**FLAT), stages=(1, 2), decode_limit=limits()
    )
    assert_whole(outcome, rows)
    # While the first is being computed the loop waits for it: all others join its batch, the other one stays empty.
    assert outcome.places() == {0: 1, 1: 1, 2: 1}
    assert outcome.by_id()[0].last_token_s > 3.0
    # 1 is heard of at 0.25 and pulled until 0.3, then 2 until 0.35; 2's tokens come at 0.45 and 0.55.
    assert outcome.by_id()[2].finish_s == pytest.approx(0.55, abs=20 * H)


@pytest.mark.parametrize("jump", [True, False])
def test_an_engine_that_blocks_computes_nothing_while_it_pulls(jump):
    # 0 decodes from 0.2 on; 1 is prefilled at 0.25, heard of at 0.3 and pulled until 0.5, when both go on.
    rows = requests((0.0, 16, 11), (0.15, 32, 3))
    outcome = simulate_pools(DistServe(), rows, limits(), bytes_per_s=10.0, machine=linear_machine(**FLAT), jump=jump)
    assert outcome.by_id()[0].finish_s == pytest.approx(0.2 + 1.0 + 0.2)
    assert outcome.by_id()[1].finish_s == pytest.approx(0.7)


@pytest.mark.parametrize("policy", ["vllm-recompute", "vllm-swap", "sarathi", "orca"])
@settings(max_examples=20, deadline=None)
@given(rows=ROWS, replicas=st.integers(1, 2), stages=st.sampled_from([2, 4]), gpu=st.integers(10, 24))
def test_no_request_is_lost_in_pipelines(policy, rows, replicas, stages, gpu):
    kind, arrivals = parse_policy(policy, {})[1], drawn(rows)
    chunked = policy == "sarathi"
    limit = limits(gpu, 30, max_model_len=256, chunked=chunked, tokens=512)
    one, _ = jumped_and_stepped(
        lambda source, jump: simulate_replicas(
            [kind] * replicas, LeastLoaded(), source, limit, stages=stages, jump=jump
        ),
        arrivals,
    )
    for engine in range(replicas):
        members = one.members[engine * stages : (engine + 1) * stages]
        busy_s = [member.lanes.compute.busy_s for member in members]
        assert busy_s == pytest.approx([busy_s[0]] * stages)


@pytest.mark.parametrize("policy", ["distserve", "splitwise", "vllm-recompute:stage=hand-over"])
@settings(max_examples=25, deadline=None)
@given(
    rows=ROWS,
    pools=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    stages=st.sampled_from([(1, 2), (2, 1), (2, 2), (1, 4)]),
    blocks=st.tuples(st.integers(10, 24), st.integers(10, 24)),
    seats=st.sampled_from([1, 3, 256]),
    speed=st.sampled_from([10.0, 300.0, 1e9]),
    host_s=st.sampled_from([0.0, 0.005]),
    most=st.sampled_from([None, 3]),
)
@example(
    rows=[(0.0, 1, 5), (0.0, 145, 2), (0.0, 1, 2)],
    pools=(1, 1), stages=(1, 4), blocks=(10, 10), seats=1, speed=300.0, host_s=0.005, most=None,
)  # fmt: skip
def test_no_request_is_lost_between_pipelines(policy, rows, pools, stages, blocks, seats, speed, host_s, most):
    kind, arrivals, machine = parse_policy(policy, {})[1], drawn(rows), linear_machine()
    assert isinstance(machine.cost, LinearCost)
    machine.cost.prelude_base_s = host_s
    limit, decode_limit = (limits(count, 30, max_model_len=256, seqs=seats) for count in blocks)
    jumped_and_stepped(
        lambda source, jump: simulate_pools(
            kind, source, limit, prefill=pools[0], decode=pools[1], decode_limit=decode_limit, bytes_per_s=speed,
            stages=stages, machine=machine, jump=jump,
        ),
        arrivals,
        most,
    )  # fmt: skip


def test_host_stages_and_hand_overs_follow_one_another():
    """Four stages of 2 s; the host takes 1 s and a sixteenth for each of three; 8 tokens go on, 1/8 s a token."""
    cost = SimpleNamespace(iteration_s=lambda plan: 9.0, prelude_s=lambda plan: 1.0, added_host_s=lambda num: num / 16)
    pipeline = Pipeline(cost, 4, 0.125)  # type: ignore[arg-type]
    pipeline.lanes = [Lane(str(i)) for i in range(4)]
    plan = IterationPlan()
    plan.prefill_tokens, plan.num_decodes, plan.num_single_chunks, plan.chunks = 5, 2, 1, (Mock(),)
    pipeline.host_free_s = 0.5
    assert pipeline.pass_through(plan, 0.25) == 0.5 + 1.1875 + 4 * 2.0 + 3 * 1.0
    assert [lane.free_s for lane in pipeline.lanes] == [3.6875, 6.6875, 9.6875, 12.6875]
    assert pipeline.pass_through(plan, 4.0) == 4.0 + 1.1875 + 11.0
    assert pipeline.host_free_s == 5.1875
    cost.iteration_s = lambda plan: 0.0
    assert (pipeline.pass_through(plan, 7.0), pipeline.host_free_s) == (7.0, 5.1875)


@pytest.mark.parametrize(("at_s", "place"), [(0.9, 5), (1.0 - 2e-9, 5), (1.0 - 5e-10, 4), (1.0, 4), (1.5, 4)])
def test_what_is_idle_gets_a_turn_while_another_is_launched_alone(at_s, place):
    """The host is free at 1 s. Engine 5 is idle; engine 4 ends at 2 s."""
    pipeline = Pipeline(LinearCost((0.1, 0.0, 0.0), (0.1, 0.0, 0.0), 0.0, 1.0), 2, 0.0)
    pipeline.host_free_s = 1.0
    engines = SimpleNamespace(end_s=2.0, place=4), SimpleNamespace(end_s=inf, place=5)
    pipeline.engines.extend(engines)  # type: ignore[arg-type]
    assert pipeline.next_place(at_s) == place
    engines[0].end_s = 0.5
    assert pipeline.next_place(at_s) == 4
