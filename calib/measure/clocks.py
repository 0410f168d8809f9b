"""Clocks: what one execution takes on a CPU or on a CUDA device, alone or beside other work."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from math import ceil
from threading import Event, Thread
from time import perf_counter, perf_counter_ns

import torch

Work = Callable[[], object]
"""Executes once; on CUDA it queues its kernels on the current stream."""

FLUSH_CACHES = 2
MIN_FLUSH_BYTES = 128 * 2**20
"""What is written between repeats, so that nothing is measured from the cache."""
LEAD_S = 20e-6
"""How far the host may run ahead of the device when an execution begins, as it does within a row of layers."""
LEAST_COMPANY = 2
"""The other work is queued for at least so many times the timed one's duration."""
MORE_COMPANY = 8
"""... and, where that did not last, for up to so many times more."""


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

    @abstractmethod
    def beside(self, work: Work, other: Work) -> AbstractContextManager[Callable[[], float]]:
        """A context whose value times `work` while `other` runs over and over."""

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

    @contextmanager
    def beside(self, work: Work, other: Work) -> Iterator[Callable[[], float]]:
        """The other work loops in a second thread; torch lets go of the interpreter while an operator computes."""
        stop, turning = Event(), Event()
        failures: list[Exception] = []

        def loop() -> None:
            try:
                # Inference mode belongs to a thread.
                with torch.inference_mode():
                    while not stop.is_set():
                        other()
                        turning.set()
            except Exception as failure:
                failures.append(failure)
                turning.set()

        def once() -> float:
            if failures:
                raise failures[0]
            return self.host_s(work)

        thread = Thread(target=loop, daemon=True)
        thread.start()
        try:
            turning.wait()
            yield once
        finally:
            stop.set()
            thread.join()

    def synchronize(self) -> None:
        """Nothing is ever outstanding."""


class CudaClock(Clock):
    """CUDA events on the stream that the work is queued on, after the L2 cache was overwritten."""

    def __init__(self, device: torch.device, cache_bytes: int) -> None:
        self._device = device
        size = max(FLUSH_CACHES * cache_bytes, MIN_FLUSH_BYTES)
        self._flush = torch.empty(size, dtype=torch.uint8, device=device)
        self._beside = torch.cuda.Stream(device)
        seconds = min(self._between(self._flush.zero_) for _ in range(5))
        self._lead = self._flush[: max(1, min(size, int(size * LEAD_S / seconds)))]

    def device_s(self, work: Work, *, lead: bool) -> float:
        self._settle()
        return self._between(work, lead=lead)

    def host_s(self, work: Work) -> float:
        self._settle()
        begun = perf_counter_ns()
        work()
        self.synchronize()
        return (perf_counter_ns() - begun) * 1e-9

    @contextmanager
    def beside(self, work: Work, other: Work) -> Iterator[Callable[[], float]]:
        """The other work is queued on a second stream first; a repeat that outlasts it is taken again with more."""
        timed = torch.cuda.Stream(self._device)
        alone_s, other_s = self._warm_s(timed, work), self._warm_s(self._beside, other)
        count = ceil(LEAST_COMPANY * alone_s / other_s) + 2
        most = MORE_COMPANY * count

        def once() -> float:
            nonlocal count
            while count <= most:
                seconds, outlasted = self._together(timed, work, other, count)
                if not outlasted:
                    return seconds
                count *= 2
            raise Unmeasurable("the other work ends before the timed one: the host cannot queue it fast enough")

        yield once

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

    def _warm_s(self, stream: torch.cuda.Stream, work: Work) -> float:
        """Seconds of a second execution on a stream; the first one allocates the stream's memory."""
        with torch.cuda.stream(stream):
            self.device_s(work, lead=True)
            return self.device_s(work, lead=True)

    def _settle(self) -> None:
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

    def _together(self, timed: torch.cuda.Stream, work: Work, other: Work, count: int) -> tuple[float, bool]:
        """Seconds of `work`, and whether it was still running when `count` of the other were done."""
        begin, start, end, last = _event(), _event(), _event(), _event()
        self._settle()
        begin.record()
        with torch.cuda.stream(self._beside):
            for _ in range(count):
                other()
            last.record()
        with torch.cuda.stream(timed):
            self._lead.zero_()
            start.record()
            work()
            end.record()
        self.synchronize()
        return start.elapsed_time(end) * 1e-3, begin.elapsed_time(last) < begin.elapsed_time(end)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
