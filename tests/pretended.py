"""The real clock's instance without anything real: a device that takes for everything what the cost model says.

With it the two clocks can be held together, decision for decision; torch is not needed.
"""

from collections import deque
from collections.abc import Iterable
from heapq import heappop, heappush

from gpu_runtime.instance import LiveInstance, Observer
from kvtwin.testing.engines import Machine
from sim.clock.arrivals import TIE_S, Arrivals
from sim.cost.pricing import Lanes, Pricer
from sim.engine.changes import Move
from sim.engine.engine import Engine
from sim.engine.plan import IterationPlan, StepTimes
from sim.engine.scheduler import Scheduler
from sim.engine.sequence import Sequence
from traces.request import Request


class PretendedDevice:
    """A device with a clock of its own."""

    def __init__(self, machine: Machine, scheduler: Scheduler) -> None:
        self.clock_s = 0.0
        self._pending: list[tuple[float, int, Move]] = []
        self._count = 0
        self._lanes = Lanes()
        self._flying: deque[float] = deque()
        self._free_s = 0.0
        self._pricer = Pricer(
            machine.cost,
            self._lanes,
            self._finish_at,
            layers=machine.model.num_layers,
            num_groups=scheduler.memory.num_groups,
            block_bytes=scheduler.limits.block_bytes,
            hidden_bytes=machine.model.hidden_bytes_per_token_layer,
        )

    def _finish_at(self, end_s: float, move: Move) -> None:
        self._count += 1
        heappush(self._pending, (end_s, self._count, move))

    def now_s(self) -> float:
        """The time."""
        return self.clock_s

    def named(self, request: Request) -> Request:
        """As the trace names it."""
        return request

    def named_blocks(self) -> list[tuple[Sequence, tuple[int, ...]]]:
        """What is generated has the trace's names, too."""
        return []

    def execute(self, plan: IterationPlan) -> StepTimes:
        """Let as much time pass as the plan is priced."""
        times = self._pricer.step(plan, self.clock_s)
        self.clock_s = times.end_s
        return times

    def launch(self, plan: IterationPlan) -> None:
        """Begin an iteration, when the one before has ended; only its host time passes."""
        times = self._pricer.step(plan, max(self.clock_s, self._free_s))
        self._free_s = times.end_s
        self._flying.append(times.end_s)
        self.clock_s = max(self.clock_s, self._lanes.host.free_s)

    def collect(self) -> float:
        """Let time pass until the oldest has ended."""
        end_s = self._flying.popleft()
        self.clock_s = max(self.clock_s, end_s)
        return end_s

    def ended_transfers(self) -> list[Move]:
        """Copies whose time has come."""
        ended = []
        while self._pending and self._pending[0][0] <= self.clock_s + TIE_S:
            ended.append(heappop(self._pending)[2])
        return ended

    def forget(self, seq: Sequence) -> None:
        """There is nothing to forget."""

    def failures(self) -> list[tuple[Sequence, str]]:
        """Nothing fails."""
        return []

    @property
    def copies_pending(self) -> bool:
        """Whether copies are under way."""
        return bool(self._pending)

    def wait(self, until_s: float) -> None:
        """Let time pass until then, or until a copy ends."""
        self.clock_s = min(until_s, self._pending[0][0]) if self._pending else until_s


def pretend(
    engine: Engine, arrivals: Iterable[Request], machine: Machine, observer: Observer | None = None
) -> PretendedDevice:
    """Let an engine serve requests on the real clock. The `observer` hears of plans before they are committed,
    while `decodes` are still those that it decided on."""
    device = PretendedDevice(machine, engine.scheduler)
    LiveInstance(engine, device, Arrivals(arrivals), observer=observer).serve()
    return device
