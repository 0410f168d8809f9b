"""Copies that run beside the computation: a thread that queues or performs them, and a handle to wait for each."""

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

import torch

COPY_PRIORITY = -1
"""CUDA's for streams whose kernels go first; others have 0."""


class CopyFailed(Exception):
    """A copy went wrong; the cause is attached. What it was to write is undefined."""


class CopyHandle:
    """Progress of one copy. On CUDA the worker only queues it on its stream, and an event of that stream says more."""

    def __init__(self) -> None:
        self._finished = threading.Event()
        self._event: torch.cuda.Event | None = None
        self._error: Exception | None = None

    def wait_in_stream(self) -> None:
        """Make the current stream (on a CPU: the caller) wait until the copy is over; raises `CopyFailed`."""
        self._finished.wait()
        self._raise_if_failed()
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def done(self) -> bool:
        """Whether the copy is over, well or badly."""
        if not self._finished.is_set():
            return False
        return self._error is not None or self._event is None or self._event.query()

    def wait(self) -> None:
        """Block the caller until the copy is over; raises `CopyFailed` if it failed."""
        self._finished.wait()
        self._raise_if_failed()
        if self._event is None:
            return
        try:
            self._event.synchronize()
        except RuntimeError as error:
            raise CopyFailed(str(error)) from error

    def mark(self, stream: torch.cuda.Stream | None) -> None:
        """For the worker: all of it is queued on `stream`, or copied where that is None."""
        if stream is not None:
            self._event = torch.cuda.Event()
            self._event.record(stream)

    def finish(self, error: Exception | None) -> None:
        """For the worker: nothing more will be queued."""
        self._error = error
        self._finished.set()

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise CopyFailed(str(self._error)) from self._error


class CopyWorker:
    """One thread that takes copies in order; on CUDA they run on its stream. A copy that fails harms no other."""

    def __init__(self, name: str, device: torch.device) -> None:
        # What gathers and scatters blocks is short, and much waits for it: it goes before the computation's kernels.
        self.stream = torch.cuda.Stream(device, priority=COPY_PRIORITY) if device.type == "cuda" else None
        self._jobs: SimpleQueue[tuple[Callable[[], None], CopyHandle] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None], handle: CopyHandle) -> None:
        """Queue `job`, which marks `handle`; on CUDA after what is queued on the current stream."""
        if self.stream is not None:
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self.stream.device))
            self._jobs.put((lambda: self._on_stream(job, ready), handle))
        else:
            self._jobs.put((job, handle))

    def close(self) -> None:
        """Finish what is queued, on CUDA's stream as well, and end the thread: blocks may be given back then."""
        self._jobs.put(None)
        self._thread.join()
        self._finish_queued()

    def _on_stream(self, job: Callable[[], None], ready: torch.cuda.Event) -> None:
        assert self.stream is not None
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(ready)
            job()

    def _finish_queued(self) -> None:
        """Wait for what has been queued: nothing of a failed copy shall be under way when its failure is known."""
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
            self._finish_queued()
            handle.finish(error)
        else:
            handle.finish(None)


class InlineWorker(CopyWorker):
    """Makes each copy at once, in the thread that asks: for a CPU, which has no engine that copies for it."""

    def __init__(self) -> None:
        self.stream = None

    def submit(self, job: Callable[[], None], handle: CopyHandle) -> None:
        """Carry out `job`, which marks `handle`."""
        self._carry_out(job, handle)

    def close(self) -> None:
        """Nothing is queued."""
