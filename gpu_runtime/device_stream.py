"""The stream on which a device computes: small arrays sent to it, and the end of what is queued on it."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def to_device(values: Sequence[int] | np.ndarray, device: torch.device) -> Tensor:
    """The values as a tensor on the device, without waiting for what it has queued.

    A copy from pageable memory would make the host wait for its stream, and whatever copies that one waits for.
    """
    found = torch.from_numpy(values) if isinstance(values, np.ndarray) else torch.tensor(values)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found


def mark(device: torch.device) -> torch.cuda.Event | None:
    """The end of what is queued on the current stream; None on a CPU, where nothing ever is."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def wait(marked: torch.cuda.Event | None) -> None:
    """Wait until the device has come to a `mark`."""
    if marked is not None:
        marked.synchronize()


def finish(device: torch.device) -> None:
    """Wait until the device has done what is queued on the current stream; on a CPU nothing ever is."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
