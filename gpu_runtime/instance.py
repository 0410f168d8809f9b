"""The real clock: events in, plans out, a device that executes them. `sim.clock.instance` in real time.

The loop is the simulator's: deliver what has arrived, report copies that have ended, schedule, execute, commit. Nothing
here knows torch; the device does the work and says when tokens came.
"""

from collections import deque
from collections.abc import Callable
from math import inf
from typing import NamedTuple, Protocol

from gpu_runtime.measured.token_times import TokenTimes
from sim.clock.arrivals import TIE_S, end_time_s
from sim.engine.changes import Move
from sim.engine.engine import Engine
from sim.engine.plan import IterationPlan, StepTimes
from sim.engine.sequence import Sequence
from sim.errors import InvariantError
from traces.request import Request


class Device(Protocol):
    """What executes plans. Times are seconds on its own clock, zero when serving began."""

    def now_s(self) -> float:
        """The time."""
        ...

    def named(self, request: Request) -> Request:
        """A request that has arrived; where prefixes are cached, with `hash_ids` of what its prompt really is."""
        ...

    def named_blocks(self) -> list[tuple[Sequence, tuple[int, ...]]]:
        """Sequences that have filled blocks with generated tokens since this was last asked, and the blocks' keys."""
        ...

    def execute(self, plan: IterationPlan) -> StepTimes:
        """Carry out one iteration of a plan, starting its copies; returns when its tokens are there."""
        ...

    def launch(self, plan: IterationPlan) -> None:
        """Queue one iteration of a plan behind those launched before; what they choose, it reads on the device."""
        ...

    def collect(self) -> float:
        """Wait for the tokens of the oldest iteration launched; when they came, s."""
        ...

    def ended_transfers(self) -> list[Move]:
        """Copies beside and behind the computation that have ended since this was last asked, in order."""
        ...

    def forget(self, seq: Sequence) -> None:
        """A sequence has ended: its tokens are not asked for again. Its blocks come back with a plan."""
        ...

    def failures(self) -> list[tuple[Sequence, str]]:
        """Sequences whose computation or copy went wrong since this was last asked, and why."""
        ...

    @property
    def copies_pending(self) -> bool:
        """Whether copies are under way whose end the engine is to hear of."""
        ...

    def wait(self, until_s: float) -> None:
        """Return at `until_s`, or earlier when a copy ends or a request may have arrived."""
        ...


class Inbox(Protocol):
    """Where requests come from: a trace (`sim.clock.arrivals.Arrivals`) or a server."""

    @property
    def next_s(self) -> float:
        """When the next known request arrives, s; infinite if none is known."""
        ...

    def deliver(self, until_s: float, to: Callable[[Request], object]) -> None:
        """Hand over every request that has arrived by `until_s`."""
        ...


Observer = Callable[[IterationPlan, float, StepTimes], None]
"""Hears of every plan, when it was decided and when its tokens came, before it is committed."""


class Flight(NamedTuple):
    """An iteration that was launched and counted, and whose tokens have not come."""

    plan: IterationPlan
    launched_s: float
    sampled: list[Sequence]
    """Sequences that take a token."""
    ended: list[Sequence]
    """Sequences that end with these tokens."""


class LiveInstance:
    """One engine on the real clock."""

    def __init__(
        self,
        engine: Engine,
        device: Device,
        inbox: Inbox,
        *,
        observer: Observer | None = None,
        is_open: Callable[[], bool] = lambda: False,
        ended: Callable[[Request, float], object] | None = None,
    ) -> None:
        """`is_open` says whether requests that are not known yet may still come, as to a server.

        `ended` hears of every request that ended and when, s: clients in a closed loop wait for that.
        """
        self._ended = ended
        self.engine, self.device, self.inbox = engine, device, inbox
        self.observer, self.is_open = observer, is_open
        self.iterations = 0
        self._flying: deque[Flight] = deque()
        self._times: TokenTimes | None = None
        self._log_end = engine.on_end
        engine.on_end = self._end

    def _end(self, seq: Sequence) -> None:
        self.device.forget(seq)
        if self._times is not None:
            self._times.forget(seq)
        self._log_end(seq)
        if self._ended is not None:
            self._ended(seq.request, end_time_s(seq, self.engine.scheduler.now_s))

    def _add(self, request: Request) -> Sequence:
        return self.engine.add_request(self.device.named(request))

    def serve(self) -> None:
        """Serve until every request has ended and no more can come."""
        if self.engine.schedules_ahead:
            self._serve_ahead()
        else:
            self._serve_in_series()
        if self.engine.has_unfinished:
            raise InvariantError(f"the engine stands still at {self.device.now_s()} s with requests unfinished")
        self._release_last()

    def stop(self, seq: Sequence, output_tokens: int, now_s: float) -> None:
        """The `output_tokens`-th token of `seq`, which the device has just told of, is its last."""
        if self._times is None:
            self.engine.truncate(seq, output_tokens)
            return
        self._times.came((seq,), (), now_s)
        for flight in self._flying:
            if seq in flight.ended:
                flight.ended.remove(seq)
        self.engine.stop(seq, output_tokens, now_s)

    def _serve_ahead(self) -> None:
        """Two iterations in flight, as `sim.clock.instance` has them: while one runs, the next is scheduled.

        An iteration is counted when it is launched, and heard of by all others when its tokens have come.
        """
        engine, device, inbox, flying = self.engine, self.device, self.inbox, self._flying
        times = self._times = TokenTimes(engine.scheduler)
        ended_s = 0.0
        while True:
            now_s = device.now_s()
            inbox.deliver(now_s + TIE_S, self._add)
            self._report_failures()
            plan = engine.schedule(now_s)
            if plan is not None:
                # What is in the batch changes before the tokens come.
                plan.decodes = tuple(plan.decodes)
                sampled = [c.seq for c in plan.chunks if c.num_cached + c.num_new == c.seq.num_tokens]
                sampled += plan.decodes
                device.launch(plan)
                self._report_failures()
                ended = engine.commit_ahead(plan, StepTimes(1, now_s, 0.0, 0.0, now_s, 1))
                flying.append(Flight(plan, now_s, sampled, ended))
            if plan is None or len(flying) == 2:
                if flying:
                    done = flying[0]
                    start_s, ended_s = max(done.launched_s, ended_s), device.collect()
                    flying.popleft()
                    times.came(done.sampled, done.ended, ended_s)
                    for seq, keys in device.named_blocks():
                        engine.name_blocks(seq, keys)
                    self.iterations += 1
                    if self.observer is not None:
                        self.observer(done.plan, start_s, StepTimes(1, ended_s, 0.0, 0.0, ended_s, 1))
                    engine.deliver(done.ended)
                    continue
                next_s = min(inbox.next_s, engine.wakes_s)
                if next_s == inf and not self.is_open():
                    return
                device.wait(next_s)

    def _serve_in_series(self) -> None:
        """Decide, carry out, count: one iteration at a time."""
        engine, device, inbox = self.engine, self.device, self.inbox
        while True:
            now_s = device.now_s()
            inbox.deliver(now_s + TIE_S, self._add)
            for move in device.ended_transfers():
                engine.transfer_done(move)
            self._report_failures()
            plan = engine.schedule(now_s)
            if plan is None:
                next_s = min(inbox.next_s, engine.wakes_s)
                if next_s == inf and not device.copies_pending and not self.is_open():
                    break
                device.wait(next_s)
                continue
            times = device.execute(plan)
            self._report_failures()
            for seq, keys in device.named_blocks():
                engine.name_blocks(seq, keys)
            self.iterations += times.iterations
            if self.observer is not None:
                self.observer(plan, now_s, times)
            engine.commit(plan, times)

    def _release_last(self) -> None:
        """What ended last has given its blocks back since the last plan."""
        scheduler, last = self.engine.scheduler, IterationPlan()
        last.changes, scheduler.changes = tuple(scheduler.changes), []
        self.device.execute(last)

    def _report_failures(self) -> None:
        for seq, reason in self.device.failures():
            self.engine.fail(seq, reason)
