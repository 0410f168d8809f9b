"""`UnifiedAdapters` and its kin: vLLM v1's `schedule()` where at most `--max-loras` adapters run at once.

Adapters in use are those of all that run. A request that waits for another one, where that many are, is passed over in
this step, before anything of it is looked up, and keeps its place. With a connector those that have loaded wait
likewise.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence
from sim.parts.base import Order
from sim.parts.batching.unified import Unified
from sim.parts.batching.unified_offloading import UnifiedOffloading
from sim.parts.batching.unified_speculative import UnifiedSpeculative
from sim.parts.needs import Need

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler


class WithSlots(Order):
    """An order as a step sees it that passes over the requests whose adapters have no slot.

    Args:
        order: of all that wait.
        running: what runs, to which the step adds.
        max_loras: slots.
    """

    sticky: ClassVar[bool] = False
    memoized: ClassVar[tuple[str, ...]] = ("_loras", "_num_seen")

    def __init__(self, order: Order, running: dict[Sequence, int], max_loras: int) -> None:
        self.order, self.running, self.max_loras = order, running, max_loras
        self.waiting = self
        self._popped: dict[Sequence, int] = {}
        self._passed: list[Sequence] = []
        self._loras: set[str] = set()
        self._num_seen = -1

    def is_beyond(self, seq: Sequence) -> bool:
        """Whether its adapter has no slot beside those of what runs."""
        lora = seq.request.lora
        if not lora:
            return False
        if self._num_seen != len(self.running):
            self._num_seen = len(self.running)
            self._loras = {each.request.lora for each in self.running if each.request.lora}
        return len(self._loras) >= self.max_loras and lora not in self._loras

    def __bool__(self) -> bool:
        """Whether one is left that has a slot; those before it are passed over."""
        order = self.order
        while order.waiting and self.is_beyond(order.head()):
            self._passed.append(self.pop())
        return bool(order.waiting)

    def __len__(self) -> int:
        return len(self.order) + len(self._passed)

    def __iter__(self) -> Iterator[Sequence]:
        return iter((*self._passed, *self.order))

    def head(self) -> Sequence:
        return self.order.head()

    def pop(self) -> Sequence:
        seq = self.order.pop()
        self._popped[seq] = len(self._popped)
        return seq

    def put_back(self, seqs: list[Sequence]) -> None:
        self._passed += seqs

    def close(self) -> None:
        """The step has seen all that it will: what it passed over is in its place again."""
        if self._passed:
            self.order.put_back(sorted(self._passed, key=self._popped.__getitem__, reverse=True))

    def add(self, seq: Sequence) -> None:
        self.order.add(seq)

    def remove(self, seq: Sequence) -> bool:
        return self.order.remove(seq)


class UnifiedAdapters(Unified):
    """vLLM v1's `schedule()` with adapters."""

    resumes = False
    needs: ClassVar[tuple[Need, ...]] = (
        *Unified.needs,
        Need("stage", "with --enable-lora keeps its sequences", lacks="hands_over"),
        Need("stage", "with --enable-lora takes no other engine's sequences", lacks="pulls"),
    )

    def __init__(self, *, max_loras: int, **plain: Any) -> None:  # noqa: ANN401
        super().__init__(**plain)
        self.max_loras = max_loras

    def bind(self, scheduler: "Scheduler") -> None:
        super().bind(scheduler)
        # One that arrives may have a slot where those before it have none.
        self._is_sticky = False

    def _admit(self, plan: IterationPlan, now_s: float, budget: int) -> None:
        order = self.order
        self.order = seen = WithSlots(order, self.running, self.max_loras)
        super()._admit(plan, now_s, budget)
        self.order = order
        seen.close()


class UnifiedSpeculativeAdapters(UnifiedAdapters, UnifiedSpeculative):
    """The same where tokens are drafted."""


class UnifiedOffloadingAdapters(UnifiedAdapters, UnifiedOffloading):
    """The same with a connector."""

    needs: ClassVar[tuple[Need, ...]] = UnifiedOffloading.needs

    def _is_beyond(self, seq: Sequence) -> bool:
        assert isinstance(self.order, WithSlots)
        return self.order.is_beyond(seq)
