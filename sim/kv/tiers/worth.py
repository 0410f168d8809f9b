"""`Worth`: what loading a part of a prompt takes, and what computing it would, by the run's own prices."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Self

from sim.cost.lanes import streamed_s
from sim.cost.model import CostModel
from sim.engine.changes import Direction
from sim.engine.limits import Limits
from sim.engine.plan import IterationPlan, Origin, PrefillChunk
from sim.engine.sequence import Sequence
from traces.request import Request

if TYPE_CHECKING:
    from sim.systems.builder import Builder


class Worth:
    """Prices of one engine.

    Args:
        cost: of the engine's device.
        limits: of the engine; its budget cuts prompts into chunks.
        layers: of the model.
        load_s_per_block: of a copy to the GPU; None: as `cost` says.
    """

    def __init__(self, cost: CostModel, limits: Limits, layers: int, load_s_per_block: float | None = None) -> None:
        self._cost, self._layers, self._load_s_per_block = cost, layers, load_s_per_block
        self._block_bytes, self._budget = limits.block_bytes, limits.max_num_batched_tokens

    @classmethod
    def of(cls, b: "Builder", load_s_per_block: float | None = None) -> Self:
        """Of the engine whose parts are built."""
        return cls(b.deployment.cost, b.limits, b.deployment.model.num_layers, load_s_per_block)

    def load_s(self, num_blocks: int) -> float:
        """A copy of so many blocks to the GPU, alone on its lane, s."""
        if self._load_s_per_block is not None:
            return num_blocks * self._load_s_per_block
        copies = self._cost.num_copies(num_blocks, self._layers)
        return self._cost.copy_s(num_blocks * self._block_bytes, copies, Direction.H2D)

    def recompute_s(self, seq: Sequence, begin: int, end: int) -> float:
        """How much sooner `seq`, alone, is computed from its first `end` tokens on than from its first `begin`, s."""
        return self.computed_s(seq, begin) - self.computed_s(seq, end)

    def computed_s(self, seq: Sequence, num_computed: int) -> float:
        """`seq` computed from there on, alone, s."""
        return sum(self._chunks_s(seq, num_computed))

    def streamed_s(self, seq: Sequence, num_computed: int, num_blocks: int) -> float:
        """The same where so many blocks are loaded for it, layer by layer, beside the first chunk."""
        chunks = self._chunks_s(seq, num_computed)
        return streamed_s(next(chunks), self._layers, self.load_s(num_blocks), 0.0, 0.0) + sum(chunks)

    def spans_s(self, spans: Iterable[tuple[int, int]], num_blocks: int = 0) -> float:
        """Tokens of a prompt, from one place to another each, computed in one iteration, s.

        Each attends to all before it. So many blocks are loaded layer by layer beside that.
        """
        plan, seq = IterationPlan(), Sequence(Request(0, 0.0, 1, 1))
        for begin, end in spans:
            plan.chunks += (PrefillChunk(seq, end - begin, begin, Origin.ADMITTED),)
            plan.prefill_tokens += end - begin
            plan.prefill_pairs += (end * (end + 1) - begin * (begin + 1)) // 2
            plan.prefill_squares += (end - begin) ** 2
        plan.num_sampled_prefills = 1
        compute_s = self._cost.iteration_s(plan)
        return streamed_s(compute_s, self._layers, self.load_s(num_blocks), 0.0, 0.0) if num_blocks else compute_s

    def _chunks_s(self, seq: Sequence, num_computed: int) -> Iterator[float]:
        last = max(seq.num_tokens, num_computed + 1)
        while num_computed < last:
            num_new = min(self._budget, last - num_computed)
            plan = IterationPlan()
            plan.chunks = (PrefillChunk(seq, num_new, num_computed, Origin.ADMITTED),)
            plan.prefill_tokens = num_new
            plan.prefill_pairs = num_new * num_computed + num_new * (num_new + 1) // 2
            plan.prefill_squares = num_new * num_new
            num_computed += num_new
            plan.num_sampled_prefills = int(num_computed == last)
            yield self._cost.iteration_s(plan)
