"""Replicas that come and go: rules by hand, nothing lost, a fixed number as ever, jumps as steps."""

from collections import Counter
from dataclasses import astuple, replace
from math import inf
from types import SimpleNamespace

import pytest

from sim.options.policies import parse_policy
from sim.options.scenario import Scenario
from sim.results.metrics import ENGINE_COLUMNS, TABLE_COLUMNS
from sim.results.result import assemble
from sim.run.prepare import prepare
from sim.run.runs import Recording
from sim.run.simulate import build_run, execute_all
from sim.topology.autoscalers import DynamoOptions, DynamoPlanner, Hpa, HpaOptions, parse_autoscale
from traces.request import Request

SCENARIO = Scenario(workload="fixed", model="llama-3.1-8b", gpu="a100-80g", router="least-loaded")
WAVES = [
    Request(i, at_s, 400, 60 + 7 * (i % 5))
    for i, at_s in enumerate(sorted(20.0 * wave + 0.1 * k for wave in range(4) for k in range(60 * (1 + wave % 2))))
]
"""Four bursts of 60 and 120 requests, ten a second, 20 s apart."""
BUSY = "hpa:target=10,max=4,interval-s=1,down-window-s=3,start-s=2"


def run(autoscale=None, replicas=None, policy="vllm-v1", *, jump=True, table=None):
    scenario = replace(SCENARIO, autoscale=autoscale, replicas=replicas)
    setup = prepare(scenario, policy, parse_policy(policy, {})[1])
    return execute_all(build_run(setup, WAVES, table=table, keep=Recording(detailed=True), jump=jump))


def times(done):
    return {row.request_id: (row.arrival_s, row.ttft_s, row.e2el_s) for row in done.log.requests}


@pytest.mark.parametrize("policy", ["vllm-v1", "vllm-recompute"])
def test_two_replicas_that_are_not_scaled_are_two_replicas(policy):
    fixed = assemble(run(replicas=2, policy=policy))
    scaled = assemble(run("hpa:target=10,min=2,max=2,interval-s=0.3", policy=policy))
    for name in ("ttfts", "latencies", "itls", "engines", "lanes", "num_iterations", "makespan_s"):
        assert getattr(scaled, name) == getattr(fixed, name)
    assert scaled.scaling.gpu_s == pytest.approx(2 * fixed.makespan_s) == scaled.scaling.fixed_gpu_s


@pytest.mark.parametrize("rule", [BUSY, "dynamo:max=3,ttft-ms=60,itl-ms=12.5,interval-s=1,start-s=2"])
def test_every_request_ends_once_at_a_replica_that_serves(rule):
    rows = []
    done = run(rule, table=SimpleNamespace(write=rows.append))
    assert Counter(row[0] for row in rows) == Counter(range(len(WAVES)))
    lives, most = done.lives, parse_autoscale(rule).max
    assert len(lives) == len(done.engines) == len(done.instances) > 2
    for row in rows:
        known = dict(zip((*TABLE_COLUMNS, *ENGINE_COLUMNS), row, strict=False))
        life, sent_s = lives[known["engine"]], WAVES[row[0]].arrival_s
        assert known["status"] == "completed" and life.ready_s <= sent_s <= life.drained_from_s
        # The front end's time is the client's.
        assert sent_s + known["e2el_s"] - done.log.front_end_s <= life.stopped_s + 1e-9
    assert len({row[-1] for row in rows}) > 2 and any(life.stopped_s < inf for life in lives)
    for life in lives:
        assert sum(other.asked_s <= life.asked_s < other.stopped_s for other in lives) <= most
    scaling = assemble(done).scaling
    assert scaling.gpu_s < scaling.fixed_gpu_s and 0.0 < scaling.idle_share < 1.0
    held_s = sum(min(life.stopped_s, scaling.gpu_s / scaling.mean_replicas) - life.asked_s for life in lives)
    assert held_s == pytest.approx(scaling.gpu_s)


def test_jumps_change_nothing():
    jumped, stepped = run(BUSY), run(BUSY, jump=False)
    for life, again in zip(jumped.lives, stepped.lives, strict=True):
        assert astuple(life) == pytest.approx(astuple(again), abs=1e-9)
    for request_id, found in times(jumped).items():
        assert found == pytest.approx(times(stepped)[request_id], abs=1e-9)


# -- rules by hand ---------------------------------------------------------------------------------------------------


def views(*loads):
    return [
        SimpleNamespace(num_in_flight=n, num_waiting=n, waiting_tokens=100 * n, tokens_in_flight=50 * n) for n in loads
    ]


def test_hpa_by_hand():
    """Means of 10 are wanted: 25 ask for ceil(2 * 2.5), 10.9 are within a tenth; nothing goes for 60 s."""
    rule = Hpa(HpaOptions(max=20, target=10.0, down_window_s=60.0))
    assert rule.desired(0.0, views(25, 25), 0) == 5
    # Three start and count as idle: 50 / 50 is no reason, 80 / 50 asks for eight.
    assert rule.desired(15.0, views(25, 25), 3) == 5
    assert rule.desired(30.0, views(40, 40), 3) == 8
    # At most double or four more.
    assert Hpa(HpaOptions(max=20, target=1.0)).desired(0.0, views(50), 0) == 5
    assert rule.desired(45.0, views(*[10.9] * 8), 0) == 8
    # The eight asked for at 45 s count until 105 s; then what was asked for since.
    assert [rule.desired(s, views(*[2] * 8), 0) for s in (60.0, 105.0, 106.0)] == [8, 8, 2]


def test_dynamo_by_hand():
    """1 ms a waiting token and a sequence: 500 tokens, 40 sequences. Five loads of less than half of 80 % of that."""
    rule = DynamoPlanner(DynamoOptions(max=4, itl_ms=40.0), lambda tokens: 1e-3 * tokens, lambda n, _: 1e-3 * n)
    assert rule.desired(0.0, views(6, 6), 0) == 3
    assert rule.desired(0.0, views(6, 5), 0) == 2
    assert rule.desired(0.0, views(6, 6), 1) == 3
    assert rule.desired(0.0, views(1, 1), 0) == rule.desired(0.0, views(1.99, 1.99), 0) == 1
    assert rule.desired(0.0, views(2, 1), 0) == 2
    assert rule.desired(0.0, views(0), 0) == 1
    assert rule.desired(0.0, views(9, 9, 9, 9), 0) == 4
