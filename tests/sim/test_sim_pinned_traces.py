"""What becomes of a grid of traces is pinned in `golden/traces/` (`pinned_traces.py` renews it)."""

import pinned_requests
import pinned_traces
import pytest
from pinned_traces import TRACES, lines

TOPICS = pinned_traces.TOPICS | pinned_requests.TOPICS


def test_every_topic_is_pinned():
    assert {path.stem for path in TRACES.iterdir()} == set(TOPICS)


@pytest.mark.parametrize("topic", TOPICS)
def test_traces_are_what_is_pinned(topic):
    assert lines(TOPICS[topic]) == (TRACES / f"{topic}.txt").read_text().splitlines(), "if that is meant: make pins"
