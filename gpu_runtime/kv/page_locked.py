"""Page-locked host memory of exactly the bytes asked for: torch's own allocator rounds them up to a power of two."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sim.errors import UserError


def page_locked(shape: Sequence[int], dtype: torch.dtype, owner: object) -> tuple[Tensor, Callable[[], object]]:
    """A zeroed tensor that GPUs copy from and to without a detour, and what ends that (at the latest with `owner`).

    Raises:
        UserError: the driver refuses, as where a process may not lock so much memory.
    """
    # Written before it is locked: pages come when they are first touched.
    tensor = torch.empty(shape, dtype=dtype)
    tensor.view(-1).view(torch.uint8).zero_()
    pointer, num_bytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    runtime = _runtime()
    if status := int(runtime.cudaHostRegister(pointer, num_bytes, 0)):
        raise UserError(
            f"host memory: {num_bytes} bytes cannot be page-locked (cudaHostRegister: CUDA error {status}): lower "
            "--swap-space (or --num-cpu-blocks-override), or let the process lock more (ulimit -l)"
        )
    unlock = weakref.finalize(owner, _unlock, runtime, pointer)
    # When the interpreter ends, the driver ends the locks itself.
    unlock.atexit = False
    return tensor, unlock


def _runtime() -> Any:  # noqa: ANN401 - torch does not name the module's type
    return torch.cuda.cudart()


def _unlock(runtime: Any, pointer: int) -> None:  # noqa: ANN401
    if status := int(runtime.cudaHostUnregister(pointer)):
        raise RuntimeError(f"cudaHostUnregister failed: CUDA error {status}")
