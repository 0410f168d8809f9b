"""`MappedMemory`: KV in contiguous virtual memory, in pages that the GPU's driver maps (vAttention).

Prabhu et al., "vAttention: Dynamic Memory Management for Serving LLMs without PagedAttention" (ASPLOS 2025). Each seat
has virtual memory for the longest context, and each layer keys and values of its own: a block is as many tokens as fill
one page, and takes a page of each. What a prompt lacks is mapped before it is computed. What decodes take next is
mapped while the step before computes. Pages of a sequence that has ended stay mapped, and the next that takes its place
has them; they are unmapped only when others need them. What comes from another engine is mapped before the next step.
"""

from bisect import bisect_left, insort
from typing import TYPE_CHECKING, ClassVar, Self

from sim.engine.limits import Limits
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence
from sim.kv.page_options import PageOptions
from sim.kv.paged import PagedMemory

if TYPE_CHECKING:
    from sim.systems.builder import Builder


class MappedMemory(PagedMemory):
    """Blocks on demand, of whole pages, and what mapping them takes."""

    name: ClassVar[str] = "mapped"
    options: ClassVar[type | None] = PageOptions
    can_cache_prefixes: ClassVar[bool] = False
    in_pages: ClassVar[bool] = True
    unexecutable: ClassVar[str] = (
        "memory=mapped has the driver map pages, which the runtime does not ask it to; serve with --policy sarathi"
    )
    can_swap = False

    @classmethod
    def build(cls, b: "Builder") -> Self:
        b.refuse_windows("memory=mapped")
        b.refuse_unlike_layers()
        pages = 2 * b.deployment.model.num_layers
        return cls(b.limits, pages * b.options(PageOptions).map_us / 1e6)

    def __init__(self, limits: Limits, map_s_per_block: float) -> None:
        super().__init__(limits)
        self.map_s_per_block = map_s_per_block
        # Blocks that places without a sequence have mapped, in order, and their sum: of those that count as free.
        self._kept: list[int] = []
        self._num_kept = 0
        self._num_mapped = 0

    def place(self, seq: Sequence, num_tokens: int) -> None:
        super().place(seq, num_tokens)
        self._take_place(seq)

    def receive(self, seq: Sequence, num_tokens: int) -> int:
        blocks = super().receive(seq, num_tokens)
        self._take_place(seq)
        return blocks

    def _take_place(self, seq: Sequence) -> None:
        kept, blocks = self._kept, seq.num_blocks
        if kept:
            # The place that has as many, or the next more, or else the most.
            there = kept.pop(min(bisect_left(kept, blocks), len(kept) - 1))
            self._num_kept -= there
            blocks = max(0, blocks - there)
        self._map(blocks)

    def take_chunk(self, seq: Sequence, num_tokens: int) -> None:
        before = seq.num_blocks
        super().take_chunk(seq, num_tokens)
        self._map(seq.num_blocks - before)

    def _map(self, num_blocks: int) -> None:
        self._num_mapped += num_blocks
        self._unmap()

    def _unmap(self) -> None:
        """Others have taken what idle places had mapped: those with the most lose it first."""
        while self._num_kept > self.gpu.free:
            most = self._kept.pop()
            left = max(0, most - (self._num_kept - self.gpu.free))
            self._num_kept -= most - left
            if left:
                insort(self._kept, left)

    def release(self, seq: Sequence) -> None:
        self._unmap()
        blocks = seq.num_blocks
        super().release(seq)
        if blocks:
            insort(self._kept, blocks)
            self._num_kept += blocks

    def repeats(self, plan: IterationPlan, steps: int) -> int:
        return 1 if self._num_mapped else super().repeats(plan, steps)

    def complete(self, plan: IterationPlan) -> None:
        if self._num_mapped:
            plan.added_s += self._num_mapped * self.map_s_per_block
            self.scheduler.counters.policy["mapped_blocks"] += self._num_mapped
            self._num_mapped = 0
