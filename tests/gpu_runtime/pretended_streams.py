"""Streams, events, graphs and host threads that note which waited for which (`pretended_cuda`)."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
from happens_before import Place
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from pretended_cuda import Machine


class Stream:
    """In order within itself."""

    machine: "Machine"

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.cuda_stream, self.device = self.machine.next_handle(), self.machine.device
        self.agent = self.machine.order.agent(f"stream {self.cuda_stream}")

    def wait_event(self, event: "Event") -> None:
        self.agent.hear(self.machine.order.thread.tell())
        self.agent.hear(event.clock)

    def wait_stream(self, other: "Stream") -> None:
        event = self.machine.Event()
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        self.machine.must_not_capture("synchronising a stream")
        self.machine.order.thread.hear(self.agent.tell())


class Event:
    """`query` says no a few times, as long as nothing else tells that it must be over."""

    machine: "Machine"

    def __init__(self, enable_timing: bool = False) -> None:
        self.timing = enable_timing
        self.clock = np.zeros_like(self.machine.order.thread.clock)
        self._patience = self.machine.dice.randrange(4)
        self._over = False

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.machine.current_stream()
        stream.agent.hear(self.machine.order.thread.tell())
        self.clock = stream.agent.tell()

    def query(self) -> bool:
        self.machine.must_not_capture("asking an event")
        self._patience -= 1
        if self._patience < 0 or (self.clock <= self.machine.order.thread.clock).all():
            self.synchronize()
        return self._over

    def synchronize(self) -> None:
        self.machine.must_not_capture("waiting for an event")
        self._over = True
        self.machine.order.thread.hear(self.clock)

    def elapsed_time(self, end: "Event") -> float:
        assert self.timing and end.timing, "events without timing"
        for event in (self, end):
            if not (event.clock <= self.machine.order.thread.clock).all():
                self.machine.order.complain("elapsed_time of an event that may not be over")
        return 0.001


class Work:
    """One operation on a stream: `run` computes it, `places` says what it reads and writes then."""

    def __init__(
        self, name: str, run: Callable[[], Any], places: Callable[[], tuple[list[Place], list[Place]]]
    ) -> None:
        self.name, self.run, self.places = name, run, places
        self.keep: list[tuple[Tensor, int]] = []
        # Outputs of a captured operation, which stay where they are, and their places among what `run` returns.

    def again(self) -> None:
        """As part of a graph."""
        found = tree_leaves(self.run())
        for tensor, place in self.keep:
            tensor.copy_(found[place])


class Graph:
    """What was launched on the capturing stream."""

    def __init__(self, machine: "Machine") -> None:
        self.machine, self.work = machine, list[Work]()

    def replay(self) -> None:
        self.machine.must_not_capture("launching a graph")
        with _disable_current_modes():
            for work in self.work:
                self.machine.watch(work)
                work.again()


class WatchedQueue(SimpleQueue):
    """A thread that takes something knows all that was done before it was put there."""

    machine: "Machine"

    def put(self, item: Any) -> None:
        super().put((self.machine.order.thread.tell(), item))

    def get(self) -> Any:
        clock, item = super().get()
        self.machine.order.thread.hear(clock)
        return item


class WatchedFlag(threading.Event):
    """A thread that has seen it set knows all that was done before."""

    machine: "Machine"
    clock: np.ndarray | None = None

    def set(self) -> None:
        told = self.machine.order.thread.tell()
        self.clock = told if self.clock is None else np.maximum(told, self.clock)
        super().set()

    def is_set(self) -> bool:
        if super().is_set():
            assert self.clock is not None
            self.machine.order.thread.hear(self.clock)
            return True
        return False

    def wait(self, timeout: float | None = None) -> bool:
        super().wait(timeout)
        return self.is_set()


class WatchedThread(threading.Thread):
    """Knows what its maker did, and a thread that joins it what it did."""

    machine: "Machine"

    def start(self) -> None:
        self._given = self.machine.order.thread.tell()
        super().start()

    def run(self) -> None:
        with self.machine:
            self.machine.order.thread.hear(self._given)
            super().run()
            self._left = self.machine.order.thread.tell()

    def join(self, timeout: float | None = None) -> None:
        super().join(timeout)
        self.machine.order.thread.hear(self._left)
