"""`Offloading`, `OffloadingPaged`: the GPU's blocks with vLLM's OffloadingConnector, prefixes cached or not."""

from typing import TYPE_CHECKING, ClassVar, Self

from sim.engine.changes import Move
from sim.engine.limits import Limits
from sim.engine.sequence import Sequence
from sim.kv.backing import Backing
from sim.kv.gaps import Places
from sim.kv.index.prefix_index import Holding, Keys
from sim.kv.memory import Memory
from sim.kv.paged import PagedMemory
from sim.kv.prefix import PrefixMemory
from sim.kv.tiers.connector import OffloadingConnector
from sim.kv.tiers.fences import FencedIndex, FencedStack
from sim.kv.tiers.tiering import connector_of

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler
    from sim.systems.builder import Builder


def has_ended(seq: Sequence) -> bool:
    """Whether a sequence that gives its blocks back has all its tokens."""
    return seq.num_generated >= seq.output_tokens


class Offloading(Backing):
    """A connector behind shared blocks; what a load brings is shared once it is seen to have ended."""

    unexecutable: ClassVar[str] = (
        "--kv-offloading-size: runs on a device keep no prefixes on the host yet; leave it out"
    )

    @classmethod
    def build(cls, b: "Builder") -> PagedMemory:
        return PrefixMemory.build(b, cls(connector_of(b)))

    def __init__(self, connector: OffloadingConnector) -> None:
        self.connector = connector

    def bind(self, scheduler: "Scheduler") -> None:
        super().bind(scheduler)
        self._fenced = FencedIndex(self.blocks.published, self.connector.reused)
        self.blocks.index = self.blocks.gpu.index = self._fenced

    def look_up(self, seq: Sequence) -> None:
        if seq not in self.blocks.holdings:
            self.blocks.holdings[seq] = Holding(seq, self.keys_of(seq))

    def keys_of(self, seq: Sequence) -> Keys:
        return self.connector.block_keys(seq)

    def taken(self, seq: Sequence, found: Places) -> None:
        self.resume(seq)

    def resume(self, seq: Sequence) -> None:
        """`seq` has its blocks and goes on."""
        if self._fenced.fences:
            self._fenced.hit(self.blocks.holdings[seq])

    def prepare(self, now_s: float) -> None:
        if self._fenced.fences and not self.connector.fenced:
            self._fenced.fences.clear()

    def keeps(self, seq: Sequence) -> bool:
        if has_ended(seq):
            self._fenced.leaving = self.connector.finished(seq)
        return False

    def forget(self, seq: Sequence) -> None:
        self.connector.forget(seq)

    def transfer_done(self, move: Move) -> None:
        self.connector.transfer_done(move)


class OffloadingPaged(Memory):
    """Blocks of one sequence each."""

    name: ClassVar[str] = "paged"
    unexecutable: ClassVar[str] = Offloading.unexecutable

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
