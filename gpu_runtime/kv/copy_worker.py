"""Copies that run beside the computation: a thread that queues or performs them, and a handle to wait for each."""

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

import torch


class CopyFailed(Exception):
    """A copy went wrong; the cause is attached. What it was to write is undefined."""


class CopyHandle:
    """Progress of one copy, as a whole and layer group by layer group.

    On CUDA the worker only queues copies on its stream; then a mark is an event of that stream. On a CPU a mark is set
    when the bytes are there.
    """

    def __init__(self, groups: tuple[int, ...], layer_group: int) -> None:
        """`groups` are the layer groups that arrive one by one; empty: the copy arrives as a whole."""
        self._layer_group = layer_group
        self._queued = {group: threading.Event() for group in groups}
        self._finished = threading.Event()
        self._events: list[torch.cuda.Event] = []
        self._event_of: dict[int, torch.cuda.Event] = {}
        self._error: Exception | None = None

    def wait_layer(self, layer: int) -> None:
        """Make the current stream (on a CPU: the caller) wait until the blocks of a layer are there.

        Returns at once for a layer that the copy does not touch. Raises `CopyFailed` if it failed.
        """
        group = layer // self._layer_group
        if self._queued and group not in self._queued:
            return
        self._queued.get(group, self._finished).wait()
        self._raise_if_failed()
        event = self._event_of.get(group) if self._queued else (self._events or [None])[-1]
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def done(self) -> bool:
        """Whether the copy is over, well or badly."""
        return self._finished.is_set() and (self._error is not None or all(event.query() for event in self._events))

    def wait(self) -> None:
        """Block the caller until the copy is over; raises `CopyFailed` if it failed."""
        self._finished.wait()
        self._raise_if_failed()
        try:
            for event in self._events:
                event.synchronize()
        except RuntimeError as error:
            raise CopyFailed(str(error)) from error

    def mark(self, group: int | None, stream: torch.cuda.Stream | None) -> None:
        """For the worker: a layer group (None: everything) is queued on `stream`, or copied where that is None."""
        if stream is not None:
            event = torch.cuda.Event()
            event.record(stream)
            self._events.append(event)
            if group is not None:
                self._event_of[group] = event
        if group is not None:
            self._queued[group].set()

    def finish(self, error: Exception | None) -> None:
        """For the worker: nothing more will be queued."""
        self._error = error
        self._finished.set()
        for flag in self._queued.values():
            flag.set()

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise CopyFailed(str(self._error)) from self._error


class CopyWorker:
    """One thread that takes copies in order; on CUDA they run on its stream. A copy that fails harms no other."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._jobs: SimpleQueue[tuple[Callable[[], None], CopyHandle] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None], handle: CopyHandle) -> None:
        """Queue `job`, which marks the layer groups of `handle`; on CUDA after what the current stream holds so far."""
        if self.stream is not None:
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self.stream.device))
            self._jobs.put((lambda: self._on_stream(job, ready), handle))
        else:
            self._jobs.put((job, handle))

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _on_stream(self, job: Callable[[], None], ready: torch.cuda.Event) -> None:
        assert self.stream is not None
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(ready)
            job()

    def _settle(self) -> None:
        """Wait for what a failed copy has queued, so that nothing of it is under way when its failure is known."""
        if self.stream is not None:
            with suppress(RuntimeError):
                self.stream.synchronize()

    def _run(self) -> None:
        # Inference mode belongs to a thread, and tensors that were made in it are written to in it alone.
        with torch.inference_mode():
            while (entry := self._jobs.get()) is not None:
                self._carry_out(*entry)
                # Tensors of a finished copy shall not live until the next one comes.
                del entry

    def _carry_out(self, job: Callable[[], None], handle: CopyHandle) -> None:
        try:
            job()
        except Exception as error:
            self._settle()
            handle.finish(error)
        else:
            handle.finish(None)


class InlineWorker(CopyWorker):
    """Makes each copy at once, in the thread that asks: for a CPU, which has nobody else to copy for it."""

    def __init__(self) -> None:
        self.stream = None

    def submit(self, job: Callable[[], None], handle: CopyHandle) -> None:
        """Carry out `job`, which marks the layer groups of `handle`."""
        self._carry_out(job, handle)

    def close(self) -> None:
        """Nothing is queued."""
