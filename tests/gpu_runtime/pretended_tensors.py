"""Tensors of a device that is not there: CPU tensors in disguise, and which granules of their memory a view shows."""

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from happens_before import GRANULE, Memory, Region
from pretended_streams import Stream
from torch import Tensor

DEVICE = torch.device("cuda", 0)


class OnDevice(Tensor):
    """A tensor on the device: `inner` has its values, `memory` what is known of its storage."""

    inner: Tensor
    memory: Memory
    is_cuda = property(lambda self: True)
    device = property(lambda self: DEVICE)
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, memory: Memory) -> "OnDevice":
        made = Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype
        )
        made.inner, made.memory = inner, memory
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on a thread that the pretended device does not watch")

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("a tensor of the device has no numpy array")

    def record_stream(self, stream: Stream) -> None:
        self.memory.recorded.add(stream.agent.number)


@lru_cache(maxsize=4096)
def _granules(shape: tuple[int, ...], stride: tuple[int, ...], offset: int, itemsize: int) -> Region:
    """The granules of a view, in the view's shape; a slice where they are in a row."""
    expected, contiguous = 1, True
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        contiguous = contiguous and (size == 1 or step == expected)
        expected *= size
    if contiguous:
        return slice(offset * itemsize // GRANULE, -(-(offset + expected) * itemsize // GRANULE))
    return elements(shape, stride, offset) * itemsize // GRANULE


def elements(shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> np.ndarray:
    """Where in the storage each element of a view is."""
    at = np.full(shape, offset, dtype=np.int64)
    for axis, (size, step) in enumerate(zip(shape, stride, strict=True)):
        at += (np.arange(size) * step).reshape(-1, *(1,) * (len(shape) - axis - 1))
    return at


def whole(tensor: Tensor) -> Region:
    """All that a view shows."""
    return _granules(tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.element_size())
