"""vLLM v1 on the stages of a pipeline: how batches follow one another, by hand. `tests/oracle` has what it decides.

An iteration takes 0.1 s, half of it at each of two stages.
"""

import json
from dataclasses import replace

import pytest
from clock_small import FLAT, ROWS, drawn
from hypothesis import given, settings
from hypothesis import strategies as st

import kvtwin
from kvtwin.testing import limits, linear_machine, requests
from kvtwin.testing.engines import simulate
from sim.cost.host import Host
from sim.engine.limits import Limits
from sim.engine.sequence import Status
from sim.systems.vllm_v1 import VllmV1

AHEAD, SERIAL = VllmV1(async_scheduling=True), VllmV1(async_scheduling=False)


def staged(limit: Limits, stages: int = 2) -> Limits:
    return replace(limit, stages=stages)


def times(
    policy: VllmV1, *rows: tuple[float, int, int], host: Host | None = None, stage_layers: tuple[int, ...] = ()
) -> dict[int, list[float]]:
    machine = linear_machine(prefill=FLAT["prefill"], decode=FLAT["decode"], host=host)
    outcome = simulate(
        policy, requests(*rows), staged(limits()), machine=machine, record=True, stage_layers=stage_layers
    )
    return outcome.tokens


ONE, TWO = ((0.0, 10, 3),), ((0.0, 10, 4), (0.02, 10, 3))
TIMES = {
    # What the last stage samples is what the first one feeds.
    "one decodes as on one stage": (AHEAD, ONE, (), [[0.1, 0.2, 0.3]]),
    "in series too": (SERIAL, ONE, (), [[0.1, 0.2, 0.3]]),
    # Three places are taken at 0: a prompt, nothing, a decode. When the first has ended, the second's prompt follows.
    "ahead a later prompt has batches of its own": (AHEAD, TWO, (), [[0.1, 0.2, 0.3, 0.4], [0.25, 0.35, 0.45]]),
    # It waits for the first prompt alone; then both are known, and one stage is idle from then on.
    "in series all meet in one batch": (SERIAL, TWO, (), [[0.1, 0.2, 0.3, 0.4], [0.2, 0.3, 0.4]]),
    # One has three of four layers: 0.075 s of each batch. The other waits.
    "alone unlike stages are as like ones": (AHEAD, ONE, (1, 3), [[0.1, 0.2, 0.3]]),
    "batches follow as fast as the longest": (AHEAD, TWO, (1, 3), [[0.1, 0.2, 0.35, 0.5], [0.275, 0.425, 0.575]]),
}


@pytest.mark.parametrize("case", TIMES)
def test_batches_by_hand(case):
    policy, rows, layers, expected = TIMES[case]
    found = times(policy, *rows, stage_layers=layers)
    assert [found[i] for i in range(len(rows))] == [pytest.approx(one) for one in expected]


@pytest.mark.parametrize("policy", [AHEAD, SERIAL])
def test_the_host_schedules_the_next_while_a_batch_is_computed(policy):
    """It takes 0.02 s; in series only where a batch is ready while another one runs, which one sequence has not."""
    waits_s = 0.0 if policy is AHEAD else 0.02
    found = times(policy, (0.0, 10, 3), host=Host(0.02, 0.0, hidden=True))[0]
    assert found == pytest.approx([0.12, 0.22 + waits_s, 0.32 + 2 * waits_s])


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, stages=st.sampled_from([2, 3, 4]), gpu=st.integers(17, 40), policy=st.sampled_from([AHEAD, SERIAL]))
def test_no_request_is_lost_and_no_stage_does_two_things(rows, stages, gpu, policy):
    arrivals = drawn(rows)
    outcome = simulate(policy, arrivals, staged(limits(gpu, max_model_len=256), stages))
    assert sorted(outcome.by_id()) == [request.request_id for request in arrivals]
    for seq in outcome.ended:
        assert seq.status is Status.FINISHED and seq.num_generated == seq.request.output_tokens
        assert seq.request.arrival_s - 1e-9 <= seq.first_scheduled_s <= seq.first_token_s <= seq.finish_s
    assert outcome.scheduler.gpu.free == outcome.scheduler.gpu.num_blocks
    ends_s = [one.end_s for _, _, one in outcome.plans]
    assert ends_s == sorted(ends_s)
    # A batch is at each stage for an equal part of its price.
    priced_s = sum(linear_machine().cost.iteration_s(plan) for plan, _, _ in outcome.plans)
    assert outcome.lanes.compute.busy_s == pytest.approx(priced_s / stages)


def test_a_run_has_one_pool_and_one_scheduler_an_engine(tmp_path, capsys):
    words = ["run", "--workload", "fixed", "--num-prompts", "40", "--model", "llama-2-7b", "--gpu", "l20", "--replicas"]
    words += ["2", "--pipeline-parallel-size", "2", "--out", str(tmp_path)]
    assert kvtwin.main([*words, "--policy", "vllm-v1"]) == 0
    queued = json.loads((tmp_path / "result.json").read_text())
    assert queued["completed"] == 40 and len(queued["engines"]) == 2
    assert kvtwin.main([*words, "--policy", "vllm-recompute"]) == 0
    virtual = json.loads((tmp_path / "result.json").read_text())
    assert len(virtual["engines"]) == 4
    # Of vLLM 0.5's virtual engines each has a share.
    assert queued["engines"][0]["num_gpu_blocks"] > virtual["engines"][0]["num_gpu_blocks"]
    capsys.readouterr()
