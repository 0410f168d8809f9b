"""`Tokeniser`: requests reach the engine once their prompts are tokenised, which takes longer the longer they are."""

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf

from sim.clock.arrivals import Arrivals
from traces.request import Request


class Tokeniser(Arrivals):
    """Requests as a client sends them, handed over `s_per_token` later for each token of the prompt.

    Prompts are tokenised beside one another: none waits for the one before. A request's arrival is then the time at
    which it reached the engine; `RequestLog` knows how much earlier it was sent.
    """

    __slots__ = ("_s_per_token", "_sent", "_under_way")

    def __init__(self, sent: Arrivals, s_per_token: float) -> None:
        self._sent = sent
        self._s_per_token = s_per_token
        self._under_way: list[tuple[float, int, Request]] = []
        self.next_s = sent.next_s

    @property
    def hears_ends(self) -> bool:
        """Whether their sender hears of ends."""
        return self._sent.hears_ends

    def deliver(self, until_s: float, to: Callable[[Request], object]) -> None:
        """Hand over every request that was sent and tokenised by `until_s`."""
        self._sent.deliver(until_s, self._begin)
        while self._under_way and self._under_way[0][0] <= until_s:
            at_s, _, request = heappop(self._under_way)
            to(request._replace(arrival_s=at_s))
        self._foresee()

    def ended(self, request: Request, at_s: float) -> None:
        """Its sender may send another."""
        self._sent.ended(request, at_s)
        self._foresee()

    def _begin(self, request: Request) -> None:
        at_s = request.arrival_s + self._s_per_token * request.prompt_tokens
        heappush(self._under_way, (at_s, request.request_id, request))

    def _foresee(self) -> None:
        """The next is due, or is sent and due after that: nothing is handed over before."""
        self.next_s = min(self._sent.next_s, self._under_way[0][0] if self._under_way else inf)
