"""Small crowded engines decide what is pinned in `golden/schedules.txt` (`pinned_schedules.py` renews it)."""

import pinned_schedules
import pytest

PINNED = pinned_schedules.SCHEDULES.read_text().splitlines()
NAMES = pinned_schedules.names()


def test_every_system_is_pinned():
    pinned = [line.rpartition(":")[0] for line in PINNED]
    assert pinned == [f"{name} #{place}" for name in NAMES for place in range(pinned_schedules.runs_of(name))]


@pytest.mark.parametrize("name", NAMES)
def test_schedules_are_those_pinned(name):
    found = pinned_schedules.lines(name)
    assert found == [line for line in PINNED if line.rpartition(" #")[0] == name], "if that is meant: make pins"
