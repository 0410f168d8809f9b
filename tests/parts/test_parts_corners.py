"""Every system keeps to `kvtwin.testing.conformance` at the `corners` of what an engine may meet."""

import pinned_schedules
import pytest
from corners import KINDS, corner

from kvtwin.testing.conformance import check_one
from sim.policy_options import parse_policy

NAMES = [name for name in pinned_schedules.names() if " " not in name]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", NAMES)
def test_systems_keep_to_what_they_must_at_the_corners(text: str, kind: str) -> None:
    """A workload of each kind, another for each system."""
    policy = parse_policy(text, {})[1]
    check_one(policy, corner(kind, policy, NAMES.index(text) % 20))
