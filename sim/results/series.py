"""Time series of one run: queues, pools (the terms of LayerKV's Eq. 5) and busy lanes, one row a sampled iteration."""

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
"""Blocks are pool units (`block_size` tokens x the policy's layer group); allocated and released are running totals."""

SAMPLE_LIMIT = 20_000
"""When this many rows are kept, every other one goes and half as many are taken: memory does not grow with the run."""


class Series:
    """Samples the scheduler at iteration starts."""

    def __init__(self, scheduler: Scheduler, lanes: Lanes, limit: int = SAMPLE_LIMIT) -> None:
        self._scheduler, self._lanes, self._limit = scheduler, lanes, limit
        self._every = 1
        self._seen = 0
        self.time_use = TimeUse(scheduler, lanes)
        self.columns: dict[str, array] = {name: array("d") for name in COLUMNS}

    def __len__(self) -> int:
        return len(self.columns["time_s"])

    def observe(self, plan: IterationPlan, now_s: float, times: StepTimes) -> None:
        """Take a row, unless this iteration falls between samples."""
        self.time_use.observe(plan, now_s, times)
        is_between = self._seen % self._every
        self._seen += 1
        if is_between:
            return
        scheduler, lanes = self._scheduler, self._lanes
        row = (
            now_s,
            scheduler.num_waiting + sum(chunk.origin is Origin.ADMITTED for chunk in plan.chunks),
            len(scheduler.batch),
            scheduler.num_swapped,
            scheduler.gpu.free,
            scheduler.gpu.num_allocated,
            scheduler.gpu.num_released,
            scheduler.host.free,
            lanes.compute.busy_s,
            lanes.h2d.busy_s,
            lanes.d2h.busy_s,
            *self.time_use.bound_s,
        )
        for column, value in zip(self.columns.values(), row, strict=True):
            column.append(value)
        if len(self) >= self._limit:
            self.columns = {name: column[::2] for name, column in self.columns.items()}
            self._every *= 2
