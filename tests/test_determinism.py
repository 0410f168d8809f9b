"""What the suite draws at random is the same in every run."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


def drawn() -> list[int]:
    found: list[int] = []

    @settings(max_examples=20)
    @given(value=st.integers())
    def draw(value: int) -> None:
        found.append(value)

    draw()
    return found


def test_examples_are_the_same_in_every_run(pytestconfig):
    if pytestconfig.getoption("--hypothesis-profile") == "random":
        pytest.skip("asked to be random")
    found = drawn()
    assert len(set(found)) > 5
    assert found == drawn()
