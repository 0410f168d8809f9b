"""CUDA graphs of arbitrary work."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from calib.measure.clocks import Unmeasurable, Work
from gpu_runtime.model.decode_graph import capture_graph

WARMUPS = 3
"""Executions before the capture: kernels are compiled and libraries choose theirs, which a capture forbids."""


@contextmanager
def telling_capture() -> Iterator[None]:
    """Within, what cannot be captured is `Unmeasurable`; a lack of memory is not."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise Unmeasurable(f"cannot be captured in a CUDA graph ({str(error).splitlines()[0]})") from error


def captured(work: Work, stream: torch.cuda.Stream) -> Work:
    """Work that replays a CUDA graph of `work` on whatever stream is current.

    Captured on `stream`, one for all: libraries keep a workspace for each that they have seen.

    Raises:
        Unmeasurable: the work cannot be captured, because it waits for the device or sends it something.
    """
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        for _ in range(WARMUPS):
            work()
    stream.synchronize()
    results: list[object] = []
    with telling_capture():
        graph = capture_graph(lambda: results.append(work()), stream)

    # A graph knows addresses only: what the work reads, and what it returns, lives as long as the graph.
    kept = (work, results[0])

    def replay() -> object:
        graph.replay()
        return kept[1]

    return replay
