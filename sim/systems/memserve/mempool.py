"""`MemPool`: prefix caches of engines that prefill and engines that decode, which send each other what they lack.

Hu et al., "MemServe: Context Caching for Disaggregated LLM Serving with Elastic Memory Pool" (2024; arXiv 2406.17565).
An engine that decodes pulls those blocks only that it has not cached. What it generates is sent back when a sequence
ends, so that the next turn hits the answer where it is prefilled. Blocks stay taken until they have been sent.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from sim.engine.changes import Move, Tier
from sim.engine.limits import Limits
from sim.engine.sequence import Sequence
from sim.kv.memory import ALL_LAYERS, ReturnsKV
from sim.kv.paged import PagedMemory
from sim.kv.prefix import PrefixMemory
from sim.systems.memserve.options import MemPoolOptions

if TYPE_CHECKING:
    from sim.systems.builder import Builder


class MemPool(PrefixMemory, ReturnsKV):
    """Blocks on demand, shared where prefixes are, with other engines' memory beside it."""

    name: ClassVar[str] = "mempool"
    options: ClassVar[type | None] = MemPoolOptions
    runs_live: ClassVar[bool] = False

    @classmethod
    def build(cls, b: "Builder") -> PagedMemory:
        """Paged memory for engines that are not to cache."""
        caching = b.options(MemPoolOptions).caching
        if not b.limits.enable_prefix_caching or (b.deployment.role == "decode" and caching == "prefill"):
            return PagedMemory(b.limits)
        b.refuse_windows("memory=mempool")
        return cls(b.limits, returns=caching == "return", in_flight_hits=b.policy.is_unified)

    def __init__(self, limits: Limits, *, returns: bool, in_flight_hits: bool = False) -> None:
        """`returns`: what sequences that came from other engines generate is sent back."""
        super().__init__(limits, in_flight_hits=in_flight_hits)
        self.returns_kv = returns
        self._received: set[Sequence] = set()
        self._returning: dict[Sequence, None] = {}

    def holders(self) -> Iterable[tuple[Sequence, Tier]]:
        return ((seq, Tier.GPU) for seq in self._returning)

    def receive(self, seq: Sequence, num_tokens: int) -> int:
        self._received.add(seq)
        return super().receive(seq, num_tokens)

    # -- what was generated --------------------------------------------------------------------------------------------

    def release(self, seq: Sequence) -> None:
        if seq.num_generated < seq.output_tokens or seq not in self._received:
            super().release(seq)
            return
        self._received.remove(seq)
        first, end = seq.request.prompt_tokens // self.block_size, self._named_blocks(seq)
        if not self.returns_kv or end <= first:
            super().release(seq)
            return
        self._returning[seq] = None
        self.publish(seq, end * self.block_size)
        tokens = first * self.block_size, end * self.block_size
        self.scheduler.pulled.append(Move(seq, ALL_LAYERS, *tokens, Tier.GPU, Tier.PEER, end - first, 0, True))

    def _named_blocks(self, seq: Sequence) -> int:
        """Full blocks that others can ask for."""
        holding = self._holdings.get(seq)
        return 0 if holding is None else min(self.full_blocks(seq), len(holding.keys))

    def returned(self, seq: Sequence) -> None:
        del self._returning[seq]
        super().release(seq)

    def insert(self, seq: Sequence) -> None:
        match = self._published_match(seq)
        end = self._named_blocks(seq)
        if match.num_blocks < end and end - match.num_blocks + match.num_idle <= self.gpu.free:
            self._hold(seq, match, end)
            self.scheduler.counters.policy["returned_blocks"] += end - match.num_blocks
            seq.num_computed, seq.num_tokens = 0, end * self.block_size + 1
            super().release(seq)
        self.forget(seq)

    def forget(self, seq: Sequence) -> None:
        super().forget(seq)
        self._received.discard(seq)
