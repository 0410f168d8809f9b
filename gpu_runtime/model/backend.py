"""Which kernels compute what lies on a device."""

import torch
from torch import Tensor


def uses_triton(tensor: Tensor) -> bool:
    """Triton's kernels on CUDA, plain torch elsewhere."""
    return tensor.is_cuda


def finish(device: torch.device) -> None:
    """Wait until the device has done what is queued on the current stream; on a CPU nothing ever is."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
