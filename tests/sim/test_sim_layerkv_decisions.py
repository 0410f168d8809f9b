"""LayerKV takes the decisions that are pinned in `golden/`, one iteration at a time and in jumps alike."""

from typing import Any

import pytest
from decisions import CASES, Case, answer, read


def assert_same(found: Any, pinned: Any, where: str) -> None:
    """Equal structure and whole numbers; times to 1e-9 s a second."""
    if isinstance(pinned, list):
        assert len(found) == len(pinned), where
        for i, (one, other) in enumerate(zip(found, pinned, strict=True)):
            assert_same(one, other, f"{where}[{i}]")
    elif isinstance(pinned, float):
        assert found == pytest.approx(pinned, rel=1e-9, abs=1e-9), where
    else:
        assert found == pinned, where


@pytest.mark.parametrize("jump", [False, True], ids=["stepped", "jumped"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_decision_is_as_pinned(case: Case, jump: bool) -> None:
    found, pinned = answer(case, jump=jump), read(case)
    for name in ("steps", "requests"):
        assert_same(found[name], pinned[name], f"{case.name} {name}")
    assert found["preemptions"] == pinned["preemptions"]
    assert found["policy"] == pinned["policy"]


def test_the_pinned_workloads_bring_about_what_layerkv_can_do() -> None:
    seen: set[str] = set()
    for case in CASES:
        pinned = read(case)
        seen |= pinned["policy"].keys()
        seen |= {request[4] for request in pinned["requests"]}
        # Some decision is there in every case that a policy without layers would not take.
        assert any(step[3][3] or step[3][4] for step in pinned["steps"]), case.name
    assert seen >= {"emergency_offloads", "forecast_shortages", "streamed_sequences", "promoted", "finished"}
