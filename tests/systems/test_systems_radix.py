"""SGLang's rules on small engines, worked out by hand: order, admission by expected growth, retraction, hits.

Blocks are single tokens, and traces name single tokens (`hash_block_tokens` 1).
"""

from dataclasses import replace
from random import Random

import pytest

from kvtwin.testing import limits, linear_machine, requests, simulate
from kvtwin.testing.conformance import Workload, check_jumps
from sim.options.policies import parse_policy
from sim.parts.batching.base import TOO_LONG
from sim.systems.radix.preset import Radix
from traces.request import Request


def radix_limits(gpu, seqs=256, tokens=8192, block_size=1):
    found = limits(gpu, 0, block_size=block_size, max_model_len=4096, seqs=seqs, tokens=tokens, chunked=True)
    return replace(found, enable_prefix_caching=True)


def prompts(*rows):
    """(arrival_s, prompt, output_tokens) rows as requests; a prompt is a text whose letters are its tokens."""
    return [
        Request(i, arrival_s, len(text), output, "", tuple(map(ord, text)), 1)
        for i, (arrival_s, text, output) in enumerate(rows)
    ]


def plain(*rows):
    return [Request(i, *row) for i, row in enumerate(rows)]


def starts(outcome):
    """Requests in the order in which they started."""
    return sorted(outcome.by_id(), key=lambda key: (outcome.by_id()[key].first_scheduled_s, key))


QUEUE = prompts(
    (0.0, "system:alpha", 40),  # runs while the others come
    (0.001, "other", 2),
    (0.002, "system:beta", 2),
    (0.003, "system:alpine", 2),
    (0.004, "sysadmin", 2),
)


def test_the_longest_cached_prefix_comes_first():
    """Of "system:alpha" they have 0, 7, 10 and 3 letters; one runs at a time."""
    outcome = simulate(Radix(), QUEUE, radix_limits(1000, seqs=1))
    assert starts(outcome) == [0, 3, 2, 4, 1]
    hits = [outcome.by_id()[i].num_cached_tokens for i in range(5)]
    assert hits == [0, 0, 7, 10, 3]


def test_first_come_first_served_leaves_the_queue_alone():
    outcome = simulate(Radix(schedule_policy="fcfs"), QUEUE, radix_limits(1000, seqs=1))
    assert starts(outcome) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("longest", "order"), [(3, [0, 1, 3, 2, 4]), (4, [0, 3, 2, 4, 1]), (0, [0, 3, 2, 4, 1])])
def test_lpm_does_not_sort_a_queue_that_is_too_long(longest, order):
    """Four wait: above three the queue stays as it is, and is sorted when it has three."""
    assert starts(simulate(Radix(lpm_longest=longest), QUEUE, radix_limits(1000, seqs=1))) == order


def test_the_heaviest_branch_comes_first():
    """Three wait at "b" and one at "aaaa": "b" goes first, though its hits are shorter, until as many wait for each."""
    rows = prompts(
        (0.0, "aaaa", 2), (0.0, "b", 2), (0.0, "cccccc", 40),
        (0.5, "aaaax", 2), (0.5, "by", 2), (0.5, "bz", 2), (0.5, "bw", 2), (0.5, "q", 2),
    )  # fmt: skip
    heavy = starts(simulate(Radix(schedule_policy="dfs-weight"), rows, radix_limits(1000, seqs=1)))
    assert heavy[3:] == [4, 5, 3, 6, 7]
    assert starts(simulate(Radix(), rows, radix_limits(1000, seqs=1)))[3:] == [3, 4, 5, 6, 7]


def test_without_a_cache_the_order_is_first_come_first_served():
    outcome = simulate(Radix(), QUEUE, replace(radix_limits(1000, seqs=1), enable_prefix_caching=False))
    assert starts(outcome) == [0, 1, 2, 3, 4]
    assert outcome.scheduler.counters.prefix_hit_tokens == 0


def test_hits_are_counted_in_tokens_or_in_pages():
    """12 letters are shared: all of them by tokens, 8 by pages of 4 and of 8, none by pages of 16."""
    rows = prompts((0.0, "twelve chars and this", 3), (9.0, "twelve charsOR", 3))
    for size, hits in ((1, 12), (4, 12), (8, 8), (16, 0)):
        outcome = simulate(Radix(), rows, radix_limits(1600 // size, block_size=size))
        assert outcome.by_id()[1].num_cached_tokens == hits


@pytest.mark.parametrize("seed", range(6))
def test_hits_are_those_of_all_tokens_compared_with_all_before(seed):
    """One at a time, in a pool that holds everything: a prompt hits the longest beginning of anything computed before,
    answers included (but for their last token, which is never computed), and all but its own last token at most."""
    dice = Random(seed)
    known: list[tuple[int, ...]] = []
    rows, wanted = [], []
    for i in range(30):
        stem = dice.choice(known) if known and dice.random() < 0.8 else ()
        text = stem[: dice.randrange(len(stem) + 1)] + tuple(dice.randrange(4) for _ in range(dice.randrange(1, 30)))
        prompt = dice.randint(1, len(text))
        output = len(text) - prompt + 1
        rows.append(Request(i, float(1000 * i), prompt, output, "", text[:prompt], 1, text[prompt:]))
        shared = [
            next((n for n in range(min(len(text), len(k))) if text[n] != k[n]), min(len(text), len(k))) for k in known
        ]
        wanted.append(min(prompt - 1, max(shared, default=0)))
        known.append(text)
    ended = simulate(Radix(), rows, radix_limits(10_000)).by_id()
    assert [ended[i].num_cached_tokens for i in range(30)] == wanted


def num_decodes_before(outcome, request_id):
    """Decode iterations before a request's first chunk."""
    decodes = 0
    for plan, _, times in outcome.plans:
        if any(chunk.seq.request.request_id == request_id for chunk in plan.chunks):
            return decodes
        decodes += times.iterations * bool(plan.num_decodes)
    raise AssertionError(f"{request_id} never started")


@pytest.mark.parametrize("jump", [True, False])
def test_what_waits_starts_when_less_growth_is_expected(jump):
    """1,100 tokens. The first has 20 + 1,000, the second wants 300 + 100 = 400.

    After k decodes 1,080 - k are free, the ratio is 0.7 - 0.001 k and 999 - k are to come: the difference is 399.5 at
    k = 28 and 400.1 at k = 29.
    """
    outcome = simulate(Radix(), plain((0.0, 20, 1000), (0.001, 300, 100)), radix_limits(1100), jump=jump)
    assert num_decodes_before(outcome, 1) == 29


@pytest.mark.parametrize("jump", [True, False])
def test_of_a_long_answer_4096_tokens_are_expected_at_most(jump):
    """5,100 tokens. The first has 20 + 5,000, the second wants 20 + 3,000.

    After k decodes 5,080 - k are free, and of the 4,999 - k to come 4,096 count: 5,080 - k - (0.7 - 0.001 k) * 4,096 is
    3,017.8 at k = 260 and 3,020.9 at k = 261.
    """
    outcome = simulate(Radix(), plain((0.0, 20, 5000), (0.001, 20, 3000)), radix_limits(5100), jump=jump)
    assert num_decodes_before(outcome, 1) == 261


@pytest.mark.parametrize("jump", [True, False])
def test_in_pages_a_start_just_before_the_ratio_stays_is_not_jumped_over(jump):
    """4,000 tokens in pages of 16. The first has 20 + 3,000, the second wants 3,024 + 100: 196 pages, 3,136 tokens.

    After 600 decodes the first holds 39 of 250 pages, the ratio is 0.1 and 2,399 are to come: 3,376 - 239.9 are left.
    """
    outcome = simulate(Radix(), plain((0.0, 20, 3000), (0.001, 3024, 100)), radix_limits(250, block_size=16), jump=jump)
    assert num_decodes_before(outcome, 1) == 600


def test_caution_and_what_is_asked_for_keep_what_waits_out():
    """The least ratio times 10 is 1: all that the first may generate is kept room for. Asking for as much does, too."""
    rows = plain((0.0, 20, 1000), (0.001, 300, 100))
    outcome = simulate(Radix(schedule_conservativeness=10.0), rows, radix_limits(1100))
    assert num_decodes_before(outcome, 1) == 999
    rows = plain((0.0, 20, 500), (0.001, 300, 100))
    assert num_decodes_before(simulate(Radix(), rows, radix_limits(1100)), 1) == 0
    assert num_decodes_before(simulate(Radix(max_new_tokens=1000), rows, radix_limits(1100)), 1) == 499


def test_the_fewest_tokens_and_the_longest_prompt_are_computed_again():
    """100 tokens: 11 + 47 and 10 + 46 start together, as 89 - 0.7 * 46 = 56.8 > 56.

    Each decode takes 2 of the 79 left: the 40th finds one. Both have 40 tokens, so the longer prompt goes, and finds
    its own 11 again when the other has ended.
    """
    outcome = simulate(Radix(), plain((0.0, 11, 47), (0.001, 10, 46)), radix_limits(100))
    assert outcome.scheduler.counters.preemptions == 1
    ended = outcome.by_id()
    assert [ended[i].num_preemptions for i in (0, 1)] == [1, 0]
    assert outcome.scheduler.counters.prefix_rehit_tokens == 11
    assert num_decodes_before(outcome, 1) == 0
    # 47 - 41 tokens are left to the first, of which its second prompt gives one.
    widths = [(plan.num_decodes, times.iterations) for plan, _, times in outcome.plans if plan.num_decodes]
    assert sum(times for width, times in widths if width == 2) == 39
    assert sum(times for width, times in widths if width == 1) == 6 + 6


@pytest.mark.parametrize(("gpu", "preempted"), [(113, [0, 1, 1]), (114, [0, 0, 1])])
def test_what_is_left_has_room_for_twenty_tokens_each(gpu, preempted):
    """Three prompts of 10, 10 and 12 have 32 + 27 x 3 = 113 tokens when three more are wanted: the last gives 39 back.

    Two that are left want 40, which a pool of 114 has then; one of 113 takes the second out as well.
    """
    rows = plain((0.0, 10, 30), (0.001, 10, 30), (0.001, 12, 30))
    ended = simulate(Radix(), rows, radix_limits(gpu)).by_id()
    assert [ended[i].num_preemptions for i in range(3)] == preempted


def test_long_prompts_go_on_before_others_start_or_decode():
    """In chunks of 64 a prompt of 150 takes three steps, the last with the first 42 of the next one."""
    outcome = simulate(
        Radix(), plain((0.0, 10, 30), (0.001, 150, 2), (0.001, 100, 2)), radix_limits(1000, tokens=64, seqs=9)
    )
    chunks = [
        [(c.seq.request.request_id, c.num_new) for c in plan.chunks] for plan, _, _ in outcome.plans if plan.chunks
    ]
    assert chunks == [[(0, 10)], [(1, 64)], [(1, 64)], [(1, 22), (2, 42)], [(2, 58)]]
    assert [plan.num_decodes for plan, _, _ in outcome.plans[1:5]] == [0, 0, 0, 0]


def test_what_computes_the_same_at_once_keeps_one_copy():
    """Ten prompts of 50 equal tokens in one step: each is computed, as none was first, and 49 + 10 own are kept."""
    rows = prompts(*((0.0, "x" * 50, 5) for _ in range(10)))
    outcome = simulate(Radix(), rows, radix_limits(1000))
    assert outcome.scheduler.counters.prefix_hit_tokens == 0
    first, _, _ = outcome.plans[0]
    assert first.prefill_tokens == 500
    used = []

    def watch(scheduler):
        return lambda plan, start_s, times: used.append(scheduler.gpu.num_blocks - scheduler.gpu.free)

    simulate(Radix(), rows, radix_limits(1000), observe=watch)
    assert used[0] == 50 and used[1] == 60


# -- where jumps end -------------------------------------------------------------------------------------------------


CAUTIOUS = Radix(schedule_conservativeness=10.0)
"""All growth is kept room for: nothing changes with time."""

# The first has 20 + 1,000 of 1,100 tokens; the second can never start beside it, the third hits it and can.
OVERTAKEN = prompts((0.0, "a" * 20, 1000), (0.001, "b" * 300, 100), (5.0, "a" * 10, 5)), radix_limits(1100)
# Beside the third (10 + 500 of 520) the fourth never fits, whose 100 hits put it first; the fifth would. 405
# tokens are unused; the 406th is taken from the hits of the fourth, looked up before those of the fifth.
EVICTED = (
    prompts(
        (0.0, "x" * 100, 1), (0.0, "y" * 5, 1), (1.0, "a" * 10, 500),
        (1.001, "x" * 100 + "z" * 50, 10), (1.001, "yyyyyz", 2),
    ),
    radix_limits(520),
)  # fmt: skip
# 600 tokens, 200 of them idle: the third takes 460, and only the older idle leaf goes.
STEP_BY_STEP = (
    prompts((0.0, "x" * 100, 1), (1.0, "y" * 100, 1), (2.0, "a" * 10, 450), (60.0, "y" * 100, 1)),
    radix_limits(600),
)


@pytest.mark.parametrize("case", [OVERTAKEN, EVICTED, STEP_BY_STEP], ids=["overtaken", "evicted", "step by step"])
def test_jumps_end_where_answers_change(case):
    """Jumps run too far that take for true: none overtakes, hits outlast evictions, many steps evict as one."""
    rows, limit = case
    check_jumps(CAUTIOUS, Workload(rows, limit, linear_machine()))


def test_the_worked_cases_are_what_they_say():
    by_id = simulate(CAUTIOUS, *OVERTAKEN).by_id()
    assert (by_id[2].num_cached_tokens, by_id[2].finish_s < 6 < by_id[1].first_token_s) == (9, True)
    outcome = simulate(CAUTIOUS, *EVICTED)
    assert num_decodes_before(outcome, 4) == 406
    assert [outcome.by_id()[i].num_cached_tokens for i in (3, 4)] == [0, 5]
    assert simulate(CAUTIOUS, *STEP_BY_STEP).by_id()[3].num_cached_tokens == 99


# -- what the paper claims, and what it must not bring ---------------------------------------------------------------


def interleaved(groups=8, each=12, shared=100, own=10):
    """Requests of `groups` prompts in turn, all at once."""
    rows = []
    for i in range(groups * each):
        ids = tuple(1000 * (i % groups) + n for n in range(shared)) + tuple(10**6 + 100 * i + n for n in range(own))
        rows.append(Request(i, 0.0, shared + own, 4, "", ids, 1))
    return rows


def test_sorting_by_prefix_hits_more_than_arrival_in_a_small_pool():
    """Section 3 of the paper: an order like a depth-first one computes each prefix once, first come, first served
    evicts it before it returns. Eight prefixes of 100 tokens, two at a time, in 350 tokens."""
    rows, limit = interleaved(), radix_limits(350, seqs=2)
    sorted_, arrival = (
        simulate(Radix(schedule_policy=policy), rows, limit).scheduler.counters.prefix_hit_tokens
        for policy in ("lpm", "fcfs")
    )
    assert arrival == 0
    # At most 11 of 12 of each group can hit: the first two of the first group start together, others find one other.
    assert sorted_ >= 8 * 10 * 100
    assert sorted_ <= 8 * 11 * 100


def test_a_cache_brings_nothing_where_nothing_is_shared():
    rows = plain(*((0.1 * i, 100 + i, 20) for i in range(40)))
    cached = simulate(Radix(), rows, radix_limits(400))
    without = simulate(Radix(), rows, replace(radix_limits(400), enable_prefix_caching=False))
    assert cached.scheduler.counters.prefix_hit_tokens == 0
    assert [s.finish_s for s in cached.ended] == pytest.approx([s.finish_s for s in without.ended])


def test_a_request_that_the_pool_cannot_hold_is_ignored():
    outcome = simulate(Radix(), plain((0.0, 60, 40), (0.0, 60, 39)), radix_limits(100))
    assert [outcome.by_id()[i].error != "" for i in (0, 1)] == [True, False]
    # Asking for all there is asks for no more than that.
    outcome = simulate(Radix(max_new_tokens=1000), plain((0.0, 60, 40), (0.0, 60, 39)), radix_limits(100))
    assert [outcome.by_id()[i].error != "" for i in (0, 1)] == [True, False]


def test_a_prompt_as_long_as_the_context_is_computed_and_a_longer_one_is_not():
    limit = replace(radix_limits(1000), max_model_len=60)
    outcome = simulate(Radix(), plain((0.0, 60, 1), (0.0, 61, 1)), limit)
    assert [outcome.by_id()[i].error for i in (0, 1)] == ["", f"ignored: {TOO_LONG}"]


@pytest.mark.parametrize("policy", ["radix", "vllm-v1:order=lpm", "cachedattention:order=lpm"])
def test_the_longest_cached_prefix_comes_first_whatever_memory_has_it(policy: str):
    """0 computes a prompt that 2 begins with; 1 came before 2 and shares nothing."""
    rows = requests((0.0, 64, 8), (0.01, 64, 8), (0.02, 64, 8))
    names = (range(4), range(10, 14), (0, 1, 2, 20))
    rows = [row._replace(hash_ids=tuple(ids), hash_block_tokens=16) for row, ids in zip(rows, names, strict=True)]
    limit = replace(limits(seqs=1, block_size=16), enable_prefix_caching=True)
    ended = simulate(parse_policy(policy, {})[1], rows, limit).by_id()
    assert ended[2].finish_s < ended[1].first_token_s
