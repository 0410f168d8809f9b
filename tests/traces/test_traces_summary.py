"""The one-pass statistics are numpy's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces.errors import TraceError
from traces.request import Request
from traces.summary import summarize

sample = st.lists(st.tuples(st.floats(0, 10), st.integers(1, 50), st.integers(1, 9)), min_size=2, max_size=60)


@given(sample)
def test_statistics_are_numpys(values):
    gaps, prompts, outputs = (np.array(column, float) for column in zip(*values, strict=True))
    times = np.cumsum(gaps)
    summary = summarize(
        Request(i, t, int(p), int(o)) for i, (t, p, o) in enumerate(zip(times, prompts, outputs, strict=True))
    )
    for length, column in ((summary.prompt_tokens, prompts), (summary.output_tokens, outputs)):
        got = (length.mean, length.std, length.p50, length.p90, length.p99)
        assert got == pytest.approx((column.mean(), column.std(), *np.percentile(column, [50, 90, 99])))
        assert (length.min, length.max, length.total) == (column.min(), column.max(), column.sum())
    intervals = np.diff(times)
    assert summary.duration_s == pytest.approx(times[-1] - times[0])
    if intervals.mean() > 1e-3:
        assert summary.interval_mean_s == pytest.approx(intervals.mean())
        assert summary.interval_cv == pytest.approx(intervals.std() / intervals.mean(), abs=1e-6)
    if prompts.std() and outputs.std():
        assert summary.correlation == pytest.approx(np.corrcoef(prompts, outputs)[0, 1], abs=1e-9)


def test_an_infinite_cache_hits_the_unbroken_leading_run():
    stream = [
        Request(0, 0.0, 30, 1, "a", (1, 2), 16),
        Request(1, 1.0, 40, 1, "a", (1, 2, 3), 16),  # 2 of 3 blocks, 32 of 40 tokens
        Request(2, 1.0, 40, 1, "b", (9, 2, 3), 16),  # none: the run breaks at once
        Request(3, 2.0, 40, 1, "b", (9, 2, 3), 16),  # all 3 blocks, that is 40 tokens
    ]
    summary = summarize(stream)
    assert summary.infinite_cache_block_hits == 5 / 11
    assert summary.infinite_cache_token_hits == 72 / 150
    assert summary.sessions == 2
    assert summary.shared_stamps == 1 / 4


def test_one_request_and_none():
    summary = summarize([Request(0, 3.0, 5, 6)])
    assert summary.requests == 1
    assert summary.to_dict()["interval_cv"] is None
    with pytest.raises(TraceError, match="no request"):
        summarize([])
