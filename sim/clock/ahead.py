"""`AheadMember`: an engine of several that schedules an iteration while the one before it runs.

As `Instance.serve` has it for one engine: two iterations are in flight, and the next is decided when the oldest ends.
An idle engine decides on two at once. A jump is counted when its last iteration begins, and only then the next is
decided: until then it can be priced again, so that an event is seen as it would be iteration by iteration.
"""

from collections import deque
from math import inf
from typing import NamedTuple

from sim.clock.member import Member
from sim.engine.plan import IterationPlan, StepTimes
from sim.engine.sequence import Sequence


class Flight(NamedTuple):
    """An iteration whose tokens have been counted and have not come."""

    end_s: float
    ended: list[Sequence]
    """Whose last tokens they are."""
    prefilled: list[Sequence]
    """Sequences that leave for another engine with them."""


class AheadMember(Member):
    """A member with two iterations in flight. `_plan` is a jump that has been decided and not counted."""

    _starts_s = 0.0
    """When the computation of the latest plan begins, s: what was decided before it has ended."""
    _decides_s = inf
    """When the next plan may be decided, s: the latest is an iteration that begins, and its host time is over.

    Infinite where there was nothing to decide: the next event may change that.
    """

    def __init__(self, *args, **kwargs) -> None:  # noqa: ANN002, ANN003 - as Member's
        super().__init__(*args, **kwargs)
        self._flying: deque[Flight] = deque()

    @property
    def running_until_s(self) -> float:
        return self._flying[0].end_s if self._flying else self.end_s if self._plan is not None else 0.0

    def settle(self) -> None:
        self._settled = True
        now_s, plan, times, flying = self.end_s, self._plan, self._times, self._flying
        if plan is not None and times is not None and now_s >= self._decides_s:
            self._count(plan, times)
            self._plan = self._times = None
        if not flying or flying[0].end_s > now_s:
            return
        if flying[0].prefilled:
            self.engine.scheduler.stage.prefilled += flying[0].prefilled
            flying[0].prefilled.clear()
        if len(flying) == 2 or self._decides_s > now_s:
            self.engine.deliver(flying.popleft().ended)

    def _count(self, plan: IterationPlan, times: StepTimes) -> None:
        """The plan is in flight: its tokens count from now on."""
        self._note(plan, self._starts_s, times)
        ended, stage, prefilled = self.engine.commit_ahead(plan, times), self.engine.scheduler.stage, []
        if stage.hands_over:
            prefilled, stage.prefilled = stage.prefilled, prefilled
        self._flying.append(Flight(times.end_s, ended, prefilled))

    def decide(self) -> None:
        self._settled = False
        now_s, flying = self.end_s, self._flying
        if self._plan is None and (now_s >= self._decides_s or self._decides_s == inf):
            self._starts_s = max(now_s, flying[0].end_s) if flying else now_s
            if not self._take_events(now_s):
                self._decides_s = self.busy_until_s
            elif (plan := self._schedule(now_s)) is None:
                self._decides_s = inf
            else:
                jumps = self.jump and plan.max_steps > 1
                self._mark = self.lanes.mark() if jumps else None
                times = self._price(plan)
                if jumps:
                    self._plan, self._times = plan, times
                else:
                    self._decides_s = max(self._decides_s, self._launched_s(plan, now_s))
                    self._count(plan, times)
        self.end_s = self._boundary_s

    def _price(self, plan: IterationPlan) -> StepTimes:
        times = self._run_ahead(plan, self._starts_s)
        self._decides_s = max(self._starts_s, self.lanes.host.free_s)
        if times.iterations > 1:
            self._decides_s = max(self._decides_s, times.end_s - times.last_s)
        return times

    @property
    def _boundary_s(self) -> float:
        """When there is anything to settle or decide next, s."""
        flying = self._flying
        if self._plan is not None:
            return flying[0].end_s if flying and flying[0].prefilled else self._decides_s
        if flying:
            # Two in flight: the next is decided when the first of them has ended.
            return min(self._decides_s, flying[0].end_s)
        return self._decides_s if self._decides_s < inf else self._wakes_s

    def drained_s(self, now_s: float) -> float:
        return self._starts_s

    def _wake_at(self, at_s: float) -> bool:
        if self._settled:
            # It is about to look.
            return False
        plan, end_s = self._plan, self.end_s
        if plan is not None and self._mark is not None and at_s < self._decides_s:
            self.lanes.restore(self._mark)
            self._times = self._price(plan)
        self.end_s = self._boundary_s
        return self.end_s < end_s
