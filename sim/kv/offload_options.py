"""Options of vLLM's OffloadingConnector: `--kv-offloading-size`, and the keys of its `kv_connector_extra_config`."""

from math import inf
from typing import Literal

from sim.frozen import frozen
from sim.kv.tiers.drive import Drive
from sim.parts.options import GIB, MOST_GIB, CheckedOptions, Only, option, vllm_option

OFFLOADS = Only("offloads", told="kv-offloading-size")
STORES = Only("storage_space")
MEASURED = (0.0, 1e9)
PAGE_BYTES = 4096
"""A chunk on the host is rounded up to whole pages."""


@frozen
class OffloadOptions(CheckedOptions):
    """What is offloaded to the host; nothing unless a size is given."""

    kv_offloading_size: float | None = vllm_option(
        None,
        "GiB of host memory for KV blocks that leave the GPU, of all GPUs of the engine together",
        within=(0.0, MOST_GIB),
    )
    cpu_chunks: int | None = option(
        None, "chunks on the host, instead of sizing them from --kv-offloading-size", within=(0, inf)
    )
    blocks_per_chunk: int = option(1, "blocks that are stored and loaded together", within=(1, inf), only=OFFLOADS)
    eviction_policy: Literal["lru", "arc"] = option("lru", "which chunks give way on the host", only=OFFLOADS)
    store_threshold: int = option(
        0, "times a chunk must be offered before it is stored; 0 and 1: once", within=(0, inf), only=OFFLOADS
    )
    offload_outputs: bool = option(False, "store generated tokens as well as prompts", only=OFFLOADS)
    load_s_per_block: float | None = option(
        None, "seconds to load a block, on a lane of its own (default: by the profile)", within=MEASURED, only=OFFLOADS
    )
    store_s_per_block: float | None = option(
        None, "seconds to store a block (default: by the profile)", within=MEASURED, only=OFFLOADS
    )
    storage_space: float = option(
        0.0,
        "GiB of files behind the host (vLLM's tier `fs`); inf: as many as are written; 0: none",
        within=(0.0, inf),
        only=OFFLOADS,
    )
    storage_shared: bool = option(False, "replicas share the files, each at the bandwidths below", only=STORES)
    storage_read_gb_per_s: float = option(
        5.0, "bandwidth from the files to the host, GB/s", within=(1e-3, 1e6), only=STORES
    )
    storage_write_gb_per_s: float = option(
        3.0, "bandwidth from the host to the files, GB/s", within=(1e-3, 1e6), only=STORES
    )
    storage_latency_us: float = option(
        100.0, "time before each copy from or to files begins, us", within=(0.0, 1e12), only=STORES
    )

    @property
    def offloads(self) -> bool:
        """Whether there is anything to offload to."""
        return self.kv_offloading_size is not None or self.cpu_chunks is not None

    def num_chunks(self, block_bytes: float) -> int:
        """Chunks that the host holds, of blocks that take `block_bytes` on all GPUs together."""
        if self.cpu_chunks is not None:
            return self.cpu_chunks
        pages = -(-int(block_bytes * self.blocks_per_chunk) // PAGE_BYTES)
        return int((self.kv_offloading_size or 0.0) * GIB) // (pages * PAGE_BYTES)

    def num_stored_chunks(self, block_bytes: float) -> int | None:
        """Chunks that the files hold; None: as many as are written."""
        chunk_bytes = block_bytes * self.blocks_per_chunk
        return None if self.storage_space == inf else int(self.storage_space * GIB / chunk_bytes)

    def drive(self, block_bytes: float) -> Drive:
        """What copies from and to the files take."""
        return Drive(
            block_bytes,
            read_bytes_per_s=self.storage_read_gb_per_s * 1e9,
            write_bytes_per_s=self.storage_write_gb_per_s * 1e9,
            latency_s=self.storage_latency_us / 1e6,
        )
