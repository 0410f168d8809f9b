"""`Recompute`: a victim's KV is dropped; prompt and generated tokens are computed again (vLLM's default)."""

from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence
from sim.parts.base import Eviction


class Recompute(Eviction):
    """Victims go back to the queue, in the order in which they ran."""

    def __init__(self) -> None:
        self._preempted: list[Sequence] = []

    def evict(self, seq: Sequence, plan: IterationPlan) -> None:
        self.scheduler.recompute(seq)
        self._preempted.append(seq)

    @property
    def has_victims(self) -> bool:
        return bool(self._preempted)

    def settle(self) -> bool:
        if not self._preempted:
            return False
        self.scheduler.order.put_back(self._preempted)
        self._preempted.clear()
        return True
