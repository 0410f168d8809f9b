"""`Arrivals`: the requests of a trace, handed over as they fall due on whichever clock runs."""

from collections.abc import Callable, Iterable
from math import inf
from typing import Final

from sim.engine.sequence import Sequence
from traces.request import Request

TIE_S: Final = 1e-9
"""Events this close to a boundary count as simultaneous with it: sums of floats differ by less."""


class Arrivals:
    """Requests of a trace in order of arrival, read one ahead."""

    __slots__ = ("_iterator", "_next", "next_s")

    def __init__(self, requests: Iterable[Request]) -> None:
        self._iterator = iter(requests)
        self._next: Request | None = None
        self.next_s = -inf
        self._read()

    @property
    def hears_ends(self) -> bool:
        """Whether `ended` is to be called."""
        return False

    def _read(self) -> None:
        self._next = next(self._iterator, None)
        self.next_s = inf if self._next is None else self._next.arrival_s

    def deliver(self, until_s: float, to: Callable[[Request], object]) -> None:
        """Hand over every request that has arrived by `until_s`."""
        while self._next is not None and self.next_s <= until_s:
            to(self._next)
            self._read()

    def ended(self, request: Request, at_s: float) -> None:
        """`request`, as it was handed over, ended at `at_s`, completed or not."""


def end_time_s(seq: Sequence, now_s: float) -> float:
    """When a sequence that has just ended did so, s: with its last token or, given up, `now_s`."""
    return seq.finish_s if seq.finish_s >= 0.0 else now_s
