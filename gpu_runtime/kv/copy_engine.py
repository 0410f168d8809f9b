"""`CopyEngine`: blocks between GPU and host beside the computation, one lane per direction."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from gpu_runtime.device_stream import to_device
from gpu_runtime.kv import batched_copies
from gpu_runtime.kv.copy_spans import CopySpans
from gpu_runtime.kv.copy_worker import CopyFailed, CopyHandle, CopyWorker, InlineWorker
from gpu_runtime.kv.pool import KVPool
from sim.cost.model import BATCHED_COPIES
from sim.engine.changes import Direction

__all__ = ["CopyEngine", "CopyFailed", "CopyHandle"]

PIECE_BYTES = 4 * 2**20
"""No copy is larger: what an iteration uploads waits for the one that is under way, here 0.2 ms at 25 GB/s."""
STAGING_BYTES = 32 * 2**20
"""Size of the buffer on the GPU through which scattered blocks go."""
STAGING_RUN_BYTES = 512 * 2**10
"""Runs longer than this on average are copied directly: 20 us at 25 GB/s outweigh the 5 us it takes to queue a copy."""


class CopyEngine:
    """Copies that run beside the computation: a stream and a thread for each direction.

    A copy starts after what was queued on the current stream when it was submitted, and copies of one direction run in
    order. It keeps no block from being freed: do that to those that a copy reads or writes only when it is `done`.
    """

    def __init__(self, device: torch.device | str, *, inline: bool = False) -> None:
        """`device` is that of the GPU pool; on a CPU the threads themselves copy, or with `inline` the caller does."""
        self.device = torch.device(device)
        if inline and self.device.type == "cuda":
            raise ValueError("inline copies are for a CPU: on CUDA nothing would run beside them")
        self._workers = {
            direction: InlineWorker() if inline else CopyWorker(direction.value, self.device) for direction in Direction
        }
        self.spans = CopySpans(self.device)

    def close(self) -> None:
        """Finish what is queued and end the threads."""
        for worker in self._workers.values():
            worker.close()

    def copy_blocks(
        self, src_pool: KVPool, src_ids: Sequence[int], dst_pool: KVPool, dst_ids: Sequence[int], direction: Direction
    ) -> CopyHandle:
        """Copy block `src_ids[i]` to `dst_ids[i]`.

        Args:
            src_pool: where the blocks are.
            src_ids: their ids there.
            dst_pool: where they go; a pinned pool where it is the host's and the other is on CUDA.
            dst_ids: their ids there, all different.
            direction: the lane, and which of the pools is the host's.

        Raises:
            ValueError: blocks of different shape or dtype, ids that do not fit.
        """
        _check(src_pool, src_ids, dst_pool, dst_ids)
        src, dst = _array(src_ids), _array(dst_ids)
        return self._submit(direction, lambda _: copy_now(src_pool.raw, src, dst_pool.raw, dst, direction))

    def copy_layer(
        self,
        src_pool: KVPool,
        src_ids: Sequence[int],
        dst_pool: KVPool,
        dst_ids: Sequence[int],
        layer: int,
        direction: Direction,
    ) -> CopyHandle:
        """The same of one layer of each block, from 0 to layer_group."""
        _check(src_pool, src_ids, dst_pool, dst_ids)
        src, dst = (_array(ids) * src_pool.layer_group + layer for ids in (src_ids, dst_ids))
        return self._submit(
            direction, lambda _: copy_now(src_pool.raw_layers, src, dst_pool.raw_layers, dst, direction)
        )

    def copy_rows(
        self, src: Tensor, src_rows: Sequence[int], dst: Tensor, dst_rows: Sequence[int], direction: Direction
    ) -> CopyHandle:
        """Copy row `src_rows[i]` of a tensor to row `dst_rows[i]` of another. Both are kept until the copy is over."""
        here, there = _array(src_rows), _array(dst_rows)

        def job(stream: torch.cuda.Stream | None) -> None:
            if stream is None:
                dst[torch.from_numpy(there)] = src[torch.from_numpy(here)]
                return
            copy_now(src, here, dst, there, direction)
            for tensor in (src, dst):
                if tensor.is_cuda:
                    # Its memory shall not be given out again before the stream is through with it.
                    tensor.record_stream(stream)

        return self._submit(direction, job)

    def _submit(self, direction: Direction, job: Callable[[torch.cuda.Stream | None], None]) -> CopyHandle:
        worker, spans, handle = self._workers[direction], self.spans, CopyHandle()

        def noted() -> None:
            start = spans.mark(worker.stream)
            job(worker.stream)
            handle.mark(worker.stream)
            spans.note(direction, start, spans.mark(worker.stream))

        worker.submit(noted, handle)
        return handle


def _array(ids: Sequence[int]) -> np.ndarray:
    return np.asarray(ids, dtype=np.int64)


def copy_now(src: Tensor, src_ids: np.ndarray, dst: Tensor, dst_ids: np.ndarray, direction: Direction) -> None:
    """Queue (on a CPU: make) copies of blocks, neighbours together; scattered ones on the GPU go through a buffer."""
    host_ids = dst_ids if direction is Direction.D2H else src_ids
    num_runs, num_host_runs = len(contiguous_runs(src_ids, dst_ids)), len(contiguous_runs(host_ids, host_ids))
    num_bytes = len(src_ids) * src[0].numel() * src.element_size()
    if (src.is_cuda or dst.is_cuda) and prefers_staging(num_runs, num_host_runs, num_bytes):
        _copy_staged(src, src_ids, dst, dst_ids, direction)
    else:
        _copy_runs(src, src_ids, dst, dst_ids)


def prefers_staging(num_runs: int, num_host_runs: int, num_bytes: int) -> bool:
    """Whether to gather (or scatter) on the GPU: when direct copies would be small, and this at least halves them."""
    return num_bytes < num_runs * STAGING_RUN_BYTES and 2 * num_host_runs <= num_runs


def contiguous_runs(src_ids: np.ndarray, dst_ids: np.ndarray) -> np.ndarray:
    """Stretches in which both ids go up by one: [runs, 3], the first source, the first destination, how many."""
    ends = np.flatnonzero((np.diff(src_ids) != 1) | (np.diff(dst_ids) != 1)) + 1
    starts = np.concatenate(([0], ends)) if len(src_ids) else ends
    return np.stack((src_ids[starts], dst_ids[starts], np.diff(starts, append=len(src_ids))), axis=1)


def pieces(src_ids: np.ndarray, dst_ids: np.ndarray, most: int) -> np.ndarray:
    """Contiguous runs, cut into such of at most so many blocks; [pieces, 3] as `contiguous_runs`."""
    runs = contiguous_runs(src_ids, dst_ids)
    counts = runs[:, 2]
    cuts = -(-counts // most)
    # Which piece of its run each is.
    number = np.arange(cuts.sum()) - np.repeat(np.cumsum(cuts) - cuts, cuts)
    found = np.repeat(runs, cuts, axis=0)
    found[:, :2] += (number * most)[:, None]
    found[:, 2] = np.minimum(most, found[:, 2] - number * most)
    return found


def _copy_runs(src: Tensor, src_ids: np.ndarray, dst: Tensor, dst_ids: np.ndarray) -> None:
    """Queue copies of blocks as they lie."""
    found = pieces(src_ids, dst_ids, max(1, PIECE_BYTES // (src[0].numel() * src.element_size())))
    host = dst if src.is_cuda else src
    # Of pageable memory the driver's batches promise nothing.
    batches = (src.is_cuda or dst.is_cuda) and len(found) >= BATCHED_COPIES and host.is_pinned()
    if batches and batched_copies.copy_pieces(src, dst, found):
        return
    for start, to, count in found.tolist():
        dst[to : to + count].copy_(src[start : start + count], non_blocking=True)


def _copy_staged(src: Tensor, src_ids: np.ndarray, dst: Tensor, dst_ids: np.ndarray, direction: Direction) -> None:
    """The GPU's side goes through a contiguous buffer, so that only the host's side decides the number of copies."""
    per_buffer = max(1, STAGING_BYTES // (src[0].numel() * src.element_size()))
    on_gpu = src if direction is Direction.D2H else dst
    staging = torch.empty((min(per_buffer, len(src_ids)), *src.shape[1:]), device=on_gpu.device, dtype=src.dtype)
    for first in range(0, len(src_ids), per_buffer):
        from_ids, to_ids = src_ids[first : first + per_buffer], dst_ids[first : first + per_buffer]
        used = staging[: len(from_ids)]
        places = np.arange(len(from_ids))
        if direction is Direction.D2H:
            torch.index_select(src, 0, to_device(from_ids, src.device), out=used)
            _copy_runs(used, places, dst, to_ids)
        else:
            _copy_runs(src, from_ids, used, places)
            dst.index_copy_(0, to_device(to_ids, dst.device), used)


def _check(src_pool: KVPool, src_ids: Sequence[int], dst_pool: KVPool, dst_ids: Sequence[int]) -> None:
    ours, theirs = src_pool.data, dst_pool.data
    if ours.shape[1:] != theirs.shape[1:] or ours.dtype != theirs.dtype:
        raise ValueError(f"blocks of {ours.dtype} {list(ours.shape[1:])} and {theirs.dtype} {list(theirs.shape[1:])}")
    if len(src_ids) != len(dst_ids) or len(set(dst_ids)) != len(dst_ids):
        raise ValueError(f"{len(src_ids)} blocks to {len(set(dst_ids))} different places of {len(dst_ids)}")
    for ids, pool in ((src_ids, src_pool), (dst_ids, dst_pool)):
        if ids and not 0 <= min(ids) <= max(ids) < pool.num_blocks:
            raise ValueError(f"block ids from {min(ids)} to {max(ids)} in a pool of {pool.num_blocks}")
