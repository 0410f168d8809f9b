"""Many copies in one call of the driver: `cudaMemcpyBatchAsync` of CUDA 12.8 on, through the bindings torch brings.

Asked for one by one, a few thousand scattered blocks cost Python more than the link.
"""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

NOT_SUPPORTED = frozenset({35, 36, 801})
"""CUDA errors: the bindings' runtime needs a newer driver than torch's; the call does; it is not supported."""

LEGACY_STREAMS = frozenset({0, 1})
"""CUDA's handles of its legacy default stream, which takes no batches. It is torch's current one by default."""

Piece = tuple[int, int, int]
"""First block of the source, first of the target, how many."""


@cache
def _runtime() -> Any:  # noqa: ANN401 - may be absent
    """`cuda.bindings.runtime`; None where it is not installed, too old, or its driver does not know the call."""
    try:
        runtime = import_module("cuda.bindings.runtime")
    except ImportError:
        return None
    return runtime if hasattr(runtime, "cudaMemcpyBatchAsync") else None


def copy_pieces(source: Tensor, target: Tensor, pieces: Sequence[Piece]) -> bool:
    """Queue copies of blocks on the current stream; False, and nothing is done, where there is no such call, or none
    for this stream.

    Args:
        source: [blocks, ...], contiguous; on the GPU or page-locked.
        target: the same of where they go.
        pieces: what to copy; no two overlap in the target.

    Raises:
        RuntimeError: the driver refuses.
    """
    runtime, stream = _runtime(), torch.cuda.current_stream().cuda_stream
    if runtime is None or stream in LEGACY_STREAMS:
        return False
    block_bytes = source[0].numel() * source.element_size()
    base, to = source.data_ptr(), target.data_ptr()
    attributes = runtime.cudaMemcpyAttributes()
    # As for a copy of its own: after what is queued on the stream, and before what comes next.
    attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
    found = runtime.cudaMemcpyBatchAsync(
        [to + place * block_bytes for _, place, _ in pieces],
        [base + place * block_bytes for place, _, _ in pieces],
        [count * block_bytes for _, _, count in pieces],
        len(pieces),
        [attributes],
        [0],
        1,
        stream,
    )
    # CUDA 12 also returns which copy failed.
    status = int(found[0])
    if status in NOT_SUPPORTED:
        return False
    if status:
        raise RuntimeError(f"cudaMemcpyBatchAsync of {len(pieces)} copies failed: CUDA error {status}")
    return True
