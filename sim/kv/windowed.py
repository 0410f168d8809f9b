"""`WindowedMemory`: whole blocks on demand, and a ring of blocks for layers with a sliding window.

As vLLM's hybrid KV cache manager: layers of one kind are cut into groups of as many layers, a block holds `block_size`
tokens of one group, and any block serves any group. A sequence of B blocks holds B for every group that keeps all, and
min(B, ceil(window / block_size)) for every group with a window: vLLM 0.5.5's ring, of which a prompt holds no more than
one. `HybridMemory` has vLLM 1's way, which frees blocks that have left the window.
"""

from typing import TYPE_CHECKING, ClassVar, Self

from sim.engine.batch import DecodeBatch
from sim.engine.limits import Limits
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence
from sim.engine.windowed_batch import WindowedBatch
from sim.errors import InvariantError
from sim.kv.paged import PagedMemory

if TYPE_CHECKING:
    from sim.systems.builder import Builder


class WindowedMemory(PagedMemory):
    """Pool blocks are those of one group; `unit` is a whole block's, one for each group."""

    unexecutable: ClassVar[str] = (
        "rings of blocks for layers with a window are not computed on a device: serve with --policy vllm-v1"
    )

    @classmethod
    def build(cls, b: "Builder") -> Self:
        return cls(b.limits)

    def __init__(self, limits: Limits) -> None:
        window = limits.window
        if window is None or window.blocks is None:
            raise InvariantError("memory with rings needs to know how long they are")
        super().__init__(limits, window.num_full + window.num_window)
        self._num_full, self._num_window, self._ring_blocks = window.num_full, window.num_window, window.blocks

    def blocks_holding(self, num_tokens: int) -> int:
        blocks = -(-num_tokens // self.block_size)
        return self._num_full * blocks + self._num_window * min(blocks, self._ring_blocks)

    def held_blocks(self, seq: Sequence) -> int:
        return self.blocks_holding(seq.num_blocks * self.block_size)

    def blocks_wanted(self, seq: Sequence, num_tokens: int) -> int:
        return self.blocks_holding(num_tokens)

    def blocks_missing(self, seq: Sequence, num_tokens: int) -> int:
        return self.blocks_holding(num_tokens) - self.held_blocks(seq)

    def decode_blocks(self, steps: int = 1) -> int:
        """Also what the next `steps` iterations take."""
        batch = self._rings
        return self._num_full * batch.blocks_needed(steps) + self._num_window * batch.ring_blocks_needed(steps)

    def decode_blocks_of(self, seq: Sequence) -> int:
        if not self.batch.needs_block(seq):
            return 0
        return self._num_full + (self._num_window if self._rings.ring_grows(seq) else 0)

    # -- decodes ---------------------------------------------------------------------------------------------------

    @property
    def _rings(self) -> WindowedBatch:
        batch = self.batch
        assert isinstance(batch, WindowedBatch)
        return batch

    def append(self, seq: Sequence) -> None:
        self.gpu.allocate(self.decode_blocks_of(seq))

    def grow_further(self, batch: DecodeBatch, steps: int) -> None:
        self.gpu.allocate(self.decode_blocks(steps) - self.decode_blocks())

    def repeats(self, plan: IterationPlan, steps: int) -> int:
        # The first iteration's blocks are taken already.
        spare = self.gpu.free + self.decode_blocks() - self.unit
        if self.decode_blocks(steps) <= spare:
            return steps
        # Most iterations that fit: they need ever more.
        fitting, too_many = 1, steps
        while too_many - fitting > 1:
            middle = (fitting + too_many) // 2
            if self.decode_blocks(middle) <= spare:
                fitting = middle
            else:
                too_many = middle
        return fitting
