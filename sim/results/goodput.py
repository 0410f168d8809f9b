"""`Goodput`: the SLOs of `--goodput`."""

from collections.abc import Iterable

from sim.errors import UserError
from traces.slos import SLOs, parse_slos


class Goodput(SLOs):
    """The SLOs of requests that have none of their own, as `--goodput` says them: `ttft:500 tpot:50` (ms)."""

    __slots__ = ()

    @staticmethod
    def parse(words: Iterable[str]) -> "Goodput":
        """Read `NAME:MILLISECONDS` words as `vllm bench serve --goodput` takes them."""
        try:
            return Goodput(*parse_slos(words))
        except ValueError as error:
            raise UserError(f"--goodput: {error}") from None
