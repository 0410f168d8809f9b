"""`Pricer`: what one iteration and everything that moves beside it takes on the lanes, from the cost model alone.

Both clocks may use it: the virtual one always, the real one where a device is only pretended.
"""

from collections.abc import Callable, Collection
from functools import lru_cache, partial
from math import ceil, inf

from sim.cost.host import after_host_s, run_beside_host
from sim.cost.lanes import Lane, pipelined_s, restored_s, streamed_s
from sim.cost.model import CostModel, run_s, steps_until
from sim.cost.restoring import LayerSplit, StateBytes, restore_times
from sim.engine.changes import D2H, DISK, H2D, HOST, Direction, Gathered, Move, Projected, Rebuilt, Restore, Streamed
from sim.engine.layers import SEND_BUFFER_LAYERS
from sim.engine.plan import IterationPlan, StepTimes

KNOWN_COPIES = 4096
"""Sizes of copies, in each direction, whose seconds are kept."""
EndsAt = Callable[[Collection[Move]], float]
FinishAt = Callable[[float, Move], None]
"""Hears when a copy beside the computation will end, s, and which."""


LanesMark = tuple[tuple[float, float, int], ...]
"""Where every lane stood: `Lanes.mark`."""


class Lanes:
    """The lanes of one instance: computation, PCIe in each direction over the links of its GPUs, the engine's host.

    `links` are its lanes to other instances, in the order in which they were asked for; `disk_read` and `disk_write`
    those between its host and its disk.
    """

    __slots__ = ("_all", "compute", "d2h", "disk_read", "disk_write", "h2d", "host", "links")

    def __init__(self, *, keep_intervals: bool = False) -> None:
        self.compute = Lane("GPU compute", keep_intervals=keep_intervals)
        self.h2d = Lane("PCIe host to device", keep_intervals=keep_intervals)
        self.d2h = Lane("PCIe device to host", keep_intervals=keep_intervals)
        self.host = Lane("Engine host", keep_intervals=keep_intervals)
        self._all = self.compute, self.h2d, self.d2h, self.host
        # No jump uses them.
        self.disk_read = Lane("Disk read", keep_intervals=keep_intervals)
        self.disk_write = Lane("Disk write", keep_intervals=keep_intervals)
        self.links: dict[str, Lane] = {}

    def link(self, name: str) -> Lane:
        """The lane to other instances of that name; new at first."""
        lane = self.links.get(name)
        if lane is None:
            lane = self.links[name] = Lane(name, keep_intervals=self.compute.intervals is not None)
        return lane

    def of(self, direction: Direction) -> Lane:
        """The PCIe lane of a direction."""
        return self.d2h if direction is D2H else self.h2d

    def of_move(self, move: Move) -> Lane:
        """The lane that a copy of this engine takes."""
        if move.source is DISK:
            return self.disk_read
        if move.target is DISK:
            return self.disk_write
        return self.d2h if move.target is HOST else self.h2d

    def mark(self) -> LanesMark:
        """Where the lanes stand, for `restore`."""
        return tuple((lane.free_s, lane.busy_s, len(lane.intervals or ())) for lane in self._all)

    def restore(self, mark: LanesMark) -> None:
        """Forget what was booked since `mark`."""
        for lane, (free_s, busy_s, num_intervals) in zip(self._all, mark, strict=True):
            lane.free_s, lane.busy_s = free_s, busy_s
            if lane.intervals is not None:
                del lane.intervals[num_intervals:]


class Pricer:
    """Prices plans of one instance, and keeps its lanes.

    Args:
        cost, lanes: the model of time, and where it is spent.
        finish_at: hears of the ends of copies.
        ends_at: says when the last of some copies ends, of which those that are over do not count.
        layers: of the model.
        num_groups: layer groups that a whole block is divided into (`Memory.num_groups`).
        block_bytes: of a whole block, per GPU.
        hidden_bytes: of one token's input of one layer, for restores from hidden states.
        copy_unit_bytes: pieces in which copies give way to all-reduces on the same lane.
    """

    def __init__(
        self,
        cost: CostModel,
        lanes: Lanes,
        finish_at: FinishAt,
        *,
        layers: int,
        num_groups: int,
        block_bytes: float,
        hidden_bytes: float = 0.0,
        copy_unit_bytes: float = 1 << 20,
        ends_at: EndsAt = lambda moves: 0.0,
    ) -> None:
        self.cost, self.lanes, self.layers = cost, lanes, layers
        self._host = cost.host
        self.copy_unit_bytes = copy_unit_bytes
        self.unit_bytes = block_bytes / num_groups
        self.unit_layers = layers // num_groups
        self.hidden_bytes = hidden_bytes
        # Copies of as many blocks come again and again.
        self._out_s = lru_cache(maxsize=KNOWN_COPIES)(partial(self._copied_s, D2H))
        self._in_s = lru_cache(maxsize=KNOWN_COPIES)(partial(self._copied_s, H2D))
        self._finish_at, self._ends_at = finish_at, ends_at
        self._waits_s = self.started_s = 0.0
        """When the last computation that had to wait for copies was ready to, and when it began, s."""

    def copy_s(self, num_blocks: int, direction: Direction) -> float:
        """Copy of so many pool blocks."""
        return self._out_s(num_blocks) if direction is D2H else self._in_s(num_blocks)

    def _copied_s(self, direction: Direction, num_blocks: int) -> float:
        cost = self.cost
        return cost.copy_s(num_blocks * self.unit_bytes, cost.num_copies(num_blocks, self.unit_layers), direction)

    def move_s(self, move: Move) -> float:
        """One copy, alone on its lane."""
        if move.s_per_block is not None:
            return move.num_blocks * move.s_per_block
        return self._out_s(move.num_blocks) if move.target is HOST else self._in_s(move.num_blocks)

    # -- one iteration ---------------------------------------------------------------------------------------------

    def step(self, plan: IterationPlan, now_s: float) -> StepTimes:
        """Price one iteration with everything that moves before, beside and behind its computation."""
        start_s = now_s
        if self._host is not None:
            lanes = self.lanes
            start_s = after_host_s(self._host, plan.num_decodes + len(plan.chunks), now_s, lanes.host, lanes.compute)
        if plan.swapped_out_blocks or plan.swapped_in_blocks or plan.mixed_restores:
            start_s = self._before(plan, start_s)
        if plan.awaited:
            self._waits_s = start_s
            start_s = self.started_s = self._await(plan, start_s)
        compute_s = self.cost.iteration_s(plan)
        if plan.decode_shared_tokens:
            compute_s -= self.cost.unread_s(plan.decode_shared_tokens)
        seconds = compute_s
        if plan.beside or plan.behind or plan.streamed:
            if plan.streamed and not isinstance(plan.streamed[-1], Streamed):
                compute_s = self._rebuilding(plan, compute_s)
            # Waiting for copies occupies the iteration, not the lane.
            seconds = self._overlap(plan, start_s, compute_s)
        if plan.added_s:
            compute_s += plan.added_s
            seconds += plan.added_s
        end_s = start_s + seconds
        lane = self.lanes.compute
        if lane.intervals is None:
            lane.busy_s += compute_s
        else:
            lane.run(start_s, compute_s, plan.kind)
        if plan.after:
            end_s = self._follow(plan, end_s)
        lane.free_s = end_s
        return StepTimes(1, end_s, 0.0, 0.0, end_s, 1)

    def _before(self, plan: IterationPlan, now_s: float) -> float:
        """Copies on the computation's own stream; returns when it may begin, s."""
        lanes = self.lanes
        start_s = now_s
        if plan.swapped_out_blocks:
            start_s = lanes.d2h.reserve(now_s, self.copy_s(plan.swapped_out_blocks, D2H), "swap out")
        if plan.swapped_in_blocks:
            start_s = lanes.h2d.reserve(start_s, self.copy_s(plan.swapped_in_blocks, H2D), "swap in")
        for restore in plan.mixed_restores:
            start_s = self._restore(restore, start_s)
        return start_s

    def _await(self, plan: IterationPlan, now_s: float) -> float:
        """Begin the copies beside the computation, and wait for those under way that are awaited; their end, s."""
        for move in plan.beside:
            self._start(move, now_s)
        return max(now_s, self._ends_at(plan.awaited))

    def _start(self, move: Move, now_s: float, stretch: float = 1.0) -> float:
        """Begin a copy beside the computation; returns its end, s. What is on the disk's lanes nothing stretches."""
        seconds = self.move_s(move)
        if stretch != 1.0 and not move.uses_disk:
            seconds *= stretch
        end_s = self.lanes.of_move(move).reserve(now_s, seconds, "KV layers")
        self._finish_at(end_s, move)
        return end_s

    def _follow(self, plan: IterationPlan, end_s: float) -> float:
        """Copies that begin when the computation has ended; when the next may begin, s."""
        for move in plan.after:
            ended_s = self.lanes.of(move.direction).reserve(end_s, self.move_s(move), "load KV")
            self._finish_at(ended_s, move)
            if not self.cost.copies_beside_compute:
                end_s = ended_s
        return end_s

    def _restore(self, restore: Restore, start_s: float) -> float:
        """Layers computed again, projected from hidden states or copied, as a pipeline (HCache); returns its end, s."""
        split = LayerSplit(len(restore.recomputed_groups), len(restore.hidden_groups), len(restore.kv_groups))
        blocks = restore.num_blocks // split.copied if split.copied else 0
        state = StateBytes(self.hidden_bytes, self.unit_bytes / self.unit_layers)
        classes = restore_times(self.cost, split, restore.num_tokens, blocks, state)
        seconds = restored_s(classes)
        self.lanes.h2d.reserve(start_s, sum([times.num_layers * times.h2d_s for times in classes]), "restore")
        self.lanes.compute.run(start_s, sum([times.num_layers * times.compute_s for times in classes]), "restore")
        return start_s + seconds

    def _overlap(self, plan: IterationPlan, start_s: float, compute_s: float) -> float:
        """Put the plan's copies on their lanes; returns the computation's duration, waiting for copies included."""
        cost = self.cost
        if not cost.copies_beside_compute:
            return self._in_turn(plan, start_s, compute_s)
        stretch = 1.0
        if cost.all_reduce_on_pcie and compute_s > 0.0:
            compute_s, stretch = self._share_with_all_reduce(plan, compute_s)
        for move in () if plan.awaited else plan.beside:
            self._start(move, start_s, stretch)
        if plan.streamed:
            compute_s = self._stream(plan, start_s, compute_s, stretch)
        if plan.behind:
            compute_s = self._send_behind(plan, start_s, compute_s, stretch)
        return compute_s

    def _stream(self, plan: IterationPlan, start_s: float, compute_s: float, stretch: float) -> float:
        """Every layer waits for its KV from the host; returns the pass's duration."""
        lanes = self.lanes
        read_s, written_s = self._streams(plan)
        record, read_from_s = plan.streamed[-1], start_s
        # What a record is is told sooner than what it is not.
        is_plain = isinstance(record, Streamed)
        if not is_plain and isinstance(record, Gathered) and plan.awaited:
            read_from_s = max(self._waits_s, self._ends_at(plan.awaited[: record.after]))
        wait_s = max(read_from_s, lanes.h2d.free_s) - start_s
        if not is_plain and isinstance(record, Rebuilt):
            copied_s = lanes.h2d.reserve(start_s, read_s * stretch, "stream KV") - start_s if read_s else 0.0
            seconds = self._rebuilt_s(plan, record, compute_s, read_s * stretch, copied_s)
            if written_s:
                written_s = lanes.d2h.reserve(start_s, written_s * stretch, "stream KV") - start_s
            return max(seconds, written_s)
        seconds = streamed_s(compute_s, self.layers, read_s * stretch, written_s * stretch, wait_s)
        lanes.h2d.reserve(read_from_s, read_s * stretch, "stream KV")
        if written_s:
            lanes.d2h.reserve(start_s + seconds - written_s * stretch, written_s * stretch, "stream KV")
        return seconds

    def _rebuilding(self, plan: IterationPlan, compute_s: float) -> float:
        """The computation with what makes KV anew between its layers, s."""
        from sim.cost.rebuilding import kernels_s  # noqa: PLC0415 - few systems have it

        for record in plan.streamed:
            if isinstance(record, Rebuilt):
                compute_s = kernels_s(self.cost, plan, record, compute_s, self.layers)
            elif isinstance(record, Projected):
                compute_s += record.num_groups * self.unit_layers * self.cost.project_s(record.num_tokens)
        return compute_s

    def _rebuilt_s(
        self, plan: IterationPlan, record: Rebuilt, compute_s: float, read_s: float, copied_s: float
    ) -> float:
        """Duration of a pass that brings KV back between its layers; copies that take `read_s` end after `copied_s`."""
        if record.overlapped and record.after:
            from sim.cost.rebuilding import contiguous_s  # noqa: PLC0415 - few systems have it

            decode_s = min(compute_s, self.cost.iteration_s(plan))
            again_s, wait_s = compute_s - decode_s, copied_s - read_s
            return contiguous_s(record, decode_s, again_s, read_s, wait_s, self.layers, self.unit_layers)
        # Windows of layers are many and alike: theirs overlap as their sums do.
        return max(compute_s, copied_s) if record.overlapped else compute_s + copied_s

    def _streams(self, plan: IterationPlan) -> tuple[float, float]:
        """Seconds of the copies in and out between the layers, alone on their lanes."""
        read = written = 0
        gathered_s = 0.0
        projected: list[Projected] = []
        for record in plan.streamed:
            written += record.num_written
            if isinstance(record, Streamed):
                read += record.num_read
            elif isinstance(record, Gathered):
                gathered_s += record.num_read * record.s_per_block
            else:
                read += record.num_read
                if isinstance(record, Projected):
                    projected.append(record)
        out_s = self._out_s(written) if written else 0.0
        in_s = self._in_s(read) + gathered_s
        for record in projected:
            if record.num_tokens:
                # Inputs of a layer lie together: one piece each.
                layers = record.num_groups * self.unit_layers
                in_s += self.cost.copy_s(layers * record.num_tokens * self.hidden_bytes, layers, H2D)
        return in_s, out_s

    def _send_behind(self, plan: IterationPlan, start_s: float, compute_s: float, stretch: float) -> float:
        """Layers of the prefills leave for the host while later layers compute (LayerKV section 3.1.2)."""
        lane, layers, sent = self.lanes.d2h, self.layers, plan.behind_groups
        layer_s = compute_s / layers
        copy_s = self._out_s(plan.behind_blocks) * stretch
        per_layer_s = copy_s / sent
        wait_s = lane.free_s - start_s
        if max(per_layer_s, wait_s) * layers > compute_s:
            # Else every copy ends before the next layer does, and nothing waits.
            compute_s = pipelined_s(compute_s, layers, sent, per_layer_s, wait_s, SEND_BUFFER_LAYERS)
        end_s = lane.reserve(start_s + layer_s, copy_s, "offload behind prefill")
        # The last layer's copy cannot start before the layer is computed.
        last_s = start_s + compute_s - layer_s + per_layer_s
        if last_s > end_s:
            lane.free_s = end_s = last_s
        for move in plan.behind:
            if move.is_reported:
                self._finish_at(end_s, move)
        return compute_s

    def _in_turn(self, plan: IterationPlan, start_s: float, compute_s: float) -> float:
        """Copies by the processor that computes (a CPU): one after the other, and nothing else meanwhile."""
        lanes, at_s = self.lanes, start_s
        for move in () if plan.awaited else plan.beside:
            end_s = self._start(move, at_s)
            # A disk needs no processor.
            at_s = at_s if move.uses_disk else end_s
        if plan.streamed:
            read_s, written_s = self._streams(plan)
            at_s = lanes.h2d.reserve(at_s, read_s, "stream KV")
            if written_s:
                at_s = lanes.d2h.reserve(at_s, written_s, "stream KV")
        at_s += compute_s
        if plan.behind:
            copy_s = self.copy_s(plan.behind_blocks, D2H)
            at_s = lanes.d2h.reserve(at_s, copy_s, "offload behind prefill")
            for move in plan.behind:
                if move.is_reported:
                    self._finish_at(at_s, move)
        return at_s - start_s

    def _share_with_all_reduce(self, plan: IterationPlan, compute_s: float) -> tuple[float, float]:
        """All-reduces on the PCIe lane go first: copies get the time that is left, in units of `copy_unit_bytes`.

        A unit on its way is not interrupted, so an all-reduce waits for half of one on average (LayerKV 3.1.3).
        Returns the computation's duration and by how much copies are stretched.
        """
        cost = self.cost
        busy_s = cost.all_reduce_s(plan.num_tokens)
        stretch = compute_s / (compute_s - busy_s)
        blocks = plan.behind_blocks + sum(move.num_blocks for move in plan.beside if not move.uses_disk)
        blocks += sum(streamed.num_read + streamed.num_written for streamed in plan.streamed)
        moved = blocks * self.unit_bytes
        unit_s = cost.copy_s(min(self.copy_unit_bytes, moved), 1, D2H)
        copies_s = cost.copy_s(moved, max(1, int(moved / self.copy_unit_bytes)), D2H)
        waiting = cost.num_all_reduces * min(1.0, copies_s / compute_s)
        return compute_s + waiting * unit_s / 2, stretch

    # -- many like iterations ----------------------------------------------------------------------------------------

    def run(self, plan: IterationPlan, now_s: float, until_s: float, more: int = 0) -> StepTimes:
        """Price like decode iterations as one event: up to `plan.max_steps`, to the first end at or after `until_s`.

        Then `more` of them, where the next is scheduled before the last begins.
        """
        first_s, slope_s = self.cost.decode_run(
            plan.num_decodes, plan.decode_context_tokens, plan.decode_window, plan.decode_longest_tokens
        )
        if plan.decode_shared_tokens:
            first_s -= self.cost.unread_s(plan.decode_shared_tokens)
        first_s += plan.added_s
        steps, host = plan.max_steps, self._host
        if plan.num_decodes > self.cost.straight_decodes and steps > 1:
            batch = plan.num_decodes, plan.decode_context_tokens, plan.decode_window, plan.decode_longest_tokens
            steps = int(min(steps, self.cost.straight_steps(*batch)))
        if host is not None and host.hidden:
            if plan.streamed:
                return self.step(plan, now_s)
            lanes, ahead = self.lanes, more > 0
            return run_beside_host(
                host, plan.num_decodes, first_s, slope_s, steps, now_s, until_s, lanes.host, lanes.compute, ahead=ahead
            )
        host_s = 0.0 if host is None else host.seconds(plan.num_decodes)
        if plan.streamed:
            lanes = self.lanes
            if (
                not self.cost.copies_beside_compute
                or self.cost.all_reduce_on_pcie
                or lanes.h2d.free_s > now_s
                or lanes.d2h.free_s > now_s
            ):
                return self.step(plan, now_s)
            if not isinstance(plan.streamed[-1], Streamed):
                first_s = self._rebuilding(plan, first_s)
            return self._run_streamed(plan, steps, now_s, until_s, first_s, slope_s, host_s)
        first_s += host_s
        if steps > 1 and until_s < inf:
            steps = min(steps, steps_until(until_s - now_s, first_s, slope_s, steps) + more)
        end_s = now_s + (run_s(first_s, slope_s, steps) if steps > 1 else first_s)
        if host_s:
            self.lanes.host.run(now_s, end_s - now_s, "host", host_s * steps)
        self.lanes.compute.run(now_s, end_s - now_s, "decode", end_s - now_s - host_s * steps)
        return StepTimes(steps, now_s + first_s, first_s + slope_s, slope_s, end_s, steps)

    def _run_streamed(
        self,
        plan: IterationPlan,
        steps: int,
        now_s: float,
        until_s: float,
        compute_s: float,
        slope_s: float,
        host_s: float,
    ) -> StepTimes:
        """Iterations that bring in as much KV each: copying or computing is longer, up to where that changes."""
        lanes, layers = self.lanes, self.layers
        read_s, written_s = self._streams(plan)
        growth_s = slope_s
        copying_s = max(read_s, written_s)
        if compute_s < copying_s:
            growth_s = slope_s / layers
            if slope_s > 0.0:
                steps = min(steps, max(1, ceil((copying_s - compute_s) / slope_s)))
        first_s = host_s + streamed_s(compute_s, layers, read_s, written_s, 0.0)
        if steps > 1 and until_s < inf:
            steps = steps_until(until_s - now_s, first_s, growth_s, steps)
        end_s = now_s + run_s(first_s, growth_s, steps)
        at_s, computing_s = now_s, compute_s
        for i in range(steps):
            if host_s:
                lanes.host.run(at_s, host_s, "host")
            lanes.h2d.reserve(at_s + host_s, read_s, "stream KV")
            lanes.compute.run(at_s + host_s, computing_s, "decode")
            at_s = now_s + run_s(first_s, growth_s, i + 1)
            lanes.d2h.reserve(at_s - written_s, written_s, "stream KV")
            computing_s += slope_s
        return StepTimes(steps, now_s + first_s, first_s + growth_s, growth_s, end_s, steps)
