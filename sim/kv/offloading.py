"""`OffloadingMemory`, `OffloadingPaged`: the GPU's blocks with vLLM's OffloadingConnector, prefixes cached or not."""

from typing import TYPE_CHECKING, ClassVar, Self

from sim.engine.changes import Move
from sim.engine.limits import Limits
from sim.engine.sequence import Sequence
from sim.kv.block_pool import BlockPool
from sim.kv.index.prefix_index import Holding, Keys
from sim.kv.memory import Memory
from sim.kv.prefix import PrefixMemory
from sim.kv.tiers.connector import OffloadingConnector
from sim.kv.tiers.fences import FencedIndex, FencedStack
from sim.kv.tiers.tiering import connector_of

if TYPE_CHECKING:
    from sim.systems.builder import Builder


def has_ended(seq: Sequence) -> bool:
    """Whether a sequence that gives its blocks back has all its tokens."""
    return seq.num_generated >= seq.output_tokens


class OffloadingMemory(PrefixMemory):
    """Shared blocks; what a load brings is shared once it is seen to have ended."""

    @classmethod
    def build(cls, b: "Builder") -> Self:
        return cls(b.limits, connector_of(b))

    def __init__(self, limits: Limits, connector: OffloadingConnector) -> None:
        super().__init__(limits, in_flight_hits=True)
        self.connector = connector
        self.index = self._fenced = FencedIndex(self.published, connector.reused)
        self.gpu = BlockPool(self.gpu.name, self.gpu.num_blocks, self.index)

    def look_up(self, seq: Sequence, *, is_next: bool = True) -> None:
        if seq not in self._holdings:
            self._holdings[seq] = Holding(seq, self._keys_of(seq))
        super().look_up(seq, is_next=is_next)

    def _keys_of(self, seq: Sequence) -> Keys:
        return self.connector.block_keys(seq)

    def take(self, seq: Sequence, num_tokens: int) -> None:
        super().take(seq, num_tokens)
        self.resume(seq)

    def resume(self, seq: Sequence) -> None:
        """`seq` has its blocks and goes on."""
        if self._fenced.fences:
            self._fenced.hit(self._holdings[seq])

    def prepare(self, now_s: float) -> None:
        super().prepare(now_s)
        if self._fenced.fences and not self.connector.fenced:
            self._fenced.fences.clear()

    def release(self, seq: Sequence) -> None:
        if has_ended(seq):
            self._fenced.leaving = self.connector.finished(seq)
        super().release(seq)

    def forget(self, seq: Sequence) -> None:
        super().forget(seq)
        self.connector.forget(seq)

    def transfer_done(self, move: Move) -> None:
        self.connector.transfer_done(move)


class OffloadingPaged(Memory):
    """Blocks of one sequence each."""

    name: ClassVar[str] = "paged"

    @classmethod
    def build(cls, b: "Builder") -> Self:
        return cls(b.limits, connector_of(b))

    def __init__(self, limits: Limits, connector: OffloadingConnector) -> None:
        super().__init__(limits)
        self.connector = connector
        self.gpu = self._stack = FencedStack(self.gpu.name, self.gpu.num_blocks, connector.reused)

    def resume(self, seq: Sequence) -> None:
        """`seq` has its blocks and goes on."""

    def release(self, seq: Sequence) -> None:
        blocks, seq.num_blocks = seq.num_blocks, 0
        self._stack.release_fenced(blocks, self.connector.finished(seq) if has_ended(seq) else [])
        super().release(seq)

    def forget(self, seq: Sequence) -> None:
        self.connector.forget(seq)

    def transfer_done(self, move: Move) -> None:
        self.connector.transfer_done(move)
