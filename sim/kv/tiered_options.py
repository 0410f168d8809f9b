"""Options of `memory=tiered` (CachedAttention's), of `memory=retained` (Pensieve's), and of any mix with them."""

from typing import Literal

from sim.frozen import frozen
from sim.parts.options import GIB, MOST_GIB, CheckedOptions, Only, option

ON_DISK = Only("disk_space")


@frozen
class TieredOptions(CheckedOptions):
    """The disk below the host, and what looks ahead in the queue."""

    disk_space: float = option(
        0.0,
        "GiB of disk for KV of ended turns, of all GPUs of the engine together; 0: none",
        within=(0.0, MOST_GIB),
    )
    disk_read_gb_per_s: float = option(5.0, "bandwidth from the disk, GB/s", within=(1e-3, 1e6), only=ON_DISK)
    disk_write_gb_per_s: float = option(3.0, "bandwidth to the disk, GB/s", within=(1e-3, 1e6), only=ON_DISK)
    disk_latency_us: float = option(
        100.0, "time before each copy from or to the disk begins, us", within=(0.0, 1e12), only=ON_DISK
    )
    disk_block_us: float = option(
        10.0, "time of each block of such a copy beside its bytes, us", within=(0.0, 1e12), only=ON_DISK
    )
    look_ahead: bool = option(
        True,
        "fetch from the disk what waiting requests will load, and keep it longer than what none waits for",
        only=ON_DISK,
    )

    replacement: Literal["lru", "pgdsf"] = option(
        "lru", "what gives way on the host: the longest unused, or RAGCache's least of uses x cost by a clock"
    )

    def num_disk_blocks(self, block_bytes: float) -> int:
        """Blocks that the disk holds, which take `block_bytes` on all GPUs together."""
        return int(self.disk_space * GIB / block_bytes)


@frozen
class RetentionOptions(CheckedOptions):
    """When chunks are copied to the host."""

    swap_out_threshold: float = option(
        0.25,
        "chunks are copied to the host while fewer than this share of GPU blocks are free or copied already",
        within=(0.0, 1.0),
    )
