"""`PartialRecompute`: sequences decode from the host, and part of their KV is made on the GPU as the rest comes (KVPR).

Jiang et al., "Efficient LLM Inference with I/O-Aware Partial KV Cache Recomputation", 2024. For each layer and step the
inputs of the first l tokens come in, then their keys and values are projected while the KV of the others is copied:
T(l) = l x inputs + max(l x projection, (s - l) x KV), at its least where both take as long.
"""

from math import ceil, inf
from typing import TYPE_CHECKING, ClassVar, Self

from sim.engine.changes import Direction, Projected
from sim.engine.plan import IterationPlan, StepTimes
from sim.errors import UserError
from sim.parts.needs import Need
from sim.systems.kvpr.preset import PartialRecomputeOptions
from sim.systems.layerkv.stream import Stream

if TYPE_CHECKING:
    from sim.systems.builder import Builder


class BlockSeconds:
    """What a block of one layer takes: its tokens' inputs copied, its KV projected from them, and its KV copied, s."""

    fetched_share: float = 1.0
    """Of blocks, what a decode attends to."""
    index_share: float = 0.0
    """Of blocks, what finds it: it stays on the GPU."""

    def __init__(self, inputs_s: float, projection_s: float, kv_s: float, input_share: float) -> None:
        """`input_share`: bytes of inputs, of those of KV."""
        self.inputs_s, self.projection_s, self.kv_s = inputs_s, projection_s, kv_s
        self.input_share = input_share if inputs_s < kv_s else 0.0

    @classmethod
    def of(cls, b: "Builder") -> Self:
        """Of a deployment's prices; inputs that are not to be used take for ever."""
        model, cost, size = b.deployment.model, b.deployment.cost, b.limits.block_size
        kv, recomputes = model.kv_format(), b.options(PartialRecomputeOptions).partial_recompute
        if recomputes and not kv.is_dense:
            raise UserError(
                "--kvpr-partial-recompute: a context's first tokens are computed again, and --sparse-attention chooses "
                "others; give kvpr:partial-recompute=false"
            )
        layer_bytes, input_bytes = b.limits.block_bytes / model.num_layers, size * model.hidden_bytes_per_token_layer
        found = cls(
            cost.copy_s(input_bytes, 0, Direction.H2D) if recomputes else inf, cost.project_s(size),
            cost.copy_s(layer_bytes, cost.num_copies(1, 1), Direction.H2D), input_bytes / layer_bytes,
        )  # fmt: skip
        stored = model.num_layers + kv.index_reads
        found.fetched_share, found.index_share = (kv.context_reads - kv.index_reads) / stored, kv.index_reads / stored
        return found

    def layer_s(self, blocks: int, projected: int) -> float:
        """T(l) for `projected` of `blocks` blocks."""
        return projected * self.inputs_s + max(projected * self.projection_s, (blocks - projected) * self.kv_s)

    def projected(self, blocks: int) -> int:
        """Blocks whose KV is projected: those with the least T(l). None where inputs are no smaller than KV."""
        if self.inputs_s >= self.kv_s:
            return 0
        even = int(blocks * self.kv_s / (self.projection_s + self.kv_s))
        return min((even, min(even + 1, blocks)), key=lambda projected: self.layer_s(blocks, projected))


class PartialRecompute(Stream):
    """All sequences stream, and no layers return to the GPU.

    Args:
        seconds: what T(l) is made of.
    """

    name: ClassVar[str] = "partial-recompute"
    options: ClassVar[type | None] = PartialRecomputeOptions
    needs: ClassVar[tuple[Need, ...]] = (Need("memory", "decodes from the host alone", names=("hosted-layers",)),)

    def __init__(self, seconds: BlockSeconds) -> None:
        super().__init__(None)
        self.seconds = seconds

    @classmethod
    def build(cls, b: "Builder") -> Self:
        return cls(BlockSeconds.of(b))

    def prepare(self, now_s: float) -> None:
        # Whose prefill left when all seats were taken.
        for seq in [seq for seq in self.waiting if seq not in self.blocks.copies_of]:
            self._start_streaming(seq)

    def complete(self, plan: IterationPlan) -> None:
        super().complete(plan)
        if self.seconds.input_share and plan.behind_blocks:
            # The inputs leave with the KV.
            plan.behind_blocks += ceil(plan.behind_blocks * self.seconds.input_share)

    def committed(self, plan: IterationPlan, times: StepTimes) -> None:
        for record in plan.streamed:
            if isinstance(record, Projected):
                projected = record.num_tokens // self.blocks.block_size * record.num_groups
                self.tally["projected_layer_blocks"] += projected * times.iterations
                self.tally["streamed_layer_blocks"] += record.num_read * times.iterations

    def _stream(self, plan: IterationPlan, hosted: int, cached: int, members: int, grown: int) -> None:
        projected = self.seconds.projected(cached)
        size, written = self.blocks.block_size, hosted * members
        inputs = ceil(written * self.seconds.input_share / size)
        read = hosted * ceil((cached - projected) * self.seconds.fetched_share)
        plan.streamed += (Projected(hosted, read, written + inputs, projected * size, inputs),)
        if grown:
            self.blocks.grow_hosted(hosted * grown)
