"""`Recompute`: a victim's KV is dropped; prompt and generated tokens are computed again (vLLM's default)."""

from typing import ClassVar

from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence, Status
from sim.kv.memory import Swaps
from sim.parts.base import Eviction


class Recompute(Eviction):
    """Victims go back to the queue, in the order in which they ran."""

    name: ClassVar[str] = "recompute"

    def __init__(self) -> None:
        self._preempted: list[Sequence] = []

    def evict(self, seq: Sequence, plan: IterationPlan) -> None:
        self.scheduler.recompute(seq)
        self._preempted.append(seq)

    @property
    def swaps(self) -> Swaps:
        """The memory, of evictions that move sequences whole."""
        assert isinstance(self.memory, Swaps), "asked for by what the part needs"
        return self.memory

    def swap_out(self, seq: Sequence, plan: IterationPlan) -> bool:
        """Swap a victim before the step, or have it computed again where the host is full; whether it was swapped."""
        if not self.swaps.can_swap_out(seq):
            self.scheduler.counters.swap_space_exhausted += 1
            Recompute.evict(self, seq, plan)
            return False
        self.swaps.swap_out(seq, plan)
        self.scheduler.park(seq, Status.SWAPPED)
        seq.num_preemptions += 1
        return True

    @property
    def has_victims(self) -> bool:
        return bool(self._preempted)

    def requeue_victims(self) -> bool:
        if not self._preempted:
            return False
        self.scheduler.order.put_back(self._preempted)
        self._preempted.clear()
        return True
