"""LayerKV decides alike one iteration at a time and in jumps, where every rule of the paper is needed.

What it decides is pinned (`tests/pins/pinned_layerkv.py`).
"""

from functools import cache
from typing import Any

import pytest
from decisions import CASES, Case, answer

stepped = cache(lambda case: answer(case, jump=False))


def assert_same(found: Any, expected: Any, where: str) -> None:
    """Equal structure and whole numbers; times to 1e-9 s a second."""
    if isinstance(expected, list):
        assert len(found) == len(expected), where
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}[{i}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-9), where
    else:
        assert found == expected, where


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_jumps_change_no_decision(case: Case) -> None:
    found, expected = answer(case, jump=True), stepped(case)
    for name in ("steps", "requests"):
        assert_same(found[name], expected[name], f"{case.name} {name}")
    assert found["preemptions"] == expected["preemptions"]
    assert found["policy"] == expected["policy"]


def test_the_workloads_bring_about_what_layerkv_can_do() -> None:
    seen: set[str] = set()
    for case in CASES:
        found = stepped(case)
        seen |= found["policy"].keys()
        seen |= {request[4] for request in found["requests"]}
        # Some decision is there in every case that a policy without layers would not take.
        assert any(step[3][3] or step[3][4] for step in found["steps"]), case.name
    assert seen >= {"emergency_offloads", "forecast_shortages", "streamed_sequences", "promoted", "finished"}
