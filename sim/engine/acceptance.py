"""Which drafted tokens are accepted: a draw for each token of each request, whoever asks and whenever.

The draw depends on the seed, the request and the token's place in the answer alone, so that all policies see the same,
and a sequence that is computed again as well.
"""

from sim.engine.sequence import Sequence
from sim.errors import UserError

MASK = (1 << 64) - 1
UNIT = 2.0**-64


def draw(seed: int, request_id: int, place: int) -> float:
    """A number in [0, 1), evenly distributed (SplitMix64's finaliser; Steele, Lea and Flood, OOPSLA 2014)."""
    x = (seed * 0xD1342543DE82EF95 + request_id * 0x9E3779B97F4A7C15 + place * 0xDA942042E4DD58B5 + 1) & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return (x ^ x >> 31) * UNIT


class Acceptance:
    """Drafted tokens are accepted one after another, each with its chance, up to the first that is not.

    A request whose trace says its acceptance rate has that, at any place. UserError for one that has none where
    `chances` are empty.
    """

    def __init__(self, chances: tuple[float, ...], seed: int) -> None:
        self.chances, self.seed = chances, seed

    def num_accepted(self, seq: Sequence, num_generated: int, num_drafted: int) -> int:
        """Of the tokens drafted behind the first `num_generated` of a sequence's answer, how many are accepted."""
        seed, request_id, own = self.seed, seq.request.request_id, seq.request.acceptance_rate
        if num_drafted and own is None and not self.chances:
            raise UserError(
                f"acceptance-rate: request {request_id} has none in its trace, and the policy says none; what is "
                "accepted is drawn, not computed: give one (acceptance-rate=0.7, say), or "
                "synthetic-acceptance-rates; `kvtwin live` computes it"
            )
        for i in range(num_drafted):
            if draw(seed, request_id, num_generated + i) >= (self.chances[i] if own is None else own):
                return i
        return num_drafted
