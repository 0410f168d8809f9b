"""Lengths of measured sequences: unlike one another, and on average what the sample says."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calib.measure.lengths import drawn_lengths, spread_lengths
from calib.measure.points import Point, mean_tokens


@given(st.integers(1, 300), st.integers(1, 20_000))
def test_contexts_spread_about_their_mean(batch_size, context_tokens):
    lengths = spread_lengths(Point(op="step", batch_size=batch_size, new_tokens=1, context_tokens=context_tokens))
    assert len(lengths) == batch_size
    assert sum(lengths) == batch_size * context_tokens
    assert context_tokens * 0.75 - 1 <= min(lengths) and max(lengths) <= context_tokens * 1.25 + 1


def test_four_contexts_by_hand():
    point = Point(op="step", batch_size=4, new_tokens=1, context_tokens=120)
    assert spread_lengths(point) == [90, 110, 130, 150]


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_prompts_have_lengths_that_come_once_up_to_the_grids(batch_size):
    """A kernel library that makes a plan for every length would else be timed without: 512 tokens are 496 to 512."""
    point = Point(op="layers", batch_size=batch_size, new_tokens=mean_tokens(512))
    lengths = list(islice(drawn_lengths(point, 3), 17))
    for sequence in zip(*lengths, strict=True):
        assert sorted(sequence) == list(range(496, 513))
    if batch_size % 2 == 0:
        assert {sum(found) for found in lengths} == {point.tokens}
    assert point.length == 512 and next(drawn_lengths(point, 3)) == lengths[0] != next(drawn_lengths(point, 4))


def test_what_has_no_length_of_its_own_is_executed_as_it_is():
    """Decodes, chunks after cached tokens, and prompts of a few tokens."""
    for shape in ({"new_tokens": 1}, {"new_tokens": 512, "context_tokens": 16}, {"new_tokens": 16}):
        point = Point(op="layers", batch_size=2, **shape)
        assert list(islice(drawn_lengths(point, 0), 2)) == [[point.new_tokens] * 2] * 2 and point.draw == 0
