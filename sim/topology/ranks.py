"""Routing to data-parallel ranks: the router chooses an engine, and within it vLLM's front end or SGLang's controller.

Sources: vLLM 0.33, `DPLBAsyncMPClient`, `DPCoordinator`; sglang 0.5.23, `managers/data_parallel_controller.py`.
"""

from collections.abc import Sequence
from typing import ClassVar

from sim.topology.pipelines import Together
from sim.topology.routers import EngineView, Router
from traces.request import Request

WAITING_WEIGHT = 4
"""What a request that waits counts, of those that run (vLLM)."""


class ToRanks(Router):
    """vLLM's: the rank with the least 4 x waiting + running, as the front end knows them.

    What it knows are the ranks' loads as of the first request of each `report_s`, and what it has sent since.
    """

    report_s: ClassVar[float] = 0.1
    """How often ranks tell of their loads, s."""

    def __init__(self, router: Router, ranks: int) -> None:
        """`ranks` of each engine, between which `router` chooses."""
        self.router, self.ranks, self.sees_kv = router, ranks, router.sees_kv
        self._loads: list[tuple[int, ...]] = []
        self._reported_s = -self.report_s

    def load_of(self, rank: EngineView) -> tuple[int, ...]:
        """The rank with the least gets a request."""
        return (WAITING_WEIGHT * rank.num_waiting + rank.num_in_flight - rank.num_waiting,)

    def load_added(self, request: Request) -> tuple[int, ...]:
        """What a request that was sent adds until its rank tells."""
        return (WAITING_WEIGHT,)

    def route(self, request: Request, engines: Sequence[EngineView]) -> int:
        if not self._loads or request.arrival_s >= self._reported_s + self.report_s:
            self._reported_s = request.arrival_s
            self._loads = [self.load_of(rank) for rank in engines]
        first = self._first(request, engines)
        place = min(range(first, first + self.ranks), key=self._loads.__getitem__)
        added = self.load_added(request)
        self._loads[place] = tuple(map(sum, zip(self._loads[place], added, strict=True)))
        return place

    def _first(self, request: Request, engines: Sequence[EngineView]) -> int:
        """The first rank of the engine that `router` chooses."""
        ranks = self.ranks
        found = [Together(engines[first : first + ranks]) for first in range(0, len(engines), ranks)]
        return self.router.route(request, found) * ranks


class InTurn(ToRanks):
    """SGLang's default: an engine's ranks take turns."""

    def __init__(self, router: Router, ranks: int) -> None:
        super().__init__(router, ranks)
        self._turns: dict[int, int] = {}

    def route(self, request: Request, engines: Sequence[EngineView]) -> int:
        first = self._first(request, engines)
        turn = self._turns.get(first, 0)
        self._turns[first] = (turn + 1) % self.ranks
        return first + turn


class ByLoad(ToRanks):
    """SGLang's `total_requests`, or `total_tokens`: in KV and in prompts that wait, then by requests."""

    report_s: ClassVar[float] = 0.02

    def __init__(self, router: Router, ranks: int, *, by_tokens: bool) -> None:
        super().__init__(router, ranks)
        self.by_tokens = by_tokens
        self.sees_kv |= by_tokens

    def load_of(self, rank: EngineView) -> tuple[int, ...]:
        if not self.by_tokens:
            return (rank.num_in_flight,)
        return round(rank.kv_usage * rank.kv_tokens) + rank.waiting_tokens, rank.num_in_flight

    def load_added(self, request: Request) -> tuple[int, ...]:
        return (request.prompt_tokens, 1) if self.by_tokens else (1,)
