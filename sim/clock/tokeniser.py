"""`Tokeniser`: requests reach the engine once their prompts are tokenised, one after the other."""

from collections import deque
from collections.abc import Callable
from math import inf

from sim.clock.arrivals import Arrivals
from traces.request import Request


class Tokeniser(Arrivals):
    """Requests as a client sends them, handed over once tokenised: `s_per_token` for each token of the prompt.

    Prompts wait for one another, as for vLLM's one thread (`renderer_num_workers`), and keep their order. A request's
    arrival is then the time at which it reached the engine; `sent_s` is told when it was sent.
    """

    __slots__ = ("_free_s", "_s_per_token", "_sent", "_sent_s", "_under_way")

    def __init__(self, sent: Arrivals, s_per_token: float, sent_s: dict[int, float] | None = None) -> None:
        self._sent = sent
        self._s_per_token = s_per_token
        self._sent_s = {} if sent_s is None else sent_s
        self._under_way: deque[Request] = deque()
        self._free_s = 0.0
        self.next_s = sent.next_s

    @property
    def hears_ends(self) -> bool:
        """Whether their sender hears of ends."""
        return self._sent.hears_ends

    def deliver(self, until_s: float, to: Callable[[Request], object]) -> None:
        """Hand over every request that was sent and tokenised by `until_s`."""
        self._sent.deliver(until_s, self._begin)
        while self._under_way and self._under_way[0].arrival_s <= until_s:
            to(self._under_way.popleft())
        self._foresee()

    def ended(self, request: Request, at_s: float) -> None:
        """Its sender may send another."""
        self._sent.ended(request, at_s)
        self._foresee()

    def _begin(self, request: Request) -> None:
        self._sent_s[request.request_id] = request.arrival_s
        self._free_s = max(self._free_s, request.arrival_s) + self._s_per_token * request.prompt_tokens
        self._under_way.append(request._replace(arrival_s=self._free_s))

    def _foresee(self) -> None:
        """The next is due, or is sent and due after that: nothing is handed over before."""
        self.next_s = min(self._sent.next_s, self._under_way[0].arrival_s if self._under_way else inf)
