"""`Stream`: sequences decode with layers on the host, which are copied in anew every step, until they fit on the GPU.

LayerKV's reading (i), "transferred layer-by-layer from host". A step pays the link for all KV on the host.
"""

from typing import TYPE_CHECKING, ClassVar, Self

from sim.engine.changes import Direction, Move, Streamed, Tier
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence
from sim.systems.layerkv.preset import LayerKVOptions
from sim.systems.layerkv.promote import Promote

if TYPE_CHECKING:
    from sim.systems.builder import Builder


class Stream(Promote):
    """As `Promote`, but a sequence with layers on the host decodes meanwhile.

    Args:
        tpot_slo_s: none starts to stream if the copies of a step then last longer; None: no bound.
    """

    name: ClassVar[str] = "stream"
    streams: ClassVar[bool] = True

    def __init__(self, tpot_slo_s: float | None) -> None:
        super().__init__()
        self.tpot_slo_s = tpot_slo_s

    @classmethod
    def build(cls, b: "Builder") -> Self:
        options = b.options(LayerKVOptions)
        return cls(options.tpot_slo_ms / 1e3 if options.slo_aware else None)

    def transferred(self, move: Move) -> None:
        super().transferred(move)
        seq = move.seq
        if move.target is Tier.HOST and seq not in self.blocks.copies_of and seq in self.waiting:
            self._start_streaming(seq)

    def _start_streaming(self, seq: Sequence) -> None:
        """Let a parked sequence decode from the host, if a step then still keeps to the TPOT."""
        if self.scheduler.num_seated >= self.max_num_seqs:
            return
        hosted = self.blocks.num_hosted(seq)
        if self.tpot_slo_s is not None:
            step = self.batch.step
            units = sum(cohort.num_hosted * cohort.num_cached_blocks(step) for cohort in self.batch.cohorts.values())
            units += hosted * seq.num_blocks
            cost = self.scheduler.deployment.cost
            num_bytes = units * self.blocks.limits.block_bytes / self.layers
            if cost.copy_s(num_bytes, cost.num_copies(units, 1), Direction.H2D) > self.tpot_slo_s:
                return
        self.unpark(seq)
        self.streaming[seq] = None
        self.scheduler.join(seq, num_hosted=hosted)
        self.tally["streamed_sequences"] += 1

    def reserve(self) -> None:
        """Take the host blocks that streaming sequences grow into; one that finds none is computed again."""
        batch, blocks = self.batch, self.blocks
        if not self.streaming and not blocks.host_reserved:
            return
        while not blocks.reserve_on_host(
            sum(cohort.num_hosted * cohort.blocks_needed(batch.step) for cohort in batch.cohorts.values())
        ):
            seq, _ = self.streaming.popitem()
            self.scheduler.take_out(seq)
            self.drop(seq)
            self.scheduler.order.put_back([seq])

    def complete(self, plan: IterationPlan) -> None:
        """Every step brings in the missing layers again; blocks that they grow by lie on the host."""
        if not plan.num_decodes or not self.streaming:
            return
        batch = self.batch
        if plan.num_decodes == len(batch.members):
            step = batch.step
            for hosted, cohort in batch.cohorts.items():
                self._stream(plan, hosted, cohort.num_cached_blocks(step), cohort.size, cohort.blocks_needed(step))
            return
        for seq in plan.decodes:
            if seq in self.streaming:
                hosted, grown = self.blocks.num_hosted(seq), int(batch.needs_block(seq))
                self._stream(plan, hosted, batch.num_blocks_of(seq), 1, grown)

    def _stream(self, plan: IterationPlan, hosted: int, cached: int, members: int, grown: int) -> None:
        """`members` with `hosted` layers on the host, which have `cached` blocks and begin `grown` more."""
        plan.streamed += (Streamed(hosted, hosted * cached, hosted * members),)
        if grown:
            self.blocks.grow_hosted(hosted * grown)

    def repeats(self, plan: IterationPlan, steps: int) -> int:
        """Until one of those that stream begins a block."""
        if self.scheduler.changed:
            # What was prepared did not see what `reserve` has dropped since.
            return 1
        step = self.batch.step
        for cohort in self.batch.cohorts.values():
            steps = min(steps, cohort.steps_until_growth(step))
        return steps
