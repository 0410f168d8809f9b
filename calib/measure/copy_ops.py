"""Work that moves bytes: between device and host, from pinned to pageable memory, and between GPUs."""

from itertools import cycle

import numpy as np
import torch
from torch import Tensor
from torch.cuda import nccl

from calib.measure.clocks import Work
from calib.measure.points import Point
from gpu_runtime.kv.copy_engine import copy_now
from gpu_runtime.kv.page_locked import page_locked
from sim.engine.changes import Direction

TILE_BYTES = 16 * 2**20
"""Random bytes, repeated: making a gigabyte of them takes seconds."""
PIECES = 4096
"""Places in the buffers that repeats take turns with, at most."""
LEAD_BYTES = 256 * 2**20
"""Written on every GPU before an all-reduce, so that all ranks are asked before the first of them can start."""


class CopyBuffers:
    """Buffers of one size on the device, in pinned and in pageable host memory, made when first needed.

    On a CPU all three are plain memory and copies between them are `memcpy` through the same code.
    """

    def __init__(self, size: int, device: torch.device, seed: int) -> None:
        self._size = size
        self._device = device
        self._seed = seed
        self._buffers: dict[str, Tensor] = {}

    def work(self, point: Point) -> Work:
        """Copies of a point's pieces as the runtime makes them, from and to places in random order.

        Args:
            point: its op is h2d, d2h or host_memcpy.

        Raises:
            UserError: the driver refuses to page-lock so much memory.
        """
        if point.op == "host_memcpy":
            return self._memcpy(point)
        device, host = self._buffer("device"), self._buffer(point.memory.removesuffix("-row"))
        piece, count = point.piece_bytes, point.num_copies
        slots = self._size // piece
        rounds = max(1, min(slots, PIECES) // count)
        rng = np.random.default_rng(self._seed + point.num_bytes)
        sources, targets = (rng.permutation(slots)[: rounds * count] for _ in range(2))
        if point.memory == "pinned-row":
            row = np.arange(rounds * count)
            sources, targets = (sources, row) if point.op == "d2h" else (row, targets)
        blocks = [buffer[: slots * piece].view(slots, piece) for buffer in (device, host)]
        direction = Direction(point.op)
        source, target = blocks if direction is Direction.D2H else reversed(blocks)
        turns = cycle([(sources[at : at + count], targets[at : at + count]) for at in range(0, rounds * count, count)])

        def copy() -> None:
            source_ids, target_ids = next(turns)
            copy_now(source, source_ids, target, target_ids, direction)

        return copy

    def _memcpy(self, point: Point) -> Work:
        """One thread's `memcpy`, which numpy calls; torch would use several."""
        source, target = self._buffer("pinned").numpy(), self._buffer("pageable").numpy()
        size = point.num_bytes
        starts = [size * turn for turn in range(max(1, min(self._size // size, PIECES)))]
        turns = cycle([(target[start : start + size], source[start : start + size]) for start in starts])

        def copy() -> None:
            to, of = next(turns)
            np.copyto(to, of)

        return copy

    def _buffer(self, kind: str) -> Tensor:
        if kind not in self._buffers:
            on_device = kind == "device"
            if kind == "pinned" and self._device.type == "cuda":
                # As the runtime's pools are, and not as torch pins memory.
                buffer, _ = page_locked((self._size,), torch.uint8, self)
            else:
                device = self._device if on_device else torch.device("cpu")
                buffer = torch.empty(self._size, dtype=torch.uint8, device=device)
            generator = torch.Generator().manual_seed(self._seed + len(self._buffers))
            tile = torch.randint(256, (min(TILE_BYTES, self._size),), dtype=torch.uint8, generator=generator)
            for part in buffer.split(len(tile)):
                part.copy_(tile[: len(part)])
            self._buffers[kind] = buffer
        return self._buffers[kind]


class AllReduce:
    """Sums over several GPUs of one process through NCCL."""

    def __init__(self, point: Point, dtype: torch.dtype) -> None:
        self._devices = [torch.device("cuda", index) for index in range(point.tp)]
        elements = point.num_bytes // dtype.itemsize
        self._parts = [torch.randn(elements, device=device, dtype=dtype) for device in self._devices]
        # Sums of sums would overflow: they go elsewhere.
        self._sums = [torch.empty_like(part) for part in self._parts]
        self._leads = [torch.empty(LEAD_BYTES, dtype=torch.uint8, device=device) for device in self._devices]

    def once(self) -> float:
        """Seconds of one all-reduce on the first GPU, all ranks having been asked before."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._synchronize()
        # The first GPU's last: its event shall not fire before the others have been asked.
        for lead in reversed(self._leads):
            lead.zero_()
        start.record()
        nccl.all_reduce(self._parts, self._sums)
        end.record()
        self._synchronize()
        return start.elapsed_time(end) * 1e-3

    def _synchronize(self) -> None:
        for device in self._devices:
            torch.cuda.synchronize(device)
