"""A device with a clock of its own that takes for everything what the cost model says."""

from heapq import heappop, heappush

from sim.clock.arrivals import TIE_S
from sim.cost.pricing import Pricer
from sim.engine.plan import IterationPlan, StepTimes, Transfer
from sim.engine.sequence import Sequence


class PretendedDevice:
    """A device with a clock of its own that takes for everything what the cost model says."""

    def __init__(self, cost, lanes, layers):
        self.clock_s = 0.0
        self.pending: list[tuple[float, int, Transfer]] = []
        self.count = 0
        self.pricer = Pricer(cost, lanes, self.finish_at, layers=layers)

    def finish_at(self, end_s: float, transfer: Transfer) -> None:
        self.count += 1
        heappush(self.pending, (end_s, self.count, transfer))

    def now_s(self) -> float:
        return self.clock_s

    def execute(self, plan: IterationPlan) -> StepTimes:
        times = self.pricer.step(plan, self.clock_s)
        self.clock_s = times.end_s
        return times

    def ended_transfers(self) -> list[Transfer]:
        ended = []
        while self.pending and self.pending[0][0] <= self.clock_s + TIE_S:
            ended.append(heappop(self.pending)[2])
        return ended

    def failures(self) -> list[tuple[Sequence, str]]:
        return []

    @property
    def copies_pending(self) -> bool:
        return bool(self.pending)

    def wait(self, until_s: float) -> None:
        self.clock_s = min(until_s, self.pending[0][0]) if self.pending else until_s
