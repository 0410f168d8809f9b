"""`ClosedLoop`: requests that wait for earlier ones to end, as users and benchmark clients do.

Two reasons to wait, alone or together. `max_concurrency` is `vllm bench serve --max-concurrency`: at most so many
requests are in flight, the next is sent when one ends or, if that is later, at its own arrival. `by_session`: a turn of
a session is sent once the turn before it has its answer and the gap between the two in the trace has passed, which is
then the time to think. In the generated workload `sessions` it is that exactly; a recorded gap includes the answer.

Requests are handed over with the time at which they were sent as their arrival.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from sim.clock.arrivals import Arrivals
from traces.errors import TraceError
from traces.request import Request


@dataclass(slots=True)
class _Session:
    """A session: when its latest turn in the trace arrived there, and where that turn is."""

    traced_s: float
    ended_s: float | None = None
    """When the latest turn that was sent ended, s; None while one is under way."""
    held: list[tuple[Request, float]] = field(default_factory=list)
    """Turns read, each with the gap to the one before it, s."""


class ClosedLoop(Arrivals):
    """Requests in order of arrival, sent when the loop lets them.

    Args:
        requests: in order of arrival; read one ahead.
        max_concurrency: most requests in flight; None: any number.
        by_session: whether turns wait for the answer before. TraceError at a request without a session id.
        front_end_s: between a client and the engine, there and back: so much later clients hear of an end.
    """

    __slots__ = ("_by_session", "_free", "_front_end_s", "_ready", "_sessions", "_unused")

    def __init__(
        self,
        requests: Iterable[Request],
        max_concurrency: int | None = None,
        *,
        by_session: bool = False,
        front_end_s: float = 0.0,
    ) -> None:
        self._front_end_s = front_end_s
        self._by_session = by_session
        self._unused = inf if max_concurrency is None else max_concurrency
        # When places that were taken became free, s.
        self._free: list[float] = []
        self._sessions: dict[str, _Session] = {}
        self._ready: list[tuple[float, int, Request]] = []
        super().__init__(requests)

    @property
    def hears_ends(self) -> bool:
        """All ends: the next request may wait for one."""
        return True

    def _read(self) -> None:
        super()._read()
        self._foresee()

    def _foresee(self) -> None:
        """When something may be sent next: infinite while every place is taken."""
        free_s = self._free_s
        traced_s = inf if self._next is None else self._next.arrival_s
        next_s = min(traced_s, self._ready[0][0]) if self._ready else traced_s
        self.next_s = next_s if next_s > free_s else free_s

    @property
    def _free_s(self) -> float:
        """When the place that the next request gets became free, s; infinite while all are taken."""
        if self._unused:
            return 0.0
        return self._free[0] if self._free else inf

    def deliver(self, until_s: float, to: Callable[[Request], object]) -> None:
        while self.next_s <= until_s:
            ready, request = self._ready, self._next
            if ready and (request is None or ready[0][0] <= request.arrival_s):
                request = heappop(ready)[2]
                self._send(request, to)
            else:
                assert request is not None
                super()._read()
                if not self._by_session or self._join_session(request):
                    self._send(request, to)
            self._foresee()

    def _send(self, request: Request, to: Callable[[Request], object]) -> None:
        sent_s = max(request.arrival_s, self._free_s)
        if self._unused:
            self._unused -= 1
        else:
            heappop(self._free)
        to(request if sent_s == request.arrival_s else request._replace(arrival_s=sent_s))

    def _join_session(self, request: Request) -> bool:
        """A request was just read: whether it is sent at its arrival; else its session keeps it until it may be."""
        if not request.session_id:
            raise TraceError(f"request {request.request_id}: has no session id; leave --closed-sessions out")
        session = self._sessions.get(request.session_id)
        if session is None:
            self._sessions[request.session_id] = _Session(request.arrival_s)
            return True
        gap_s = request.arrival_s - session.traced_s
        session.traced_s = request.arrival_s
        session.held.append((request, gap_s))
        if session.ended_s is not None:
            self._release(session, session.ended_s)
        return False

    def _release(self, session: _Session, ended_s: float) -> None:
        """The turn before ended: the next one may be sent after its gap, if it has been read yet."""
        session.ended_s = ended_s
        if session.held:
            request, gap_s = session.held.pop(0)
            session.ended_s = None
            ready_s = ended_s + gap_s
            heappush(self._ready, (ready_s, request.request_id, request._replace(arrival_s=ready_s)))

    def ended(self, request: Request, at_s: float) -> None:
        at_s += self._front_end_s
        if self._unused < inf:
            heappush(self._free, at_s)
        if self._by_session:
            self._release(self._sessions[request.session_id], at_s)
        self._foresee()
