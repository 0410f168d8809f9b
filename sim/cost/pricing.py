"""`Pricer`: what one iteration and everything that moves beside it takes on the lanes, from the cost model alone.

Both clocks may use it: the virtual one always, the real one where a device is only pretended.
"""

from collections.abc import Callable

from sim.cost.forms import CostModel
from sim.cost.lanes import SEND_BUFFER_LAYERS, Lane, pipelined_s, streamed_s
from sim.engine.plan import Direction, IterationPlan, StepTimes, Transfer

FinishAt = Callable[[float, Transfer], None]
"""Hears when a copy beside the computation will end, s, and which."""


class Lanes:
    """The lanes of one instance: computation, and PCIe in each direction over the links of its GPUs."""

    __slots__ = ("compute", "d2h", "h2d")

    def __init__(self, *, keep_intervals: bool = False) -> None:
        self.compute = Lane("GPU compute", keep_intervals=keep_intervals)
        self.h2d = Lane("PCIe host to device", keep_intervals=keep_intervals)
        self.d2h = Lane("PCIe device to host", keep_intervals=keep_intervals)

    def of(self, direction: Direction) -> Lane:
        """The PCIe lane of a direction."""
        return self.d2h if direction is Direction.D2H else self.h2d


class Pricer:
    """Prices plans of one instance of `layers` layers, and keeps its lanes."""

    def __init__(
        self, cost: CostModel, lanes: Lanes, finish_at: FinishAt, *, layers: int, copy_unit_bytes: float = 1 << 20
    ) -> None:
        self.cost, self.lanes, self.layers = cost, lanes, layers
        self.copy_unit_bytes = copy_unit_bytes
        self._finish_at = finish_at

    def step(self, plan: IterationPlan, now_s: float) -> StepTimes:
        """Price one iteration with everything that moves before, beside and behind its computation."""
        cost, lanes = self.cost, self.lanes
        start_s = now_s
        if plan.swapped_out_blocks or plan.swapped_in_blocks:
            start_s = lanes.d2h.reserve(now_s, cost.swap_s(plan.swapped_out_blocks), "swap out")
            start_s = lanes.h2d.reserve(start_s, cost.swap_s(plan.swapped_in_blocks), "swap in")
        compute_s = cost.iteration_s(plan)
        seconds = compute_s
        if plan.background or plan.pipelined_layers or plan.streamed_bytes:
            # Waiting for copies occupies the iteration, not the lane.
            seconds = self._overlap(plan, start_s, compute_s)
        end_s = start_s + seconds
        lanes.compute.run(start_s, compute_s, plan.kind)
        return StepTimes(1, end_s, 0.0, 0.0, end_s)

    def _overlap(self, plan: IterationPlan, start_s: float, compute_s: float) -> float:
        """Put the plan's copies on their lanes; returns the computation's duration, waiting for copies included."""
        cost, lanes = self.cost, self.lanes
        if not cost.copies_beside_compute:
            return self._in_turn(plan, start_s, compute_s)
        stretch = 1.0
        if cost.all_reduce_on_pcie and compute_s > 0.0:
            compute_s, stretch = self._share_with_all_reduce(plan, compute_s)
        for transfer in plan.background:
            copy_s = cost.copy_s(transfer.num_bytes, transfer.num_copies, transfer.direction) * stretch
            self._finish_at(lanes.of(transfer.direction).reserve(start_s, copy_s, "KV layers"), transfer)
        if plan.streamed_bytes:
            stream_s = cost.copy_s(plan.streamed_bytes, plan.streamed_copies, Direction.H2D) * stretch
            wait_s = max(0.0, lanes.h2d.free_s - start_s)
            compute_s = streamed_s(compute_s, self.layers, stream_s, wait_s)
            lanes.h2d.reserve(start_s, stream_s, "stream KV")
        copied = plan.pipelined_layers
        if copied:
            # Layers of the prefills leave for the host while later layers compute (LayerKV section 3.1.2).
            copy_s = cost.copy_s(plan.pipelined_bytes, plan.pipelined_copies, Direction.D2H) * stretch
            lane, layers, per_layer_s = lanes.d2h, self.layers, copy_s / copied
            wait_s = lane.free_s - start_s
            first_ready_s = start_s + compute_s / layers
            if max(per_layer_s, wait_s) * layers > compute_s:
                # Else every copy ends before the next layer does, and nothing waits.
                compute_s = pipelined_s(compute_s, layers, copied, per_layer_s, wait_s, SEND_BUFFER_LAYERS)
            end_s = lane.reserve(first_ready_s, copy_s, "offload behind prefill")
            # The last layer's copy cannot start before the layer is computed.
            last_s = start_s + compute_s - compute_s / layers + per_layer_s
            if last_s > end_s:
                lane.free_s = end_s = last_s
            for transfer in plan.pipelined_d2h:
                self._finish_at(end_s, transfer)
        return compute_s

    def _in_turn(self, plan: IterationPlan, start_s: float, compute_s: float) -> float:
        """Copies by the processor that computes (a CPU): one after the other, and nothing else meanwhile."""
        cost, lanes, at_s = self.cost, self.lanes, start_s
        for transfer in plan.background:
            copy_s = cost.copy_s(transfer.num_bytes, transfer.num_copies, transfer.direction)
            at_s = lanes.of(transfer.direction).reserve(at_s, copy_s, "KV layers")
            self._finish_at(at_s, transfer)
        if plan.streamed_bytes:
            copy_s = cost.copy_s(plan.streamed_bytes, plan.streamed_copies, Direction.H2D)
            at_s = lanes.h2d.reserve(at_s, copy_s, "stream KV")
        at_s += compute_s
        if plan.pipelined_layers:
            copy_s = cost.copy_s(plan.pipelined_bytes, plan.pipelined_copies, Direction.D2H)
            at_s = lanes.d2h.reserve(at_s, copy_s, "offload behind prefill")
            for transfer in plan.pipelined_d2h:
                self._finish_at(at_s, transfer)
        return at_s - start_s

    def _share_with_all_reduce(self, plan: IterationPlan, compute_s: float) -> tuple[float, float]:
        """All-reduces on the PCIe lane go first: copies get the time that is left, in units of `copy_unit_bytes`.

        A unit on its way is not interrupted, so an all-reduce waits for half of one on average (LayerKV 3.1.3).
        Returns the computation's duration and by how much copies are stretched.
        """
        cost = self.cost
        busy_s = cost.all_reduce_s(plan.prefill_tokens + plan.num_decodes)
        stretch = compute_s / (compute_s - busy_s)
        moved = plan.streamed_bytes + plan.pipelined_bytes + sum(t.num_bytes for t in plan.background)
        unit_s = cost.copy_s(min(self.copy_unit_bytes, moved), 1, Direction.D2H)
        copies_s = cost.copy_s(moved, max(1, int(moved / self.copy_unit_bytes)), Direction.D2H)
        waiting = cost.num_all_reduces * min(1.0, copies_s / compute_s)
        return compute_s + waiting * unit_s / 2, stretch
