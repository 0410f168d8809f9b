"""Options of vLLM's OffloadingConnector: `--kv-offloading-size`, and the keys of its `kv_connector_extra_config`."""

from dataclasses import dataclass
from typing import Literal

from sim.errors import UserError
from sim.parts.options import MOST_GIB, Only, option, vllm_option

GIB = 1 << 30
OFFLOADS = Only("offloads", told="kv-offloading-size")
PAGE_BYTES = 4096
"""A chunk on the host is rounded up to whole pages."""


@dataclass(frozen=True)
class OffloadOptions:
    """What is offloaded to the host; nothing unless a size is given."""

    kv_offloading_size: float | None = vllm_option(
        None, "GiB of host memory for KV blocks that leave the GPU, of all GPUs of the engine together"
    )
    cpu_chunks: int | None = option(None, "chunks on the host, instead of sizing them from --kv-offloading-size")
    blocks_per_chunk: int = option(1, "blocks that are stored and loaded together", only=OFFLOADS)
    eviction_policy: Literal["lru", "arc"] = option("lru", "which chunks give way on the host", only=OFFLOADS)
    store_threshold: int = option(0, "times a chunk must be offered before it is stored; 0 and 1: once", only=OFFLOADS)
    offload_outputs: bool = option(False, "store generated tokens as well as prompts", only=OFFLOADS)
    load_s_per_block: float | None = option(
        None, "seconds to load a block, on a lane of its own (default: by the profile)", only=OFFLOADS
    )
    store_s_per_block: float | None = option(None, "seconds to store a block (default: by the profile)", only=OFFLOADS)

    def __post_init__(self) -> None:
        if self.kv_offloading_size is not None and self.kv_offloading_size > MOST_GIB:
            raise UserError(f"kv-offloading-size: {self.kv_offloading_size} is more than {MOST_GIB:g} GiB; give less")
        for name, least in (("kv_offloading_size", 0), ("cpu_chunks", 0), ("blocks_per_chunk", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"{name.replace('_', '-')}: {value} is less than {least}; give {least} or more")
        for name in ("store_threshold", "load_s_per_block", "store_s_per_block"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise UserError(f"{name.replace('_', '-')}: {value} is not a number of 0 or more")

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
