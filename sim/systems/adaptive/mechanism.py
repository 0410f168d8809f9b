"""`Mechanism`: whether one whose blocks others shall have is swapped or computed again, by price; and in what pieces.

Blocks that are held without decoding serve nothing: b of B blocks for T seconds cost the engine T b / B seconds. A swap
holds them until the copies ahead of it have gone, then until its own have, piece by piece, and again for as long as
its way back takes. Computing it again frees them at once, and takes the prompt's price with its blocks held meanwhile.

A copy's end is seen at the end of an iteration: so much as one lasts is a piece, and its blocks are free when it has
gone.

Of blocks that span all layers none is free before its last layer has gone. With a share x of the layers copied and the
others computed again, copies that take C seconds each way and prefill that takes P, a swap costs (W + 2 x C) b / B +
(1 - x) P: linear in x, so that all layers or none are best, and no split is tried.
"""

from math import ceil

from sim.cost.model import CostModel
from sim.engine.changes import D2H, H2D, Direction
from sim.engine.limits import Limits
from sim.systems.adaptive.request_price import RequestPrice


class Mechanism:
    """Prices in seconds of the engine.

    Args:
        cost, limits: of the engine.
        price: what its prompts take.
        by_price: whether to compute again what costs less so; else all are swapped.
    """

    def __init__(self, cost: CostModel, limits: Limits, price: RequestPrice, *, by_price: bool) -> None:
        self.by_price = by_price
        self._cost, self._price = cost, price
        self._block_bytes, self._num_gpu_blocks = limits.block_bytes, limits.num_gpu_blocks

    def copy_s(self, num_blocks: int, direction: Direction) -> float:
        """A copy of so many blocks, alone on the link."""
        return self._cost.copy_s(num_blocks * self._block_bytes, self._cost.num_copies(num_blocks, 1), direction)

    def num_pieces(self, num_blocks: int, iteration_s: float) -> int:
        """Copies in which so many blocks leave, at least 1 and at most one a block."""
        return max(1, min(num_blocks, ceil(self.copy_s(num_blocks, D2H) / iteration_s)))

    def swap_s(self, num_blocks: int, num_ahead: int, iteration_s: float) -> float:
        """What a swap of `num_blocks` costs, out and back, with `num_ahead` blocks yet to leave before it."""
        pieces = self.num_pieces(num_blocks, iteration_s)
        # Of n equal pieces the blocks wait for (n + 1) / 2 on average.
        out_s = self.copy_s(num_blocks, D2H) * (pieces + 1) / (2 * pieces)
        held_s = self.copy_s(num_ahead, D2H) + out_s + self.copy_s(num_blocks, H2D)
        return held_s * num_blocks / self._num_gpu_blocks

    def recompute_s(self, num_tokens: int, num_blocks: int) -> float:
        """What it costs to compute `num_tokens` tokens in `num_blocks` blocks again."""
        return self._price.prefill_s(num_tokens) * (1.0 + num_blocks / self._num_gpu_blocks)

    def recomputes(self, num_tokens: int, num_blocks: int, num_ahead: int, iteration_s: float) -> bool:
        """Whether a sequence that leaves is computed again."""
        if not self.by_price:
            return False
        return self.recompute_s(num_tokens, num_blocks) < self.swap_s(num_blocks, num_ahead, iteration_s)

    def recomputes_late(self, num_tokens: int, num_blocks: int) -> bool:
        """The same where a swap would hold up all iterations for as long as its copy out takes, and not only blocks."""
        return self.by_price and self._price.prefill_s(num_tokens) < self.copy_s(num_blocks, D2H)
