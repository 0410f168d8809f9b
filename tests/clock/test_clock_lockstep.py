"""Data-parallel ranks that share experts: prices by hand, and that they go in step."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from clusters import run_with_pauses

from sim.cost.engine_profile import EngineProfile
from sim.cost.model import ridge
from sim.cost.profile import load_profile
from sim.cost.roofline import RooflineCost
from sim.cost.spread_experts import KNOWN_TOKENS, SpreadExpertsCost
from sim.engine.plan import IterationPlan
from sim.errors import UserError
from sim.options.policies import parse_policy
from sim.options.scenario import Scenario
from sim.run.prepare import Setup, prepare
from sim.run.runs import Recording
from sim.run.simulate import build_run, execute_all
from sim.specs.expert_layout import ExpertLayout
from sim.specs.hardware import load_hardware
from sim.specs.models import load_model
from sim.systems.sglang.batching import ExtendFirst
from sim.topology.ranks import ByLoad, InTurn, ToRanks
from sim.topology.routers import RoundRobin
from traces.request import Request

MODEL, GPU = "qwen3-30b-a3b", "h100"
AHEAD, SERIAL = "vllm-v1", "vllm-v1:async-scheduling=false"
SGLANG = "sglang:enable-dp-attention=true"


def cost_of(gpu=GPU, **layout):
    return SpreadExpertsCost(
        load_model(MODEL), load_hardware(gpu), load_profile(f"{gpu}-imported"), ExpertLayout(**layout)
    )


def setup_of(policy=AHEAD, **options) -> Setup:
    asked = {"workload": "fixed", "model": MODEL, "gpu": GPU, "data_parallel_size": 2} | options
    return prepare(Scenario(**asked), policy, parse_policy(policy, {})[1])


def test_shares_of_experts_cost_what_they_do_in_a_group_and_the_exchange_by_hand():
    """Of two ranks with 64 tokens each, the experts are those of a group of two GPUs over 128 tokens."""
    cost, group = (
        cost_of(ranks=2),
        RooflineCost(load_model(MODEL), load_hardware(GPU), profile := load_profile(f"{GPU}-imported"), 2),
    )
    exchanged_s = 0.0
    # A hidden state of 2,048 elements; with the all-gather go eight experts' numbers and weights.
    for size in (2 * 2048 + 8 * 8, 2 * 2048):
        moved_s = 128 * size / 2 / profile.value("allreduce_bytes_per_s")
        exchanged_s += profile.value("allreduce_launch_s") + profile.value("allreduce_latency_s") + moved_s
        exchanged_s += 2 * (profile.value("allreduce_chunk_s") * moved_s) ** 0.5
    assert cost.exchange_s(128) == pytest.approx(48 * exchanged_s)
    assert cost.experts_s(64) == pytest.approx(group.experts_s(128) + 48 * exchanged_s)


def test_between_nodes_links_may_be_what_a_collective_waits_for():
    """Of 32 B200 each node of eight gets three quarters of all bytes over eight links of 47 GB/s."""
    within_s, links_s = (31 / 32 / load_profile("b200-imported").value("allreduce_bytes_per_s"), 3 / 4 / (8 * 47e9))
    assert links_s > within_s
    assert cost_of("b200", ranks=32).exchange_s_per_byte == pytest.approx(links_s)
    # Two GPUs of a rank gather everything each, unless experts are parallel: vLLM then gathers once for all.
    assert cost_of("b200", ranks=16, tp=2).exchange_s_per_byte == pytest.approx(2 * links_s)
    assert cost_of("b200", ranks=16, tp=2, expert_parallel=True).exchange_s_per_byte == pytest.approx(links_s)
    assert cost_of("b200", ranks=8).exchange_s_per_byte < within_s


def test_whole_experts_by_hand_and_the_slowest_gpu():
    constants = load_profile(f"{GPU}-imported").experts("")
    assert constants is not None
    cost, tokens = cost_of(tp=4, expert_parallel=True), 4096
    # 4 of 128 experts' GPUs; every expert is met, and the slowest has about a fourth of the rows.
    compute_s = tokens * 8 / 4 * 2 * 3 * 2048 * 768 / constants["expert_flops_per_s"]
    read_s = 128 / 4 * 3 * 2048 * 768 * 2 / constants["expert_bytes_per_s"]
    moved = tokens * 8 / 4 * (3 * 2048 + 6 * 768) * 2 + tokens * 8 * 3 / 4 * 2048 * 2
    by_hand_s = ridge(compute_s, read_s, constants["expert_roofline_exponent"])
    by_hand_s += moved / constants["expert_activation_bytes_per_s"] + constants["expert_launch_s"]
    assert 48 * by_hand_s < cost.experts_s(tokens) < 48 * 1.02 * by_hand_s
    # One token meets eight experts, three of them on one GPU more often than not.
    few_s = cost_of(tp=4, expert_parallel=True, seed=1).experts_s(1)
    assert few_s == pytest.approx(cost.experts_s(1), rel=0.1)
    assert few_s > 1.2 * 48 * 2 * 3 * 2048 * 768 * 2 / constants["expert_bytes_per_s"]
    # No group without ranks exchanges anything, and unlike experts make one GPU wait for another.
    assert cost.exchange_s(tokens) == 0.0
    skewed = cost_of(tp=4, expert_parallel=True, skew=1.0)
    assert skewed.experts_s(tokens) > 1.05 * cost.experts_s(tokens)
    assert skewed.loads.chosen.sum() == pytest.approx(8)
    assert skewed.loads.chosen.max() <= 1


def test_whole_experts_are_drawn_for_some_numbers_of_tokens_and_lie_on_straight_lines_between():
    cost, (low, high) = cost_of(tp=4, expert_parallel=True), KNOWN_TOKENS[-6:-4]
    at = (3 * low + high) // 4
    share = (at - low) / (high - low)
    assert cost.experts_s(at) == pytest.approx((1 - share) * cost.experts_s(low) + share * cost.experts_s(high))


@pytest.mark.parametrize("policy", [AHEAD, SERIAL, SGLANG])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_with_the_same_requests_are_as_one(policy, ranks, monkeypatch):
    """As the price of one rank assumes of the others; and what is stepped here, one engine jumps."""
    # SGLang's ranks share a tokeniser, which one engine has to itself.
    monkeypatch.setattr(EngineProfile, "front_end", lambda profile: (profile.value("front_end_s"), 0.0))
    setup = setup_of(policy, data_parallel_size=ranks, enable_expert_parallel=True)
    random = Random(ranks)
    drawn = [(0.2 * i, random.randint(1, 3000), random.randint(1, 60)) for i in range(12)]
    alone = replace(setup, scenario=replace(setup.scenario, data_parallel_size=None), experts=None)
    run = execute_all(build_run(alone, [Request(i, *one) for i, one in enumerate(drawn)]))
    own = {r.request_id: (r.queue_s, r.ttft_s, r.e2el_s) for r in run.log.requests or ()}
    requests = [Request(ranks * i + rank, *one) for i, one in enumerate(drawn) for rank in range(ranks)]
    together = execute_all(build_run(setup, requests)).log.requests
    assert together is not None
    assert len(together) == ranks * len(own)
    for found in together:
        expected = own[found.request_id // ranks]
        assert (found.queue_s, found.ttft_s, found.e2el_s) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("policy", [AHEAD, SERIAL, SGLANG])
def test_ranks_begin_and_end_together_and_lose_nothing(policy):
    """Crowded, with pauses in which ranks run out of requests, one before the other."""
    # SGLang's pages have one token.
    blocks = 3200 if policy == SGLANG else 200
    setup = setup_of(policy, data_parallel_size=3, num_gpu_blocks_override=blocks, max_num_seqs=8)
    run, seen = run_with_pauses(setup)
    assert min(run.log.ended_at.values()) > 5
    spans = sorted(set(seen))
    assert len(spans) < len(seen)
    for (_, end_s), (start_s, _) in pairwise(spans):
        assert start_s >= end_s - 1e-9
    assert all(parts.scheduler.memory.recount() == (0, 0) for parts in run.engines)


class Rank:
    tokens_in_flight = waiting_tokens = kv_tokens = 0
    running_until_s = kv_usage = 0.0

    def __init__(self, waiting, running):
        self.num_waiting, self.num_in_flight = waiting, waiting + running

    def prompt_tokens_of(self, request):
        return 0, 0


def test_the_front_end_counts_waiting_fourfold_and_knows_queues_every_tenth_of_a_second():
    router, engines = ToRanks(RoundRobin(), 2), [Rank(1, 0), Rank(0, 3)]
    route = [router.route(Request(i, 0.01 * i, 1, 1), engines) for i in range(3)]
    # 4 against 3; then 4 against 7; then 8 against 7.
    assert route == [1, 0, 1]
    engines[0] = Rank(9, 9)
    assert router.route(Request(3, 0.09, 1, 1), engines) == 0
    assert router.route(Request(4, 0.1, 1, 1), engines) == 1


def routes(router, engines, *requests):
    return [router.route(Request(i, at_s, prompt, 1), engines) for i, (at_s, prompt) in enumerate(requests)]


def test_sglangs_ranks_take_turns_whatever_they_have_each_engines_its_own():
    ranks = [Rank(9, 9), Rank(0, 0), Rank(0, 0), Rank(0, 0)]
    # Engines of two ranks, in turn.
    assert routes(InTurn(RoundRobin(), 2), ranks, *[(0.0, 1)] * 6) == [0, 2, 1, 3, 0, 2]


def test_sglangs_controller_knows_loads_every_fiftieth_of_a_second():
    ranks = [Rank(1, 1), Rank(0, 3)]
    # Two against three; then as many, and the first; then four against three. At 20 ms, two against three again.
    asked = [(0.0, 1), (0.005, 1), (0.01, 1), (0.02, 1)]
    assert routes(ByLoad(RoundRobin(), 2, by_tokens=False), ranks, *asked) == [0, 0, 1, 0]
    few, many = Rank(0, 3), Rank(0, 1)
    # 50 of 100 tokens of KV in use, and none; what waits has 30 and 80: as many, and fewer requests decide.
    few.kv_tokens, few.kv_usage, few.waiting_tokens, many.waiting_tokens = 100, 0.5, 30, 80
    assert routes(ByLoad(RoundRobin(), 2, by_tokens=True), [few, many], (0.0, 10), (0.001, 10)) == [1, 0]


def test_sglang_divides_chunk_seats_and_conservativeness():
    asked = {"max_num_seqs": 100, "max_num_batched_tokens": 4096, "data_parallel_size": 4}
    setup = setup_of(SGLANG, **asked)
    assert (setup.limits.max_num_batched_tokens, setup.limits.max_num_seqs) == (1024, 25)
    # 0.7 x 0.3; of a rank alone 0.7.
    for found, ratio in ((setup, 0.21), (setup_of(SGLANG, data_parallel_size=1), 0.7)):
        batching = build_run(found, []).engines[0].scheduler.batching
        assert isinstance(batching, ExtendFirst)
        assert batching.ratio == pytest.approx(ratio)


def test_a_rank_keeps_its_ratio_until_all_are_idle():
    """SGLang resets it where a rank has no batch, and a rank that is idle alone has an idle one."""
    setup = setup_of(SGLANG)
    # The first rank's requests end early; the second's long after. Later both have one more.
    requests = [Request(0, 0.0, 10, 20), Request(1, 0.0, 10, 200), Request(2, 50.0, 10, 1)]
    ratios: list[float] = []

    def watch(plan, at_s, times):
        batching = run.engines[0].scheduler.batching
        assert isinstance(batching, ExtendFirst)
        ratios.append(batching.ratio)

    run = build_run(setup, requests, keep=Recording(watch=watch))
    execute_all(run)
    # 20 steps of both, 180 of the second alone, and one more of the first.
    assert ratios[60] == ratios[200] < 0.21
    assert ratios[-1] == pytest.approx(0.21)


def test_an_idle_rank_of_sglang_computes_nothing_and_one_of_vllm_a_token():
    cost = cost_of(ranks=2)
    plan = IterationPlan()
    plan.num_decodes = 4096
    (vllm, _), (sglang, _) = cost.set_together([plan, None]), cost.set_together([plan, None], 0)
    assert vllm - sglang == pytest.approx(cost.spread_s(4097, 4096) - cost.spread_s(4096, 4096))


@pytest.mark.parametrize(
    ("options", "policy", "words"),
    [
        ({}, "vllm-recompute", "--data-parallel-size: ranks that share experts iterate together in vLLM v1"),
        ({"model": "llama-3.1-8b", "enable_expert_parallel": True}, AHEAD, "llama-3.1-8b has no experts"),
        ({"model": "llama-2-7b", "pipeline_parallel_size": 2}, "vllm-recompute", "2 ranks of virtual engines"),
        ({"data_parallel_size": 64, "tp": 4, "enable_expert_parallel": True}, AHEAD, "256 GPUs are more than the 128"),
        ({"model": "llama-3.1-8b"}, SGLANG, "llama-3.1-8b has no experts"),
        ({"data_parallel_size": 4}, f"{SGLANG},chunked-prefill-size=3", "3 tokens are fewer than the 4 ranks"),
        ({"cost_form": "paper"}, AHEAD, "form paper has no prices of experts"),
    ],
)
def test_what_cannot_be_is_refused(options, policy, words):
    with pytest.raises(UserError, match=words):
        setup_of(policy, **options)


def test_memory_holds_a_share_of_the_experts_and_ranks_of_a_dense_model_go_by_themselves():
    model = load_model(MODEL)
    routed, rest = model.routed_weight_bytes, model.weight_bytes(1) - model.routed_weight_bytes
    assert model.weight_bytes(1, 4) == pytest.approx(rest + routed / 4)
    dense = setup_of(SERIAL, model="llama-3.1-8b")
    assert dense.experts is None
    run = execute_all(build_run(dense, [Request(0, 0.0, 100, 50), Request(1, 0.0, 4000, 3)]))
    assert run.log.ended_at == {0: 1, 1: 1}


def test_without_dp_attention_ranks_of_sglang_are_servers_of_their_own():
    """Each has all experts: as replicas in turn, whatever is done at once."""
    requests = [Request(place, place / 50, 200 + 30 * place, 20) for place in range(9)]
    ranks = setup_of("sglang")
    assert ranks.experts is None
    apart = [ranks, setup_of("sglang", data_parallel_size=None, replicas=2, router="round-robin")]
    first, second = (execute_all(build_run(setup, requests)).log.requests for setup in apart)
    assert first == second
