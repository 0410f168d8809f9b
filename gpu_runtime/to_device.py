"""Small arrays on their way to the device."""

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
