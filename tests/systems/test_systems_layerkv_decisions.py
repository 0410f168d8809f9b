"""LayerKV decides alike one iteration at a time and in jumps, where every rule of the paper is needed.

What it decides is pinned (`tests/pins/pinned_layerkv.py`).
"""

import pytest
from decisions import CASES, Case, answer

from kvtwin.testing import requests
from kvtwin.testing.conformance import Workload, check_jumps
from sim.options.policies import parse_policy


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_jumps_change_no_decision(case: Case) -> None:
    check_jumps(parse_policy(case.policy, {})[1], Workload(requests(*case.rows()), case.limits, case.machine()))


def test_the_workloads_bring_about_what_layerkv_can_do() -> None:
    seen: set[str] = set()
    for case in CASES:
        found = answer(case)
        seen |= found["policy"].keys()
        seen |= {request[4] for request in found["requests"]}
        # Some decision is there in every case that a policy without layers would not take.
        assert any(step[3][3] or step[3][4] for step in found["steps"]), case.name
    assert seen >= {"emergency_offloads", "forecast_shortages", "streamed_sequences", "promoted", "finished"}
