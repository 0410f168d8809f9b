"""Pools that this machine's memory holds: defaults are cut to it, what was asked for is refused if it does not fit."""

from dataclasses import replace

import psutil

from sim.errors import UserError
from sim.scenario import Scenario
from sim.simulate import GIB, prepare
from sim.systems.base import Policy

DEFAULT_SHARE = 4
"""Unless told otherwise a pool takes at most one part in so many of the memory that is free."""


def fit_to_machine(scenario: Scenario, policy: Policy, device: str) -> Scenario:
    """The scenario with pools of KV blocks that this machine's host can hold beside everything else.

    On a CPU that goes for the pool that stands in for the GPU's as well. Pools of the policies' own defaults are made
    smaller; UserError where those asked for do not fit.
    """
    if policy.schedules_ahead:
        raise UserError("--async-scheduling: runs on a device are not scheduled ahead yet; leave it out")
    limits = prepare(scenario, "", policy).limits
    free_bytes = psutil.virtual_memory().available
    held = [("host", "num_cpu_blocks_override", limits.num_cpu_blocks, scenario.swap_space is not None)]
    if device == "cpu":
        held.append(("GPU's stand-in", "num_gpu_blocks_override", limits.num_gpu_blocks, False))
    asked = 0
    for name, field, blocks, given in held:
        most = int(free_bytes / DEFAULT_SHARE / limits.block_bytes)
        if not given and getattr(scenario, field) is None and blocks > most:
            if most < 1:
                raise UserError(f"{name} pool: no block of {limits.block_bytes:.0f} bytes fits: free some memory")
            scenario, blocks = replace(scenario, **{field: most}), most
        asked += blocks
    if asked * limits.block_bytes > free_bytes:
        raise UserError(
            f"KV pools in host memory: {asked * limits.block_bytes / GIB:.1f} GiB asked for, "
            f"{free_bytes / GIB:.1f} GiB are free: lower --swap-space (or --num-cpu-blocks-override)"
            + (" or --num-gpu-blocks-override" if device == "cpu" else "")
        )
    return scenario
