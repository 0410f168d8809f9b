"""CUDA graphs of arbitrary work."""

import torch

from calib.measure.clocks import Unmeasurable, Work

WARMUPS = 3
"""Executions before the capture: kernels are compiled and libraries choose theirs, which a capture forbids."""


def captured(work: Work, device: torch.device) -> Work:
    """Work that replays a CUDA graph of `work` on whatever stream is current.

    Raises:
        Unmeasurable: the work cannot be captured, because it waits for the device or sends it something.
    """
    stream, before = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        for _ in range(WARMUPS):
            work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            result = work()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise Unmeasurable(f"cannot be captured in a CUDA graph ({str(error).splitlines()[0]})") from error
    finally:
        # Where ending the capture fails, torch leaves its stream current.
        torch.cuda.set_stream(before)

    # A graph knows addresses only: what the work reads, and what it returns, lives as long as the graph.
    kept = (work, result)

    def replay() -> object:
        graph.replay()
        return kept[1]

    return replay
