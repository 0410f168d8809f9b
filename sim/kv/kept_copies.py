"""`KeptCopies`: what came back from the host is kept there, and need not be copied out again (FastSwitch's reuse).

Shen et al., "FastSwitch: Optimizing Context Switching Efficiency in Fairness-aware Large Language Model Serving" (2024;
arXiv 2411.18424). Full blocks do not change. A sequence that is swapped out again copies what it filled since; copies
of those that run give way, the oldest first, to sequences that need the room.
"""

from typing import TYPE_CHECKING, ClassVar

from sim.engine.changes import Move, Tier
from sim.engine.limits import Limits
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence
from sim.kv.memory import ALL_LAYERS
from sim.kv.paged import PagedMemory
from sim.parts.needs import Need

if TYPE_CHECKING:
    from sim.systems.builder import Builder


class KeptCopies(PagedMemory):
    """`PagedMemory` whose host blocks outlive the return of a sequence."""

    name: ClassVar[str] = "kept-copies"
    needs: ClassVar[tuple[Need, ...]] = (
        Need("eviction", "keeps what swaps leave on the host", offers="returns_when_asked"),
    )
    can_cache_prefixes: ClassVar[bool] = False
    unexecutable: ClassVar[str] = (
        "memory=kept-copies keeps blocks on the host that plans do not name yet; serve with memory=paged"
    )

    @classmethod
    def build(cls, b: "Builder") -> "KeptCopies":
        b.refuse_windows("memory=kept-copies")
        return cls(b.limits)

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        # Of sequences on the GPU: full blocks that the host still has, those that came back first first.
        self._copies: dict[Sequence, int] = {}
        self._num_copies = 0

    def can_swap_out(self, seq: Sequence) -> bool:
        return self.held_blocks(seq) <= self.host.free + self._num_copies

    def swap_out(self, seq: Sequence, plan: IterationPlan) -> None:
        held, kept = self.held_blocks(seq), self._copies.pop(seq, 0)
        self._num_copies -= kept
        new = held - kept
        while self.host.free < new:
            self._drop(next(iter(self._copies)))
        self.gpu.release(held)
        self.host.allocate(new)
        counters = self.scheduler.counters
        counters.swap_out_blocks += new
        counters.policy["reused_copies"] += kept
        plan.swapped_out_blocks += new
        size = self.block_size
        self.scheduler.changes.append(
            Move(seq, ALL_LAYERS, kept * size, held * size, Tier.GPU, Tier.HOST, new, 0, False)
        )

    def swap_in(self, seq: Sequence, plan: IterationPlan) -> None:
        super().swap_in(seq, plan)
        full = (seq.num_computed if seq.prefilling else seq.num_tokens - 1) // self.block_size
        self.host.allocate(full)
        self._copies[seq] = full
        self._num_copies += full

    def send_out(self, seq: Sequence, num_pieces: int = 1) -> None:
        self._drop(seq)
        super().send_out(seq, num_pieces)

    def _drop(self, seq: Sequence) -> None:
        kept = self._copies.pop(seq, 0)
        self._num_copies -= kept
        self.host.release(kept)

    def release(self, seq: Sequence) -> None:
        self._drop(seq)
        super().release(seq)

    def recount(self) -> tuple[int, int]:
        gpu, host = super().recount()
        return gpu, host + sum(self._copies.values())
