"""Time series of one run: queues, pools (the terms of LayerKV's Eq. 5) and busy lanes, a row a sampled iteration,
and one where the engine falls idle: what it had before must not seem to last until it wakes."""

from array import array

from sim.cost.pricing import Lanes
from sim.engine.plan import IterationPlan, Origin, StepTimes
from sim.engine.scheduler import Scheduler
from sim.results.time_use import TimeUse

COLUMNS = {
    "time_s": "Start of the iteration, or of having nothing to do, s.",
    "num_waiting": "Requests waiting for their prefill, those included that this iteration admits.",
    "num_decoding": "Sequences in the decode batch.",
    "num_swapped": "Sequences with KV on the host that do not decode: swapped, parked or on the way back; between "
    "pools, those whose KV waits to be pulled or is on its way.",
    "gpu_free_blocks": "Pool units free on the GPU, the iteration's own blocks taken.",
    "gpu_allocated_blocks": "Pool units taken since the start: Eq. 5's running total.",
    "gpu_released_blocks": "Pool units given back since the start; free = pool + released - allocated.",
    "host_free_blocks": "Pool units free on the host.",
    "compute_busy_s": "Computation since the start, this iteration's included, s.",
    "h2d_busy_s": "Copies to the GPU since the start, those booked ahead included, s.",
    "d2h_busy_s": "Copies to the host since the start, those booked ahead included, s.",
    "bound_memory_s": "Since the start, s, in iterations during which KV memory kept the next request from starting, "
    "or a request's KV was away.",
    "bound_seats_s": "The same of `max_num_seqs`.",
    "bound_tokens_s": "The same of `max_num_batched_tokens`.",
    "bound_slo_s": "The same of SLO-aware admission (`slack`).",
    "bound_policy_s": "The same of other rules of the policy: a batch that runs to its end, an order.",
    "bound_copies_s": "While no request was kept waiting: the part of iterations that waited for copies.",
    "bound_engine_s": "The part that waited for the engine's own processes.",
    "bound_compute_s": "The part that computed.",
}
"""Columns and what they are. Pool units are `block_size` tokens x the policy's layer group."""
COUNTS = tuple(COLUMNS)[1:8]

SAMPLE_LIMIT = 20_000
"""When this many rows are kept, every other one goes and half as many are taken: memory does not grow with the run."""


class Series:
    """Samples the scheduler at iteration starts, and where nothing can be done."""

    def __init__(self, scheduler: Scheduler, lanes: Lanes, limit: int = SAMPLE_LIMIT) -> None:
        self._scheduler, self._lanes, self._limit = scheduler, lanes, limit
        self._every = 1
        self._seen = 0
        self._busy_until_s = 0.0
        self.time_use = TimeUse(scheduler, lanes)
        self.columns: dict[str, array] = {name: array("d") for name in COLUMNS}

    def __len__(self) -> int:
        return len(self.columns["time_s"])

    def observe(self, plan: IterationPlan, now_s: float, times: StepTimes) -> None:
        """Take a row, unless this iteration falls between samples."""
        self.time_use.observe(plan, now_s, times)
        self._busy_until_s = times.end_s
        is_between = self._seen % self._every
        self._seen += 1
        if is_between:
            return
        self._take(now_s, self._counts(sum(chunk.origin is Origin.ADMITTED for chunk in plan.chunks)))

    def rest(self, now_s: float) -> None:
        """Nothing can be done at `now_s`: take a row, unless an iteration is under way or nothing has changed."""
        counts = self._counts(0)
        last = [self.columns[name][-1] for name in COUNTS] if len(self) else None
        if now_s >= self._busy_until_s and last is not None and list(counts) != last:
            self._take(now_s, counts)

    def _counts(self, num_admitted: int) -> tuple[float, ...]:
        scheduler = self._scheduler
        return (
            scheduler.num_waiting + num_admitted,
            len(scheduler.batch),
            scheduler.num_swapped,
            scheduler.gpu.free,
            scheduler.gpu.num_allocated,
            scheduler.gpu.num_released,
            scheduler.host.free,
        )

    def _take(self, now_s: float, counts: tuple[float, ...]) -> None:
        lanes = self._lanes
        busy_s = lanes.compute.busy_s, lanes.h2d.busy_s, lanes.d2h.busy_s
        row = now_s, *counts, *busy_s, *self.time_use.bound_s
        for column, value in zip(self.columns.values(), row, strict=True):
            column.append(value)
        if len(self) >= self._limit:
            self.columns = {name: column[::2] for name, column in self.columns.items()}
            self._every *= 2
