"""Many copies in few calls of the driver: `cudaMemcpyBatchAsync` of CUDA 12.8 on, through the bindings torch brings.

Asked for one by one, a few thousand scattered blocks cost Python more than the link; asked for all at once, the link
waits until Python has put the last of them into a list.
"""

from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

PIECES_PER_CALL = 128
"""While the link copies these, Python prepares the next: some 0.1 ms at a microsecond each."""
NOT_SUPPORTED = frozenset({35, 36, 801})
"""CUDA errors: the bindings' runtime needs a newer driver than torch's; the call does; it is not supported."""

LEGACY_STREAMS = frozenset({0, 1})
"""CUDA's handles of its legacy default stream, which takes no batches. It is torch's current one by default."""


@cache
def _runtime() -> Any:  # noqa: ANN401 - may be absent
    """`cuda.bindings.runtime`; None where it is not installed, too old, or its driver does not know the call."""
    try:
        runtime = import_module("cuda.bindings.runtime")
    except ImportError:
        return None
    return runtime if hasattr(runtime, "cudaMemcpyBatchAsync") else None


def copy_pieces(source: Tensor, target: Tensor, pieces: np.ndarray) -> bool:
    """Queue copies of blocks on the current stream; False, and nothing is done, where there is no such call, or none
    for this stream.

    Args:
        source: [blocks, ...], contiguous; on the GPU or page-locked.
        target: the same of where they go.
        pieces: [n, 3] what to copy: first block of the source, first of the target, how many; no two overlap in the
            target.

    Raises:
        RuntimeError: the driver refuses.
    """
    runtime, stream = _runtime(), torch.cuda.current_stream().cuda_stream
    if runtime is None or stream in LEGACY_STREAMS:
        return False
    bases = np.array([source.data_ptr(), target.data_ptr(), 0], dtype=np.int64)
    places = bases + pieces * (source[0].numel() * source.element_size())
    attributes = runtime.cudaMemcpyAttributes()
    # As for a copy of its own: after what is queued on the stream, and before what comes next.
    attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
    for first in range(0, len(places), PIECES_PER_CALL):
        sources, targets, sizes = places[first : first + PIECES_PER_CALL].T.tolist()
        found = runtime.cudaMemcpyBatchAsync(targets, sources, sizes, len(sizes), [attributes], [0], 1, stream)
        # CUDA 12 also returns which copy failed.
        status = int(found[0])
        if status in NOT_SUPPORTED and not first:
            return False
        if status:
            raise RuntimeError(f"cudaMemcpyBatchAsync of {len(sizes)} copies failed: CUDA error {status}")
    return True
