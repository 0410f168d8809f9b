"""SLOs of one request: what files say of them, and whether times meet them.

In CSV and in JSON lines `ttft:500 tpot:50`, ms, the words of `vllm bench serve --goodput`.
"""

from collections.abc import Iterable
from typing import NamedTuple

from traces.fields import Where
from traces.named_numbers import named_numbers

FIELD = "slos"
NAMES = ("ttft", "tpot", "e2el")
MOST_MS = 1e12
"""Thirty years."""


class SLOs(NamedTuple):
    """The longest that each may take, s; None where not asked for."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2el_s: float | None = None

    def met(self, ttft_s: float, tpot_s: float, e2el_s: float) -> bool:
        """Whether a request with these times meets every SLO."""
        return (
            (self.ttft_s is None or ttft_s <= self.ttft_s)
            and (self.tpot_s is None or tpot_s <= self.tpot_s)
            and (self.e2el_s is None or e2el_s <= self.e2el_s)
        )

    def __str__(self) -> str:
        pairs = zip(NAMES, self, strict=True)
        return " ".join(f"{name}:{1e3 * slo_s:.15g}" for name, slo_s in pairs if slo_s is not None)


def parse_slos(words: Iterable[str]) -> SLOs:
    """Read `NAME:MILLISECONDS` words; ValueError says which is none, and what to do."""
    found = named_numbers(words, NAMES, "MILLISECONDS", MOST_MS)
    return SLOs(**{f"{name}_s": milliseconds / 1e3 for name, milliseconds in found.items()})


def read_slos(where: Where, value: object, *_: int) -> SLOs | None:
    """What a trace says of one request, None where nothing; TraceError says what is wrong with it."""
    problem = "is not text"
    if value is None:
        return None
    try:
        if isinstance(value, str):
            return parse_slos(words) if (words := value.split()) else None
    except ValueError as error:
        problem = str(error)
    raise where.error(FIELD, value, f"is wrong: {problem}", "write it as in ttft:500 tpot:50 (ms)")
