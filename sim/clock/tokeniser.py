"""`Tokeniser`: requests reach the engine once their prompts are tokenised, one after the other."""

from collections.abc import Callable
from heapq import heappop, heappush, heapreplace
from math import inf
from typing import Any

from sim.clock.arrivals import Arrivals
from traces.request import Request, as_request


class Tokeniser(Arrivals):
    """Requests as a client sends them, handed over once tokenised: `s_per_token` for each token of the prompt.

    Each server tokenises one prompt at a time, as vLLM's one thread does (`renderer_num_workers`); of `num_servers` the
    one that is free first takes the next. A request's arrival is then the time at which it reached the engine;
    `sent_s` is told when it was sent.
    """

    __slots__ = ("_free_s", "_num_begun", "_s_per_token", "_sent", "_sent_s", "_under_way")

    def __init__(
        self, sent: Arrivals, s_per_token: float, num_servers: int = 1, sent_s: dict[int, float] | None = None
    ) -> None:
        self._sent = sent
        self._s_per_token = s_per_token
        self._sent_s = {} if sent_s is None else sent_s
        self._free_s = [0.0] * num_servers
        # When it is done, how many began before it, the request.
        self._under_way: list[tuple[float, int, Request]] = []
        self._num_begun = 0
        self.next_s = sent.next_s

    @property
    def hears_ends(self) -> bool:
        """Whether their sender hears of ends."""
        return self._sent.hears_ends

    def deliver(self, until_s: float, to: Callable[[Request], object]) -> None:
        """Hand over every request that was sent and tokenised by `until_s`."""
        self._sent.deliver(until_s, self._begin)
        while self._under_way and self._under_way[0][0] <= until_s:
            to(heappop(self._under_way)[2])
        self._foresee()

    def ended(self, request: Request, at_s: float) -> None:
        """Its sender may send another."""
        self._sent.ended(request, at_s)
        self._foresee()

    def _begin(self, request: Request) -> None:
        self._sent_s[request.request_id] = request.arrival_s
        done_s = max(self._free_s[0], request.arrival_s) + self._s_per_token * request.prompt_tokens
        heapreplace(self._free_s, done_s)
        # As `_replace` would, in a fifth of its time: compiled code would unpack a named tuple, and a starred one.
        row: tuple[Any, ...] = request
        handed = as_request((row[0], done_s) + row[2:])  # noqa: RUF005
        heappush(self._under_way, (done_s, self._num_begun, handed))
        self._num_begun += 1

    def _foresee(self) -> None:
        """The next is due, or is sent and due after that: nothing is handed over before."""
        self.next_s = min(self._sent.next_s, self._under_way[0][0] if self._under_way else inf)
