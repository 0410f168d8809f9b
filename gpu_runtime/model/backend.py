"""Which kernels compute what lies on a device."""

from importlib.util import find_spec

import torch
from torch import Tensor

from sim.errors import UserError

OF_DEVICE = {"cuda": ("auto", "triton", "flashinfer"), "cpu": ("auto", "torch")}
"""Of `--attention-backend`; auto is triton on CUDA and torch on a CPU, never what has not been measured."""
FLASHINFER_DTYPES = (torch.float16, torch.bfloat16)
FLASHINFER_HEAD_DIMS = (64, 128, 256)
"""That its kernels are compiled for."""


def check_backend(name: str, device: str, dtype: torch.dtype, head_dim: int) -> None:
    """UserError for an attention backend that cannot compute this on this device."""
    where = f"--attention-backend {name}"
    if name not in OF_DEVICE[device]:
        raise UserError(f"{where}: does not run on --device {device}: use one of {', '.join(OF_DEVICE[device])}")
    if name != "flashinfer":
        return
    if find_spec("flashinfer") is None:
        raise UserError(f"{where}: flashinfer is not installed: pip install 'kvtwin[flashinfer]'")
    if dtype not in FLASHINFER_DTYPES:
        raise UserError(f"{where}: computes in 16 bits, not in {dtype}: give --dtype bfloat16, or use triton")
    if head_dim not in FLASHINFER_HEAD_DIMS:
        known = ", ".join(map(str, FLASHINFER_HEAD_DIMS))
        raise UserError(f"{where}: heads of {head_dim} elements, it has kernels for {known}: use triton")


def uses_triton(tensor: Tensor) -> bool:
    """Triton's kernels on CUDA, plain torch elsewhere."""
    return tensor.is_cuda


def finish(device: torch.device) -> None:
    """Wait until the device has done what is queued on the current stream; on a CPU nothing ever is."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
