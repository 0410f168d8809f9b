"""Routing to data-parallel ranks: the router chooses an engine, and within it vLLM's front end the rank."""

from collections.abc import Sequence

from sim.topology.pipelines import Together
from sim.topology.routers import EngineView, Router
from traces.request import Request

REPORT_S = 0.1
"""How often ranks tell the front end of their queues (vLLM's `DPCoordinator`), s."""
WAITING_WEIGHT = 4
"""What a request that waits counts, of those that run (vLLM's `DPLBAsyncMPClient`)."""


class ToRanks(Router):
    """The rank with the least 4 x waiting + running, as the front end knows them; `router`'s choice between engines.

    What it knows are the ranks' queues as of the first request of each 0.1 s, and what it has sent since, which counts
    as waiting.
    """

    def __init__(self, router: Router, ranks: int) -> None:
        """`ranks` of each engine."""
        self.router, self.ranks, self.sees_kv = router, ranks, router.sees_kv
        self._scores: list[int] = []
        self._reported_s = -REPORT_S

    def route(self, request: Request, engines: Sequence[EngineView]) -> int:
        ranks = self.ranks
        if not self._scores or request.arrival_s >= self._reported_s + REPORT_S:
            self._reported_s = request.arrival_s
            self._scores = [WAITING_WEIGHT * e.num_waiting + e.num_in_flight - e.num_waiting for e in engines]
        found = [Together(engines[first : first + ranks]) for first in range(0, len(engines), ranks)]
        chosen = self.router.route(request, found) * ranks
        scores = self._scores[chosen : chosen + ranks]
        place = chosen + scores.index(min(scores))
        self._scores[place] += WAITING_WEIGHT
        return place
