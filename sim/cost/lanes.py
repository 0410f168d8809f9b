"""`Lane`: a resource that does one thing at a time (GPU compute, PCIe in each direction), as a timeline."""

from collections.abc import Iterable
from typing import NamedTuple

from sim.cost.model import LayerTimes
from sim.engine.layers import offloaded_layers


class Interval(NamedTuple):
    """A busy stretch of a lane, s, and what for."""

    start_s: float
    end_s: float
    label: str


class Lane:
    """First come, first served. Keeps when it is free again, how long it was busy and, if asked, every interval."""

    __slots__ = ("busy_s", "free_s", "intervals", "name")

    def __init__(self, name: str, *, keep_intervals: bool = False) -> None:
        self.name = name
        self.free_s = 0.0
        self.busy_s = 0.0
        self.intervals: list[Interval] | None = [] if keep_intervals else None

    def reserve(self, ready_s: float, duration_s: float, label: str) -> float:
        """Occupy the lane for `duration_s` from `ready_s` or, if later, from when it is free; returns the end, s."""
        start_s = ready_s if ready_s > self.free_s else self.free_s
        end_s = start_s + duration_s
        self.free_s = end_s
        self.busy_s += duration_s
        if self.intervals is not None and duration_s > 0.0:
            self.intervals.append(Interval(start_s, end_s, label))
        return end_s

    def run(self, start_s: float, duration_s: float, label: str, busy_s: float | None = None) -> None:
        """Occupy a lane that nothing else uses, which is therefore free at `start_s`.

        `busy_s` is what of the stretch it works, where that is not all.
        """
        self.busy_s += duration_s if busy_s is None else busy_s
        if self.intervals is not None and duration_s > 0.0:
            self.intervals.append(Interval(start_s, start_s + duration_s, label))


def pipelined_s(compute_s: float, layers: int, copied: int, copy_s: float, lane_wait_s: float, buffers: int) -> float:
    """Duration of a pass over `layers` equal layers of which `copied`, evenly spread, are copied out behind it.

    A copy (`copy_s` each) starts once its layer is computed and the lane free, which is busy for `lane_wait_s` yet; a
    copied layer may only be computed while fewer than `buffers` earlier copies are unfinished (LayerKV's send buffer).
    Copies still under way at the end are not waited for.
    """
    if copied <= buffers:
        return compute_s
    layer_s = compute_s / layers
    offloaded = offloaded_layers(layers, layers - copied)
    if buffers > 1 and copy_s <= layer_s and lane_wait_s <= (offloaded[0] + 1) * layer_s:
        # Every copy ends before the next offloaded layer does: nothing waits.
        return compute_s
    # The max-plus recurrence over the offloaded layers; those between them only take their time.
    ends: list[float] = []
    done_s, lane_free_s, previous = 0.0, lane_wait_s, -1
    for k, layer in enumerate(offloaded):
        done_s += (layer - previous - 1) * layer_s
        if k >= buffers and ends[k - buffers] > done_s:
            done_s = ends[k - buffers]
        done_s += layer_s
        lane_free_s = max(done_s, lane_free_s) + copy_s
        ends.append(lane_free_s)
        previous = layer
    return done_s + (layers - 1 - previous) * layer_s


def streamed_s(compute_s: float, layers: int, read_s: float, written_s: float, lane_wait_s: float) -> float:
    """Duration of a pass over `layers` equal layers, each of which waits for its KV and sends out what it writes.

    Layer l starts at max(layer l-1 done, its KV arrived); the copies in follow one another from `lane_wait_s` on (below
    0: they began before the pass), the copies out once their layers are computed. A flow shop of three lanes and equal
    jobs: one job's whole way, and the longest lane's time for the others.
    """
    longest_s = max(max(compute_s, read_s), written_s)
    seconds = lane_wait_s + (compute_s + read_s + written_s) / layers + longest_s * (layers - 1) / layers
    return seconds if lane_wait_s >= 0.0 else max(seconds, streamed_s(compute_s, layers, 0.0, written_s, 0.0))


def restored_s(classes: Iterable[LayerTimes]) -> float:
    """Duration of bringing layers back one after the other, each computed once its copy has come (HCache's pipeline).

    Copies follow one another, computations too: a flow shop of two lanes, in closed form for each class of like layers.
    """
    copied_s = computed_s = 0.0
    for count, compute_s, copy_s, _ in classes:
        if count:
            first_s, last_s = copied_s + copy_s + count * compute_s, copied_s + count * copy_s + compute_s
            computed_s = max(max(computed_s + count * compute_s, first_s), last_s)
            copied_s += count * copy_s
    return max(copied_s, computed_s)
