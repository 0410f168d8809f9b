"""The systems kvtwin knows, by name."""

from difflib import get_close_matches

from sim.errors import UserError
from sim.policies.base import Policy
from sim.policies.layerkv import LayerKV
from sim.policies.vllm import VllmRecompute, VllmSwap

POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (VllmRecompute, VllmSwap, LayerKV)}


def policy_named(name: str) -> type[Policy]:
    """The policy of that name; `UserError` with the nearest right one otherwise."""
    found = POLICIES.get(name)
    if found is None:
        near = get_close_matches(name, POLICIES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"--policy: unknown policy {name!r}; {hint}known: {', '.join(POLICIES)}")
    return found
