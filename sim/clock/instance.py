"""The virtual clock: a SimPy process that has plans priced and waits.

One process is one serving instance; it pulls the arrivals that are due at each iteration boundary (decisions happen
nowhere else) and sleeps until the next one.
"""

from collections.abc import Callable, Collection, Generator
from heapq import heappop, heappush
from math import inf
from typing import Any

from simpy.core import Environment
from simpy.events import Event

from sim.clock.arrivals import TIE_S, Arrivals, end_time_s
from sim.cost.model import CostModel
from sim.cost.pricing import Lanes, Pricer
from sim.engine.changes import Move
from sim.engine.engine import Engine
from sim.engine.plan import IterationPlan, StepTimes
from sim.engine.sequence import Sequence
from sim.errors import InvariantError

Observer = Callable[[IterationPlan, float, StepTimes], None]
"""Hears of every plan, when it started and when its tokens came, before it is committed."""


class Instance:
    """One engine on the virtual clock."""

    def __init__(
        self,
        env: Environment,
        engine: Engine,
        cost: CostModel,
        arrivals: Arrivals,
        lanes: Lanes,
        *,
        layers: int,
        block_bytes: float,
        hidden_bytes: float = 0.0,
        jump: bool = True,
        copy_unit_bytes: float = 1 << 20,
        observer: Observer | None = None,
        pricer: type[Pricer] = Pricer,
    ) -> None:
        self.env, self.engine, self.cost = env, engine, cost
        self.arrivals, self.lanes = arrivals, lanes
        self.jump = jump
        num_groups = engine.scheduler.memory.num_groups
        self.pricer = pricer(
            cost, lanes, self._finish_at, layers=layers, num_groups=num_groups, block_bytes=block_bytes,
            hidden_bytes=hidden_bytes, copy_unit_bytes=copy_unit_bytes, ends_at=self._ends_at,
        )  # fmt: skip
        self.observer = observer
        self.iterations = 0
        self._transfers: list[tuple[float, int, Any]] = []
        """Copies under way by their end, s; of a member of a cluster all that it is told, by when it happens."""
        self._num_transfers = 0
        if arrivals.hears_ends:
            self._log_end = engine.on_end
            engine.on_end = self._end

    def serve(self) -> Generator[Event, None, None]:
        """Serve until every request of the trace has ended.

        The process runs ahead of `env.now` as long as no other event is due before the end of an iteration: what
        nothing else can notice need not be an event.
        """
        if self.engine.schedules_ahead:
            yield from self._serve_ahead()
            return
        env, engine, arrivals, transfers = self.env, self.engine, self.arrivals, self._transfers
        queue, pricer = env._queue, self.pricer  # `peek` raises an error where none is due
        add_request = engine.add_request
        now_s: float = env.now
        while True:
            due_s = now_s + TIE_S
            if arrivals.next_s <= due_s:
                arrivals.deliver(due_s, add_request)
            while transfers and transfers[0][0] <= due_s:
                engine.transfer_done(heappop(transfers)[2])
            plan = engine.schedule(now_s)
            if plan is None:
                times = None
                end_s = self._wakes_s
                if end_s == inf:
                    break
            else:
                times = self._run(plan, now_s) if plan.max_steps > 1 else pricer.step(plan, now_s)
                end_s = times.end_s
                if plan.awaited:
                    self._tell_started()
            if queue and queue[0][0] <= end_s:
                yield env.timeout(end_s - env.now)
            if plan is not None and times is not None:
                self._note(plan, now_s, times)
                engine.commit(plan, times)
            now_s = end_s
        if engine.has_unfinished:
            raise InvariantError(f"the engine stands still at {now_s} s with requests unfinished")
        if now_s > env.now:
            yield env.timeout(now_s - env.now)

    def _serve_ahead(self) -> Generator[Event, None, None]:
        """Two iterations in flight: as one begins, the next is scheduled, with the arrivals known then.

        A plan is priced when it is made, so its tokens are counted at once; the sequences that end with them are told
        of when the tokens come. Nothing jumps before that: a closed loop may send a request then.
        """
        env, engine, arrivals, transfers = self.env, self.engine, self.arrivals, self._transfers
        queue, host, pricer = env._queue, self.lanes.host, self.pricer
        older: StepTimes | None = None
        older_ended: list[Sequence] = []
        add_request = engine.add_request
        now_s: float = env.now
        free_s = now_s
        while True:
            if queue and queue[0][0] <= now_s:
                yield env.timeout(now_s - env.now)
            if arrivals.next_s <= now_s + TIE_S:
                arrivals.deliver(now_s + TIE_S, add_request)
            if transfers:
                self._tell_ended(now_s)
            plan = engine.schedule(now_s)
            newer: StepTimes | None = None
            newer_ended: list[Sequence] = []
            if plan is not None:
                start_s = now_s if now_s > free_s else free_s
                newer = self._run_ahead(plan, start_s) if plan.max_steps > 1 else pricer.step(plan, start_s)
                free_s = newer.end_s
                if transfers:
                    now_s = self._launched_s(plan, now_s)
                self._note(plan, start_s, newer)
                newer_ended = engine.commit_ahead(plan, newer)
            if older is not None:
                if older.end_s > now_s:
                    now_s = older.end_s
                engine.deliver(older_ended)
            elif newer is None:
                wakes_s = self._wakes_s
                if wakes_s == inf:
                    break
                now_s = wakes_s
            older, older_ended = newer, newer_ended
            if older is not None and older.iterations > 1:
                # All iterations of a jump but the last have been scheduled with it.
                now_s = max(now_s, free_s - older.last_s)
            # Host time: the next is scheduled once this one's is over.
            if host.free_s > now_s:
                now_s = host.free_s
        if engine.has_unfinished:
            raise InvariantError(f"the engine stands still at {now_s} s with requests unfinished")
        if now_s > env.now:
            yield env.timeout(now_s - env.now)

    def _note(self, plan: IterationPlan, start_s: float, times: StepTimes) -> None:
        """The plan's iterations take place as priced, from then on."""
        self.iterations += times.iterations
        if times.iterations > 1:
            self.cost.note_jump(plan, times.iterations)
        if self.observer is not None:
            self.observer(plan, start_s, times)

    @property
    def _wakes_s(self) -> float:
        """When an engine with nothing to do may have some again, s."""
        next_s, wakes_s, transfers = self.arrivals.next_s, self.engine.wakes_s, self._transfers
        if wakes_s < next_s:
            next_s = wakes_s
        return min(next_s, transfers[0][0]) if transfers else next_s

    def _run_ahead(self, plan: IterationPlan, start_s: float) -> StepTimes:
        """A jump as `_run` has it, and one iteration more: that one is scheduled before the event is known."""
        until_s = self._until_s(plan) - TIE_S
        if plan.max_steps == 1 or not self.jump or until_s <= start_s:
            return self.pricer.step(plan, start_s)
        return self.pricer.run(plan, start_s, until_s, more=1)

    def _run(self, plan: IterationPlan, now_s: float) -> StepTimes:
        """Price like decode iterations as one event, up to the first boundary after the next event."""
        if not self.jump:
            return self.pricer.step(plan, now_s)
        return self.pricer.run(plan, now_s, self._until_s(plan) - TIE_S)

    def _until_s(self, plan: IterationPlan) -> float:
        """When the next event ends a jump, s."""
        until_s = self.arrivals.next_s if plan.cut_on_arrival else inf
        if self._transfers and self._transfers[0][0] < until_s:
            until_s = self._transfers[0][0]
        return plan.until_s if plan.until_s < until_s else until_s

    def _end(self, seq: Sequence) -> None:
        self._log_end(seq)
        self.arrivals.ended(seq.request, end_time_s(seq, self.engine.scheduler.now_s))

    def _tell_started(self) -> None:
        """The computation waited for copies: tell of those that have ended when it began, before it ends."""
        self._tell_ended(self.pricer.started_s)

    def _launched_s(self, plan: IterationPlan, now_s: float) -> float:
        """When the host has launched an iteration, s: awaited copies have ended, and it reports what has by then."""
        if plan.awaited:
            now_s = max(now_s, self._ends_at(plan.awaited))
        elif not self.engine.scheduler.batching.reports_copies:
            return now_s
        self._tell_ended(now_s)
        return now_s

    def _tell_ended(self, now_s: float) -> None:
        transfers, due_s = self._transfers, now_s + TIE_S
        while transfers and transfers[0][0] <= due_s:
            self.engine.transfer_done(heappop(transfers)[2])

    def _ends_at(self, moves: Collection[Move]) -> float:
        return max((end_s for end_s, _, move in self._transfers if move in moves), default=0.0)

    def _finish_at(self, end_s: float, transfer: Move) -> None:
        self._num_transfers += 1
        heappush(self._transfers, (end_s, self._num_transfers, transfer))
