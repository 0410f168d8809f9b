"""Orders: any waiting request can be taken out; vLLM's priorities, PrefillOnly's queue, BatchLLM's groups."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.testing import conformance, limits, linear_machine, simulate
from kvtwin.testing.engines import build_engine
from sim.engine.sequence import Sequence
from sim.options.policies import parse_policy
from sim.parts.order.priority import Priority
from sim.systems.batchllm.prefix_groups import one_level
from traces.generators import generate
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


ROWS = st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 3)), max_size=12)


@given(ROWS, st.data())
def test_the_queue_is_sorted_and_says_what_was_in_it(rows, data):
    seqs = [Sequence(Request(i, float(at), 5, 5, priority=priority)) for i, (priority, at) in enumerate(rows)]
    order = Priority()
    order.put_back(seqs[::2])
    for seq in seqs[1::2]:
        order.add(seq)
    gone = data.draw(st.sets(st.sampled_from(seqs))) if seqs else set()
    assert [order.remove(seq) for seq in gone] == [True] * len(gone)
    assert [order.remove(seq) for seq in gone] == [False] * len(gone)
    left = sorted(
        (seq for seq in seqs if seq not in gone),
        key=lambda seq: (seq.request.priority, seq.request.arrival_s, seq.request.request_id),
    )
    assert list(order) == left and len(order) == len(left)
    for seq in left:
        assert order.head() is seq and order.pop() is seq
    assert not order


MACHINE = linear_machine(prefill=(0.0, 1e-3, 0.0), decode=(1e-3, 0.0, 0.0))


def starts(*rows: Request, options: str = "wait-weight=0", cached: bool = True) -> list[int]:
    """Requests by start: one seat, blocks of 16 tokens, a millisecond a token."""
    policy = parse_policy(f"vllm-recompute:order=shortest-prefill,{options}", {})[1]
    limit = replace(limits(gpu=100, seqs=1), enable_prefix_caching=cached)
    ended = simulate(policy, rows, limit, machine=MACHINE).ended
    return [seq.request.request_id for seq in sorted(ended, key=lambda seq: seq.first_scheduled_s)]


def prompt(number: int, arrival_s: float, *ids: int) -> Request:
    return Request(number, arrival_s, 16 * len(ids), 1, "", ids, 16)


FIRST = prompt(0, 0.0, 1, 2, 3, 4)
QUEUE = (prompt(1, 0.01, 5, 6, 7), prompt(2, 0.02, 1, 2, 3, 4, 8), prompt(3, 0.03, 5, 6, 7, 9), prompt(4, 0.04, 10, 11))
"""Left to compute while the first runs: 48, 80 or, when it has ended, 16; 64 or, after the next but one, 16; and 32."""


def test_what_was_just_computed_goes_next():
    """2 hits the first's four blocks; then 4 has the least, then 1, whose blocks 3 hits."""
    assert starts(FIRST, *QUEUE) == [0, 2, 4, 1, 3]


def test_without_a_cache_the_shortest_prompt_goes_first():
    assert starts(FIRST, *QUEUE, cached=False) == [0, 4, 1, 3, 2]


@pytest.mark.parametrize(("weight", "order"), [(0.5, [0, 2, 4, 1, 3]), (0.6, [0, 2, 1, 3, 4]), (1e3, [0, 1, 2, 3, 4])])
def test_waiting_makes_up_for_length(weight, order):
    """1 has 48 ms to compute and arrived at 10 ms, 4 has 32 and arrived at 40: even where 30 ms weigh 16, at 0.533."""
    assert starts(FIRST, *QUEUE, options=f"wait-weight={weight}") == order


@pytest.mark.parametrize("system", ["vllm-v1:async-scheduling=true,", "radix:"])
def test_it_keeps_to_what_every_order_must(system):
    conformance.check(parse_policy(f"{system}order=shortest-prefill", {})[1], examples=20)


def test_one_token_answers_come_sooner_on_average_than_in_order_of_arrival():
    """The paper's workload: posts of users whose profiles are long and shared, and no decodes."""
    profiles = {"documents": 1, "document_len": 128, "corpus": 40}
    asked = list(generate("documents", num_prompts=300, request_rate=12.0, output_len=1, **profiles))
    limit = replace(limits(gpu=120, max_model_len=1024), enable_prefix_caching=True)
    mean_s = {}
    for order in ("fcfs", "shortest-prefill"):
        policy = parse_policy(f"vllm-v1:order={order}", {})[1]
        outcome = simulate(policy, asked, limit, machine=MACHINE, checked=False)
        mean_s[order] = sum(seq.finish_s - seq.request.arrival_s for seq in outcome.ended) / len(asked)
    assert mean_s["shortest-prefill"] < 0.9 * mean_s["fcfs"]


def groups(*texts):
    """Groups as (prefix, members), the prefix read from the first of them."""
    prompts = [tuple(map(ord, text)) for text in texts]
    return sorted((texts[members[0]][:depth], sorted(members)) for depth, members in one_level(prompts))


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (["ab", "cd"], [("", [0, 1])]),
        (["abc", "abd", "xyz"], [("", [2]), ("ab", [0, 1])]),
        (["abc", "abc"], [("abc", [0, 1])]),
        # "abcd" of three saves 2 * 2 beyond "ab", and "ab" once more costs 2.
        (["abcdx", "abcdy", "abcdz", "abq", "abr"], [("ab", [3, 4]), ("abcd", [0, 1, 2])]),
        # Of two it saves 1 * 2, which is no more than 2.
        (["abcdx", "abcdy", "abq", "abr"], [("ab", [0, 1, 2, 3])]),
        # A prompt that is another's beginning.
        (["ab", "abc", "abd"], [("ab", [0, 1, 2])]),
    ],
)
def test_groups_worked_by_hand(texts, found):
    assert groups(*texts) == found


def test_nothing_is_no_group():
    assert one_level([]) == []


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_everything_is_in_one_group_whose_prefix_they_have(seed):
    dice = Random(seed)
    stems = [tuple(dice.randrange(2) for _ in range(dice.randrange(1, 9))) for _ in range(3)]
    prompts = [
        stem[: dice.randrange(len(stem) + 1)] + tuple(dice.randrange(2) for _ in range(dice.randrange(4)))
        for stem in (dice.choice(stems) for _ in range(dice.randrange(12)))
    ]
    found = one_level(prompts)
    assert sorted(i for _, members in found for i in members) == list(range(len(prompts)))
    for depth, members in found:
        assert len({prompts[i][:depth] for i in members}) == 1
        assert min(len(prompts[i]) for i in members) >= depth
    # Never worse than to share the first key alone, with all that have it.
    saved = sum((len(members) - 1) * depth for depth, members in found)
    firsts = [prompt[0] for prompt in prompts if prompt]
    assert saved >= sum(max(0, firsts.count(key) - 1) for key in set(firsts))
