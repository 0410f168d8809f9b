"""`Member`: one engine among several on the virtual clock, whose next boundary is known and can be brought forward.

A plan is priced when it is decided and committed when its time has come. A jump that an event reaches under way is
priced again, so that it ends at the first boundary after the event: an engine need not stop for what goes to another.
"""

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from math import inf

from simpy.core import Environment

from sim.clock.arrivals import TIE_S, Arrivals, end_time_s
from sim.clock.instance import Instance, Observer
from sim.cost.model import CostModel
from sim.cost.pricing import Lanes, LanesMark, Pricer
from sim.engine.changes import Move
from sim.engine.engine import Engine
from sim.engine.plan import IterationPlan, StepTimes
from sim.engine.sequence import Sequence, Status
from sim.errors import InvariantError
from traces.request import Request


class Inbox(Arrivals):
    """Requests that were sent to an engine and that it has not seen: it looks at boundaries only."""

    __slots__ = ("_sent",)

    def __init__(self) -> None:
        self._sent: deque[Request] = deque()
        super().__init__(())

    def put(self, request: Request) -> None:
        """`request` was sent to this engine, after all others."""
        if not self._sent:
            self.next_s = request.arrival_s
        self._sent.append(request)

    def deliver(self, until_s: float, to: Callable[[Request], object]) -> None:
        sent = self._sent
        while sent and sent[0].arrival_s <= until_s:
            to(sent.popleft())
        self.next_s = sent[0].arrival_s if sent else inf

    def __len__(self) -> int:
        return len(self._sent)

    @property
    def tokens(self) -> int:
        """Their prompts."""
        return sum(request.prompt_tokens for request in self._sent)


Event = Move | Sequence | Request
"""A copy that ended, a sequence that another engine has prefilled, or a request whose prefix had to come first."""
Carry = Callable[["Member", Move, float], float]
"""Starts a copy from another engine at that time, s; returns its end, s."""


class Member(Instance):
    """An engine of a cluster. `end_s` is its next boundary; infinite while nothing is known that could wake it."""

    def __init__(
        self,
        env: Environment,
        engine: Engine,
        cost: CostModel,
        lanes: Lanes,
        *,
        layers: int,
        block_bytes: float,
        hidden_bytes: float = 0.0,
        jump: bool = True,
        observer: Observer | None = None,
        ended: Callable[[Request, float], object] | None = None,
        pricer: type[Pricer] = Pricer,
    ) -> None:
        """`ended` hears of every request that ended and when, s."""
        self.inbox = Inbox()
        super().__init__(
            env, engine, cost, self.inbox, lanes, layers=layers, block_bytes=block_bytes, hidden_bytes=hidden_bytes,
            jump=jump, observer=observer, pricer=pricer,
        )  # fmt: skip
        self.end_s = inf
        self.busy_until_s = 0.0
        """Until when nothing can be decided here: KV is being pulled that the engine waits for, s."""
        self.num_in_flight = 0
        """Requests sent here that have not ended."""
        self.tokens_in_flight = 0
        """Their prompts' tokens."""
        self._num_coming = 0
        self.num_decisions = 0
        """How often it decided."""
        self.carry: Carry | None = None
        """For an engine that pulls."""
        self.take_back: Callable[[Member, float], bool] | None = None
        """For one that may decode what it prefilled for others: whether there was any."""
        self._events: list[tuple[float, int, Event]] = self._transfers
        self._ended = ended
        self._log_end = engine.on_end
        engine.on_end = self._end
        self._hears_end: Callable[[Request], None] | None = None
        self._settled = False
        self._plan: IterationPlan | None = None
        self._times: StepTimes | None = None
        self._mark: LanesMark | None = None

    @property
    def in_step(self) -> tuple[int, ...]:
        """Places of members whose boundaries are always its own, itself among them; empty where it goes by itself."""
        return ()

    # -- what routers see --------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their prefill, those not yet seen included."""
        return self.engine.scheduler.num_waiting + len(self.inbox) + self._num_coming

    @property
    def running_until_s(self) -> float:
        """When the iteration under way ends, s; 0 where there is none."""
        return 0.0 if self._plan is None else self.end_s

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of those that wait."""
        return sum(seq.num_tokens for seq in self.engine.scheduler.order) + self.inbox.tokens

    @property
    def kv_tokens(self) -> int:
        """Tokens for which the GPU's KV blocks have room."""
        memory = self.engine.scheduler.memory
        return memory.gpu.num_blocks // memory.unit * memory.block_size

    @property
    def kv_usage(self) -> float:
        """Share of these blocks that sequences hold; within a jump, that of its first iteration."""
        pool = self.engine.scheduler.memory.gpu
        return 1.0 - pool.free / pool.num_blocks

    def prompt_tokens_of(self, request: Request) -> tuple[int, int]:
        """Tokens of a prompt that are not cached here, and those of the free blocks that it would take."""
        memory, seq = self.engine.scheduler.memory, Sequence(request)
        taken = memory.blocks_wanted(seq, seq.num_tokens) // memory.unit * memory.block_size
        return seq.num_tokens - memory.cached_tokens(seq), taken

    # -- time --------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """The boundary `end_s` has come: commit what ended there."""
        self._settled = True
        plan, times = self._plan, self._times
        if plan is not None:
            assert times is not None
            self._note(plan, self._began_s, times)
            self.engine.commit(plan, times)
            self._plan = self._times = None

    def decide(self) -> None:
        """At the boundary `end_s`, settled: take the events that are due and begin the next iterations."""
        self._settled = False
        now_s = self._began_s = self.end_s
        if not self._take_events(now_s):
            self.end_s = self.busy_until_s
            return
        self._plan = plan = self._schedule(now_s)
        if plan is None:
            self.end_s = self._wakes_s
        elif plan.max_steps > 1 and self.jump:
            self._mark = self.lanes.mark()
            self._times = self._run(plan, now_s)
            self.end_s = self._times.end_s
        else:
            self._times = self.pricer.step(plan, now_s)
            self.end_s = self._times.end_s
            if plan.awaited:
                self._tell_started()

    def _take_events(self, now_s: float) -> bool:
        """Take the events that are due, and pull what the engine waits for; whether anything can be decided now."""
        if now_s < self.busy_until_s - TIE_S:
            return False
        engine, inbox, events = self.engine, self.inbox, self._events
        self.num_decisions += 1
        due_s = now_s + TIE_S
        if inbox.next_s <= due_s:
            inbox.deliver(due_s, engine.add_request)
        while events and events[0][0] <= due_s:
            event = heappop(events)[2]
            if isinstance(event, Sequence):
                # Else it was taken back.
                if event.status is Status.PARKED:
                    engine.offer(event)
            elif isinstance(event, Request):
                self._num_coming -= 1
                engine.add_request(event)
            else:
                engine.transfer_done(event)
        if engine.scheduler.stage.blocking and (moves := engine.pull(now_s)):
            ready_s = self.drained_s(now_s)
            self.busy_until_s = max(self._pull(move, ready_s) for move in moves)
            return False
        return True

    def _schedule(self, now_s: float) -> IterationPlan | None:
        """The next plan, where there is any; what it pulls is on its way."""
        plan = self.engine.schedule(now_s)
        while plan is None and self.take_back is not None and self.take_back(self, now_s):
            plan = self.engine.schedule(now_s)
        for move in () if plan is None else plan.pulled:
            self._pull(move, now_s)
        return plan

    def drained_s(self, now_s: float) -> float:
        """When all that was launched by `now_s` has been computed, s."""
        return now_s

    def take(self, request: Request) -> None:
        """`request` is in flight here from now on."""
        self.num_in_flight += 1
        self.tokens_in_flight += request.prompt_tokens

    def let_go(self, request: Request) -> None:
        """It no longer is."""
        self.num_in_flight -= 1
        self.tokens_in_flight -= request.prompt_tokens

    def send(self, request: Request, ready_s: float = 0.0) -> bool:
        """`request` goes to this engine, which may see it from `ready_s` on; whether its boundary came forward."""
        self.take(request)
        if ready_s > request.arrival_s:
            self._num_coming += 1
            return self.tell(ready_s, request)
        self.inbox.put(request)
        return self._wake_at(request.arrival_s)

    def turn_away(self, request: Request, reason: str) -> None:
        """`request` ends as it arrives."""
        seq = Sequence(request)
        seq.status, seq.error = Status.IGNORED, f"ignored: {reason}"
        ignored = self.engine.scheduler.counters.ignored
        ignored[reason] = ignored.get(reason, 0) + 1
        self._log_end(seq)
        if self._ended is not None:
            self._ended(request, request.arrival_s)

    def tell(self, at_s: float, event: Event) -> bool:
        """`event` is one from `at_s` on; whether the boundary came forward."""
        self._num_transfers += 1
        heappush(self._events, (at_s, self._num_transfers, event))
        return self._wake_at(at_s)

    def hears_ends(self, ended: Callable[[Request], None]) -> None:
        """`ended` is to hear of all requests that end here."""
        self._hears_end = ended

    def _pull(self, move: Move, at_s: float) -> float:
        if self.carry is None:
            raise InvariantError(f"{move.seq}: pulled, and there is no link")
        end_s = self.carry(self, move, at_s)
        self._finish_at(end_s, move)
        return end_s

    def _wake_at(self, at_s: float) -> bool:
        """An event is due at `at_s`: wake up then, or end a jump at the first boundary after it."""
        if self._settled:
            # It is about to look.
            return False
        plan, end_s = self._plan, self.end_s
        if plan is None:
            self.end_s = min(end_s, at_s)
        elif plan.max_steps > 1 and self.jump and at_s < end_s and self._mark is not None:
            self.lanes.restore(self._mark)
            self._times = self._run(plan, self._began_s)
            self.end_s = self._times.end_s
        return self.end_s < end_s

    def _end(self, seq: Sequence) -> None:
        self._log_end(seq)
        self.let_go(seq.request)
        if self._hears_end is not None:
            self._hears_end(seq.request)
        if self._ended is not None:
            self._ended(seq.request, end_time_s(seq, self.engine.scheduler.now_s))
