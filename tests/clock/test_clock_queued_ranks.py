"""Data-parallel ranks that share experts, each a pipeline: their batches pass the stages together."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from clusters import run_with_pauses

from sim.clock.queued_ranks import QueuedLockstep
from sim.options.policies import parse_policy
from sim.options.scenario import Scenario
from sim.run.prepare import Setup, prepare
from sim.run.simulate import build_run, execute_all
from traces.request import Request

AHEAD, SERIAL = "vllm-v1", "vllm-v1:async-scheduling=false"


def setup_of(policy: str, **options) -> Setup:
    asked = {"workload": "fixed", "model": "qwen3-30b-a3b", "gpu": "h100", "pipeline_parallel_size": 2}
    asked |= {"data_parallel_size": 2, "enable_expert_parallel": True} | options
    return prepare(Scenario(**asked), policy, parse_policy(policy, {})[1])


def facts(setup: Setup, requests: list[Request]) -> dict[int, tuple[float, ...]]:
    found = execute_all(build_run(setup, requests)).log.requests
    assert found is not None
    return {one.request_id: (one.queue_s, one.ttft_s, one.e2el_s) for one in found}


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("policy", [AHEAD, SERIAL])
def test_ranks_with_the_same_requests_are_one_pipeline_but_for_dummies(policy, stages, monkeypatch):
    """Were dummy batches free, each would go as alone. Some wait for one, and nothing ends earlier for them."""
    # Prompts reach the engines when they are drawn for: later ones would share batches, and end earlier for a dummy.
    monkeypatch.setattr(Setup, "front_end", (0.0, 0.0))
    setup = setup_of(policy, pipeline_parallel_size=stages)
    random = Random(stages)
    drawn = [(0.05 * i, random.randint(1, 3000), random.randint(2, 40)) for i in range(10)]
    alone = replace(setup, scenario=replace(setup.scenario, data_parallel_size=None), experts=None)
    own = facts(alone, [Request(i, *one) for i, one in enumerate(drawn)])
    requests = [Request(2 * i + rank, *one) for i, one in enumerate(drawn) for rank in range(2)]
    with_dummies = facts(setup, requests)
    monkeypatch.setattr(QueuedLockstep, "dummy_s", lambda lockstep: 0.0)
    together = facts(setup, requests)
    assert len(together) == 2 * len(own)
    for number, found in together.items():
        assert found == pytest.approx(own[number // 2], abs=1e-7)
    assert all(found[2] >= together[number][2] - 1e-9 for number, found in with_dummies.items())
    assert stages == 3 or any(found[2] > together[number][2] + 1e-4 for number, found in with_dummies.items())


@pytest.mark.parametrize("policy", [AHEAD, SERIAL])
def test_batches_follow_one_another_on_all_ranks_and_nothing_is_lost(policy):
    """Crowded, with pauses in which ranks run out of requests, one before the other."""
    setup = setup_of(policy, data_parallel_size=3, num_gpu_blocks_override=200, max_num_seqs=8)
    run, seen = run_with_pauses(setup)
    spans = sorted(set(seen))
    # Batches of a turn are counted once.
    assert len(spans) < len(seen)
    assert all(next_s > began_s and next_end_s > end_s for (began_s, end_s), (next_s, next_end_s) in pairwise(spans))
    assert all(parts.scheduler.memory.recount() == (0, 0) for parts in run.engines)


def test_one_rank_alone_waits_for_no_dummy_of_the_other():
    """A dummy has fewer tokens to compute, and passes the stages behind the batch before."""
    setup = setup_of(AHEAD)
    one = facts(setup, [Request(0, 0.0, 100, 30)])[0]
    both = facts(setup, [Request(0, 0.0, 100, 30), Request(1, 0.0, 100, 30)])
    assert one[2] <= both[0][2] == both[1][2]


def test_ranks_of_a_dense_model_are_pipelines_by_themselves():
    setup = setup_of(AHEAD, model="llama-3.1-8b", enable_expert_parallel=False)
    assert setup.experts is None
    found = facts(setup, [Request(0, 0.0, 100, 30), Request(1, 0.0, 4000, 30)])
    alone = setup_of(AHEAD, model="llama-3.1-8b", enable_expert_parallel=False, data_parallel_size=None)
    assert found[0] == facts(alone, [Request(0, 0.0, 100, 30)])[0]
