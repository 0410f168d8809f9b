"""Speculative decoding: times worked out by hand, Leviathan et al.'s Eq. 1, what does not go with it."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvtwin.testing import engines
from kvtwin.testing.engines import Machine, limits, linear_machine, requests, simulate, tiny_model
from sim.bounds.compared import best_bound
from sim.cost.forms import LinearCost
from sim.cost.roofline import RooflineCost
from sim.engine.acceptance import Acceptance
from sim.engine.limits import WindowLimits
from sim.engine.sequence import Sequence
from sim.errors import UserError
from sim.options.policies import parse_policy
from sim.options.scenario import Scenario
from sim.run.prepare import prepare
from sim.specs.models import load_model
from sim.specs.sparse_attention import parse_sparse_attention, with_sparse_attention
from sim.systems.base import Policy
from traces.readers import open_trace
from traces.request import Request

P0, P1, P2 = engines.PREFILL
D0, D1, D2 = engines.DECODE


def drafting(words: str, method: str = "ngram") -> Policy:
    return parse_policy(f"vllm-v1:spec-method={method},{words}", {})[1]


def test_accepted_tokens_come_together_and_a_step_verifies_all_drafts() -> None:
    """A prompt of 16 and six tokens, two drafted a step, all accepted: 1, then 3, then the last 2 of 3.

    Verified tokens read the sequence's KV once, with those before them: 19 and 22 tokens of context.
    """
    policy = drafting("spec-tokens=2,acceptance-rate=1")
    outcome = simulate(policy, requests((0.0, 16, 6)), limits(chunked=True), record=True)
    first = P0 + 16 * P1 + 256 * P2
    second = first + D0 + 3 * D1 + 19 * D2
    third = second + D0 + 3 * D1 + 22 * D2
    assert outcome.tokens[0] == pytest.approx([first, second, second, second, third, third])
    assert outcome.scheduler.counters.policy == {"drafted_tokens": 4, "accepted_tokens": 3, "num_drafts": 2}


def test_drafts_are_verified_over_what_each_row_attends_to() -> None:
    """Quest with a budget of 9 and pages of 4: rows of 17, 18 and 19 tokens read 9 each, and the index of 19 once."""
    model = with_sparse_attention(tiny_model(4), parse_sparse_attention("quest:budget=9,page=4,dense-layers=0"))
    plain = linear_machine()
    machine = Machine(
        model, LinearCost(engines.PREFILL, engines.DECODE, 1e-4, 1.0, model=model), plain.profile, plain.hardware
    )
    limit = limits(chunked=True, window=WindowLimits(9))
    outcome = simulate(drafting("spec-tokens=2,acceptance-rate=1"), requests((0.0, 16, 4)), limit, machine=machine)
    first = P0 + 16 * P1 + 256 * P2
    assert outcome.by_id()[0].finish_s == pytest.approx(first + D0 + 3 * D1 + (27 + 19 / 4) * D2)


def test_slots_ahead_are_taken_and_those_of_rejected_tokens_stay_with_the_sequence() -> None:
    """A prompt of 12 in blocks of 4, four drafted by a model that needs four slots of its own: 16 slots for the prompt,
    then 12 + 5 + 4 = 21, where six blocks are held until 12 + 3 tokens and as many more make it 24 + 1."""
    policy = drafting("spec-tokens=4,acceptance-rate=0", "eagle")
    held: list[int] = []

    def watch(scheduler):
        return lambda plan, start_s, times: held.append(scheduler.gpu.num_blocks - scheduler.gpu.free)

    limit = limits(gpu=20, block_size=4, chunked=True)
    simulate(policy, requests((0.0, 12, 6)), limit, observe=watch)
    # Computed before each step: 0, 12, 13, 14, 15, 16; to hold: 16, 21, 22, 23, 24, 25 tokens.
    assert held == [4, 6, 6, 6, 6, 7]


def test_a_step_takes_as_many_tokens_as_eq_1_says() -> None:
    """(1 - p^(k+1)) / (1 - p), within 4 standard errors of 20,000 steps; by place: 1 + 0.8 + 0.2."""
    seq = Sequence(Request(0, 0.0, 1, 1))
    steps = 20_000
    for p, k in ((0.7, 4), (0.3, 2), (0.9, 8)):
        acceptance = Acceptance((p,) * k, seed=3)
        taken = [1 + acceptance.num_accepted(seq, i * (k + 1), k) for i in range(steps)]
        mean = sum(taken) / steps
        deviation = (sum((t - mean) ** 2 for t in taken) / steps) ** 0.5
        assert abs(mean - (1 - p ** (k + 1)) / (1 - p)) < 4 * deviation / steps**0.5
    by_place = Acceptance(drafting("spec-tokens=2,synthetic-acceptance-rates=0.8 0.2").chances(), seed=3)  # type: ignore[attr-defined]
    mean = sum(1 + by_place.num_accepted(seq, 3 * i, 2) for i in range(steps)) / steps
    assert mean == pytest.approx(2.0, abs=0.02)


def test_a_request_whose_trace_says_its_acceptance_rate_has_that(tmp_path: Path) -> None:
    """Alone, 40 tokens: one with the prompt, then a token a step at 0, 5 of 4 drafts a step at 1; else the policy's."""
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens,acceptance_rate\n0,12,41,0\n9,12,41,1\n18,12,41,\n")
    for share, steps in ((1.0, [40, 8, 8]), (0.0, [40, 8, 40])):
        policy = drafting(f"spec-tokens=4,acceptance-rate={share}")
        outcome = simulate(policy, list(open_trace(path)), limits(chunked=True))
        starts = [start_s for plan, start_s, _ in outcome.plans if plan.num_decodes]
        assert [sum(i * 9 <= start_s < (i + 1) * 9 for start_s in starts) for i in range(3)] == steps


def test_what_is_accepted_depends_on_seed_request_and_place_alone() -> None:
    """So that all policies see the same; other seeds and requests draw others."""
    one, other = Sequence(Request(1, 0.0, 9, 90)), Sequence(Request(2, 5.0, 7, 90))

    def draws(seq: Sequence, seed: int) -> list[int]:
        return [Acceptance((0.5,) * 8, seed).num_accepted(seq, place, 8) for place in range(40)]

    assert draws(one, 0) == draws(Sequence(one.request), 0)
    assert len({tuple(draws(one, 0)), tuple(draws(one, 1)), tuple(draws(other, 0))}) == 3


def test_a_head_is_priced_as_a_layer_and_the_lm_head() -> None:
    """Linear prices: the share of the model's operations that one of four layers and the LM head are, of each pass."""
    machine = linear_machine()
    rows, limit = requests((0.0, 16, 6)), limits(chunked=True)
    ends = {}
    for method in ("ngram", "eagle"):
        policy = drafting("spec-tokens=1,acceptance-rate=0", method)
        ends[method] = simulate(policy, rows, limit, machine=machine).by_id()[0].finish_s
    prefill = P0 + 16 * P1 + 256 * P2
    # The last but one of five steps drafts in vain; the last one is known to be.
    decodes = sum(D0 + 2 * D1 + D2 * (17 + i + 1) for i in range(4))
    layers, head = machine.model.linear_flops_per_token, machine.model.head_flops_per_token
    share = (layers / 4 + head) / (layers + head)
    assert ends["eagle"] - ends["ngram"] == pytest.approx(share * (prefill + decodes))


def test_the_model_drafts_by_itself_over_a_part_of_each_context() -> None:
    """Two passes for each drafting, of 10 tokens of the sequence's 17 and more; behind a prompt none is counted yet."""
    ends, rows = {}, requests((0.0, 16, 6))
    for method, words in (("ngram", ""), ("sparse_kv", ",spec-kv-budget=10")):
        policy = drafting(f"spec-tokens=2,acceptance-rate=0{words}", method)
        ends[method] = simulate(policy, rows, limits(chunked=True)).by_id()[0].finish_s
    # The last but one of five steps drafts in vain; the last one is known to be.
    first, later = 2 * (D0 + D1) + D2, 2 * (D0 + D1 + 10 * D2)
    assert ends["sparse_kv"] - ends["ngram"] == pytest.approx(first + 4 * later)


def test_weights_and_kv_of_what_drafts_take_memory() -> None:
    """A head keeps one layer's KV beside the model's 40, a draft model its own; blocks are as many as are left."""
    scenario = Scenario(model="qwen3-14b", gpu="h100", workload="fixed")
    plain = prepare(scenario, "", parse_policy("vllm-v1", {})[1]).limits
    head = prepare(scenario, "", drafting("spec-tokens=3,acceptance-rate=0.7", "mtp")).limits
    words = "spec-tokens=3,acceptance-rate=0.7,spec-model=qwen3-0.6b"
    setup = prepare(scenario, "", drafting(words, "draft_model"))
    draft = load_model("qwen3-0.6b")
    assert head.block_bytes == pytest.approx(plain.block_bytes * 41 / 40)
    assert setup.limits.block_bytes == plain.block_bytes + 16 * draft.kv_bytes_per_token(1)
    used = plain.num_gpu_blocks * plain.block_bytes - setup.limits.num_gpu_blocks * setup.limits.block_bytes
    assert abs(used - draft.weight_bytes(1)) <= 2 * setup.limits.block_bytes
    assert isinstance(setup.cost, RooflineCost)
    # In series: what a step accepts is known before the next.
    assert not setup.policy.schedules_ahead


PLENTY = "spec-tokens=2,acceptance-rate=0.5"


def test_where_no_acceptance_is_given_the_first_draft_says_so() -> None:
    """A trace may say it of every request; else the policy must."""
    policy = drafting("spec-tokens=2")
    with pytest.raises(UserError, match="acceptance-rate: request 0 has none in its trace"):
        simulate(policy, requests((0.0, 16, 6)), limits(chunked=True))
    assert simulate(policy, [requests((0.0, 16, 6))[0]._replace(acceptance_rate=1.0)], limits(chunked=True)).ended


def test_windows_and_bounds_refuse_drafts() -> None:
    """The bound holds for one token of a sequence at a time, and rings have no slots ahead."""
    policy = drafting(PLENTY)
    with pytest.raises(UserError, match="keep a window, a state or a part"):
        policy.parts(limits(chunked=True, window=WindowLimits(64, blocks=5)), linear_machine().deployment)
    scenario = Scenario(workload="fixed", goodput=("ttft:1000",), num_prompts=2)
    setup = prepare(scenario, "", policy)
    assert best_bound([setup], asked=False) is None
    with pytest.raises(UserError, match="--bound: is for engines that decode one token"):
        best_bound([setup, replace(setup, policy=policy)])
