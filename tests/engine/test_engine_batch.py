"""The decode batch and its cohorts as counts, against member by member; and iterations of several tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.engine.batch import Cohort, DecodeBatch
from sim.engine.itl import GapCollector
from sim.engine.plan import IterationPlan, StepTimes
from sim.engine.ranked_batch import RankedBatch
from sim.engine.sequence import Sequence
from sim.errors import InvariantError
from traces.request import Request


def test_a_cohort_by_hand() -> None:
    """Blocks of 4; contexts 5, 8, 9 at step 0: cached 4, 7, 8, in 1, 2, 2 blocks; the first and the third begin one."""
    cohort = Cohort(3, 4)
    for context in (5, 8, 9):
        cohort.count(context, 1)
    assert (cohort.size, cohort.num_cached_blocks(0), cohort.blocks_needed(0)) == (3, 5, 2)
    # Where a block begins, these counts hold for one iteration only. At 1 (5, 8, 9 cached: 2, 2, 3 blocks) the second
    # begins one, at 2 and 3 none does.
    assert [cohort.steps_until_growth(step) for step in range(4)] == [1, 1, 2, 1]
    assert [cohort.num_cached_blocks(step) for step in range(4)] == [5, 7, 8, 8]
    assert [cohort.blocks_needed(step) for step in range(4)] == [2, 1, 0, 0]
    cohort.count(8, -1)
    assert (cohort.size, cohort.num_cached_blocks(0), cohort.blocks_needed(0)) == (2, 3, 2)


members = st.lists(st.integers(1, 60), min_size=1, max_size=8)


@given(st.integers(1, 9), members, st.integers(0, 40), st.lists(st.booleans(), min_size=8, max_size=8))
def test_counts_are_those_of_the_members(block_size: int, contexts: list[int], step: int, leave: list[bool]) -> None:
    """Members join at step 0 with their contexts, a token fed included; some leave again."""
    cohort = Cohort(1, block_size)
    for context in contexts:
        cohort.count(context, 1)
    stay = [context for context, leaves in zip(contexts, leave, strict=False) if not leaves]
    for context, leaves in zip(contexts, leave, strict=False):
        if leaves:
            cohort.count(context, -1)

    def cached_blocks(at: int) -> int:
        return sum(-(-(context + at - 1) // block_size) for context in stay)

    def begun(at: int) -> int:
        return sum((context + at - 1) % block_size == 0 for context in stay)

    assert cohort.size == len(stay)
    assert cohort.num_cached_blocks(step) == cached_blocks(step)
    assert cohort.blocks_needed(step) == begun(step)
    # What an iteration begins, the next one finds cached.
    assert cohort.num_cached_blocks(step + 1) == cohort.num_cached_blocks(step) + cohort.blocks_needed(step)


# -- the batch -----------------------------------------------------------------------------------------------------


def member(batch: DecodeBatch, request_id: int, prompt: int, output: int, *, hosted: int = 0) -> Sequence:
    """Prefilled at 0 s, and in the batch with its first token."""
    seq = Sequence(Request(request_id, 0.0, prompt, output))
    seq.num_tokens, seq.num_generated, seq.last_token_s = prompt + 1, 1, 0.0
    if batch.token_log is not None:
        batch.token_log[request_id] = [0.0]
    batch.add(seq, num_hosted=hosted)
    return seq


def logged() -> tuple[DecodeBatch, GapCollector]:
    gaps = GapCollector()
    batch = DecodeBatch(4, gaps)
    batch.token_log = {}
    return batch, gaps


def test_two_tokens_an_iteration() -> None:
    """Three iterations that end at 1.0, 1.5 and 2.2 s (gaps of 0.5, then 0.2 more) with two tokens each: both members
    have 1 + 6 tokens, and gaps of 1, 0, 0.5, 0, 0.7 and 0 s."""
    batch, gaps = logged()
    first, second = member(batch, 0, 3, 9), member(batch, 1, 8, 7)
    ended = batch.advance(StepTimes(3, 1.0, 0.5, 0.2, 2.2, 6))
    assert ended == [second]
    assert (second.num_tokens, second.num_generated, second.last_token_s) == (15, 7, 2.2)
    assert batch.num_generated_of(first) == 7
    assert batch.num_tokens_of(first) == batch.context_tokens == 10
    assert batch.step == 6
    found = gaps.statistics((50.0, 99.0))
    assert found is not None and found.exact
    each = [1.0, 0.0, 0.5, 0.0, 0.7, 0.0]
    assert found.count == 12
    assert found.mean == pytest.approx(np.mean(each))
    assert found.std == pytest.approx(np.std(each))
    assert found.percentiles[50.0] == pytest.approx(0.25)
    assert batch.token_log is not None
    for times in batch.token_log.values():
        assert times == pytest.approx([0.0, 1.0, 1.0, 1.5, 1.5, 2.2, 2.2])
        assert sorted(np.diff(times)) == pytest.approx(sorted(each), abs=1e-12)


def test_several_tokens_an_iteration_after_one_that_left_a_sequence_out() -> None:
    """Gaps begin at each one's own last token: 0's at 0.4 s, 1's at 0."""
    batch, gaps = logged()
    seqs = member(batch, 0, 3, 9), member(batch, 1, 8, 9)
    assert batch.advance_some([seqs[0]], 0.4) == []
    assert batch.advance(StepTimes(2, 1.0, 0.5, 0.0, 1.5, 4)) == []
    found = gaps.statistics(())
    assert found is not None
    expected = [0.4, 0.6, 0.0, 0.5, 0.0, 1.0, 0.0, 0.5, 0.0]
    assert found.count == len(expected)
    assert found.mean == pytest.approx(np.mean(expected))
    assert [batch.num_generated_of(seq) for seq in seqs] == [6, 5]


def test_what_was_left_out_has_one_long_gap_the_others_short_ones() -> None:
    """Two, then three, of the three members have a token at 0.4, 0.7 and 1.2 s; the last waits for 1.2 s."""
    batch, gaps = logged()
    seqs = [member(batch, i, 5, 9) for i in range(3)]
    batch.advance_some(seqs[:2], 0.4)
    assert list(batch.members) == [seqs[2], *seqs[:2]]
    batch.advance_some(seqs[:1], 0.7)
    assert [batch.last_token_s_of(seq) for seq in seqs] == [0.7, 0.4, 0.0]
    batch.advance(StepTimes(1, 1.2, 0.0, 0.0, 1.2, 1))
    found = gaps.statistics((0.0, 100.0))
    assert found is not None
    each = [0.4, 0.4, 0.3, 0.5, 0.8, 1.2]
    assert (found.count, found.mean, found.std) == pytest.approx((6, np.mean(each), np.std(each)))
    assert found.percentiles == pytest.approx({0.0: 0.3, 100.0: 1.2})
    # None is late any more.
    batch.advance(StepTimes(1, 1.3, 0.0, 0.0, 1.3, 1))
    found = gaps.statistics((0.0,))
    assert found is not None
    assert (found.count, found.percentiles[0.0]) == pytest.approx((9, 0.1))
    assert [batch.num_generated_of(seq) for seq in seqs] == [5, 4, 3]


def test_a_plan_may_end_with_a_member_but_not_go_past_it() -> None:
    batch, _ = logged()
    seq = member(batch, 0, 3, 5)
    member(batch, 1, 3, 9)
    assert batch.advance(StepTimes(2, 1.0, 0.5, 0.0, 1.5, 4)) == [seq]
    batch, _ = logged()
    member(batch, 0, 3, 4)
    member(batch, 1, 3, 9)
    with pytest.raises(InvariantError, match="past its last token"):
        batch.advance(StepTimes(2, 1.0, 0.5, 0.0, 1.5, 4))


def test_a_member_may_end_earlier_with_a_token_that_is_yet_to_come() -> None:
    batch, _ = logged()
    seq, other = member(batch, 0, 3, 5), member(batch, 1, 3, 9)
    assert batch.advance(StepTimes(1, 1.0, 0.0, 0.0, 1.0, 1)) == []
    generated = batch.num_generated_of(seq)
    for tokens in (generated - 1, generated, 6):
        with pytest.raises(InvariantError) as caught:
            batch.shorten(seq, tokens)
        assert str(caught.value) == f"{seq}: has {generated} tokens and cannot end with {tokens}"
        assert seq.output_tokens == 5
    batch.shorten(seq, 5)
    batch.shorten(other, generated + 1)
    assert batch.advance(StepTimes(1, 2.0, 0.0, 0.0, 2.0, 1)) == [other]
    assert (seq.output_tokens, other.output_tokens) == (5, generated + 1)


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 3)), min_size=1, max_size=6),
    st.lists(st.integers(1, 6), min_size=1, max_size=8),
    st.integers(1, 5),
)
def test_any_number_of_tokens_keeps_the_counts_of_the_members(
    rows: list[tuple[int, int]], per_iteration: list[int], block_size: int
) -> None:
    """Growth, contexts and cohorts after iterations of 1 to 6 tokens are those of the members' own lengths."""
    gaps = GapCollector()
    batch = DecodeBatch(block_size, gaps)
    seqs = [member(batch, i, prompt, 1000, hosted=hosted) for i, (prompt, hosted) in enumerate(rows)]
    given_tokens = 0
    for i, tokens in enumerate(per_iteration):
        before = sum(map(batch.num_blocks_of, seqs))
        grown = batch.blocks_needed(tokens)
        batch.advance(StepTimes(1, i + 1.0, 0.0, 0.0, i + 1.0, tokens))
        given_tokens += tokens
        lengths = [prompt + 1 + given_tokens for prompt, _ in rows]
        assert [batch.num_tokens_of(seq) for seq in seqs] == lengths
        assert batch.context_tokens == sum(lengths)
        assert sum(map(batch.num_blocks_of, seqs)) == before + grown
        for hosted, cohort in batch.cohorts.items():
            of_it = [length for length, row in zip(lengths, rows, strict=True) if row[1] == hosted]
            assert cohort.num_cached_blocks(batch.step) == sum(-(-(length - 1) // block_size) for length in of_it)
    found = gaps.statistics(())
    assert found is not None
    assert found.count == given_tokens * len(rows)
    assert found.mean == pytest.approx(len(per_iteration) / given_tokens)


@given(
    st.lists(st.tuples(st.sampled_from(["join", "leave", "all", "some"]), st.integers(0, 30)), min_size=1, max_size=30),
    st.integers(1, 5),
)
def test_a_ranked_batch_knows_its_longest_context(events: list[tuple[str, int]], block_size: int) -> None:
    """Members join, leave, are left out of an iteration or complete."""
    batch, plan = RankedBatch(block_size, GapCollector()), IterationPlan()
    for i, (event, size) in enumerate(events):
        members = list(batch.members)
        if event == "join":
            member(batch, i, size + 1, 12)
        elif event == "leave" and members:
            batch.remove(members[size % len(members)])
        elif event == "all" and members:
            batch.advance(StepTimes(1, float(i), 0.0, 0.0, float(i), 1))
        elif members:
            plan.decodes, plan.num_decodes = members[: 1 + size % len(members)], 1 + size % len(members)
            batch.follow(plan)
            assert plan.decode_longest_tokens == max(map(batch.num_tokens_of, plan.decodes))
            batch.advance_some(plan.decodes, float(i))
        assert batch.longest_tokens == max(map(batch.num_tokens_of, batch.members), default=0)
