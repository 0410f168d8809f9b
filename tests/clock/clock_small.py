"""Small traffic for clusters, and what holds of every cluster: nothing is lost, and jumps change nothing."""

from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise

import pytest
from clusters import ClusterOutcome
from hypothesis import strategies as st

from kvtwin.testing import requests
from kvtwin.testing.conformance import TOLERANCE_S
from sim.clock.arrivals import Arrivals
from sim.clock.closed_loop import ClosedLoop
from sim.engine.sequence import Status
from traces.request import Request

FLAT = {"prefill": (0.1, 0.0, 0.0), "decode": (0.1, 0.0, 0.0)}
"""Every iteration takes 0.1 s."""
GAPS_S = st.sampled_from([0.0, 0.0, 0.001, 0.02, 0.1, 0.5])
ROWS = st.lists(st.tuples(GAPS_S, st.integers(1, 150), st.integers(1, 40)), min_size=1, max_size=25)
"""Gap before a request, s, and its tokens of prompt and output."""


def drawn(rows: Iterable[tuple[float, int, int]]) -> list[Request]:
    gaps_s, *tokens = zip(*rows, strict=True)
    return requests(*zip(accumulate(gaps_s), *tokens, strict=True))


def assert_whole(outcome: ClusterOutcome, arrivals, *, cut: bool = False) -> None:
    """Every request ended once, every block is free, no lane and no link did two things at a time.

    `cut`: an engine may end a sequence that its pool has no room for.
    """
    assert sorted(seq.request.request_id for seq, _ in outcome.ended) == [r.request_id for r in arrivals]
    for member in outcome.members:
        assert member.num_in_flight == 0
        assert not member.engine.has_unfinished
        for pool in (member.engine.scheduler.gpu, member.engine.scheduler.host):
            assert pool.free == pool.num_blocks
        lanes = member.lanes
        for lane in (lanes.compute, lanes.h2d, lanes.d2h, *lanes.links.values()):
            for before, after in pairwise(lane.intervals or ()):
                assert after.start_s >= before.end_s - 1e-9
    for seq, _ in outcome.ended:
        assert seq.status in (Status.FINISHED, Status.IGNORED)
        if seq.status is Status.FINISHED:
            assert cut or seq.num_generated == seq.request.output_tokens
            assert seq.request.arrival_s - 1e-9 <= seq.first_scheduled_s <= seq.first_token_s <= seq.finish_s


def jumped_and_stepped(
    run: Callable[[Arrivals, bool], ClusterOutcome],
    arrivals: list[Request],
    most: int | None = None,
    *,
    cut: bool = False,
) -> tuple[ClusterOutcome, ClusterOutcome]:
    """Two runs, with jumps and without, both whole and alike. With `most` requests at a time if that is given."""
    one, other = (run(ClosedLoop(arrivals, most) if most else Arrivals(arrivals), jump) for jump in (True, False))
    for outcome in (one, other):
        assert_whole(outcome, arrivals, cut=cut)
    assert one.places() == other.places()
    there = other.by_id()
    for key, seq in one.by_id().items():
        also = there[key]
        assert (seq.status, seq.error, seq.num_cached_tokens) == (also.status, also.error, also.num_cached_tokens)
        assert seq.first_token_s == pytest.approx(also.first_token_s, abs=TOLERANCE_S)
        assert seq.finish_s == pytest.approx(also.finish_s, abs=TOLERANCE_S)
    for a, b in zip(one.members, other.members, strict=True):
        assert a.iterations == b.iterations
        assert a.engine.scheduler.counters == b.engine.scheduler.counters
        assert a.lanes.compute.busy_s == pytest.approx(b.lanes.compute.busy_s, abs=1e-6)
    return one, other
