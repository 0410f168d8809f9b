"""What ends a run early and leaves what is finished: Ctrl-C and SIGTERM, which differ in the exit status alone."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
TERMINATED = 143
"""Exit statuses: 128 and the signal's number."""

_terminated: list[int] = []


def terminate(signum: int, frame: FrameType | None) -> None:
    """SIGTERM, as Ctrl-C."""
    _terminated.append(signum)
    raise KeyboardInterrupt


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Within, SIGTERM interrupts; outside the main thread, or where it is handled already, nothing changes."""
    _terminated.clear()
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def exit_status(status: int) -> int:
    """The status of a command, given that of an interrupted one where it was interrupted."""
    return TERMINATED if status == INTERRUPTED and _terminated else status


@contextmanager
def interrupts_call(stop: Callable[[], object]) -> Iterator[None]:
    """Within, the first signal calls `stop` in place of raising; a second one ends at once."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: terminate}
    main = threading.current_thread() is threading.main_thread()
    ours = [number for number, handler in usual.items() if main and signal.getsignal(number) is handler]

    def restore() -> None:
        for number in ours:
            signal.signal(number, usual[number])

    def interrupt(signum: int, frame: FrameType | None) -> None:
        restore()
        if signum == signal.SIGTERM:
            _terminated.append(signum)
        stop()

    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        restore()
