"""`RequestLevel`: a batch of requests runs to its end before the next one starts (FasterTransformer)."""

from typing import TYPE_CHECKING, ClassVar

from sim.engine.plan import IterationPlan
from sim.parts.base import Order, overrides
from sim.parts.batching.prefill_first import PrefillFirst

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler


class RequestLevel(PrefillFirst):
    """Prompts are admitted, all in one step, only when nothing is running."""

    name: ClassVar[str] = "request-level"
    has_choice: ClassVar[bool] = False

    def bind(self, scheduler: "Scheduler") -> None:
        super().bind(scheduler)
        # An empty queue may be planned anew as soon as a request is there, and one that is not sticky sorted anew.
        self._order_prepares = overrides(scheduler.order, "prepare", Order)

    def fill(self, plan: IterationPlan, now_s: float, *, may_start: bool = True) -> None:
        super().fill(plan, now_s, may_start=may_start and not self.scheduler.num_running)
        if plan.num_decodes and not plan.chunks:
            # No request is looked at before the batch has ended.
            order = self.order
            plan.cut_on_arrival = self._order_prepares and not (order.waiting and order.sticky)
