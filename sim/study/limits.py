"""Which limit binds a deployment, and what more of something would buy: the same search with one thing changed.

A limit binds as far as half as much again of it carries more load. A faster GPU carries more whatever the limit is,
since sequences then leave their seats and their memory sooner: compute binds unless a limit brings half
as much.
"""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any, Literal

from msgspec import Struct

from sim.cost.changed_profile import also_changed
from sim.errors import UserError
from sim.options.scenario import Scenario
from sim.run.prepare import Setup
from sim.specs.kv_format import kv_dtype
from sim.study.points import setup_of
from sim.study.search import Reached

MORE = 1.5
"""Each limit is raised by this factor, one at a time."""
BINDS = 0.05
"""Least gain of load that counts."""
OF_COMPUTE = 0.5
"""Least share of a faster GPU's gain with which another limit binds."""
TEN_GB = 10e9
COMPUTE = "compute"
FP8_KV = "fp8 KV"
SPEED_ERRORS = {"derived": 0.1, "imported": 0.05, "measured": 0.05, "measured-from-server": 0.05}
"""How much faster or slower than a profile of that status the GPU might be, for the range of the answer.

Held-out errors of imported profiles are 2.5 to 4.7 %; those of derived ones are not known, and 10 % is a guess.
"""


class Change(Struct, frozen=True):
    """One thing changed: a limit raised, or something that can be bought or switched on."""

    name: str
    kind: Literal["limit", "purchase"]
    options: dict[str, Any]
    guess: float = 1.0
    """Of the factor on the load that it brings: where its search may begin."""


class Gain(Struct, frozen=True):
    """What one change brings: the share by which load (or goodput) rises; None where it cannot be had."""

    change: Change
    gain: float | None
    reason: str = ""


def gains_of(tried: Sequence[Change], at_first: Reached, changed: Sequence[Reached]) -> list[Gain]:
    """What each change brings, by what was reached without it and with it."""
    gains = []
    for change, one in zip(tried, changed, strict=True):
        error_text = one.failing.outcome.error if one.failing is not None else None
        if one.ran is None:
            gains.append(Gain(change, None, error_text or one.unknown or "no load meets the SLOs"))
        else:
            gains.append(Gain(change, one.most / at_first.most - 1.0 if at_first.most else None, one.unknown))
    return gains


def faster(options: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """The option by which the GPU is that much faster."""
    return {"profile": also_changed(options.get("profile"), f"gpu_speed={factor!r}")}


def changes(options: Mapping[str, Any]) -> list[Change]:
    """What can be changed of a deployment; not the KV memory of pools that have unlike numbers of blocks."""
    setup = setup_of(options)
    limits = setup.limits
    # One --num-gpu-blocks-override is of both pools.
    has_memory = setup.decode is None or setup.decode.limits.num_gpu_blocks == limits.num_gpu_blocks

    def memory(num_blocks: int) -> dict[str, Any]:
        return {"num_gpu_blocks_override": num_blocks, "gpu_memory_utilization": Scenario.gpu_memory_utilization}

    budget, seats = ceil(MORE * limits.max_num_batched_tokens), ceil(MORE * limits.max_num_seqs)
    held = {"max_num_batched_tokens": max(limits.max_num_batched_tokens, seats)}
    found = [Change("KV memory", "limit", memory(ceil(MORE * limits.num_gpu_blocks)))] if has_memory else []
    found += [
        Change("seats", "limit", {"max_num_seqs": seats, **held}),
        Change("token budget", "limit", {"max_num_batched_tokens": budget}),
        Change(COMPUTE, "limit", faster(options, MORE), MORE),
    ]
    if pcie := _pcie(setup):
        profile = also_changed(options.get("profile"), f"pcie_bytes_per_s={MORE * pcie!r}")
        found.insert(-1, Change("PCIe", "limit", {"profile": profile}))
    if setup.scenario.link_gbps is not None:
        found.append(Change("link", "limit", {"link_gbps": MORE * setup.scenario.link_gbps}))
    if has_memory:
        ten = limits.num_gpu_blocks + int(TEN_GB / limits.block_bytes)
        found.append(Change("10 GB more KV memory a GPU", "purchase", memory(ten)))
    if setup.decode is None and setup.pp == 1 and setup.scenario.autoscale is None:
        engines = setup.scenario.num_engines + 1
        router = setup.scenario.router or "least-loaded"
        gpus = "one GPU more" if setup.tp == 1 else f"one engine more ({setup.tp} GPUs)"
        found.append(Change(gpus, "purchase", {"replicas": engines, "router": router}, engines / (engines - 1)))
    for role in ("prefill", "decode") if setup.decode is not None else ():
        engines = getattr(setup.scenario, f"{role}_replicas") + 1
        found.append(Change(f"one {role} engine more", "purchase", {f"{role}_replicas": engines}))
    if setup.scenario.kv_cache_dtype == "auto":
        found.append(Change(FP8_KV, "purchase", {"kv_cache_dtype": fp8_of(setup)}))
    if setup.policy.name == "vllm-v1" and setup.pp == 1 and not options.get("kv_offloading_size"):
        found.append(Change("CPU offload of 64 GiB", "purchase", {"kv_offloading_size": 64.0}))
    return found


def fp8_of(setup: Setup) -> str:
    """The FP8 that the GPU can hold: before compute capability 8.9 that of range, not of precision."""
    try:
        kv_dtype("fp8", setup.hardware)
    except UserError:
        return "fp8_e5m2"
    return "fp8"


def _pcie(setup: Setup) -> float:
    linear = setup.profile.linear
    # A linear profile has seconds a block, which no rate stands for.
    return setup.profile.value("h2d_bytes_per_s") if linear is None else 0.0


def bound_by(gains: Sequence[Gain]) -> str | None:
    """The limit that binds; None where none was tried."""
    found = {g.change.name: g.gain for g in gains if g.change.kind == "limit" and g.gain is not None}
    return binding(found) if found else None


def binding(gains: Mapping[str, float]) -> str:
    """The limit that binds, by the gains of load that raising each brought."""
    others = {name: gain for name, gain in gains.items() if name != COMPUTE}
    name = max(others, key=lambda limit: others[limit], default=COMPUTE)
    least = max(BINDS, OF_COMPUTE * gains.get(COMPUTE, 0.0))
    return name if others and others[name] >= least else COMPUTE
