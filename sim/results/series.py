"""Time series of one run: queues, pools (the terms of LayerKV's Eq. 5) and busy lanes, a row a sampled iteration,
and one where the engine falls idle: what it had before must not seem to last until it wakes."""

from array import array

from sim.cost.pricing import Lanes
from sim.engine.plan import IterationPlan, Origin, StepTimes
from sim.engine.scheduler import Scheduler
from sim.results.time_use import LIMITS, TimeUse

COLUMNS = (
    "time_s",
    "num_waiting",
    "num_decoding",
    "num_swapped",
    "gpu_free_blocks",
    "gpu_allocated_blocks",
    "gpu_released_blocks",
    "host_free_blocks",
    "compute_busy_s",
    "h2d_busy_s",
    "d2h_busy_s",
    *(f"bound_{limit}_s" for limit in LIMITS),
)
COUNTS = COLUMNS[1:8]
"""Blocks are pool units (`block_size` tokens x the policy's layer group); allocated and released are running totals."""

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
