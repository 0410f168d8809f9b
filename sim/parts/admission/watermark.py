"""Admission by memory alone: `Watermark`, with a share of the GPU's blocks kept free."""

from sim.engine.sequence import Sequence
from sim.parts.base import Admission

WATERMARK = 0.01
"""Share of the GPU blocks kept free at admission (vLLM 0.5.5's BlockSpaceManagerV1)."""


class Watermark(Admission):
    """The head starts if its prompt has blocks above the watermark."""

    def __init__(self, num_gpu_blocks: int, share: float = WATERMARK) -> None:
        """`share` of `num_gpu_blocks` whole blocks stays free; 0 where memory is reserved for all there may be."""
        self.keep_free = int(share * num_gpu_blocks)

    def admits(self, seq: Sequence) -> bool:
        return self.memory.fits(seq, self.keep_free)
