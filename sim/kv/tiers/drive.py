"""`Drive`: what copies between a disk, or files, and the host take."""


class Drive:
    """Bandwidths, a latency and a cost of each block.

    Args:
        block_bytes: of a block, over all GPUs of the engine.
        read_bytes_per_s, write_bytes_per_s: of its two lanes.
        latency_s: before each copy begins.
        s_per_block: of each block beside its bytes.
    """

    def __init__(
        self,
        block_bytes: float,
        *,
        read_bytes_per_s: float,
        write_bytes_per_s: float,
        latency_s: float = 0.0,
        s_per_block: float = 0.0,
    ) -> None:
        self._latency_s = latency_s
        self._read_s = block_bytes / read_bytes_per_s + s_per_block
        self._write_s = block_bytes / write_bytes_per_s + s_per_block

    def read_s(self, num_blocks: int) -> float:
        """A copy of so many blocks to the host, alone on its lane, s."""
        return self._latency_s + num_blocks * self._read_s

    def write_s(self, num_blocks: int) -> float:
        """The same from the host."""
        return self._latency_s + num_blocks * self._write_s
