"""Results of small runs over every system are those that are pinned in `golden/runs.json` (`pinned.py` renews them)."""

import json

import pinned
import pytest

RUNS = json.loads(pinned.RUNS.read_text())


def test_every_run_is_pinned():
    assert list(RUNS) == list(pinned.cases())


@pytest.mark.parametrize(("name", "words"), pinned.cases().items())
def test_results_are_those_pinned(name, words):
    assert pinned.answer(words) == RUNS[name], "if that is meant: make pins"
