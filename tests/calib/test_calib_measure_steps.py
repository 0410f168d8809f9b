"""Contexts of measured decodes: unlike one another, and on average what the sample says."""

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from calib.measure.engine_steps import spread_lengths  # noqa: E402
from calib.measure.points import Point  # noqa: E402


@given(st.integers(1, 300), st.integers(1, 20_000))
def test_contexts_spread_about_their_mean(batch_size, context_tokens):
    lengths = spread_lengths(Point(op="step", batch_size=batch_size, new_tokens=1, context_tokens=context_tokens))
    assert len(lengths) == batch_size
    assert sum(lengths) == batch_size * context_tokens
    assert context_tokens * 0.75 - 1 <= min(lengths) and max(lengths) <= context_tokens * 1.25 + 1


def test_four_contexts_by_hand():
    point = Point(op="step", batch_size=4, new_tokens=1, context_tokens=120)
    assert spread_lengths(point) == [90, 110, 130, 150]
