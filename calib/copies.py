"""Fits of copies and of all-reduces.

T_copy = setup + max(launch * pieces, bytes / X): pieces are asked for while others are on their way (per direction;
    LayerKV's beta is not one constant for small copies). Fewer than `BATCHED_COPIES` pieces are asked for one by one:
    T_copy = lone + max(lone * (pieces - 1), bytes / X).
T_all-reduce = launch + 2 (G - 1) latency + r / X + 2 sqrt(chunk r / X), r = 2 (G - 1) / G * bytes: a ring of G GPUs, as
    a pipeline of chunks. k chunks cost k chunk + (r / X) / k beside, least at k = sqrt((r / X) / chunk).
"""

from collections.abc import Mapping, Sequence

import numpy as np

from calib.robust import Array, Estimate, Fit, Parameter, fit_relative, mape
from calib.samples import Sample
from sim.cost.model import BATCHED_COPIES
from sim.errors import UserError

COPY_COSTS = ("copy_lone_s", "copy_setup_s", "copy_launch_s")
MOST_ERROR = 0.25
"""Mean error beyond which copies follow another law than this one."""
LEAST_S = 1e-9
LEAST_SIZES = 3
OFF = 0.8
LEAST_SPAN = 16.0
"""Copies of fewer sizes, or of sizes closer together, cannot tell the cost of asking from the rate."""


def plain_copies(samples: Sequence[Sample], op: str) -> list[Sample]:
    """Copies of pinned memory that ran alone."""
    return [s for s in samples if s.op == op and s.memory == "pinned" and not s.beside]


def check_sizes(samples: Sequence[Sample], op: str) -> None:
    """UserError naming what is missing, unless the samples' sizes can tell launch from rate."""
    sizes = sorted({s.num_bytes / s.num_copies for s in samples})
    if len(sizes) < LEAST_SIZES or sizes[-1] < LEAST_SPAN * sizes[0]:
        raise UserError(
            f"samples: op {op!r} has {len(sizes)} sizes, from {sizes[0]:g} to {sizes[-1]:g} bytes a piece: measure at "
            f"least {LEAST_SIZES} sizes spanning a factor of {LEAST_SPAN:g}, or leave the op out"
        )


def copy_s(constants: Mapping[str, float], samples: Sequence[Sample]) -> Array:
    """Seconds of each copy, shape (samples,), as `sim.cost.roofline` prices it."""
    pieces, moved_s = _pieces(samples), _moved_s(constants, samples)
    batched_s = constants.get("copy_setup_s", 0.0) + np.maximum(constants["copy_launch_s"] * pieces, moved_s)
    lone = constants.get("copy_lone_s", 0.0)
    if not lone:
        return batched_s
    return np.where(pieces < BATCHED_COPIES, lone + np.maximum(lone * (pieces - 1), moved_s), batched_s)


def fit_copies(samples: Sequence[Sample]) -> Fit | None:
    """copy_lone_s, copy_setup_s, copy_launch_s (for both directions) and {h2d,d2h}_bytes_per_s; None without copies.

    A set-up is told where copies of several numbers of pieces are asked for together, what lone ones cost where there
    are any: else these constants are left out.
    """
    chosen = [s for op in ("h2d", "d2h") for s in plain_copies(samples, op)]
    if not chosen:
        return None
    batched = [s for s in chosen if s.num_copies >= BATCHED_COPIES]
    parameters = _rates(chosen)
    # Starts lie off what the samples say, where a maximum has no slope.
    lone = [s.latency_s for s in chosen if s.num_copies < BATCHED_COPIES]
    if lone and batched:
        parameters["copy_lone_s"] = Parameter(max(OFF * min(lone), LEAST_S), log=False)
    asked = batched or chosen
    if len({s.num_copies for s in batched}) > 1:
        parameters["copy_setup_s"] = Parameter(max(float(np.min(_measured(batched))) / 2, LEAST_S), log=False)
    parameters["copy_launch_s"] = Parameter(
        max(OFF * float(np.min(_measured(asked) / _pieces(asked))), LEAST_S), log=False
    )
    found = fit_relative(lambda values: copy_s(values, chosen), _measured(chosen), parameters)
    for name in COPY_COSTS:
        if name in found.estimates and not found.estimates[name].told:
            # Too small to be seen beside the rest: of a launch, every piece was longer on its way than asked for.
            found.estimates[name] = Estimate(0.0, None, 0.0, 0.0)
    return found


def fault_of_copies(samples: Sequence[Sample], fit: Fit) -> str:
    """Why a fit says nothing of the link; empty where it does."""
    for name, estimate in fit.estimates.items():
        if name.endswith("_per_s") and not estimate.told:
            low, high = f"{estimate.low:.3g}", f"{estimate.high:.3g}"
            return f"they do not tell {name}: {estimate.value:.3g}, 95 % interval {low} to {high}"
    chosen = [s for op in ("h2d", "d2h") for s in plain_copies(samples, op)]
    error = mape(copy_s(fit.values, chosen), _measured(chosen))
    return f"the fit misses them by {100 * error:.0f} %" if error > MOST_ERROR else ""


def turns_s(constants: Mapping[str, float], samples: Sequence[Sample]) -> Array:
    """Seconds of each copy where asking and moving take turns, as the papers have it; shape (samples,)."""
    return constants["copy_launch_s"] * _pieces(samples) + _moved_s(constants, samples)


def fit_turns(samples: Sequence[Sample]) -> Fit | None:
    """copy_launch_s and rates of `turns_s`; None without copies."""
    chosen = [s for op in ("h2d", "d2h") for s in plain_copies(samples, op)]
    if not chosen:
        return None
    least_s = OFF * max(float(np.min(_measured(chosen) / _pieces(chosen))), LEAST_S)
    parameters = {"copy_launch_s": Parameter(least_s, log=False)} | _rates(chosen)
    found = fit_relative(lambda values: turns_s(values, chosen), _measured(chosen), parameters)
    if not found.estimates["copy_launch_s"].told:
        found.estimates["copy_launch_s"] = Estimate(0.0, None, 0.0, 0.0)
    return found


def _rates(samples: Sequence[Sample]) -> dict[str, Parameter]:
    """A rate to find for each direction; UserError where sizes cannot tell it."""
    found: dict[str, Parameter] = {}
    for op in sorted({s.op for s in samples}):
        check_sizes([s for s in samples if s.op == op], op)
        best = max(s.num_bytes / s.latency_s for s in samples if s.op == op)
        found[f"{op}_bytes_per_s"] = Parameter(best / OFF)
    return found


def fit_host_memcpy(samples: Sequence[Sample]) -> Fit | None:
    """host_memcpy_bytes_per_s, with a cost of asking that no profile needs; None where it was not measured."""
    chosen = plain_copies(samples, "host_memcpy")
    if not chosen:
        return None
    check_sizes(chosen, "host_memcpy")
    measured, pieces, moved = _measured(chosen), _pieces(chosen), _bytes(chosen)
    parameters = {
        "host_memcpy_bytes_per_s": Parameter(float(np.max(moved / measured))),
        "host_memcpy_launch_s": Parameter(max(float(np.min(measured / pieces)), 1e-9), log=False),
    }
    return fit_relative(
        lambda v: v["host_memcpy_launch_s"] * pieces + moved / v["host_memcpy_bytes_per_s"], measured, parameters
    )


def all_reduce_s(constants: Mapping[str, float], num_bytes: Array, gpus: Array) -> Array:
    """Seconds of all-reduces of `num_bytes` over `gpus` GPUs, shapes (n,); zero on one GPU."""
    steps = 2 * (gpus - 1)
    moved_s = steps / gpus * num_bytes / constants["allreduce_bytes_per_s"]
    pipelined_s = moved_s + 2 * np.sqrt(constants.get("allreduce_chunk_s", 0.0) * moved_s)
    return (
        (gpus > 1) * constants.get("allreduce_launch_s", 0.0) + steps * constants["allreduce_latency_s"] + pipelined_s
    )


def fit_all_reduce(samples: Sequence[Sample]) -> Fit | None:
    """The four allreduce constants; None where no all-reduce was measured.

    A launch is told from the ring's latency only where groups of several sizes were measured; else it is left out.
    """
    chosen = fastest_all_reduces(samples)
    if not chosen:
        return None
    check_sizes(chosen, "all_reduce")
    measured, moved = _measured(chosen), _bytes(chosen)
    gpus = np.array([s.tp for s in chosen], dtype=np.float64)
    parameters = {
        "allreduce_bytes_per_s": Parameter(float(np.max(2 * (gpus - 1) / gpus * moved / measured))),
        "allreduce_latency_s": Parameter(max(float(np.min(measured / (2 * (gpus - 1)))), 1e-9), log=False),
        "allreduce_chunk_s": Parameter(1e-6, 0.0, log=False),
    }
    if len(set(gpus)) > 1:
        parameters["allreduce_launch_s"] = Parameter(max(float(np.min(measured)), 1e-9), log=False)
    return fit_relative(lambda values: all_reduce_s(values, moved, gpus), measured, parameters)


def fastest_all_reduces(samples: Sequence[Sample]) -> list[Sample]:
    """All-reduces that ran alone, of each size and group the fastest: of several machines the least limited."""
    chosen = [s for s in samples if s.op == "all_reduce" and not s.beside]
    found = {(s.tp, s.num_bytes): s for s in sorted(chosen, key=lambda s: -s.latency_s)}
    return [found[key] for key in sorted(found)]


def all_reduce_points(samples: Sequence[Sample]) -> dict[str, list[tuple[float, float]]] | None:
    """Bytes and seconds of measured all-reduces by the number of GPUs, as profiles hold them; None of none."""
    found: dict[str, list[tuple[float, float]]] = {}
    for s in fastest_all_reduces(samples):
        found.setdefault(str(s.tp), []).append((s.num_bytes, s.latency_s))
    return found or None


def _measured(samples: Sequence[Sample]) -> Array:
    return np.array([s.latency_s for s in samples])


def _moved_s(constants: Mapping[str, float], samples: Sequence[Sample]) -> Array:
    return _bytes(samples) / np.array([constants[f"{s.op}_bytes_per_s"] for s in samples])


def _bytes(samples: Sequence[Sample]) -> Array:
    return np.array([s.num_bytes for s in samples])


def _pieces(samples: Sequence[Sample]) -> Array:
    return np.array([s.num_copies for s in samples], dtype=np.float64)
