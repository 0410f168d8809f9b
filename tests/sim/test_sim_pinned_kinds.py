"""What bounds, routes, setups and others are is pinned in `golden/*.txt`, a part a kind (`make pins` renews them)."""

from itertools import zip_longest

import pinned_bounds
import pinned_figures
import pinned_numbers
import pinned_results
import pinned_routes
import pinned_setups
import pinned_studies
import pytest
from goldens import lines_of

FILES = {
    pinned_bounds.BOUNDS: pinned_bounds.PINNED, pinned_figures.FIGURES: pinned_figures.PINNED,
    pinned_results.RESULTS: pinned_results.PINNED, pinned_routes.ROUTES: pinned_routes.PINNED,
    pinned_numbers.NUMBERS: pinned_numbers.PINNED,
    pinned_setups.SETUPS: pinned_setups.PINNED, pinned_studies.STUDIES: pinned_studies.PINNED,
}  # fmt: skip


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, kinds in FILES.items() for name in kinds])
def test_what_is_read_asked_for_and_told_is_what_is_pinned(path, name):
    pinned = path.read_text().splitlines()
    begins = [place for place, line in enumerate(pinned) if line.startswith("== ")]
    (own,) = (pinned[a:b] for a, b in zip(begins, [*begins[1:], None], strict=True) if pinned[a] == f"== {name}")
    for found, told in zip_longest(lines_of(name, FILES[path]), own):
        assert found == told, "if that is meant: make pins"
