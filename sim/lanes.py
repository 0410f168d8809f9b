"""`Lane`: a resource that does one thing at a time (GPU compute, PCIe in each direction), as a timeline."""

from typing import NamedTuple


SEND_BUFFER_LAYERS = 2
"""Layers of a prefill whose copies may be on their way while the next layers compute: layer l must be out before layer
l+2 is computed (LayerKV section 3.1.2)."""


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


def pipelined_s(compute_s: float, layers: int, copied: int, copy_s: float, lane_wait_s: float, buffers: int) -> float:
    """Duration of a pass over `layers` equal layers of which `copied`, evenly spread, are copied out behind it.

    Layer k's copy starts once the layer is computed and the lane free (it is busy for `lane_wait_s` yet); a copied layer
    may only be computed while at most `buffers` of its predecessors' copies are unfinished (LayerKV's send buffer).
    Max-plus in closed form: the longest path is all computation, or computation of the first copied layer, then copies
    back to back, then the computation left when the last buffer was freed. Copies after the end are not waited for.
    """
    if copied <= buffers or copy_s <= 0.0:
        return compute_s
    layer_s = compute_s / layers
    waited = copied - buffers
    first_ready_s = layer_s * -(-layers // copied)
    start_s = max(first_ready_s, lane_wait_s)
    # From the computation of the last copied layer to the end.
    tail_s = layer_s
    by_copies = start_s + waited * copy_s + tail_s
    # The lane's backlog delays only the first copy when copies are faster than computation.
    by_backlog = max(0.0, lane_wait_s) + copy_s + compute_s * (1.0 - min(1.0, (buffers + 1) / copied))
    return max(compute_s, by_copies, by_backlog if lane_wait_s > first_ready_s else 0.0)


def streamed_s(compute_s: float, layers: int, stream_s: float, lane_wait_s: float) -> float:
    """Duration of a pass over `layers` equal layers, each starting when its KV has come over PCIe.

    Layer l starts at max(layer l-1 done, its KV arrived); the copies follow one another from `lane_wait_s` on.
    """
    return max(compute_s + lane_wait_s + stream_s / layers, lane_wait_s + stream_s + compute_s / layers)
