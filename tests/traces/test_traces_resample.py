"""The block bootstrap keeps what lies within blocks, and says apart what comes twice."""

from itertools import islice, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from traces.errors import TraceError
from traces.request import Request
from traces.resample import resample


def trace(arrivals_s):
    return [Request(i, at_s, 10 + i, 5) for i, at_s in enumerate(sorted(arrivals_s))]


@example([0.0, 546.1771355938619, 6007.948491532481], 0, 986.632543467347)  # 5 L + L is beyond 6 L, once rounded
@given(st.lists(st.floats(0.0, 1e4), min_size=2, max_size=40, unique=True), st.integers(0, 9), st.floats(1.0, 1e3))
def test_arrivals_are_in_order_and_requests_are_the_traces_own(arrivals_s, seed, block_s):
    requests = trace(arrivals_s)
    drawn = list(islice(resample(requests, block_s, seed), 100))
    assert [r.request_id for r in drawn] == list(range(100))
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(drawn))
    assert {(r.prompt_tokens, r.output_tokens) for r in drawn} <= {(r.prompt_tokens, r.output_tokens) for r in requests}


def test_the_rate_stays_and_gaps_within_blocks_too():
    """Ten blocks of 10 s, each with requests at 1, 2 and 4 s of it."""
    requests = trace([10.0 * block + at_s for block in range(10) for at_s in (1.0, 2.0, 4.0)])
    drawn = list(islice(resample(requests, 9.6, 3), 300))
    assert 300 / drawn[-1].arrival_s == pytest.approx(30 / (93.0 * 30 / 29), rel=0.02)
    assert [b.arrival_s - a.arrival_s for a, b in zip(drawn[::3], drawn[1::3], strict=True)] == pytest.approx(
        [1.0] * 100
    )
    assert len({r.prompt_tokens for r in drawn}) == 30


def test_a_block_that_comes_again_is_other_text_but_for_what_blocks_share():
    """Block 0 and 1 share id 7, as a system prompt; 1 and 2 are their own."""
    requests = [Request(0, 0.0, 32, 4, "a", (7, 1), 16, (3,)), Request(1, 1.0, 32, 4, "b", (7, 2), 16)]
    drawn = list(islice(resample(requests, 1.0, 0), 40))
    assert all(r.hash_ids[0] == 7 for r in drawn)
    own = [(r.session_id, r.hash_ids[1], r.output_hash_ids) for r in drawn]
    assert len({session for session, *_ in own}) == len({ident for _, ident, _ in own}) == 40
    assert {"a", "b"} < {session for session, *_ in own}
    outputs = [ids for *_, ids in own if ids]
    assert len(set(outputs)) == len(outputs)


def test_the_seed_decides():
    requests = trace(range(50))
    first, again, other = (list(islice(resample(requests, 5.0, seed), 60)) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("requests", [[], trace([3.0]), [Request(0, 1.0, 5, 5), Request(1, 1.0, 5, 5)]])
def test_requests_at_one_moment_are_refused(requests):
    with pytest.raises(TraceError, match="one moment"):
        resample(requests, 5.0, 0)
