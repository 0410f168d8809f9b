"""Which live runs schedule an iteration while the one before it runs (vLLM's async scheduling)."""

from dataclasses import replace

from sim.cost.engine_profile import OURS, OURS_AHEAD, load_engine_profile
from sim.errors import UserError
from sim.kv.hybrid import HybridMemory
from sim.kv.paged import PagedMemory
from sim.kv.prefix import PrefixMemory
from sim.options.scenario import Scenario
from sim.run.prepare import prepare
from sim.run.runs import Recording, build_engine
from sim.systems.base import Policy

AHEAD = "unified"
"""The batching that can be scheduled ahead."""
PLAIN = {"eviction": "recompute", "stage": "direct"}
"""Parts whose plans move nothing between GPU and host."""


def scheduled(scenario: Scenario, policy: Policy, device: str) -> tuple[Scenario, Policy]:
    """Both, with `--async-scheduling` decided: as vLLM has it, on where it is open, but not on a CPU.

    Left open it is off, too, where iterations wait for copies, and where the engine's host time is not hidden. Where it
    is on, our own engine's host is priced behind the device.

    Raises:
        UserError: asked for where iterations wait for copies.
    """
    asked = policy.async_scheduling_asked
    if asked is False:
        return scenario, policy
    batching = policy.names["batching"]
    reason = moves(scenario, policy) if batching == AHEAD else f"batching={batching}"
    if asked and reason:
        raise UserError(f"--async-scheduling: {policy.name} has {reason}, and a device cannot be scheduled ahead then")
    engine = scenario.engine_profile
    hides = engine == OURS or (engine is not None and load_engine_profile(engine).host == "hidden")
    ahead = bool(asked) or (device == "cuda" and hides and not reason)
    if ahead and engine == OURS:
        scenario = replace(scenario, engine_profile=OURS_AHEAD)
    return scenario, policy.with_async_scheduling(ahead)


def moves(scenario: Scenario, policy: Policy) -> str:
    """What moves KV between GPU and host, or may, in words; empty where nothing does."""
    names = policy.names
    for kind, name in PLAIN.items():
        if names[kind] != name:
            return f"{kind}={names[kind]}"
    setup = prepare(scenario, "", policy.with_async_scheduling(False))
    memory = build_engine(setup, None, Recording()).scheduler.memory
    can = type(memory) in (PagedMemory, PrefixMemory, HybridMemory) and memory.backing is None
    return "" if can else f"memory={names['memory']} ({type(memory.backing or memory).__name__})"
