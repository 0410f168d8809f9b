"""The certified bound: by hand, against exhaustive search and the offline scheduler, never exceeded by any preset."""

from dataclasses import replace
from functools import cache
from itertools import combinations, product

import numpy as np
import pytest
from adaptive_cells import Cell
from clusters import simulate_pools
from hypothesis import given, settings
from hypothesis import strategies as st
from offline_cells import SHARES_OF_TIME, in_time, row

from kvtwin.testing import conformance, limits, linear_machine, requests, simulate
from kvtwin.testing.engines import roofline_machine
from sim.bounds.first_tokens import STEPS, most_in_time
from sim.bounds.goodput import GoodputBound, certified, goodput_bound
from sim.bounds.step_price import LinearPrice, lines_below, step_prices
from sim.bounds.work import least_within, least_work, seats
from sim.cost.engine_profile import load_engine_profile
from sim.cost.forms import LinearCost
from sim.cost.host import Host
from sim.engine.plan import IterationPlan, Origin
from sim.engine.sequence import Sequence, Status
from sim.results.goodput import Goodput
from sim.specs.models import load_model
from sim.systems import POLICIES
from traces.request import Request
from traces.slos import SLOs

SLO = Goodput(ttft_s=1.0, tpot_s=0.1)


def bound_of(arrivals, limit, machine=None, slo=SLO) -> GoodputBound:
    found = goodput_bound(arrivals, limit, (machine or linear_machine()).cost, slo)
    assert found is not None
    return found


def test_by_hand():
    """Prompts of 10 tokens at 0.1 s each, one second for the first token: ten at once can have one, two cannot wait."""
    machine = linear_machine(prefill=(0.0, 0.1, 0.0), decode=(0.0, 0.0, 0.0))
    bound = bound_of(requests(*[(0.0, 10, 1)] * 4), limits(), machine)
    # The second that all have is one prompt's: 1 s of work. The slack for ties is a microsecond.
    assert bound.good_requests == pytest.approx(1.0, abs=1e-5)
    assert bound.least_duration_s == pytest.approx(4.0)
    assert bound.goodput == pytest.approx(0.25, abs=1e-5)


def test_time_is_split_into_half_seconds():
    """Ten decodes of 0.1 s in 0.3 s, for which a half second counts: half of one can, and half of the last to come."""
    machine = linear_machine(prefill=(0.1, 0.0, 0.0), decode=(0.1, 0.0, 0.0), swap_s_per_block=1e6)
    arrivals = requests(*[(0.0, 10, 11)] * 4, (1.7, 10, 11))
    bound = bound_of(arrivals, limits(seqs=1), machine, Goodput(ttft_s=0.0, tpot_s=0.03))
    assert bound.good_requests == pytest.approx(1.0, abs=1e-5)


def test_first_tokens_come_one_after_another():
    """Prompts of 0.4 s, a second for each: two of five at once have theirs by 0.8 s, of two later ones one by 1.2 s."""
    machine = linear_machine(prefill=(0.0, 0.04, 0.0), decode=(0.0, 0.0, 0.0))
    arrivals = requests(*[(0.0, 10, 1)] * 5, *[(0.3, 10, 1)] * 2, (9.0, 10, 1))
    one, two = (goodput_bound(arrivals, limits(), machine.cost, Goodput(ttft_s=1.0), n) for n in (1, 2))
    assert one is not None and two is not None
    assert one.good_requests == pytest.approx(4.0, abs=1e-5)
    # Twice as fast: five by 1.0 s, a sixth by 1.2 s.
    assert two.good_requests == pytest.approx(7.0, abs=1e-5)


def test_what_comes_after_all_others_ended_has_all_its_time():
    """A second each, all of which a prompt takes: two that do not meet are both in time, those that do are not."""
    second, value = np.array([1.0, 1.0]), np.array([1.0, 2.0])
    for gap_s, most in ((0.0, 2.0), (0.5, 2.0), (1.0, 3.0), (9.0, 3.0)):
        arrivals = np.array([0.0, gap_s])
        assert most_in_time(arrivals, arrivals + 1.0, second, value) == most
    arrivals = np.array([0.0, 1.0, 100.0])
    assert most_in_time(arrivals, arrivals + 1.0, np.ones(3), np.array([3.0, 2.0, 1.0])) == 6.0


def chosen_by_search(arrivals, deadlines, prompts, values) -> float:
    best = 0.0
    for chosen in product((0, 1), repeat=len(arrivals)):
        end, in_time = 0, True
        for i in np.flatnonzero(chosen):
            end = max(end, arrivals[i]) + prompts[i]
            in_time = in_time and end <= deadlines[i]
        if in_time:
            best = max(best, float(np.dot(chosen, values)))
    return best


@given(
    st.lists(st.tuples(st.integers(0, STEPS), st.integers(0, 2 * STEPS), st.floats(-1.0, 1.0)), min_size=1, max_size=7)
)
def test_most_in_time_is_what_search_finds(rows):
    gaps, prompts, values = map(np.array, zip(*rows, strict=True))
    arrivals = np.cumsum(gaps) - gaps[0]
    # Whole steps: nothing is rounded.
    windows = arrivals.astype(float), arrivals + float(STEPS), prompts.astype(float), values
    assert most_in_time(*windows) == pytest.approx(chosen_by_search(*windows))
    # Rounding is in favour of the chosen.
    shorter = windows[0], windows[1], windows[2] * 0.9999 + 0.3, values
    assert most_in_time(*shorter) >= chosen_by_search(*shorter) - 1e-9


def test_without_deadlines_all_that_are_worth_anything_are_chosen():
    values = np.array([0.25, -0.5, 0.125])
    assert most_in_time(np.zeros(3), np.full(3, np.inf), np.ones(3), values) == 0.375


def test_seats_and_blocks_share_what_an_iteration_costs_however_small():
    """Ten decodes each; an iteration lasts 0.1 s. With 2 seats a decode costs 0.05 s, with 8 of 40 blocks 0.02 s."""
    machine = linear_machine(prefill=(0.1, 0.0, 0.0), decode=(0.1, 0.0, 0.0), swap_s_per_block=1e6)
    arrivals = requests(*[(0.0, 16 * 7 + 1, 11)] * 10)
    seats = bound_of(arrivals, limits(gpu=1000, seqs=2), machine)
    assert seats.least_duration_s == pytest.approx(10 * 10 * 0.05)
    blocks = bound_of(arrivals, limits(gpu=40, seqs=256), machine)
    assert blocks.least_duration_s == pytest.approx(10 * 10 * 0.1 * 8 / 40)


def test_prompts_that_no_engine_takes_count_neither_way():
    """Beside three prompts of 10 tokens, 0.1 s each, one that is longer than the context."""
    machine = linear_machine(prefill=(0.0, 0.01, 0.0), decode=(0.0, 0.0, 0.0))
    fit = requests(*[(0.0, 10, 1)] * 3)
    limit = limits(max_model_len=40)
    bound = bound_of([*fit, Request(3, 0.0, 41, 1)], limit, machine)
    assert bound == bound_of(fit, limit, machine)
    assert bound.good_requests == pytest.approx(3.0)
    assert bound.least_duration_s == pytest.approx(0.3)


@pytest.mark.parametrize(("stops", "good"), [(False, 2.0), (True, 1.0)])
def test_a_prompt_as_long_as_the_context_counts_unless_it_is_refused(stops, good):
    machine = linear_machine(prefill=(0.0, 0.01, 0.0), decode=(0.0, 0.0, 0.0))
    limit = replace(limits(max_model_len=40), stops_at_max_model_len=stops)
    assert bound_of(requests((0.0, 40, 1), (0.0, 39, 1)), limit, machine).good_requests == pytest.approx(good)


@pytest.mark.parametrize("name", ["vllm-recompute", "sarathi"])
def test_prompts_beyond_the_longest_context_count_where_they_are_computed_in_chunks(name):
    """vLLM 0.5.5 compares a chunk with `max_model_len`, not the prompt."""
    arrivals = requests((0.0, 19, 5), (0.0, 122, 27), (0.0, 76, 49))
    policy, slo = POLICIES[name](), Goodput(ttft_s=0.3, tpot_s=0.03)
    limit = conformance.limits_of(policy, limits(gpu=36, max_model_len=64), 8, 64)
    outcome = simulate(policy, arrivals, limit, goodput=slo)
    assert outcome.log.good == 3
    assert bound_of(arrivals, limit, slo=slo).good_requests == pytest.approx(3.0)


def test_what_may_all_be_refused_take_no_time_and_of_nothing_there_is_no_bound():
    """A prompt that leaves no block free may be refused as it comes."""
    cost = linear_machine().cost
    assert goodput_bound([], limits(), cost, SLO) is None
    bound = bound_of(requests((0.0, 10, 1)), limits(gpu=2))
    assert (bound.least_duration_s, bound.goodput) == (0.0, np.inf)
    assert bound_of(requests((0.0, 10, 1)), limits(gpu=3)).least_duration_s > 0.0


def test_what_ends_at_the_longest_context_has_to_be_served():
    """An answer of 30 tokens ends with the tenth: 9 decodes at 0.1 s."""
    machine = linear_machine(prefill=(0.1, 0.0, 0.0), decode=(0.1, 0.0, 0.0), swap_s_per_block=1e6)
    assert bound_of(requests((0.0, 30, 30)), limits(seqs=1, max_model_len=40), machine).least_duration_s == 0.9


def test_what_others_may_have_computed_is_no_work():
    ids = requests((0.0, 32, 2), (0.0, 32, 2), (0.0, 32, 2))
    shared = [r._replace(hash_ids=(2 + r.request_id, 1), hash_block_tokens=16) for r in ids[:2]] + ids[2:]
    work, _ = least_work(shared, limits(), linear_machine().cost)
    assert work.prompt_tokens.tolist() == [16, 16, 32]
    assert work.shared_tokens.tolist() == [16, 16, 0]
    assert work.blocks.tolist() == [2, 2, 3]


@given(st.integers(0, 1000), st.integers(1, 60))
def test_least_within_is_the_minimum(seed, size):
    rng = np.random.default_rng(seed)
    values = rng.random(size)
    pairs = np.sort(rng.integers(0, size, (20, 2)), axis=1)
    expected = [values[a : b + 1].min() for a, b in pairs]
    assert least_within(values, pairs[:, 0], pairs[:, 1]).tolist() == expected


# -- prices ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.0, 1.0), min_size=8, max_size=8), st.floats(0.0, 1.0))
def test_lines_lie_below_whatever_bends(rises, more):
    """Seconds of 8 tokens that rise as they like, and from there on by `more` beyond the last rise."""
    values = np.cumsum([0.5, *rises[1:]]).tolist()

    def seconds(tokens: int) -> float:
        return values[tokens - 1] if tokens <= 8 else values[-1] + (tokens - 8) * (rises[-1] + more)

    for fixed, slope in lines_below(seconds, 8, (1, 2, 3)):
        assert fixed >= 0.0 <= slope
        assert all(fixed + slope * tokens <= seconds(tokens) + 1e-9 for tokens in (*range(1, 20), 10**6))


def test_lines_by_hand():
    """1.5 s for a token and half a second for each more: flat, as it rises, and through zero no steeper than that.

    Where four tokens take what one does, and each more a second, the line of the last rise starts below zero.
    """
    assert lines_below(lambda tokens: 1.0 + 0.5 * tokens, 8, (1, 4)) == [(0.0, 0.5), (1.5, 0.0), (1.0, 0.5)]
    assert lines_below(lambda tokens: max(1.0, tokens - 3.0), 8, (1, 4)) == [(0.0, 0.25), (1.0, 0.0)]


MACHINES = {
    "linear": lambda: linear_machine(),
    "linear, host": lambda: linear_machine(host=Host(0.004, 1e-4, False)),
    "l20": lambda: roofline_machine("l20", 1.0),
    "rtx-4090, KV shared": lambda: roofline_machine("rtx-4090", 1.0, model=load_model("llama-3.1-8b")),
    "rtx-4090, KV not shared": lambda: roofline_machine("rtx-4090", 1.0, model=load_model("llama-2-7b")),
    "h100, imported": lambda: roofline_machine("h100", 1.0, tp=2),
    "h100, FP8": lambda: roofline_machine(
        "h100", 1.0, tp=8, model=load_model("llama-3.1-70b").with_quantization("fp8")
    ),
    "h100, experts": lambda: roofline_machine("h100", 1.0, tp=2, model=load_model("mixtral-8x7b-v0.1")),
    "h100, sampling": lambda: roofline_machine(
        "h100", 1.0, model=load_model("qwen3-8b"), engine=load_engine_profile("vllm-0.12-top-p")
    ),
}


@cache
def machine_of(name):
    return MACHINES[name]()


@pytest.mark.parametrize("name", MACHINES)
@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 3000)), max_size=3),
    contexts=st.lists(st.integers(1, 5000), max_size=40),
)
def test_no_iteration_is_cheaper_than_its_linear_prices(name, prompts, contexts):
    cost, plan = machine_of(name).cost, IterationPlan()
    attention_s = 0.0
    for new, cached in prompts:
        seq = Sequence(Request(0, 0.0, new + cached, 2))
        seq.num_computed = cached
        plan.add_chunk(seq, new, Origin.ADMITTED)
    if not isinstance(cost, LinearCost):
        attention_s = cost.attention_s_per_pair * plan.prefill_pairs  # type: ignore[attr-defined]
    plan.num_decodes, plan.decode_context_tokens = len(contexts), sum(contexts)
    if not prompts and not contexts:
        return
    host_s = cost.added_host_s(len(prompts) + len(contexts))
    blocks = sum(-(-context // 16) for context in contexts)
    for price in step_prices(cost, 16, blocks):
        # As many blocks as are held: all of the fixed time is due; by seats it is without decodes, too.
        fixed_s = 0.0 if contexts or price.by_blocks else price.fixed_s
        assert price.least_s(plan, attention_s) + fixed_s <= (cost.iteration_s(plan) + host_s) * (1 + 1e-9)


def test_a_decode_pays_for_the_seats_that_no_request_may_have_beside_it():
    """Ten iterations of 0.1 s in half a second: half of one by itself is good, and of two at once half of each.

    Were there 256 to share an iteration, all would be.
    """
    machine = linear_machine(prefill=(0.1, 0.0, 0.0), decode=(0.1, 0.0, 0.0), swap_s_per_block=1e6)
    slo = Goodput(ttft_s=0.0, tpot_s=0.04)
    for arrivals_s, good in (((0.0, 2.05, 4.6), 1.5), ((0.0, 0.0, 4.6), 1.5), ((0.0,) * 256 + (4.6,), 128.5)):
        bound = bound_of(requests(*((at_s, 10, 11) for at_s in arrivals_s)), limits(gpu=1000), machine, slo)
        assert bound.good_requests == pytest.approx(good, rel=1e-4)


@given(st.lists(st.tuples(st.floats(0.0, 9.0), st.floats(0.0, 5.0), st.integers(1, 3)), min_size=1, max_size=12))
def test_seats_are_as_many_as_are_served_at_any_time_of_ones_own(rows):
    arrivals, times, outputs = zip(*rows, strict=True)
    begin, end = np.array(arrivals), np.array(arrivals) + np.array(times)
    work, _ = least_work(requests(*((0.0, 10, output) for output in outputs)), limits(), linear_machine().cost)
    found = seats(work, limits(seqs=8), begin, end)
    for i, output in enumerate(outputs):
        served = [
            sum(n > 1 and a <= now_s <= e for a, e, n in zip(begin, end, outputs, strict=True))
            for now_s in (*begin, *end)
            if begin[i] <= now_s <= end[i]
        ]
        assert found[i] == (min(8, max(served)) if output > 1 else 8)


def test_a_decode_beside_the_weights_costs_more_where_tpot_is_short():
    """5 ms each beside 10 ms, a token every 20 ms: two fit an iteration, so each of 10 takes half of one, 10 ms."""
    cost = LinearCost((0.0, 0.0, 0.0), (0.01, 0.005, 0.0), 0.0, 1.0, model=linear_machine().model)
    work, _ = least_work(requests((0.0, 10, 11)), limits(), cost)
    price = step_prices(cost, 16, 100)[0]._replace(fixed_s=0.01)
    assert work.paced_s(price, np.array([0.2])) == pytest.approx([0.1])
    assert work.paced_s(price, np.array([np.inf])) == pytest.approx([0.05])


@given(
    st.integers(1, 30),
    st.floats(0.0, 1e-2),
    st.floats(0.0, 1e-4),
    st.floats(1e-3, 0.1),
    st.lists(st.floats(1.0, 50.0), min_size=30, max_size=30),
)
def test_no_iterations_of_any_lengths_cost_a_good_request_less(num_decodes, decode_s, context_s, fixed_s, times):
    """Each iteration is charged x L / (L - F), its own L drawn: L - F is at least x."""
    price = LinearPrice(0.0, 0.0, decode_s, context_s, context_s, 0.0, fixed_s)
    work, _ = least_work(requests((0.0, 100, num_decodes + 1)), limits(), linear_machine().cost)
    added_s = decode_s + context_s * (101 + np.arange(num_decodes))
    left_s = np.maximum(1e-6, added_s * times[:num_decodes])
    charged_s = float((added_s * (1.0 + fixed_s / left_s)).sum())
    (least_s,) = work.paced_s(price, np.array([float((fixed_s + left_s).sum())]))
    assert least_s <= charged_s * (1 + 1e-9)


# -- against exhaustive search ---------------------------------------------------------------------------------------


def best_by_search(arrivals, limit, slo, cost) -> tuple[int, float]:
    """Most good requests, and most goodput, of all schedules of tiny requests; parking is free.

    Iterations of one token or whole prompts in any mix, as seats and blocks allow; idle until the next arrival.
    """
    size, count = limit.block_size, len(arrivals)
    best = [0, 0.0]

    @cache
    def ends(now_s: float, done: tuple[int, ...], firsts: tuple[float, ...], lasts: tuple[float, ...]) -> None:
        if all(done[i] == arrivals[i].output_tokens for i in range(count)):
            good = sum(
                slo.met(
                    firsts[i] - arrivals[i].arrival_s,
                    (lasts[i] - firsts[i]) / max(1, arrivals[i].output_tokens - 1),
                    lasts[i] - arrivals[i].arrival_s,
                )
                for i in range(count)
            )
            best[0] = max(best[0], good)
            best[1] = max(best[1], good / (max(lasts) - arrivals[0].arrival_s))
            return
        here = [i for i in range(count) if arrivals[i].arrival_s <= now_s and done[i] < arrivals[i].output_tokens]
        later = [r.arrival_s for r in arrivals if r.arrival_s > now_s]
        if later:
            ends(min(later), done, firsts, lasts)
        for chosen in range(1, 1 << len(here)):
            who = [i for n, i in enumerate(here) if chosen >> n & 1]
            blocks = sum(-(-(arrivals[i].prompt_tokens + done[i]) // size) for i in who)
            if len(who) > limit.max_num_seqs or blocks > limit.num_gpu_blocks:
                continue
            plan = IterationPlan()
            for i in who:
                if done[i]:
                    plan.num_decodes += 1
                    plan.decode_context_tokens += arrivals[i].prompt_tokens + done[i]
                else:
                    plan.add_chunk(Sequence(arrivals[i]), arrivals[i].prompt_tokens, Origin.ADMITTED)
            end_s = now_s + cost.iteration_s(plan)
            ends(
                end_s,
                tuple(n + (i in who) for i, n in enumerate(done)),
                tuple(end_s if i in who and not done[i] else at for i, at in enumerate(firsts)),
                tuple(end_s if i in who else at for i, at in enumerate(lasts)),
            )

    ends(arrivals[0].arrival_s, (0,) * count, (0.0,) * count, (0.0,) * count)
    return best[0], best[1]


tiny = st.lists(
    st.tuples(st.sampled_from([0.0, 0.01, 0.03]), st.integers(1, 40), st.integers(1, 3)), min_size=1, max_size=3
)


@settings(max_examples=40, deadline=None)
@given(tiny, st.integers(4, 7), st.integers(1, 3), st.floats(0.01, 0.12), st.floats(0.01, 0.05))
def test_no_schedule_of_tiny_requests_is_better(rows, blocks, seats, ttft_s, tpot_s):
    now_s, found = 0.0, []
    for gap_s, prompt, output in rows:
        now_s += gap_s
        found.append((now_s, prompt, output))
    arrivals, limit, slo = requests(*found), limits(gpu=blocks, seqs=seats), Goodput(ttft_s=ttft_s, tpot_s=tpot_s)
    good, goodput = best_by_search(arrivals, limit, slo, linear_machine().cost)
    bound = bound_of(arrivals, limit, slo=slo)
    assert good <= bound.good_requests + 1e-6
    assert goodput <= bound.goodput * (1 + 1e-6)


@pytest.mark.parametrize(("arrivals_s", "tokens"), [((0.0, 0.0), 6), ((0.0, 0.5), 5)])
def test_nor_where_all_are_good_by_sharing_every_iteration(arrivals_s, tokens):
    """Iterations of 1 s: without time to spare, so that a decode may pay for no more than its share of one."""
    machine = linear_machine(prefill=(1.0, 0.01, 0.0), decode=(1.0, 0.01, 0.0), swap_s_per_block=1e6)
    arrivals, slo = requests(*((at_s, 1, tokens) for at_s in arrivals_s)), Goodput(ttft_s=2.1, tpot_s=1.1)
    good, _ = best_by_search(arrivals, limits(), slo, machine.cost)
    assert good == len(arrivals) <= bound_of(arrivals, limits(), machine, slo).good_requests + 1e-6


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.01, 0.02]), st.integers(5, 40)), min_size=3, max_size=4),
    st.floats(0.02, 0.1),
)
def test_nor_of_prompts_that_share_a_window(rows, ttft_s):
    """Prompts of 5 to 40 ms, several within one SLO; a schedule of whole prompts is among the best."""
    machine = linear_machine(prefill=(0.0, 1e-3, 0.0), decode=(0.0, 1e-4, 0.0))
    times = np.cumsum([gap_s for gap_s, _ in rows])
    arrivals = requests(*((float(t), prompt, 1) for t, (_, prompt) in zip(times, rows, strict=True)))
    slo = Goodput(ttft_s=ttft_s)
    good, _ = best_by_search(arrivals, limits(), slo, machine.cost)
    bound = bound_of(arrivals, limits(), machine, slo).good_requests
    # One after another is as good as any order: the two are the same but for rounding and the slack for ties.
    assert good <= bound + 1e-6
    looser = Goodput(ttft_s=ttft_s * (1 + 10 / STEPS) + 1e-5)
    assert bound <= best_by_search(arrivals, limits(), looser, machine.cost)[0] + 1e-6


# -- against every preset --------------------------------------------------------------------------------------------

ALONE = [name for name, kind in POLICIES.items() if "hand-over" not in kind.composition.values()]


SLOS = {
    "ttft and tpot": Goodput(ttft_s=0.3, tpot_s=0.03), "e2el": Goodput(e2el_s=1.0), "ttft": Goodput(ttft_s=0.3),
    "tpot": Goodput(tpot_s=0.03),
}  # fmt: skip
HELD = [(name, "ttft and tpot") for name in ALONE]
HELD += [(name, slo) for slo in ("e2el", "ttft", "tpot") for name in ("vllm-v1", "orca")]
"""A bound knows of no policy: with one limit alone a few are enough."""


@pytest.mark.parametrize(("name", "slo"), HELD)
def test_no_run_exceeds_it(name, slo):
    policy, slo = POLICIES[name](), SLOS[slo]

    def one(workload: conformance.Workload) -> None:
        outcome = simulate(
            policy, workload.arrivals, workload.limits, machine=workload.machine, goodput=slo, checked=False
        )
        bound = bound_of(workload.arrivals, workload.limits, workload.machine, slo)
        good = outcome.log.good
        assert good <= bound.good_requests + 1e-6
        if good and outcome.log.completed == len(workload.arrivals):
            # An engine that refuses requests may end before the last arrives: a rate over less time.
            assert good / outcome.log.duration_s <= bound.goodput * (1 + 1e-6)

    conformance.over_workloads(policy, one, examples=12, shrink=False)


@pytest.mark.parametrize("name", sorted(set(POLICIES) - set(ALONE)))
def test_nor_do_engines_that_hand_over(name):
    """One that prefills and one that decodes do no more than two of which each does all."""
    policy, slo, done = POLICIES[name](), Goodput(ttft_s=0.3, tpot_s=0.03), []

    def one(workload: conformance.Workload) -> None:
        outcome = simulate_pools(policy, workload.arrivals, workload.limits, machine=workload.machine)
        bound = goodput_bound(workload.arrivals, workload.limits, workload.machine.cost, slo, num_engines=2)
        assert bound is not None
        good = sum(met(seq, slo) for seq, _ in outcome.ended if seq.status is Status.FINISHED)
        assert good <= bound.good_requests + 1e-6
        done.append(good)

    conformance.over_workloads(policy, one, examples=25, shrink=False)
    assert max(done) > 0


def met(seq: Sequence, slo: Goodput) -> bool:
    arrival_s, tokens = seq.request.arrival_s, seq.request.output_tokens
    tpot_s = (seq.finish_s - seq.first_token_s) / max(1, tokens - 1)
    return slo.met(seq.first_token_s - arrival_s, tpot_s, seq.finish_s - arrival_s)


@settings(max_examples=15, deadline=None)
@given(tiny, st.integers(6, 9), st.integers(1, 3), st.floats(0.01, 0.12), st.floats(0.01, 0.05), st.floats(0.2, 5.0))
def test_nor_does_any_preset_on_tiny_requests(rows, blocks, seats, ttft_s, tpot_s, times_s):
    """Where the bound is near what search finds, and a preset that computes too little would show."""
    times = np.cumsum([gap_s for gap_s, _, _ in rows])
    arrivals = requests(*((float(t), prompt, output) for t, (_, prompt, output) in zip(times, rows, strict=True)))
    slo, own = Goodput(ttft_s=ttft_s, tpot_s=tpot_s), SLOs(ttft_s=ttft_s * times_s, tpot_s=tpot_s / times_s)
    # Every second request has SLOs of its own, so that deadlines are not in the order of arrivals.
    arrivals = [one._replace(slos=own) if one.request_id % 2 else one for one in arrivals]
    for name in ALONE:
        policy = POLICIES[name]()
        limit = conformance.limits_of(policy, limits(gpu=blocks, host=100, max_model_len=64), seats, None)
        good = simulate(policy, arrivals, limit, goodput=slo).log.good
        assert good <= bound_of(arrivals, limit, slo=slo).good_requests + 1e-6, name


def test_any_prices_certify():
    """Weak duality: the certificate needs no solver."""
    rng = np.random.default_rng(0)
    arrivals = requests(*((i * 0.1, int(rng.integers(1, 300)), int(rng.integers(1, 40))) for i in range(60)))
    slo = Goodput(ttft_s=0.3, tpot_s=0.03)
    run = simulate(POLICIES["vllm-v1"](), arrivals, limits(gpu=60), goodput=slo)
    edges = np.linspace(0.0, 12.0, 25)
    work, _ = least_work(arrivals, limits(gpu=60), linear_machine().cost)
    (price,) = step_prices(linear_machine().cost, 16, 60)
    a = np.array([r.arrival_s for r in arrivals])
    first = a + 0.3
    last = first + 0.03 * (np.array([r.output_tokens for r in arrivals]) - 1)
    bins = [np.clip(np.searchsorted(edges, t + 1e-6, side="right") - 1, 0, 23) for t in (a, first, last)]
    seconds = work.prefill_s(price), work.decode_s(price, 0.0, 1 / 256)
    for _ in range(50):
        prices = rng.exponential(2.0, 24)
        assert certified(prices, bins[0], bins[1], bins[2], *seconds, np.diff(edges)) >= run.log.good


def test_prices_of_no_known_form_have_no_bound():
    machine = linear_machine()
    assert goodput_bound(requests((0.0, 1, 1)), limits(), machine.cost, Goodput()) is None


def test_engines_share_the_work():
    arrivals = requests(*[(0.0, 100, 20)] * 30)
    one, two = (goodput_bound(arrivals, limits(), linear_machine().cost, SLO, n) for n in (1, 2))
    assert one is not None and two is not None
    assert two.least_duration_s == pytest.approx(one.least_duration_s / 2)


CELL = Cell("llama-2-7b", "l20", "uniform 3000 600", 1.0, 8.0, 1)


def fits(chosen, arrivals, due, seconds) -> bool:
    end_s = 0.0
    for i in chosen:
        end_s = max(end_s, arrivals[i]) + seconds[i]
        if end_s > due[i]:
            return False
    return True


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 8)), min_size=1, max_size=8))
def test_of_those_there_at_once_as_many_as_search_finds_are_in_time(rows):
    due, seconds = (np.array(column, float) for column in zip(*sorted(rows), strict=True))
    arrivals, everything = np.zeros(len(rows)), range(len(rows))
    found = sorted(in_time(list(everything), arrivals, due, seconds))
    assert fits(found, arrivals, due, seconds)
    assert len(found) == max(
        n for n in range(len(rows) + 1) if any(fits(c, arrivals, due, seconds) for c in combinations(everything, n))
    )


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), min_size=1, max_size=8), st.integers(1, 8))
def test_nothing_is_left_where_all_can_be_in_time(rows, slo):
    gaps, seconds = (np.array(column, float) for column in zip(*rows, strict=True))
    arrivals, everything = np.cumsum(gaps), list(range(len(rows)))
    if fits(everything, arrivals, arrivals + slo, seconds):
        assert sorted(in_time(everything, arrivals, arrivals + slo, seconds)) == everything


def test_it_serves_what_it_chose_within_the_bound():
    found = row(CELL, 40)
    assert found["share_of_time"] in SHARES_OF_TIME
    assert 0.5 < float(str(found["share_of_bound"])) <= 1.0
    assert float(str(found["attainment"])) * 40 == pytest.approx(int(str(found["chosen"])), abs=4)
