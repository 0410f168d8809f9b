"""What the live runtime does and says is pinned in `golden/` (`pinned_runtime.py` renews it)."""

import pytest

pytest.importorskip("torch")
for needed in ("psutil", "aiohttp"):
    pytest.importorskip(needed)

from pinned_runtime import GOLDEN, TOPICS, lines  # noqa: E402


def test_every_topic_is_pinned():
    assert {path.stem for path in GOLDEN.iterdir()} == set(TOPICS)


@pytest.mark.parametrize("topic", TOPICS)
def test_the_runtime_does_what_is_pinned(topic):
    assert lines(TOPICS[topic]) == (GOLDEN / f"{topic}.txt").read_text().splitlines(), "if that is meant: make pins"
