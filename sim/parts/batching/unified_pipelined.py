"""`UnifiedPipelined`: vLLM v1's steps where layers lie on the stages of a pipeline, and batches follow one another.

Scheduled ahead, a sequence decodes at every so many steps as there are stages (`next_decode_eligible_step`): the tokens
that the last stage samples reach the first when the batch of as many steps later enters it. Else it decodes when its
token has come. A sequence preempted with tokens in flight waits until these have come.
"""

from collections import deque
from collections.abc import Collection
from itertools import chain
from typing import TYPE_CHECKING

from sim.engine.pipelined import PipelinedScheduler, sampling
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence
from sim.parts.batching.unified import Unified

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler


class UnifiedPipelined(Unified):
    """`Unified` on so many `stages`. Its batch is never decoded whole at once, and nothing jumps."""

    def bind(self, scheduler: "Scheduler") -> None:
        super().bind(scheduler)
        assert isinstance(scheduler, PipelinedScheduler)
        self.flights, self.stages = scheduler, scheduler.limits.stages
        self._sampling: deque[set[Sequence]] = deque(maxlen=self.stages - 1)
        """Sequences that sample in each of the last steps, those without work included."""

    def fill(self, plan: IterationPlan, now_s: float) -> None:
        super().fill(plan, now_s)
        plan.max_steps = 1
        self._sampling.append(sampling(plan))

    def _run_running(self, plan: IterationPlan) -> int:
        return self._run_one_by_one(plan)

    def _resting(self) -> Collection[Sequence]:
        last = self.scheduler.last_in_flight
        if self.schedules_ahead:
            return set(chain(last, *self._sampling))
        return set(chain(last, *(samples for _, samples in self.flights.flights)))

    def _must_wait(self, seq: Sequence) -> bool:
        return self.flights.is_flying(seq) or super()._must_wait(seq)
