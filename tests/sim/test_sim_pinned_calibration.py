"""What is planned, counted, imported and fitted is what is pinned in `golden/calibration/`."""

import pytest
from pinned_calibration import CALIBRATION, PINNED


@pytest.mark.parametrize("name", PINNED)
def test_calibration_is_that_pinned(name):
    assert list(PINNED[name]()) == (CALIBRATION / f"{name}.txt").read_text().splitlines(), "if that is meant: make pins"
