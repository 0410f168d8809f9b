"""`ReservedMemory`: as many blocks as the longest context takes, from admission to the end (FasterTransformer, Orca).

What a request does not use is lost to all others until it ends: internal fragmentation 1 - (prompt + output) / longest.
Nothing ever grows, so none is ever preempted.
"""

from typing import TYPE_CHECKING, ClassVar, Self

from sim.engine.batch import DecodeBatch
from sim.engine.limits import Limits
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence
from sim.kv.paged import PagedMemory

if TYPE_CHECKING:
    from sim.systems.builder import Builder


class ReservedMemory(PagedMemory):
    """ceil(max_model_len / block_size) blocks for each; more where a request of a trace outgrows that."""

    name: ClassVar[str] = "reserved"
    can_cache_prefixes: ClassVar[bool] = False
    reserves: ClassVar[bool] = True

    @classmethod
    def build(cls, b: "Builder") -> Self:
        return cls(b.limits)

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self._longest_blocks = -(-limits.max_model_len // limits.block_size)

    def blocks_for(self, seq: Sequence) -> int:
        # Output lengths come from the trace: nothing stops one at max_model_len.
        whole = seq.request.prompt_tokens + seq.request.output_tokens
        return max(self._longest_blocks, -(-whole // self.block_size))

    def blocks_wanted(self, seq: Sequence, num_tokens: int) -> int:
        return self.blocks_for(seq)

    def blocks_missing(self, seq: Sequence, num_tokens: int) -> int:
        return 0

    def place(self, seq: Sequence, num_tokens: int) -> None:
        self.take(seq, seq.num_tokens)

    def receive(self, seq: Sequence, num_tokens: int) -> int:
        self.take(seq, num_tokens)
        return seq.num_blocks

    def held_blocks(self, seq: Sequence) -> int:
        return self.blocks_for(seq)

    def can_append(self) -> bool:
        return True

    def needs_block(self, seq: Sequence) -> bool:
        return False

    def decode_blocks(self) -> int:
        return 0

    def decode_blocks_of(self, seq: Sequence) -> int:
        return 0

    def append(self, seq: Sequence) -> None:
        """What it needs is there."""

    def grow(self, batch: DecodeBatch, spare: int = 1) -> bool:
        """What they need is there."""
        return True

    def grow_further(self, batch: DecodeBatch, steps: int) -> None:
        """What they need is there."""

    def repeats(self, plan: IterationPlan, steps: int) -> int:
        return steps

    def can_swap_in(self, seq: Sequence, keep_free: int) -> bool:
        return self.gpu.free - self.held_blocks(seq) >= keep_free

    def outgrew_gpu(self, seq: Sequence) -> bool:
        return False

    def recount(self) -> tuple[int, int]:
        gpu, host = super().recount()
        batch = self.batch
        used = sum(-(-(batch.num_tokens_of(seq) - 1) // self.block_size) for seq in batch.members)
        return gpu - used + sum(self.blocks_for(seq) for seq in batch.members), host
