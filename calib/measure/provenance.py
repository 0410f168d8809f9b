"""Where samples come from: `provenance.json`, and the comments at the top of `samples.csv`."""

from collections.abc import Mapping
from typing import Any

from calib.measure.log import Note, PointLog
from calib.measure.plan import Plan
from calib.measure.readings import ranges
from calib.measure.readings import warnings as readings_warnings
from sim.version import VERSION

SLOWER = 0.95
"""A clock below this share of what it was is worth a warning."""
BUSY = 0.5
"""Load average per processor before measuring that is worth one."""
REMARKS = {
    "cpu": "h2d and d2h are copies between two tensors in the same memory, none of it pinned; nothing is flushed from "
    "the caches between repeats",
    "cuda": "copies are queued as the runtime queues them, in batches where the driver takes them; layers are timed "
    "with CUDA events after the L2 cache was overwritten, the host 20 us ahead; step, launch and host_memcpy are timed "
    "by the host",
}


def provenance(log: PointLog, plan: Plan, device: str) -> dict[str, Any]:
    """All that is known of a calibration beside its samples."""
    skipped = plan.left_out | {p: log.skipped[p] for p in plan.points if p in log.skipped}
    readings = [log.readings[point] for point in plan.points if point in log.readings]
    return {
        "kvtwin": VERSION,
        "date": log.header.begun,
        **log.header.settings,
        "remarks": REMARKS[device],
        "warnings": [*warnings(log.notes, int(log.header.settings["cpus"])), *readings_warnings(readings)],
        "readings": ranges(readings),
        "states": [{"when": note.when, **note.state} for note in log.notes],
        "skipped": [{"point": point.label, "reason": reason} for point, reason in skipped.items()],
        "points": sum(point in log.measured for point in plan.points),
    }


def comments(facts: Mapping[str, Any]) -> list[str]:
    """The short facts as lines `key: value`; lists are counted, those of warnings spelled out."""
    lines = [f"{key}: {value}" for key, value in facts.items() if isinstance(value, str | int | float)]
    lines += [f"warning: {warning}" for warning in facts["warnings"]]
    return [*lines, f"skipped: {len(facts['skipped'])}"]


def warnings(notes: list[Note], cpus: int) -> list[str]:
    """What the states of a machine with so many processors say against the measurements."""
    found: list[str] = []
    load = notes[0].state.get("load_average") if notes else None
    if isinstance(load, float) and load > BUSY * cpus:
        found.append(f"the load average was {load:.2f} before measuring: other programs took turns on {cpus} CPUs")
    if len(notes) > 1:
        first, last = notes[0].state, notes[-1].state
        before, after = first.get("sm_mhz"), last.get("sm_mhz")
        if isinstance(before, float) and isinstance(after, float) and after < SLOWER * before:
            found.append(f"the SM clock under load fell from {before:g} to {after:g} MHz while measuring")
        before, after = first.get("matmul_s"), last.get("matmul_s")
        if isinstance(before, float) and isinstance(after, float) and before < SLOWER * after:
            found.append(f"a matrix product took {before:.4g} s before and {after:.4g} s after measuring")
    throttled = {str(note.state["throttled"]) for note in notes if "throttled" in note.state} - {"no", "unknown"}
    found += [f"clocks were held down under load: {reason}" for reason in sorted(throttled)]
    return found
