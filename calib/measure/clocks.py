"""Clocks: what one execution takes on a CPU or on a CUDA device."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from time import perf_counter, perf_counter_ns

import torch

Work = Callable[[], object]
"""Executes once; on CUDA it queues its kernels on the current stream."""

FLUSH_CACHES = 2
MIN_FLUSH_BYTES = 128 * 2**20
"""What is written between repeats, so that nothing is measured from the cache."""
LEAD_S = 20e-6
"""How far the host may run ahead of the device when an execution begins, as it does within a row of layers."""


class Unmeasurable(Exception):
    """A point that this machine cannot measure; says why, for the list of skipped points."""


class Clock(ABC):
    """Times executions on one device."""

    @abstractmethod
    def device_s(self, work: Work, *, lead: bool) -> float:
        """Seconds on the device from the first operation to the last.

        Args:
            work: the execution.
            lead: let the host run ahead, so that the cost of asking shows only where the device must wait for it;
                else the device is idle when the host begins to ask.
        """

    @abstractmethod
    def host_s(self, work: Work) -> float:
        """Seconds on the host from asking to having it done."""

    def keep_busy(self, work: Work, seconds: float) -> None:  # noqa: B027 - a CPU is busy whenever it works
        """Execute over and over without a pause for so long."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done all that was asked."""


class HostClock(Clock):
    """`perf_counter_ns` around work that is done when its call returns."""

    def device_s(self, work: Work, *, lead: bool) -> float:
        return self.host_s(work)

    def host_s(self, work: Work) -> float:
        begun = perf_counter_ns()
        work()
        return (perf_counter_ns() - begun) * 1e-9

    def synchronize(self) -> None:
        """Nothing is ever outstanding."""


class CudaClock(Clock):
    """CUDA events on the stream that the work is queued on, after the L2 cache was overwritten."""

    def __init__(self, device: torch.device, cache_bytes: int) -> None:
        self._device = device
        size = max(FLUSH_CACHES * cache_bytes, MIN_FLUSH_BYTES)
        self._flush = torch.empty(size, dtype=torch.uint8, device=device)
        seconds = min(self._between(self._flush.zero_) for _ in range(5))
        self._lead = self._flush[: max(1, min(size, int(size * LEAD_S / seconds)))]

    def device_s(self, work: Work, *, lead: bool) -> float:
        self._start_clean()
        return self._between(work, lead=lead)

    def host_s(self, work: Work) -> float:
        self._start_clean()
        begun = perf_counter_ns()
        work()
        self.synchronize()
        return (perf_counter_ns() - begun) * 1e-9

    def keep_busy(self, work: Work, seconds: float) -> None:
        begun, ended = perf_counter(), _event()
        while perf_counter() - begun < seconds:
            # One execution ahead of the device: it never waits, and the queue does not grow.
            work()
            before, ended = ended, _event()
            ended.record()
            before.synchronize()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def _start_clean(self) -> None:
        self._flush.zero_()
        self.synchronize()

    def _between(self, work: Work, *, lead: bool = False) -> float:
        """Seconds between events on the current stream."""
        start, end = _event(), _event()
        if lead:
            self._lead.zero_()
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
