"""`adaptive` by hand, what it claims, and what it must not do."""

from dataclasses import replace
from itertools import product
from math import ceil

import numpy as np
import pytest

from kvtwin.testing import limits, linear_machine, requests, simulate
from kvtwin.testing.conformance import Workload, check_jumps, run
from kvtwin.testing.engines import roofline_machine
from sim.engine.sequence import Sequence
from sim.options.scenario import Scenario
from sim.results.goodput import Goodput
from sim.run.prepare import prepare
from sim.run.simulate import build_run, execute
from sim.run.traffic import traffic
from sim.specs.models import load_model
from sim.systems.adaptive.preset import Adaptive
from sim.systems.adaptive.request_price import Outlook
from sim.systems.adaptive.triage import Triage
from sim.systems.base import Policy
from sim.systems.vllm_v1 import VllmV1
from traces.request import Request

SLO = Goodput(ttft_s=3.0, tpot_s=0.2)
ROOM = limits(gpu=60, host=1000, tokens=512, chunked=True)


def crowd(count: int = 250, seed: int = 0, gap_s: float = 0.11) -> list[Request]:
    """More than 60 blocks of 16 tokens can serve, most of it short and some ten times as long."""
    rng = np.random.default_rng(seed)
    lengths = np.where(rng.random(count) < 0.2, rng.integers(200, 400, count), rng.integers(10, 60, count))
    times = np.cumsum(rng.exponential(gap_s, count))
    return requests(*((float(t), int(rng.integers(20, 120)), int(n)) for t, n in zip(times, lengths, strict=True)))


@pytest.mark.parametrize(("context", "alone"), [(200, False), (9000, True)])
def test_chunks_go_alone_where_decodes_cost_more_beside_them(context, alone):
    """L20's kernel computes tiles of rows: over long contexts decodes beside a chunk cost more than the weights."""
    model = load_model("llama-3.1-8b")
    machine = roofline_machine("l20", 16 * 131072.0, model=model)
    limit = limits(gpu=12_000, max_model_len=131_072, tokens=2048, chunked=True, block_bytes=16 * 131072.0)
    arrivals = requests(*((0.1 * i, context, 200) for i in range(30)))
    outcomes = [
        simulate(Adaptive(), arrivals, limit, machine=machine, jump=jump, checked=False) for jump in (True, False)
    ]
    plans = [plan for plan, _, _ in outcomes[0].plans]
    mixed = [plan for plan in plans if plan.chunks and plan.num_decodes]
    # There are no decodes yet when the first prompt is computed.
    lonely = sum(bool(plan.chunks and not plan.num_decodes) for plan in plans) - ceil(context / 2048)
    assert max(plan.num_decodes for plan in plans) > 12
    assert lonely > len(mixed) if alone else mixed and not lonely
    ends = [[(seq.request.request_id, seq.first_token_s, seq.finish_s) for seq in one.ended] for one in outcomes]
    assert np.allclose(ends[0], ends[1], rtol=0, atol=1e-6)


def test_whose_first_token_is_late_lets_others_pass():
    """One seat, taken for 4 s by one without time to spare: two are hopeless then (TTFT 1 s), the last is not."""
    rows = requests((0.0, 16, 200), (0.1, 16, 10), (0.2, 16, 10), (3.9, 16, 10))
    policy = Adaptive(ttft_slo_ms=1000.0, tpot_slo_ms=25.0, predictor="oracle")
    ended = simulate(policy, rows, limits(seqs=1)).by_id()
    assert ended[0].finish_s > 3.9
    assert ended[3].first_token_s < ended[1].first_token_s < ended[2].first_token_s
    assert ended[3].first_token_s - 3.9 < 1.0


def test_what_has_time_makes_room_for_a_prompt_and_returns():
    """A long answer with slack leaves for the host when a prompt finds no room; all of it meets its SLOs."""
    rows = requests((0.0, 400, 300), (0.5, 400, 20))
    limit = limits(gpu=46, host=100, tokens=512, chunked=True)
    outcome = simulate(Adaptive(predictor="oracle"), [*rows, Request(2, 1.0, 300, 10)], limit, goodput=SLO)
    assert outcome.scheduler.counters.policy["parked_sequences"] >= 1
    assert (
        outcome.scheduler.counters.policy["returned_sequences"] == outcome.scheduler.counters.policy["parked_sequences"]
    )
    assert outcome.log.good == 3


@pytest.mark.parametrize(("predictor", "tpot_ms"), [("oracle", 24.0), ("bucket", 28.0)])
def test_as_many_decode_together_as_a_short_tpot_allows(predictor, tpot_ms):
    """Room for all. An iteration takes 20 ms, and for each sequence 20 us and 0.6 us a token: none is in time if all
    decode."""
    arrivals = crowd(800, gap_s=0.015)
    limit = replace(ROOM, num_gpu_blocks=10_000, max_num_seqs=512)
    slo = Goodput(ttft_s=3.0, tpot_s=tpot_ms / 1e3)
    policy = Adaptive(tpot_slo_ms=tpot_ms, predictor=predictor)
    ours, theirs = (simulate(p, arrivals, limit, goodput=slo, checked=False) for p in (policy, VllmV1()))
    assert ours.log.good > 1.3 * theirs.log.good


def test_iterations_come_near_to_a_tpot_that_limits_the_batch():
    """559 were good while iterations kept 0.9 of it: what was left served nothing."""
    limit, slo = replace(ROOM, num_gpu_blocks=10_000, max_num_seqs=512), Goodput(ttft_s=3.0, tpot_s=0.024)
    arrivals = crowd(800, gap_s=0.015)
    assert simulate(Adaptive(tpot_slo_ms=24.0), arrivals, limit, goodput=slo, checked=False).log.good > 575


def test_nothing_starts_whose_first_token_would_be_late():
    """Twice as many prompts as there is time for. Iterations of a whole budget last 0.35 s, and a prompt waits for two:
    117 were in time, and 45 a little late, when these were not counted."""
    rows = requests(*((0.02 * i, 1000, 20) for i in range(300)))
    limit = limits(gpu=100_000, host=10_000, tokens=8192, chunked=True)
    outcome = simulate(Adaptive(predictor="oracle", async_scheduling=True), rows, limit, goodput=SLO, checked=False)
    waits_s = [seq.first_token_s - seq.request.arrival_s for seq in outcome.ended]
    assert sum(wait_s > 2.5 for wait_s in waits_s) > 100
    assert not any(3.0 < wait_s < 3.8 for wait_s in waits_s)
    assert outcome.log.good > 140


def test_a_long_prompts_attention_over_itself_makes_it_late():
    """Three of 0.85 s each are in time, the fourth is not: 0.49 s of each grow with its square. The short ones are, in
    its place."""
    machine = linear_machine(prefill=(0.005, 0.5e-4, 1e-8))
    limit = limits(gpu=100_000, host=10_000, max_model_len=16_384, tokens=8000, chunked=True)
    rows = requests(*((0.01 * i, 7000 if i < 4 else 2000, 5) for i in range(6)))
    outcome = simulate(Adaptive(predictor="oracle"), rows, limit, machine=machine, goodput=SLO)
    late = [seq.request.request_id for seq in outcome.ended if seq.first_token_s - seq.request.arrival_s > 3.0]
    assert late == [3]


@pytest.mark.parametrize(
    ("gpu", "traffic_of", "most_before"),
    [
        ("a100-80g", {"workload": "sharegpt", "num_prompts": 300}, 236),
        ("h100", {"workload": "fixed", "input_len": 2000, "output_len": 200, "num_prompts": 100}, 24),
    ],
)
def test_a_burst_is_served_as_well_as_first_come_first_served(gpu, traffic_of, most_before):
    """Llama-3.1-70B on four GPUs, 30/s: `most_before` were in time when arrivals alone told the limit, and late
    prompts started."""
    slos = ("ttft:3000", "tpot:200")
    scenario = Scenario(model="llama-3.1-70b", gpu=gpu, tp=4, request_rate=30.0, seed=1, goodput=slos, **traffic_of)
    good = [
        execute(build_run(prepare(scenario, policy.name, policy), traffic(scenario))).engines[0].log.good
        for policy in (Adaptive(), VllmV1())
    ]
    assert good[0] >= good[1]
    assert good[0] > 1.1 * most_before


def test_a_full_host_drops_what_nothing_will_serve_in_time():
    """A host for a few: those there are computed again, so that as many are good as with room for all."""
    good = dict.fromkeys((40, 4000), 0)
    # Of one load alone some are chance.
    for gap_s, host in product((0.06, 0.07), good):
        arrivals, room = crowd(gap_s=gap_s), replace(ROOM, num_cpu_blocks=host)
        outcome = simulate(Adaptive(predictor="oracle"), arrivals, room, goodput=SLO, checked=False)
        assert len(outcome.ended) == len(arrivals)
        assert ("dropped_sequences" in outcome.scheduler.counters.policy) == (host == 40)
        good[host] += outcome.log.good
    few = Workload(crowd(80, gap_s=0.06), replace(ROOM, num_cpu_blocks=40), linear_machine())
    check_jumps(Adaptive(predictor="oracle"), few)
    assert good[40] > 0.95 * good[4000]


@pytest.mark.parametrize("predictor", ["oracle", "bucket", "none"])
def test_more_requests_meet_their_slos_than_first_come_first_served(predictor):
    arrivals = crowd()
    policies = Adaptive(predictor=predictor), VllmV1()
    ours, theirs = (simulate(policy, arrivals, ROOM, goodput=SLO, checked=False) for policy in policies)
    assert ours.log.good > 1.2 * theirs.log.good


def test_with_room_for_all_nothing_is_passed_over():
    arrivals = crowd(gap_s=1.0)
    outcome = simulate(Adaptive(), arrivals, replace(ROOM, num_gpu_blocks=10_000), goodput=SLO, checked=False)
    assert outcome.log.good == len(arrivals)
    assert outcome.scheduler.counters.preemptions == 0
    firsts = [outcome.by_id()[i].first_scheduled_s for i in range(len(arrivals))]
    assert firsts == sorted(firsts)


def test_patience_ends_the_wait_of_what_is_dear():
    arrivals = crowd(gap_s=0.07)
    longest = []
    for patience_s in (0.0, 15.0):
        outcome = simulate(Adaptive(patience_s=patience_s), arrivals, ROOM, checked=False)
        longest.append(max(seq.first_token_s - seq.request.arrival_s for seq in outcome.ended))
    assert longest[1] < 0.85 * longest[0]


def test_true_lengths_are_not_known_before_they_are_over():
    """Two traces that differ in how long some answers will be run alike until the first of them ends."""
    arrivals = crowd(120)
    longer = [r._replace(output_tokens=r.output_tokens + 500) if r.request_id % 7 == 3 else r for r in arrivals]
    for policy in (Adaptive(predictor="none"), Adaptive(predictor="bucket", predictor_accuracy=1.0)):
        # Classes may tell the two apart, lengths within a class may not.
        other = (
            longer
            if policy.predictor == "none"
            else [
                r._replace(output_tokens=r.output_tokens + 1)
                if r.request_id % 7 == 3 and r.output_tokens not in (16, 32, 64, 128, 256)
                else r
                for r in arrivals
            ]
        )
        one, two = (simulate(policy, rows, ROOM, jump=False, checked=False) for rows in (arrivals, other))
        changed = {a.request_id for a, b in zip(arrivals, other, strict=True) if a != b}
        until_s = min(seq.finish_s for seq in one.ended if seq.request.request_id in changed)

        def told(outcome, until_s=until_s):
            return [
                (start_s, [(c.seq.request.request_id, c.num_new) for c in plan.chunks], plan.num_decodes)
                for plan, start_s, times in outcome.plans
                if times.end_s < until_s
            ]

        assert len(told(one)) > 50
        assert told(one) == told(two)


def test_shared_blocks_are_not_moved():
    """Prompts that share a prefix are computed again when they leave; their blocks stay in the cache."""
    rows = [
        r._replace(hash_ids=(1, 2, 10 + r.request_id), hash_block_tokens=16)
        for r in requests(*((0.02 * i, 48, 80) for i in range(12)))
    ]
    limit = replace(limits(gpu=30, host=1000, tokens=512, chunked=True), enable_prefix_caching=True)
    outcome = simulate(Adaptive(), rows, limit, machine=linear_machine(limit.block_bytes))
    assert outcome.scheduler.counters.prefix_hit_tokens > 0
    assert "parked_sequences" not in outcome.scheduler.counters.policy
    assert len(outcome.ended) == 12


def test_what_decodes_the_last_token_that_it_had_takes_one_block_for_it():
    """33 tokens, computed again 16 at a time: the last, generated before, is left for a decode, in the ninth block."""
    rows = requests(*[(0.0, 1, 1)] * 4, (0.0, 30, 4), (0.0, 32, 2))
    limit = replace(limits(17, 0, block_size=4, max_model_len=64, seqs=2), max_num_batched_tokens=16)
    outcome = simulate(Adaptive(), rows, replace(limit, enable_chunked_prefill=True))
    assert outcome.by_id()[5].num_preemptions == 1
    assert outcome.scheduler.gpu.free == 17


@pytest.mark.parametrize(
    "policy",
    [Adaptive(), Adaptive(predictor="none"), Adaptive(predictor="oracle"), Adaptive(patience_s=10.0)],
    ids=["bucket", "none", "oracle", "patient"],
)
def test_what_is_remembered_of_one_that_waits_or_is_parked_still_holds(policy, monkeypatch):
    """Prices, SLOs and what it has had: to the bit what is found anew, at every decision."""
    look, num_remembered = Triage.look, {True: 0, False: 0}

    def compare(self: Triage, seq: Sequence) -> Outlook:
        found, anew = look(self, seq), self.outlook(seq)
        assert [getattr(found, name) for name in Outlook.__slots__] == [getattr(anew, name) for name in anew.__slots__]
        num_remembered[seq.num_generated > 0] += 1
        return found

    monkeypatch.setattr(Triage, "look", compare)
    simulate(policy, crowd(100, gap_s=0.07), ROOM, checked=False)
    assert min(num_remembered.values()) > 200


def test_one_iteration_passes_before_what_has_joined_is_looked_at():
    """A prompt's last chunk lets request 0 join after the step has looked at it: the next step puts it back."""
    policy, machine = Adaptive(), linear_machine(1.0)
    limit = limits(gpu=48, host=0, block_size=1, max_model_len=64, seqs=1, tokens=16, chunked=True)
    workload = Workload(requests((0.0, 1, 34), (0.0, 1, 1)), limit, machine)
    check_jumps(policy, workload)
    assert run(policy, workload).by_id()[0].num_preemptions == 13


@pytest.mark.parametrize("at_s", [1.55, 1.6])
def test_what_holds_all_blocks_but_one_returns_when_nothing_else_is_left(at_s):
    """Seven of eight blocks leave for a prompt. Forecasts keep one more free than there is: it returns all the same."""
    policy = Adaptive(predictor="oracle", ttft_slo_ms=30_000.0)
    rows = requests((0.0, 32, 92), (at_s, 47, 23))
    outcome = simulate(policy, rows, limits(gpu=8, host=100, tokens=512, chunked=True))
    assert outcome.scheduler.counters.policy == {"parked_sequences": 1, "returned_sequences": 1}
    assert outcome.scheduler.counters.swap_out_blocks == outcome.scheduler.counters.swap_in_blocks == 7
    assert [seq.request.request_id for seq in outcome.ended] == [1, 0]


@pytest.mark.parametrize("ahead", [False, True])
def test_what_an_iteration_fills_is_hit_in_it_as_in_vllm(ahead):
    """The prompt was looked up before the decodes had their blocks, and kept what it was told then."""
    limit = replace(limits(gpu=40, chunked=True), enable_prefix_caching=True)

    def hit(policy: Policy, arrival_s: float) -> int:
        answers = Request(0, 0.0, 4, 60, "", (7,), 16, (8, 9, 10))
        asks = Request(1, arrival_s, 34, 2, "", (7, 20, 21), 16)
        return simulate(policy, [answers, asks], limit).by_id()[1].num_cached_tokens

    times = [0.01 * i for i in range(15, 30)]
    theirs = [hit(VllmV1(async_scheduling=ahead), at) for at in times]
    assert set(theirs) == {0, 16}
    assert [hit(Adaptive(async_scheduling=ahead), at) for at in times] == theirs
