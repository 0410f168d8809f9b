"""Admission by memory alone: `Watermark`, with a share of the GPU's blocks kept free, and `MemoryAlone`, without."""

from typing import TYPE_CHECKING, ClassVar, Self

from sim.engine.sequence import Sequence
from sim.parts.base import Admission

if TYPE_CHECKING:
    from sim.systems.builder import Builder

WATERMARK = 0.01
"""Share of the GPU blocks kept free at admission (vLLM 0.5.5's BlockSpaceManagerV1)."""


class Watermark(Admission):
    """The head starts if its prompt has blocks above the watermark."""

    name: ClassVar[str] = "watermark"
    by_memory_alone: ClassVar[bool] = True
    share: ClassVar[float] = WATERMARK
    """Of the GPU's blocks, how many stay free."""

    def __init__(self, num_gpu_blocks: int) -> None:
        self.keep_free = int(self.share * num_gpu_blocks)

    @classmethod
    def build(cls, b: "Builder") -> Self:
        return cls(b.limits.num_gpu_blocks)

    def admits(self, seq: Sequence) -> bool:
        return self.memory.fits(seq, self.keep_free)


class MemoryAlone(Watermark):
    """No share stays free: where memory is reserved for all there may be, or another part keeps some free."""

    name: ClassVar[str] = "memory"
    share: ClassVar[float] = 0.0
