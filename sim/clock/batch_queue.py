"""`BatchQueue`: an engine of vLLM v1 whose layers lie on the stages of a pipeline, with one scheduler.

As `EngineCore.step_with_batch_queue`: batches are scheduled, one when the host's time for the one before is over, until
the queue is full; then the engine waits for the oldest. It sees what arrives when it schedules. Batches without work
take places in the queue, too. The queue has as many places as there are stages, one more where it schedules ahead.

A batch passes stage after stage; each takes a share of its computation, as it has of the layers. Scheduled ahead, it
enters the first when the batch of as many steps before has left the last: the tokens that one sampled are what it
feeds.
"""

from collections import deque
from typing import Any

from sim.clock.member import Member
from sim.clock.pipeline import Stages
from sim.cost.lanes import Lane
from sim.engine.plan import IterationPlan, StepTimes
from sim.engine.sequence import Sequence


class BatchQueue(Member):
    """Its compute lane is that of the first stage."""

    def __init__(self, *args: Any, stage_layers: tuple[int, ...], hand_over_s_per_token: float, **options: Any) -> None:  # noqa: ANN401
        """As `Member`; layers of each stage, and what a token's activations take from one to the next, s."""
        options["jump"] = False
        super().__init__(*args, layers=max(stage_layers), **options)
        stages, layers = len(stage_layers), sum(stage_layers)
        self.hand_over_s_per_token = hand_over_s_per_token
        self.parts = [layers / own for own in stage_layers]
        """Each stage has one of so many equal parts of the computation."""
        self.schedules_ahead = self.engine.schedules_ahead
        self.places = stages + 1 if self.schedules_ahead else stages
        self._stages = Stages([self.lanes.compute, *(Lane(f"stage {number}") for number in range(1, stages))])
        self._queue: deque[tuple[float, list[Sequence] | None]] = deque()
        """Of each batch when its tokens come, s, and whose last ones they are; None where it has no work."""
        self._waits = False
        """Whether it waits for the oldest batch."""

    @property
    def running_until_s(self) -> float:
        return self._queue[0][0] if self._queue else 0.0

    def settle(self) -> None:
        self._settled = True
        if self._waits and self._queue[0][0] <= self.end_s:
            self._waits = False
            ended = self._queue.popleft()[1]
            if ended is not None:
                self.engine.deliver(ended)

    def decide(self) -> None:
        self._settled = False
        now_s, queue, engine = self.end_s, self._queue, self.engine
        if self._waits:
            return
        if not self._take_events(now_s):
            self.end_s = self.busy_until_s
            return
        free_s = now_s
        if engine.has_unfinished:
            plan = self._schedule(now_s)
            if plan is not None:
                free_s = self._launch(plan, now_s)
            elif self._add_empty(now_s):
                self._stages.skip(now_s)
        self.end_s = self.next_s(free_s) if queue else self._wakes_s

    def _add_empty(self, now_s: float) -> bool:
        """A batch without work takes a place, unless nothing is in flight; whether it does."""
        queue = self._queue
        if any(ended is not None for _, ended in queue):
            queue.append((max(now_s, queue[-1][0]), None))
            return True
        queue.clear()
        return False

    def next_s(self, free_s: float) -> float:
        """When it schedules next, s: when the host is free, or has waited for the oldest batch."""
        queue = self._queue
        self._waits = len(queue) == self.places or (bool(queue) and not self.engine.has_unfinished)
        return queue[0][0] if self._waits else free_s

    def prices(self, plan: IterationPlan, now_s: float) -> tuple[float, float]:
        """Seconds that all stages compute together, and when the host, which begins now, is free again, s."""
        cost = self.cost
        whole_s, prelude_s = cost.iteration_s(plan) + plan.added_s, cost.prelude_s(plan)
        num_sequences = plan.num_decodes + len(plan.chunks)
        host_s = prelude_s + (cost.host.seconds(num_sequences) if cost.host is not None else 0.0)
        return whole_s - prelude_s, self.lanes.host.reserve(now_s, host_s, "host")

    def _launch(self, plan: IterationPlan, now_s: float) -> float:
        """The plan is in flight; returns when the host is free again, s."""
        computed_s, free_s = self.prices(plan, now_s)
        stages_s = [computed_s / parts for parts in self.parts]
        hand_over_s = self.hand_over_s_per_token * plan.num_tokens
        self._fly(plan, *self._stages.take_in(free_s, stages_s, hand_over_s, plan.kind, ahead=self.schedules_ahead))
        return free_s

    def _fly(self, plan: IterationPlan, began_s: float, end_s: float) -> None:
        times = StepTimes(1, end_s, 0.0, 0.0, end_s, 1)
        self._note(plan, began_s, times)
        self._queue.append((end_s, self.engine.commit_ahead(plan, times)))

    def _wake_at(self, at_s: float) -> bool:
        if self._settled or self._queue:
            # It is about to look, or looks when the host is free or the oldest batch has ended.
            return False
        end_s, self.end_s = self.end_s, min(self.end_s, at_s)
        return self.end_s < end_s
