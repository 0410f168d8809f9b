"""Which limit binds a deployment, and what more of something would buy: the same search with one thing changed.

A limit binds as far as half as much again of it carries more load. A faster GPU carries more whatever the limit is,
since sequences then leave their seats and their memory sooner: compute binds unless a limit brings half
as much.
"""

from collections.abc import Mapping
from math import ceil
from typing import Any, Literal

from msgspec import Struct

from sim.errors import UserError
from sim.run.prepare import Setup
from sim.specs.kv_format import kv_dtype
from sim.study.points import setup_of

MORE = 1.5
"""Each limit is raised by this factor, one at a time."""
BINDS = 0.05
"""Least gain of load that counts."""
OF_COMPUTE = 0.5
"""Least share of a faster GPU's gain with which another limit binds."""
TEN_GB = 10e9
COMPUTE = "compute"


class Change(Struct, frozen=True):
    """One thing changed: a limit raised, or something that can be bought or switched on."""

    name: str
    kind: Literal["limit", "purchase"]
    options: dict[str, Any]


def changes(options: Mapping[str, Any]) -> list[Change]:
    """What can be changed of a deployment."""
    setup = setup_of(options)
    limits = setup.limits
    blocks = ceil(MORE * limits.num_gpu_blocks)
    budget, seats = ceil(MORE * limits.max_num_batched_tokens), ceil(MORE * limits.max_num_seqs)
    held = {"max_num_batched_tokens": max(limits.max_num_batched_tokens, seats)}
    found = [
        Change("KV memory", "limit", {"num_gpu_blocks_override": blocks}),
        Change("seats", "limit", {"max_num_seqs": seats, **held}),
        Change("token budget", "limit", {"max_num_batched_tokens": budget}),
        Change("PCIe", "limit", _profile(options, f"pcie_bytes_per_s={MORE * _pcie(setup)!r}")),
        Change(COMPUTE, "limit", _profile(options, f"gpu_speed={MORE!r}")),
    ]
    if setup.scenario.link_gbps is not None:
        found.append(Change("link", "limit", {"link_gbps": MORE * setup.scenario.link_gbps}))
    ten = limits.num_gpu_blocks + int(TEN_GB / limits.block_bytes)
    found.append(Change("10 GB more KV memory a GPU", "purchase", {"num_gpu_blocks_override": ten}))
    if setup.decode is None and setup.pp == 1:
        engines = setup.scenario.num_engines + 1
        router = setup.scenario.router or "least-loaded"
        gpus = "one GPU more" if setup.tp == 1 else f"one engine more ({setup.tp} GPUs)"
        found.append(Change(gpus, "purchase", {"replicas": engines, "router": router}))
    for role in ("prefill", "decode") if setup.decode is not None else ():
        engines = getattr(setup.scenario, f"{role}_replicas") + 1
        found.append(Change(f"one {role} engine more", "purchase", {f"{role}_replicas": engines}))
    if setup.scenario.kv_cache_dtype == "auto":
        found.append(Change("fp8 KV", "purchase", {"kv_cache_dtype": _fp8(setup)}))
    if setup.policy.name == "vllm-v1" and not options.get("kv_offloading_size"):
        found.append(Change("CPU offload of 64 GiB", "purchase", {"kv_offloading_size": 64.0}))
    return found


def _fp8(setup: Setup) -> str:
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


def _profile(options: Mapping[str, Any], change: str) -> dict[str, Any]:
    base = options.get("profile") or ""
    return {"profile": f"{base},{change}" if "=" in base else f"{base}:{change}"}


def binding(gains: Mapping[str, float]) -> str:
    """The limit that binds, by the gains of load that raising each brought."""
    others = {name: gain for name, gain in gains.items() if name != COMPUTE}
    name = max(others, key=lambda limit: others[limit], default=COMPUTE)
    least = max(BINDS, OF_COMPUTE * gains.get(COMPUTE, 0.0))
    return name if others and others[name] >= least else COMPUTE
