"""The virtual clock: a SimPy process that prices plans and waits.

The only module that knows SimPy. One process is one serving instance; it pulls the arrivals that are due at each
iteration boundary (decisions happen nowhere else) and sleeps until the next one.
"""

from collections.abc import Callable, Generator, Iterable
from heapq import heappop, heappush
from math import inf

import simpy

from sim.cost import CostModel, run_s, steps_until
from sim.engine import Engine
from sim.errors import InvariantError
from sim.lanes import SEND_BUFFER_LAYERS, Lane, pipelined_s, streamed_s
from sim.plan import Direction, IterationPlan, StepTimes, Transfer
from traces.request import Request

TIE_S = 1e-9
"""Facts this close to a boundary count as simultaneous with it: sums of floats differ by less."""


class Arrivals:
    """Requests of a trace in order of arrival, read one ahead."""

    __slots__ = ("_iterator", "_next", "next_s")

    def __init__(self, requests: Iterable[Request]) -> None:
        self._iterator = iter(requests)
        self._next: Request | None = None
        self.next_s = -inf
        self._read()

    def _read(self) -> None:
        self._next = next(self._iterator, None)
        self.next_s = inf if self._next is None else self._next.arrival_s

    def deliver(self, until_s: float, to: Callable[[Request], None]) -> None:
        """Hand over every request that has arrived by `until_s`."""
        while self._next is not None and self.next_s <= until_s:
            to(self._next)
            self._read()


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


Observer = Callable[[IterationPlan, float, StepTimes], None]
"""Hears of every plan, when it started and when its tokens came, before it is committed."""


class Instance:
    """One engine on the virtual clock."""

    def __init__(
        self,
        env: simpy.Environment,
        engine: Engine,
        cost: CostModel,
        arrivals: Arrivals,
        lanes: Lanes,
        *,
        layers: int,
        jump: bool = True,
        copy_unit_bytes: float = 1 << 20,
        observer: Observer | None = None,
    ) -> None:
        self.env, self.engine, self.cost = env, engine, cost
        self.arrivals, self.lanes, self.layers = arrivals, lanes, layers
        self.jump = jump
        self.copy_unit_bytes = copy_unit_bytes
        self.observer = observer
        self.iterations = 0
        self._transfers: list[tuple[float, int, Transfer]] = []
        self._num_transfers = 0

    def serve(self) -> Generator[simpy.Event, None, None]:
        """Serve until every request of the trace has ended.

        The process runs ahead of `env.now` as long as no other event is due before the end of an iteration: what nobody
        else can notice need not be an event.
        """
        env, engine, arrivals, transfers = self.env, self.engine, self.arrivals, self._transfers
        observer, commit, schedule, peek = self.observer, engine.commit, engine.schedule, env.peek
        now_s = env.now
        while True:
            due_s = now_s + TIE_S
            if arrivals.next_s <= due_s:
                arrivals.deliver(due_s, engine.add_request)
            while transfers and transfers[0][0] <= due_s:
                engine.transfer_done(heappop(transfers)[2])
            plan = schedule(now_s)
            if plan is None:
                times = None
                end_s = min(arrivals.next_s, transfers[0][0]) if transfers else arrivals.next_s
                if end_s == inf:
                    break
            else:
                times = self._run(plan, now_s) if plan.max_steps > 1 else self._step(plan, now_s)
                end_s = times.end_s
            if peek() <= end_s:
                yield env.timeout(end_s - env.now)
            if plan is not None and times is not None:
                self.iterations += times.steps
                if observer is not None:
                    observer(plan, now_s, times)
                commit(plan, times)
            now_s = end_s
        if engine.has_unfinished:
            raise InvariantError(f"the engine stands still at {now_s} s with requests unfinished")
        if now_s > env.now:
            yield env.timeout(now_s - env.now)

    def _run(self, plan: IterationPlan, now_s: float) -> StepTimes:
        """Price identical decode iterations as one event, up to the first boundary after the next fact."""
        first_s, slope_s = self.cost.decode_run(plan.num_decodes, plan.decode_context_tokens)
        steps = plan.max_steps if self.jump else 1
        until_s = self.arrivals.next_s if plan.cut_on_arrival else inf
        if self._transfers and self._transfers[0][0] < until_s:
            until_s = self._transfers[0][0]
        if steps > 1 and until_s < inf:
            steps = steps_until(until_s - TIE_S - now_s, first_s, slope_s, steps)
        end_s = now_s + (run_s(first_s, slope_s, steps) if steps > 1 else first_s)
        self.lanes.compute.run(now_s, end_s - now_s, "decode")
        return StepTimes(steps, now_s + first_s, first_s + slope_s, slope_s, end_s)

    def _step(self, plan: IterationPlan, now_s: float) -> StepTimes:
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
        lanes.compute.run(
            start_s, compute_s, "decode" if not plan.chunks else "mixed" if plan.num_decodes else "prefill"
        )
        return StepTimes(1, end_s, 0.0, 0.0, end_s)

    def _overlap(self, plan: IterationPlan, start_s: float, compute_s: float) -> float:
        """Put the plan's copies on their lanes; returns the computation's duration, waiting for copies included."""
        cost, lanes = self.cost, self.lanes
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

    def _finish_at(self, end_s: float, transfer: Transfer) -> None:
        self._num_transfers += 1
        heappush(self._transfers, (end_s, self._num_transfers, transfer))
