"""What is told and drawn of results is what is pinned in `golden/results.txt` (`pinned_results.py` renews it)."""

from itertools import zip_longest

import pytest
from pinned_results import KINDS, RESULTS, lines


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_told_and_drawn_as_pinned(kind):
    pinned = RESULTS.read_text().splitlines()
    begins = [place for place, line in enumerate(pinned) if line.startswith(tuple(f"{name} 0: " for name in KINDS))]
    (own,) = (pinned[a:b] for a, b in zip(begins, [*begins[1:], None], strict=True) if pinned[a].startswith(kind))
    for found, told in zip_longest(lines(kind), own):
        assert found == told, "if that is meant: make pins"
