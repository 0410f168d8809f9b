"""The one-pass statistics are numpy's."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces.errors import TraceError
from traces.generators import generate
from traces.readers import open_trace
from traces.request import Request
from traces.summary import summarize

ORACLE = Path(__file__).resolve().parents[3] / "shared" / "oracle" / "v1"

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
        Request(0, 0.0, 32, 1, "a", (1, 2), 16),
        Request(1, 1.0, 40, 1, "a", (1, 2, 3), 16),  # 2 of 3 blocks, 32 of 40 tokens
        Request(2, 1.0, 40, 1, "b", (9, 2, 3), 16),  # none: the run breaks at once
        Request(3, 2.0, 40, 1, "b", (9, 2, 3), 16),  # all 3 blocks, that is 40 tokens
    ]
    summary = summarize(stream)
    assert summary.infinite_cache_block_hits == 5 / 11
    assert summary.infinite_cache_token_hits == 72 / 152
    assert summary.sessions == 2
    assert summary.shared_stamps == 1 / 4


def test_the_same_blocks_in_another_order_are_no_prefix():
    """Ids may name contents alone (`documents`): of the second prompt nothing is hit, of the third its first block."""
    stream = [Request(i, float(i), 32, 1, "", ids, 16) for i, ids in enumerate([(1, 2), (2, 1), (1, 1)])]
    assert summarize(stream).infinite_cache_block_hits == 1 / 6


def test_an_infinite_cache_holds_what_was_generated():
    stream = [
        # 40 + 30 tokens, all computed but the last: 69 fill blocks 1 to 4 and put 5 tokens into block 5.
        Request(0, 0.0, 40, 30, "", (1, 2, 3), 16, (4, 5)),
        # The next turn, with 20 tokens more, hits blocks 1 to 4: 64 tokens. 95 computed: 15 in block 7.
        Request(1, 1.0, 90, 6, "", (1, 2, 3, 4, 6, 7), 16),
        # The turn after that needs all of block 7, which lacks the last answer's last token: 5 blocks, 80 tokens.
        Request(2, 2.0, 110, 1, "", (1, 2, 3, 4, 6, 7, 8), 16),
        # The same again: all 7 blocks, 110 tokens.
        Request(3, 3.0, 110, 1, "", (1, 2, 3, 4, 6, 7, 8), 16),
        # The first turn told otherwise from its 70th token on: it needs 5 tokens of block 5, and they are there ...
        Request(4, 4.0, 69, 1, "", (1, 2, 3, 4, 5), 16),
        # ... or 6, and they are not.
        Request(5, 5.0, 70, 1, "", (1, 2, 3, 4, 5), 16),
    ]
    summary = summarize(stream)
    assert summary.infinite_cache_block_hits == (0 + 4 + 5 + 7 + 5 + 4) / (3 + 6 + 7 + 7 + 5 + 5)
    assert summary.infinite_cache_token_hits == (0 + 64 + 80 + 110 + 69 + 64) / (40 + 90 + 110 + 110 + 69 + 70)


def test_sessions_hit_all_that_was_said_in_whole_blocks():
    options = {"shared_prefix": 100, "turns": 4, "think_time": 5, "seed": 3, "hash_block_tokens": 16}
    stream = list(generate("sessions", num_prompts=2000, **options))
    said, hits = {}, -6 * 16  # the very first request finds no system prompt
    for request in stream:
        # A new session finds the 6 full blocks of the system prompt; the last token said was never computed.
        hits += 16 * ((said[request.session_id] - 1) // 16 if request.session_id in said else 6)
        said[request.session_id] = request.prompt_tokens + request.output_tokens
    summary = summarize(stream)
    assert summary.infinite_cache_token_hits == hits / summary.prompt_tokens.total > 0.7


@pytest.mark.skipif(not ORACLE.exists(), reason="needs vLLM v1's workloads in ../shared (not shipped)")
def test_vllms_scheduler_hits_less_than_an_infinite_cache():
    summary = summarize(open_trace(ORACLE / "v1_turns.csv"))
    bound = summary.infinite_cache_token_hits
    for name in ("on512", "on2048", "on8192", "on2048private"):
        golden = json.loads((ORACLE / f"v1_turns.{name}.json").read_text())
        assert 0.75 * bound < golden["hit_tokens"] / summary.prompt_tokens.total < bound


def test_every_rank_of_lengths_counted_by_value():
    """Of 1, 1, 3 and 11: half of the way between the second and third, and 70 and 97 % of that to the last."""
    found = summarize(Request(i, float(i), n, 1) for i, n in enumerate((11, 1, 3, 1))).prompt_tokens
    assert (found.p50, found.p90, found.p99) == pytest.approx((2.0, 3 + 0.7 * 8, 3 + 0.97 * 8))
    one = summarize([Request(0, 0.0, 7, 1)]).prompt_tokens
    assert (one.mean, one.std, one.min, one.p50, one.p90, one.p99, one.max, one.total) == (7, 0, 7, 7, 7, 7, 7, 7)


def test_a_block_holds_nothing_before_a_token_of_it_was_computed():
    """Four of a prompt fill block 1; the only token of the answer is not computed. Nor is what was not asked for."""
    asked = Request(1, 1.0, 5, 1, "", (1, 2), 4)
    for first in (Request(0, 0.0, 4, 1, "", (1,), 4, (2,)), Request(0, 0.0, 4, 1, "", (1,), 4)):
        assert summarize([first, asked]).infinite_cache_block_hits == 1 / (len(first.hash_ids) + 2)


def test_requests_at_once_have_no_rate():
    found = summarize([Request(i, 3.0, 5, 6) for i in range(2)]).to_dict()
    assert [found[name] for name in ("duration_s", "interval_mean_s", "shared_stamps")] == [0.0, 0.0, 0.5]
    assert [found[name] for name in ("request_rate", "interval_cv", "correlation")] == [None] * 3


def test_one_request_and_none():
    summary = summarize([Request(0, 3.0, 5, 6)])
    assert summary.requests == 1
    assert summary.to_dict()["interval_cv"] is None
    with pytest.raises(TraceError, match="no request"):
        summarize([])
