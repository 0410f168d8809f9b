"""Which kernels compute what lies on a device."""

from contextlib import suppress
from importlib.util import find_spec

import torch
import torch.nn.attention
from torch import Tensor

from gpu_runtime.model.config import DecoderConfig
from sim.errors import UserError

OF_DEVICE = {"cuda": ("auto", "fastest", "triton", "flashinfer"), "cpu": ("auto", "fastest", "torch")}
"""Of `--attention-backend`; auto is the third: triton on CUDA and torch on a CPU, never what has not been measured. The
fastest is found when the model is there (`machine.fastest_kernels`)."""
FLASHINFER_DTYPES = (torch.float16, torch.bfloat16)
FLASHINFER_HEAD_DIMS = (64, 128, 256)
"""That its kernels are compiled for."""
FLASH_DTYPES = (torch.float16, torch.bfloat16)
FLASH_HEAD_DIM, FLASH_HEAD_STEP, FLASH_CAPABILITY = 256, 8, 8
"""Largest head of FlashAttention-2 (torch's own), what it must be a multiple of, and the first GPUs that it runs on."""
NEWER_FLASH = {9: "FA3", 10: "FA4"}
"""torch's names of newer ones, by the compute capability that they are for."""


def check_backend(name: str, device: str, dtype: torch.dtype, config: DecoderConfig) -> None:
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
    if config.head_dim not in FLASHINFER_HEAD_DIMS:
        known = ", ".join(map(str, FLASHINFER_HEAD_DIMS))
        raise UserError(f"{where}: heads of {config.head_dim} elements, it has kernels for {known}: use triton")
    if any(config.windows):
        raise UserError(f"{where}: attends to all tokens, and {config.name} has layers with a window: use triton")


def uses_triton(tensor: Tensor) -> bool:
    """Triton's kernels on CUDA, plain torch elsewhere."""
    return tensor.is_cuda


def uses_flash(query: Tensor) -> bool:
    """Whether FlashAttention attends for such queries [N, heads, head_dim]."""
    return query.is_cuda and has_flash(query.dtype, query.shape[2], query.device)


def has_flash(dtype: torch.dtype, head_dim: int, device: torch.device) -> bool:
    """Whether FlashAttention computes such heads on a CUDA device: in 16 bits, from Ampere on."""
    fits = dtype in FLASH_DTYPES and head_dim % FLASH_HEAD_STEP == 0 and head_dim <= FLASH_HEAD_DIM
    return fits and torch.cuda.get_device_capability(device)[0] >= FLASH_CAPABILITY


def activate_flash(device: torch.device) -> str:
    """Let the newest FlashAttention that is installed for this CUDA device take the place of torch's own; its name.

    torch knows how from 2.10 on, and does so only where it is asked.
    """
    wanted = NEWER_FLASH.get(torch.cuda.get_device_capability(device)[0])
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
    if wanted is not None and activate is not None:
        # It may not be installed, lack its kernels, or be unknown to this torch.
        with suppress(ImportError, RuntimeError, ValueError):
            activate(wanted)
    return current_flash()


def current_flash() -> str:
    """Which FlashAttention computes: FA2, torch's own, or what was activated."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return (current() if current is not None else None) or "FA2"
