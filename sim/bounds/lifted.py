"""Runs with one limit of the machine lifted: what faster links, more memory or better predictions could bring.

They are no bounds in the strict sense (a policy may do worse with more), but say which limit binds.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from math import inf

import msgspec

from sim.run.prepare import Setup
from sim.systems.base import Policy

ENDLESS_BLOCKS = 1 << 40
FREE_COPIES = {
    "d2h_bytes_per_s": inf,
    "h2d_bytes_per_s": inf,
    "copy_lone_s": 0.0,
    "copy_setup_s": 0.0,
    "copy_launch_s": 0.0,
    "swap_s_per_block": 0.0,
}
"""Constants of profiles where copies take no time."""


def with_infinite_links(setup: Setup) -> Setup:
    """Copies between host and GPU take no time."""
    known = setup.profile.constants
    free = {name: msgspec.structs.replace(known[name], value=v) for name, v in FREE_COPIES.items() if name in known}
    profile = msgspec.structs.replace(setup.profile, constants=known | free)
    return _both(setup.priced(profile, setup.engine_profile), with_infinite_links)


def with_infinite_memory(setup: Setup) -> Setup:
    """KV blocks on the GPU never run out."""
    return _both(
        replace(setup, limits=replace(setup.limits, num_gpu_blocks=ENDLESS_BLOCKS)),
        with_infinite_memory,
    )


def _both(setup: Setup, lift: Callable[[Setup], Setup]) -> Setup:
    return setup if setup.decode is None else replace(setup, decode=lift(setup.decode))


def with_known_lengths(setup: Setup) -> Setup | None:
    """Output lengths are predicted right; None where no part asks for them, or they are right already."""
    policy = _knowing(setup.policy)
    return None if policy is None else replace(setup, policy=policy)


def _knowing(policy: Policy) -> Policy | None:
    own = _predicts(policy)
    mixed = tuple(replace(o, predictor="oracle") if _predicts(o) else o for o in policy.mixed_options)  # type: ignore[type-var]
    if not own and mixed == policy.mixed_options:
        return None
    changes = {"predictor": "oracle"} if own else {}
    return replace(policy, mixed_options=mixed, **changes)


def _predicts(options: object) -> bool:
    return any(f.name == "predictor" for f in fields(options)) and getattr(options, "predictor") != "oracle"  # type: ignore[arg-type]  # noqa: B009


LIFTED: dict[str, Callable[[Setup], Setup | None]] = {
    "infinite PCIe": with_infinite_links,
    "infinite memory": with_infinite_memory,
    "known lengths": with_known_lengths,
}
"""Name of what is lifted -> the setup with it, None where that changes nothing."""
