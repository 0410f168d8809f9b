"""`Cluster`: several engines on one virtual clock, requests routed to them as they arrive.

What happens, happens in order of time: an arrival is routed by the state that the engines have then, and an engine
commits its iterations when every other one has come as far. Boundaries within 1 ns of one another are one: all of them
are settled, then what arrived is routed, then all decide. Nothing depends on how rounding orders them.
"""

from collections.abc import Generator, Sequence
from heapq import heappop, heappush
from math import inf

from simpy.core import Environment
from simpy.events import Event

from sim.clock.arrivals import TIE_S, Arrivals
from sim.clock.hand_overs import HandOvers
from sim.clock.member import Member
from sim.errors import InvariantError
from sim.topology.routers import REJECT, Router
from traces.request import Request


class Cluster:
    """Engines behind a router.

    Args:
        members: the engines.
        front: places of those that requests are sent to.
        arrivals: the requests; hears of their ends where it wants to (`Member.ended`).
    """

    def __init__(
        self,
        env: Environment,
        members: Sequence[Member],
        arrivals: Arrivals,
        router: Router,
        front: Sequence[int] | None = None,
        hand_overs: HandOvers | None = None,
    ) -> None:
        """`hand_overs` take sequences from the `front` to other members; without them each prefills and decodes."""
        self.env, self.members, self.arrivals, self.router = env, members, arrivals, router
        for member in members if router.sees_kv else ():
            member.jump = False
        self._front = range(len(members)) if front is None else front
        self._views = [members[place] for place in self._front]
        self._hand_overs = hand_overs
        if hand_overs is not None:
            hand_overs.on_wake = self._wake
        # (boundary, place); an entry that is not the member's boundary any more is passed over.
        self._heap: list[tuple[float, int]] = []
        self._settling: set[int] = set()

    def serve(self) -> Generator[Event, None, None]:
        """Serve until every request has ended."""
        env, arrivals, peek = self.env, self.arrivals, self.env.peek
        now_s = env.now
        while True:
            boundary_s = self._next_boundary_s()
            next_s = arrivals.next_s
            if boundary_s == next_s == inf:
                break
            alone = next_s < boundary_s - TIE_S
            now_s = max(now_s, next_s if alone else boundary_s)
            if peek() <= now_s:
                yield env.timeout(now_s - env.now)
            if alone:
                arrivals.deliver(next_s, self._route)
            else:
                self._pass(boundary_s)
        self._check(now_s)
        if now_s > env.now:
            yield env.timeout(now_s - env.now)

    def _next_boundary_s(self) -> float:
        heap, members = self._heap, self.members
        while heap and members[heap[0][1]].end_s != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else inf

    def _pass(self, boundary_s: float) -> None:
        """All engines whose boundary it is settle, then decide."""
        heap, members, due_s = self._heap, self.members, boundary_s + TIE_S
        settling = self._settling
        while heap and heap[0][0] <= due_s:
            end_s, place = heappop(heap)
            if members[place].end_s == end_s:
                settling.update(members[place].in_step or (place,))
        places = sorted(settling)
        for place in places:
            members[place].settle()
        if self._hand_overs is not None:
            for place in places:
                for other in self._hand_overs.offer_from(place):
                    self._wake(other)
        self.arrivals.deliver(due_s, self._route)
        for place in places:
            members[place].decide()
        settling.clear()
        for place in places:
            self._note(place)

    def _route(self, request: Request) -> None:
        choice = self.router.route(request, self._views)
        if choice == REJECT:
            self.members[self._front[0]].turn_away(request, self.router.reason)
            return
        place = self._front[choice]
        if self.members[place].send(request, self.router.ready_s):
            self._wake(place)

    def _wake(self, place: int) -> None:
        """A boundary came forward; members that are about to decide are noted afterwards."""
        if place not in self._settling:
            self._note(place)

    def _note(self, place: int) -> None:
        end_s = self.members[place].end_s
        if end_s < inf:
            heappush(self._heap, (end_s, place))

    def _check(self, now_s: float) -> None:
        for place, member in enumerate(self.members):
            if member.engine.has_unfinished:
                raise InvariantError(f"engine {place} stands still at {now_s} s with requests unfinished")
