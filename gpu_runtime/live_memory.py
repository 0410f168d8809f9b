"""Pools that this machine's memory holds: defaults are cut to it, what was asked for is refused if it does not fit."""

import sys
from dataclasses import replace

import psutil

from sim.errors import UserError
from sim.scenario import Scenario
from sim.simulate import GIB, prepare
from sim.systems.base import Policy
from sim.systems.mixing import MEMORIES, options_among
from sim.systems.offload_options import OffloadOptions

DEFAULT_SHARE = 4
"""Unless told otherwise a pool takes at most one part in so many of the memory that is free."""


def fit_to_machine(scenario: Scenario, policy: Policy, device: str) -> Scenario:
    """The scenario with pools of KV blocks that this machine's host can hold beside everything else.

    Prefix caches are not carried out yet: off where they are a policy's default, refused where they were asked for.
    On a CPU that goes for the pool that stands in for the GPU's as well. Pools of the policies' own defaults are made
    smaller; UserError where those asked for do not fit.
    """
    if policy.schedules_ahead:
        raise UserError("--async-scheduling: runs on a device are not scheduled ahead yet; leave it out")
    if options_among((policy, *policy.mixed_options), OffloadOptions).offloads:
        raise UserError("--kv-offloading-size: runs on a device keep no prefixes on the host yet; leave it out")
    if MEMORIES[policy.names["memory"]].always_caches:
        raise UserError(f"--policy {policy.name}: runs on a device keep no prefixes on the host yet (memory=tiered)")
    if policy.prefix_caching(scenario.enable_prefix_caching):
        if scenario.enable_prefix_caching:
            raise UserError("--enable-prefix-caching: runs on a device share no blocks yet; leave it out")
        print(f"kvtwin: warning: {policy.name} runs without its prefix cache: not yet on a device", file=sys.stderr)
        scenario = replace(scenario, enable_prefix_caching=False)
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
