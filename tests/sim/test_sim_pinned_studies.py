"""Studies read, ask for and tell what is pinned in `golden/studies.txt` (`pinned_studies.py` renews it)."""

from itertools import zip_longest

import pytest
from pinned_studies import PINNED, STUDIES, lines_of


@pytest.mark.parametrize("name", PINNED)
def test_studies_are_those_pinned(name):
    pinned = STUDIES.read_text().splitlines()
    begins = [place for place, line in enumerate(pinned) if line.startswith("== ")]
    (own,) = (pinned[a:b] for a, b in zip(begins, [*begins[1:], None], strict=True) if pinned[a] == f"== {name}")
    for found, told in zip_longest(lines_of(name), own):
        assert found == told, "if that is meant: make pins"
