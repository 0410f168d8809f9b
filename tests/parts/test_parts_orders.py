"""Any order: any waiting request can be taken out, and the others keep their places."""

from dataclasses import replace

import pytest

from kvtwin.testing import limits, linear_machine
from kvtwin.testing.engines import build_engine
from sim.options.policies import parse_policy
from traces.request import Request

SYSTEMS = {
    "fcfs": "vllm-recompute", "priority": "vllm-v1:scheduling-policy=priority", "mlfq": "fastserve",
    "triage": "adaptive", "lpm": "radix", "dfs-weight": "radix:schedule-policy=dfs-weight",
    "prefix-groups": "batchllm",
}  # fmt: skip


def waiting_in(system):
    """An order with five that wait, two of which begin alike."""
    policy = parse_policy(system, {})[1]
    limit = replace(limits(block_size=1 if "radix" in system else 16), enable_prefix_caching=policy.can_cache_prefixes)
    engine = build_engine(policy, limit, linear_machine(), lambda seq: None, checked=False)
    begins = (1, 2, 1, 3, 4)
    seqs = [
        engine.add_request(Request(i, 0.0, 48, 4, "", (begin, 10 + i, 20 + i), 16, (), i % 2))
        for i, begin in enumerate(begins)
    ]
    return engine.scheduler.order, seqs


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)
@pytest.mark.parametrize(("number", "is_prepared"), [(0, True), (2, False), (4, True)])
def test_what_waits_can_be_taken_out_once(system, number, is_prepared):
    order, seqs = waiting_in(system)
    if is_prepared:
        order.prepare(0.0)
    before, taken = list(order), seqs[number]
    assert sorted(seq.request.request_id for seq in before) == [0, 1, 2, 3, 4]
    assert len(order) == 5
    assert order.remove(taken) is True
    assert len(order) == 4
    assert set(order) == {*before} - {taken}
    assert order.remove(taken) is False
    assert len(order) == 4
    order.prepare(0.0)
    assert len(order.waiting) == 4
    popped = []
    while order.waiting:
        assert order.head() is order.head()
        popped.append(order.head())
        assert order.pop() is popped[-1]
    assert set(popped) == {*before} - {taken}
    assert len(order) == 0
    assert list(order) == []
    assert order.remove(popped[0]) is False


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)
def test_what_is_put_back_is_first_again_but_behind_all_where_hits_say_what_is_next(system):
    order, seqs = waiting_in(system)
    order.prepare(0.0)
    first = [order.pop(), order.pop()]
    order.put_back(first[::-1])
    assert len(order) == 5
    at = slice(3, None) if system.startswith("radix") else slice(2)
    assert {*list(order)[at]} == {*first}
    assert {*order} == {*seqs}
