"""Defaults, models' sizes and prices are those pinned in `golden/facts/` (`pinned_facts.py` renews them)."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("aiohttp")

from pinned_facts import FACTS, PINNED


@pytest.mark.parametrize("name", PINNED)
def test_facts_are_those_pinned(name):
    assert list(PINNED[name]()) == (FACTS / f"{name}.txt").read_text().splitlines(), "if that is meant: make pins"
