"""`AutoscaledCluster`: a cluster whose replicas come and go, as an autoscaler says.

A replica takes GPUs from when it is asked for. It serves once it has started; told to go, it gets no more requests and
holds its GPUs until those that it has have ended. Each is an engine of its own: one that comes later has cached
nothing. The autoscaler is asked between events, with what is true then, and nothing else happens at its times.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from simpy.core import Environment

from sim.clock.arrivals import Arrivals
from sim.clock.cluster import Cluster
from sim.clock.member import Member
from sim.errors import InvariantError
from sim.topology.autoscalers import Autoscaler, ScalingOptions
from sim.topology.routers import REJECT, Router
from traces.request import Request


@dataclass
class Lifetime:
    """A replica's times, s."""

    asked_s: float
    ready_s: float
    drained_from_s: float = inf
    stopped_s: float = inf


class AutoscaledCluster(Cluster):
    """Replicas behind a router, the first `num_first` of which serve from the start.

    Args:
        members: those that there are at first.
        more: makes a further engine.
        start_s: from when a replica is asked for to when it serves, s.
    """

    def __init__(
        self,
        env: Environment,
        members: list[Member],
        arrivals: Arrivals,
        router: Router,
        *,
        options: ScalingOptions,
        autoscaler: Autoscaler,
        more: Callable[[], Member],
        start_s: float,
    ) -> None:
        super().__init__(env, members, arrivals, router)
        self.members: list[Member] = members
        self.options, self.autoscaler, self.start_s, self._more = options, autoscaler, start_s, more
        self.lives = [Lifetime(0.0, 0.0) for _ in members]
        self._serving = list(range(len(members)))
        """Places of those that serve or start, the eldest first."""
        self._draining: set[int] = set()
        self._tick_s = 0.0
        self._ticks = 0

    def _next_boundary_s(self) -> float:
        boundary_s = super()._next_boundary_s()
        next_s = min(boundary_s, self.arrivals.next_s)
        while self._tick_s < next_s < inf:
            self._scale(self._tick_s)
            self._ticks += 1
            self._tick_s = self._ticks * self.options.interval_s
        return boundary_s

    def _pass(self, boundary_s: float) -> None:
        super()._pass(boundary_s)
        if self._draining:
            self._stop_idle(boundary_s)

    def _route(self, request: Request) -> None:
        ready = self._ready(request.arrival_s)
        choice = self.router.route(request, [self.members[place] for place in ready])
        if choice == REJECT:
            raise InvariantError("a router of replicas turned a request away")
        place = ready[choice]
        if self.members[place].send(request, self.router.ready_s):
            self._wake(place)

    def _ready(self, now_s: float) -> list[int]:
        return [place for place in self._serving if self.lives[place].ready_s <= now_s]

    def _scale(self, now_s: float) -> None:
        """Ask the autoscaler, and begin to do what it says."""
        ready = self._ready(now_s)
        current = len(self._serving)
        views = [self.members[place] for place in ready]
        desired = self.autoscaler.desired(now_s, views, current - len(ready))
        if not self.options.min <= desired <= self.options.max:
            raise InvariantError(f"{desired} replicas are not {self.options.min} to {self.options.max}")
        # Those that drain hold their GPUs.
        for _ in range(min(desired - current, self.options.max - current - len(self._draining))):
            self._serving.append(len(self.members))
            self.members.append(self._more())
            self.lives.append(Lifetime(now_s, now_s + self.start_s))
        for _ in range(current - desired):
            place = self._serving.pop()
            self.lives[place].drained_from_s = now_s
            self._draining.add(place)
        self._stop_idle(now_s)

    def _stop_idle(self, now_s: float) -> None:
        for place in sorted(self._draining):
            if not self.members[place].num_in_flight:
                self._draining.discard(place)
                self.lives[place].stopped_s = now_s
