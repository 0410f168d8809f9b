"""Transforms keep what they promise, whatever the requests; the block bootstrap keeps what lies within blocks."""

from itertools import islice, pairwise
from math import inf

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from traces.errors import TraceError
from traces.hash_ids import hashes_fit, output_blocks, output_hashes_fit
from traces.request import Image, Request, ToolCall
from traces.resample import resample
from traces.tool_calls import with_tool_calls
from traces.transforms import at_request_rate, clip, head, merge, scale_rate, spread_ties, window


def requests_at(*times, prompt=10, output=2):
    return [Request(i, time, prompt, output) for i, time in enumerate(times)]


def times_of(stream):
    return [request.arrival_s for request in stream]


tokens = st.integers(1, 200_000)
times = st.lists(st.integers(0, 40).map(lambda n: n / 4), max_size=30).map(sorted)


@given(times, st.floats(0.01, 100))
def test_scaling_keeps_order_and_count(at, factor):
    scaled = times_of(scale_rate(requests_at(*at), factor))
    assert scaled == sorted(scaled)
    assert scaled == [time / factor for time in at]


def test_a_window_is_half_open_rebased_and_renumbered():
    got = list(window(requests_at(0.0, 1.0, 1.5, 2.0, 9.0), 1.0, 2.0))
    assert [(r.request_id, r.arrival_s) for r in got] == [(0, 0.0), (1, 0.5)]


def test_a_window_stops_reading_at_its_end():
    def endless():
        count = 0
        while True:
            yield Request(count, float(count), 1, 1)
            count += 1

    assert len(list(window(endless(), 0, 100))) == 100


@pytest.mark.parametrize(
    ("before", "limit", "after"),
    [
        ((100, 50), 150, (100, 50)),  # fits
        ((100, 50), 149, (99, 50)),  # the prompt gives way
        ((100, 500), 200, (100, 100)),  # the output beyond half gives way
        ((1, 500), 200, (1, 199)),  # a short prompt leaves the output more than half
        ((14_050, 1_000), 4_096, (3_096, 1_000)),
        ((14_050, 3_000), 4_096, (2_048, 2_048)),
        ((5, 5), 2, (1, 1)),
    ],
)
def test_clip_by_hand(before, limit, after):
    got = next(clip([Request(0, 0.0, *before)], limit))
    assert (got.prompt_tokens, got.output_tokens) == after


@given(tokens, tokens, st.integers(2, 100_000), st.integers(1, 512))
def test_clip_fits_keeps_what_it_can_and_trims_hash_ids(prompt, output, limit, block):
    hashes = tuple(range(-(-prompt // block))) if (prompt + output) // block < 2_000 else ()
    output_hashes = tuple(range(-1, -1 - output_blocks(prompt, output, block), -1)) if hashes else ()
    before = Request(0, 0.0, prompt, output, "s", hashes, block if hashes else 0, output_hashes, 3)
    after = next(clip([before], limit))
    assert 1 <= after.prompt_tokens <= prompt
    assert 1 <= after.output_tokens <= output
    assert after.prompt_tokens + after.output_tokens == min(prompt + output, limit)
    assert after.output_tokens >= min(output, limit // 2) or after.prompt_tokens == 1
    assert next(clip([after], limit)) == after
    assert after.priority == 3
    if hashes:
        cut = after.prompt_tokens < prompt
        blocks = -(-(after.prompt_tokens + after.output_tokens) // block)
        names = (*after.hash_ids, *after.output_hash_ids)
        assert names == ((*hashes, *output_hashes)[:blocks] if not cut else hashes[: after.prompt_tokens // block])
        assert hashes_fit(after.prompt_tokens, after.hash_ids, block)
        assert output_hashes_fit(*after[2:4], after.hash_ids, block, after.output_hash_ids)


@pytest.mark.parametrize(
    ("output", "names", "limit", "after"),
    [
        (30, (4, 5), 70, (40, 30, "", (1, 2, 3), 16, (4, 5), 0)),  # fits
        (60, (4, 5, 6, 7), 80, (40, 40, "", (1, 2, 3), 16, (4, 5), 0)),  # 80 tokens are 5 blocks
        (60, (4, 5, 6, 7), 78, (39, 39, "", (1, 2), 16, (), 0)),  # the answer moved: block 3 holds other tokens
        (30, (4, 5), 62, (32, 30, "", (1, 2), 16, (), 0)),
    ],
)
def test_clip_by_hand_with_output_ids(output, names, limit, after):
    before = Request(0, 0.0, 40, output, "", (1, 2, 3), 16, names)
    assert next(clip([before], limit))[2:9] == after


@example(100, 50, [10, 9], 40)  # All that half of the context has room for.
@example(100, 50, [10, 10], 40)
@example(100, 50, [0, 0, 0, 0], 8)  # Four tokens of output: no call behind the last.
@given(tokens, st.integers(2, 300), st.lists(st.integers(0, 300), max_size=4), st.integers(2, 1000))
def test_answers_of_tools_fit_beside_what_a_clip_keeps(prompt, output, returned, limit):
    calls = tuple(ToolCall(after, 0.5, tokens) for after, tokens in enumerate(returned, 1) if after < output)
    before = Request(0, 0.0, prompt, output, calls=calls)
    after = next(clip([before], limit))
    fits = prompt + output + sum(call.returned_tokens for call in calls) <= limit
    assert (after == before) == fits
    assert after.most_tokens <= limit
    assert after.calls == calls[: len(after.calls)]
    kept = [sum(returned[: i + 1]) <= limit // 2 - 1 and i + 1 < after.output_tokens for i in range(len(calls))]
    assert len(after.calls) == (len(calls) if fits else sum(kept))


def test_a_clipped_prompt_keeps_its_whole_images() -> None:
    images = Image(0, 10, 1), Image(20, 10, 2)
    assert next(clip([Request(0, 0.0, 40, 10, images=images)], 39)).images == images[:1]
    assert next(clip([Request(0, 0.0, 40, 10, images=images)], 40)).images == images


def test_ties_are_spread_up_to_the_next_stamp():
    got = times_of(spread_ties(requests_at(0.0, 0.0, 0.0, 3.0, 6.0, 6.0)))
    assert got == [0.0, 1.0, 2.0, 3.0, 6.0, 7.5]
    assert times_of(spread_ties(requests_at(5.0, 5.0))) == [5.0, 5.0]


@given(times)
def test_spreading_keeps_order_first_of_each_stamp_and_identity(at):
    before = requests_at(*at)
    after = list(spread_ties(before))
    assert times_of(after) == sorted(times_of(after))
    assert [r.request_id for r in after] == [r.request_id for r in before]
    for old, new in zip(before, after, strict=True):
        if at.index(old.arrival_s) == old.request_id:  # the first of its stamp stays
            assert new.arrival_s == old.arrival_s
    if len(set(at)) > 1:
        assert len(set(times_of(after))) == len(at)


@given(st.lists(times, min_size=1, max_size=4))
def test_merge_is_sorted_stable_and_renumbered(streams):
    inputs = [requests_at(*at, prompt=number + 1) for number, at in enumerate(streams)]
    got = list(merge(*inputs))
    assert [r.request_id for r in got] == list(range(sum(map(len, streams))))
    expected = sorted((time, number) for number, at in enumerate(streams) for time in at)
    assert [(r.arrival_s, r.prompt_tokens - 1) for r in got] == expected


def test_merge_tells_the_prefixes_and_sessions_of_traces_apart():
    one = [Request(0, 0.0, 32, 17, "a", (1, 2), 16, (3, 4), 5)]
    two = [Request(0, 1.0, 32, 17, "a", (1, 3), 16, (4, 6))]
    first, second = merge(one, two)
    assert not {*first.hash_ids, *first.output_hash_ids} & {*second.hash_ids, *second.output_hash_ids}
    assert first.priority == 5
    assert first.session_id != second.session_id
    assert list(merge(one)) == one
    images = [Request(0, 0.0, 9, 9, images=(Image(0, 4, 7), Image(4, 5, 9)))]
    first, second = merge(images, images)
    assert not {one.image_id for one in first.images} & {one.image_id for one in second.images}
    # Where there are no sessions, none are made.
    assert {request.session_id for request in merge(requests_at(0.0), requests_at(1.0))} == {""}


@pytest.mark.parametrize(("burstiness", "cv"), [((), 1.0), ((0.25,), 2.0), ((4.0,), 0.5)])
def test_request_rate_and_burstiness_are_those_asked_for_or_poissons(burstiness, cv):
    at = times_of(at_request_rate(requests_at(*[0.0] * 40_000), 5.0, *burstiness, seed=3))
    gaps = [b - a for a, b in pairwise(at)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert at[0] == 0.0
    assert at == sorted(at)
    assert mean == pytest.approx(0.2, rel=0.04)
    assert spread / mean == pytest.approx(cv, rel=0.04)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda r: scale_rate(r, 0),
        lambda r: scale_rate(r, inf),
        lambda r: window(r, 5, 5),
        lambda r: window(r, -1, 5),
        lambda r: clip(r, 1),
        lambda r: head(r, 0),
        lambda r: with_tool_calls(r, -1.0, 1.0, 1.0),
        lambda r: at_request_rate(r, 0),
        lambda r: at_request_rate(r, 1, burstiness=0),
        lambda r: at_request_rate(r, float("nan")),
        lambda r: at_request_rate(r, 1, seed=-1),
        lambda r: resample(trace([0.0, 1.0]), 5.0, -1),
    ],
)
def test_senseless_arguments_are_refused_at_once(wrong):
    with pytest.raises(TraceError, match=";"):
        wrong([])


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
    """Block 0 and 1 share id 0, as a system prompt; 1 and 2 are their own."""
    requests = [Request(0, 0.0, 32, 4, "a", (0, 1), 16, (3,)), Request(1, 1.0, 32, 4, "b", (0, 2), 16)]
    drawn = list(islice(resample(requests, 1.0, 0), 40))
    assert all(r.hash_ids[0] == 0 for r in drawn)
    own = [(r.session_id, r.hash_ids[1], r.output_hash_ids) for r in drawn]
    assert len({session for session, *_ in own}) == 40
    assert {"a", "b"} < {session for session, *_ in own}
    names = [0, *(name for _, ident, output in own for name in (ident, *output))]
    assert len(set(names)) == len(names)


def test_the_seed_decides():
    requests = trace(range(50))
    first, again, other = (list(islice(resample(requests, 5.0, seed), 60)) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("requests", [[], trace([3.0]), [Request(0, 1.0, 5, 5), Request(1, 1.0, 5, 5)]])
def test_requests_at_one_moment_are_refused(requests):
    with pytest.raises(TraceError, match="one moment"):
        resample(requests, 5.0, 0)
