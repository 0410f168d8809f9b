"""`CopyEngine`: blocks between GPU and host beside the computation, one lane per direction."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from gpu_runtime.kv.copy_spans import CopySpans
from gpu_runtime.kv.copy_worker import CopyFailed, CopyHandle, CopyWorker, InlineWorker
from gpu_runtime.kv.pool import KVPool
from sim.engine.plan import Direction

__all__ = ["CopyEngine", "CopyFailed", "CopyHandle"]

STAGING_BYTES = 32 * 2**20
"""Size of the buffer on the GPU through which scattered blocks go."""
STAGING_RUN_BYTES = 512 * 2**10
"""Runs longer than this on average are copied directly: 20 us at 25 GB/s outweigh the 5 us it takes to queue a copy."""


class CopyEngine:
    """Copies that run beside the computation: a stream and a thread for each direction, and one thread on the host.

    A copy starts after what was queued on the current stream when it was submitted, and copies of one direction run in
    order. Nobody else holds blocks back: those that a copy reads or writes may be freed only when it is `done`.
    """

    def __init__(self, device: torch.device | str, *, inline: bool = False) -> None:
        """`device` is that of the GPU pool; on a CPU the threads themselves copy, or with `inline` the caller does."""
        self.device = torch.device(device)
        if inline and self.device.type == "cuda":
            raise ValueError("inline copies are for a CPU: on CUDA nothing would run beside them")

        def worker(name: str, device: torch.device) -> CopyWorker:
            return InlineWorker() if inline else CopyWorker(name, device)

        self._workers = {direction: worker(direction.value, self.device) for direction in Direction}
        self._host = worker("host", torch.device("cpu"))
        self.spans = CopySpans(self.device)

    def __enter__(self) -> "CopyEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Finish what is queued and end the threads."""
        for worker in (*self._workers.values(), self._host):
            worker.close()

    def copy_blocks(
        self,
        src_pool: KVPool,
        src_ids: Sequence[int],
        dst_pool: KVPool,
        dst_ids: Sequence[int],
        direction: Direction,
        groups: Sequence[int] | None = None,
    ) -> CopyHandle:
        """Copy block `src_ids[i]` to `dst_ids[i]`.

        Args:
            src_pool: where the blocks are.
            src_ids: their ids there.
            dst_pool: where they go; a pinned pool where it is the host's and the other is on CUDA.
            dst_ids: their ids there, all different.
            direction: the lane, and which of the pools is the host's.
            groups: the layer group of each block, ascending: the handle's `wait_layer` then waits for a layer's only.

        Raises:
            ValueError: blocks of different shape or dtype, ids or groups that do not fit.
        """
        _check(src_pool, src_ids, dst_pool, dst_ids)
        worker = self._workers[direction]
        parts = _by_group(list(src_ids), list(dst_ids), groups)
        handle = CopyHandle(tuple(group for group, _, _ in parts if group is not None), src_pool.layer_group)

        def job() -> None:
            for group, src, dst in parts:
                copy_now(src_pool.raw, src, dst_pool.raw, dst, direction)
                handle.mark(group, worker.stream)

        self._submit(direction, job, handle)
        return handle

    def copy_on_host(
        self,
        src_pool: KVPool,
        src_ids: Sequence[int],
        dst_pool: KVPool,
        dst_ids: Sequence[int],
        after: CopyHandle | None = None,
    ) -> CopyHandle:
        """Copy blocks between two host pools (pinned and pageable), once `after` is over.

        The copy fails if `after` does. ValueError as for `copy_blocks`.
        """
        _check(src_pool, src_ids, dst_pool, dst_ids)
        handle = CopyHandle((), src_pool.layer_group)
        src, dst = list(src_ids), list(dst_ids)

        def job() -> None:
            if after is not None:
                after.wait()
            for start, to, count in contiguous_runs(src, dst):
                dst_pool.raw[to : to + count].copy_(src_pool.raw[start : start + count])

        self._host.submit(job, handle)
        return handle

    def copy_tensors(self, pairs: Sequence[tuple[Tensor, Tensor]], direction: Direction) -> CopyHandle:
        """Copy each pair's first tensor to its second. Both are kept until the copy is over."""
        worker = self._workers[direction]
        handle = CopyHandle((), 1)

        def job() -> None:
            for src, dst in pairs:
                dst.copy_(src, non_blocking=True)
                for tensor in (src, dst):
                    if tensor.is_cuda and worker.stream is not None:
                        # Its memory shall not be given out again before the stream is through with it.
                        tensor.record_stream(worker.stream)
            handle.mark(None, worker.stream)

        self._submit(direction, job, handle)
        return handle

    def _submit(self, direction: Direction, job: Callable[[], None], handle: CopyHandle) -> None:
        worker, spans = self._workers[direction], self.spans

        def noted() -> None:
            start = spans.mark(worker.stream)
            job()
            spans.note(direction, start, spans.mark(worker.stream))

        worker.submit(noted, handle)


def copy_now(src: Tensor, src_ids: list[int], dst: Tensor, dst_ids: list[int], direction: Direction) -> None:
    """Queue (on a CPU: make) copies of blocks, neighbours together; scattered ones on the GPU go through a buffer."""
    runs = list(contiguous_runs(src_ids, dst_ids))
    host_ids = dst_ids if direction is Direction.D2H else src_ids
    host_runs = list(contiguous_runs(host_ids, host_ids))
    num_bytes = len(src_ids) * src[0].numel() * src.element_size()
    if (src.is_cuda or dst.is_cuda) and prefers_staging(len(runs), len(host_runs), num_bytes):
        _copy_staged(src, src_ids, dst, dst_ids, direction)
        return
    for start, to, count in runs:
        dst[to : to + count].copy_(src[start : start + count], non_blocking=True)


def prefers_staging(num_runs: int, num_host_runs: int, num_bytes: int) -> bool:
    """Whether to gather (or scatter) on the GPU: when direct copies would be small, and this at least halves them."""
    return num_bytes < num_runs * STAGING_RUN_BYTES and 2 * num_host_runs <= num_runs


def contiguous_runs(src_ids: Sequence[int], dst_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first source, first destination, count) of stretches in which both ids go up by one."""
    start = 0
    for i in range(1, len(src_ids) + 1):
        if i == len(src_ids) or src_ids[i] != src_ids[i - 1] + 1 or dst_ids[i] != dst_ids[i - 1] + 1:
            yield src_ids[start], dst_ids[start], i - start
            start = i


def _copy_staged(src: Tensor, src_ids: list[int], dst: Tensor, dst_ids: list[int], direction: Direction) -> None:
    """The GPU's side goes through a contiguous buffer, so that only the host's side decides the number of copies."""
    per_buffer = max(1, STAGING_BYTES // (src[0].numel() * src.element_size()))
    on_gpu = src if direction is Direction.D2H else dst
    staging = torch.empty((min(per_buffer, len(src_ids)), *src.shape[1:]), device=on_gpu.device, dtype=src.dtype)
    for first in range(0, len(src_ids), per_buffer):
        from_ids, to_ids = src_ids[first : first + per_buffer], dst_ids[first : first + per_buffer]
        used = staging[: len(from_ids)]
        places = list(range(len(from_ids)))
        if direction is Direction.D2H:
            torch.index_select(src, 0, _index(from_ids, src.device), out=used)
            for start, to, count in contiguous_runs(places, to_ids):
                dst[to : to + count].copy_(used[start : start + count], non_blocking=True)
        else:
            for start, to, count in contiguous_runs(from_ids, places):
                used[to : to + count].copy_(src[start : start + count], non_blocking=True)
            dst.index_copy_(0, _index(to_ids, dst.device), used)


def _index(ids: list[int], device: torch.device) -> Tensor:
    """Ids on the device, without waiting for its stream."""
    index = torch.tensor(ids)
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index


def _by_group(
    src: list[int], dst: list[int], groups: Sequence[int] | None
) -> list[tuple[int | None, list[int], list[int]]]:
    """The ids of each layer group, in order; all under None where there are no groups."""
    if groups is None:
        return [(None, src, dst)]
    if len(groups) != len(src) or list(groups) != sorted(groups):
        raise ValueError(f"{len(groups)} groups for {len(src)} blocks: give each block's, ascending")
    parts = []
    for group, members in groupby(range(len(src)), key=groups.__getitem__):
        where = list(members)
        parts.append((group, src[where[0] : where[-1] + 1], dst[where[0] : where[-1] + 1]))
    return parts


def _check(src_pool: KVPool, src_ids: Sequence[int], dst_pool: KVPool, dst_ids: Sequence[int]) -> None:
    ours, theirs = src_pool.data, dst_pool.data
    if ours.shape[1:] != theirs.shape[1:] or ours.dtype != theirs.dtype:
        raise ValueError(f"blocks of {ours.dtype} {list(ours.shape[1:])} and {theirs.dtype} {list(theirs.shape[1:])}")
    if len(src_ids) != len(dst_ids) or len(set(dst_ids)) != len(dst_ids):
        raise ValueError(f"{len(src_ids)} blocks to {len(set(dst_ids))} different places of {len(dst_ids)}")
    for ids, pool in ((src_ids, src_pool), (dst_ids, dst_pool)):
        if ids and not 0 <= min(ids) <= max(ids) < pool.num_blocks:
            raise ValueError(f"block ids from {min(ids)} to {max(ids)} in a pool of {pool.num_blocks}")
