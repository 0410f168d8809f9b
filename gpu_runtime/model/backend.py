"""Which kernels compute what lies on a device."""

from torch import Tensor


def uses_triton(tensor: Tensor) -> bool:
    """Triton's kernels on CUDA, plain torch elsewhere."""
    return tensor.is_cuda
