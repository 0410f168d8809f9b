"""`MemPool`: prefix caches of engines that prefill and engines that decode, which send each other what they lack.

Hu et al., "MemServe: Context Caching for Disaggregated LLM Serving with Elastic Memory Pool" (2024; arXiv 2406.17565).
An engine that decodes pulls those blocks only that it has not cached. What it generates is sent back when a sequence
ends, so that the next turn hits the answer where it is prefilled. Blocks stay taken until they have been sent.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from sim.engine.changes import Move, Tier
from sim.engine.sequence import Sequence
from sim.kv.backing import Backing
from sim.kv.memory import ALL_LAYERS, ReturnsKV
from sim.kv.paged import PagedMemory
from sim.kv.prefix import PrefixMemory
from sim.systems.memserve.preset import MemPoolOptions

if TYPE_CHECKING:
    from sim.systems.builder import Builder


class MemPool(Backing, ReturnsKV):
    """Other engines' prefix caches beside the engine's own."""

    name: ClassVar[str] = "mempool"
    options: ClassVar[type | None] = MemPoolOptions
    unexecutable: ClassVar[str] = "memory=mempool: no device sends blocks to another engine's cache yet: simulate"

    @classmethod
    def build(cls, b: "Builder") -> PagedMemory:
        """Paged memory for engines that are not to cache."""
        caching = b.options(MemPoolOptions).caching
        if not b.limits.enable_prefix_caching or (b.deployment.role == "decode" and caching == "prefill"):
            return PagedMemory(b.limits)
        b.refuse_windows("memory=mempool")
        return PrefixMemory.build(b, cls(returns=caching == "return"))

    def __init__(self, *, returns: bool) -> None:
        """`returns`: what sequences that came from other engines generate is sent back."""
        self.returns_kv = returns
        self._received: set[Sequence] = set()
        self._returning: dict[Sequence, None] = {}

    def holders(self) -> Iterable[tuple[Sequence, Tier]]:
        return ((seq, Tier.GPU) for seq in self._returning)

    def received(self, seq: Sequence) -> None:
        self._received.add(seq)

    # -- what was generated --------------------------------------------------------------------------------------------

    def keeps(self, seq: Sequence) -> bool:
        if seq.num_generated < seq.output_tokens or seq not in self._received:
            return False
        self._received.remove(seq)
        size = self.blocks.block_size
        first, end = seq.request.prompt_tokens // size, self._named_blocks(seq)
        if not self.returns_kv or end <= first:
            return False
        self._returning[seq] = None
        self.blocks.publish(seq, end * size)
        move = Move(seq, ALL_LAYERS, first * size, end * size, Tier.GPU, Tier.PEER, end - first, 0, True)
        self.scheduler.pulled.append(move)
        return True

    def _named_blocks(self, seq: Sequence) -> int:
        """Full blocks that others can ask for."""
        holding = self.blocks.holdings.get(seq)
        return 0 if holding is None else min(self.blocks.full_blocks(seq), len(holding.keys))

    def returned(self, seq: Sequence) -> None:
        del self._returning[seq]
        self.blocks.give_back(seq)

    def insert(self, seq: Sequence) -> None:
        blocks = self.blocks
        match = blocks.published_match(seq)
        end = self._named_blocks(seq)
        if match.num_blocks < end and end - match.num_blocks + match.num_idle <= blocks.gpu.free:
            blocks.hold(seq, match, end)
            self.scheduler.counters.policy["returned_blocks"] += end - match.num_blocks
            seq.num_computed, seq.num_tokens = 0, end * blocks.block_size + 1
            blocks.give_back(seq)
        blocks.forget(seq)

    def forget(self, seq: Sequence) -> None:
        self._received.discard(seq)
