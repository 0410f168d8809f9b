"""PrefillOnly's order: what is left to compute, what has just been cached, and what waiting is worth."""

from dataclasses import replace

import pytest

from kvtwin.testing import conformance, limits, linear_machine, simulate
from sim.options.policies import parse_policy
from traces.generators import generate
from traces.request import Request

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
