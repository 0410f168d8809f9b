"""`PagedMemory`: whole blocks taken as sequences grow (PagedAttention; vLLM 0.5.5's BlockSpaceManagerV1).

A prompt gets its blocks as it starts, a decode one more whenever its last block is full. A block spans all layers.
"""

from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from sim.engine.changes import Move, Release, Restore, Tier
from sim.engine.limits import Limits
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence
from sim.kv.memory import ALL_LAYERS, Memory, Swaps
from sim.parts.catalogue import class_at

if TYPE_CHECKING:
    from sim.systems.builder import Builder


class PagedMemory(Memory, Swaps):
    """Blocks on demand; sequences go to the host and come back whole."""

    name: ClassVar[str] = "paged"
    can_cache_prefixes: ClassVar[bool] = True

    @classmethod
    def build(cls, b: "Builder") -> Memory:
        """What the model's layers and the options ask for."""
        limits = b.limits
        if limits.states is not None:
            place = "sim.kv.states:StateMemory"
        elif limits.kept_of_prompt is not None:
            place = "sim.kv.compressed_prompts:CompressedPrompts"
        elif b.offloading.offloads:
            kind = "Offloading" if limits.enable_prefix_caching else "OffloadingPaged"
            place = f"sim.kv.offloading:{kind}"
        elif limits.has_window_groups and b.policy.has_hybrid_manager and not (limits.window and limits.window.chosen):
            place = "sim.kv.hybrid:HybridMemory"
        elif limits.enable_prefix_caching:
            place = "sim.kv.prefix:PrefixMemory"
        elif limits.has_window_groups:
            place = "sim.kv.windowed:WindowedMemory"
        else:
            return PagedMemory(limits)
        return class_at(place).build(b)

    def __init__(self, limits: Limits, num_groups: int = 1) -> None:
        super().__init__(limits, num_groups)
        # GPU blocks still held by sequences that are copied out piece by piece.
        self._to_send: dict[Sequence, int] = {}

    # -- to the host and back ----------------------------------------------------------------------------------------

    def can_swap_out(self, seq: Sequence) -> bool:
        return self.held_blocks(seq) <= self.host.free

    def swap_out(self, seq: Sequence, plan: IterationPlan) -> None:
        blocks = self.held_blocks(seq)
        self.gpu.release(blocks)
        self.host.allocate(blocks)
        self.scheduler.counters.swap_out_blocks += blocks
        plan.swapped_out_blocks += blocks
        move = Move(seq, ALL_LAYERS, 0, blocks * self.block_size, Tier.GPU, Tier.HOST, blocks, 0, False)
        self.scheduler.changes.append(move)

    def can_swap_in(self, seq: Sequence, keep_free: int) -> bool:
        return self.gpu.free - self.held_blocks(seq) >= (keep_free + 1) * self.unit

    def swap_in(self, seq: Sequence, plan: IterationPlan) -> None:
        blocks = self.held_blocks(seq)
        self.host.release(blocks)
        self.gpu.allocate(blocks)
        self.scheduler.counters.swap_in_blocks += blocks
        plan.swapped_in_blocks += blocks
        self.scheduler.changes.append(Restore(seq, blocks * self.block_size, (), ALL_LAYERS, (), blocks))

    def send_out(self, seq: Sequence, num_pieces: int = 1) -> None:
        blocks, size = self.held_blocks(seq), self.block_size
        self.host.allocate(blocks)
        self.copies_of[seq] = num_pieces
        self._to_send[seq] = blocks
        self.releasing += blocks
        self.scheduler.counters.swap_out_blocks += blocks
        for first, end in pairwise(blocks * i // num_pieces for i in range(num_pieces + 1)):
            count = end - first
            move = Move(seq, ALL_LAYERS, first * size, end * size, Tier.GPU, Tier.HOST, count, count, True)
            self.scheduler.beside.append(move)

    def bring_in(self, seq: Sequence) -> int:
        blocks = self.held_blocks(seq)
        self.gpu.allocate(blocks)
        self.copies_of[seq] = 1
        self.scheduler.counters.swap_in_blocks += blocks
        move = Move(seq, ALL_LAYERS, 0, blocks * self.block_size, Tier.HOST, Tier.GPU, blocks, 0, True)
        self.scheduler.beside.append(move)
        return blocks

    def transfer_done(self, move: Move) -> None:
        seq = move.seq
        left = self.copies_of.pop(seq) - 1
        if left:
            self.copies_of[seq] = left
        if move.target is Tier.HOST:
            self.releasing -= move.num_freed
            self.gpu.release(move.num_freed)
            self._to_send[seq] -= move.num_freed
            if not left:
                del self._to_send[seq]
        else:
            self.host.release(move.num_blocks)

    def drop_swapped(self, seq: Sequence) -> None:
        self.host.release(self.held_blocks(seq))
        seq.num_blocks = 0
        self.scheduler.changes.append(Release(seq))

    def recount(self) -> tuple[int, int]:
        gpu, host = super().recount()
        return gpu - sum(self.held_blocks(seq) - left for seq, left in self._to_send.items()), host
