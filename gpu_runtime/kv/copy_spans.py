"""`CopySpans`: when copies began and ended on their lane, for timelines and for how busy the link was."""

from collections import deque
from time import perf_counter
from typing import NamedTuple

import torch

from sim.engine.changes import Direction

MOST_KEPT = 100_000
"""Spans kept until they are taken; older ones are forgotten."""

Mark = float | torch.cuda.Event
"""A moment: `perf_counter` seconds, or an event of a stream that has yet to reach it."""


class CopySpan(NamedTuple):
    """One copy, s since the clock was started."""

    direction: Direction
    start_s: float
    end_s: float


class CopySpans:
    """Moments of copies, noted by the threads that make them and taken by the one that serves."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._noted: deque[tuple[Direction, Mark, Mark]] = deque(maxlen=MOST_KEPT)
        self.start_clock()

    def start_clock(self) -> None:
        """Count seconds from now, and forget what was noted before."""
        self._noted.clear()
        self._zero_event: torch.cuda.Event | None = None
        if self._device.type == "cuda":
            self._zero_event = torch.cuda.Event(enable_timing=True)
            self._zero_event.record(torch.cuda.current_stream(self._device))
            self._zero_event.synchronize()
        self._zero_s = perf_counter()

    def mark(self, stream: torch.cuda.Stream | None) -> Mark:
        """Now, or where the queue of `stream` stands."""
        if stream is None:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def note(self, direction: Direction, start: Mark, end: Mark) -> None:
        """Note a copy between two marks."""
        self._noted.append((direction, start, end))

    def take(self) -> list[CopySpan]:
        """Copies that have ended, each told once; never waits."""
        ended: list[CopySpan] = []
        for _ in range(len(self._noted)):
            direction, start, end = self._noted.popleft()
            if not isinstance(end, torch.cuda.Event) or end.query():
                start_s = _lasted_s(self._zero_event if isinstance(start, torch.cuda.Event) else self._zero_s, start)
                ended.append(CopySpan(direction, start_s, start_s + _lasted_s(start, end)))
            else:
                self._noted.append((direction, start, end))
        return ended


def _lasted_s(start: Mark | None, end: Mark) -> float:
    """CUDA tells times in single precision: hours after the clock's start a difference of two of them is too coarse."""
    if isinstance(start, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        return start.elapsed_time(end) * 1e-3
    assert start is not None and not isinstance(end, torch.cuda.Event)
    return end - start
