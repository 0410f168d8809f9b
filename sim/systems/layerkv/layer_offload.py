"""`LayerOffload`: retained layers leave for the host before memory runs out, as a forecast says (LayerKV's Eq. 5).

    Avail(t+1) = Avail(t) + Released(t) - Allocated(t)                                                          (Eq. 5)

Allocated counts the blocks that the sequences' lengths say will be needed; the paper's one block a sequence and step is
the option `one_block_a_step`. "x/2 layers, then all" is read as half of the retained layers, most recently processed
first: parked sequences before decoding ones. If memory runs out all the same, the victim goes to the host whole before
the step (counted), or is recomputed when the host is full.
"""

from typing import TYPE_CHECKING, ClassVar, Self

from sim.engine.plan import IterationPlan, StepTimes
from sim.engine.sequence import Sequence
from sim.parts.eviction.recompute import Recompute
from sim.parts.needs import Need
from sim.systems.layerkv.layer_blocks import LayerBlocks
from sim.systems.layerkv.preset import LayerKVOptions
from sim.systems.layerkv.promote import Promote

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler
    from sim.systems.builder import Builder


class LayerOffload(Recompute):
    """Staged offload ahead of need."""

    name: ClassVar[str] = "layer-offload"
    options: ClassVar[type | None] = LayerKVOptions
    needs: ClassVar[tuple[Need, ...]] = (
        Need("memory", "moves single layers", offers=LayerBlocks),
        Need("stage", "parks what it offloads", offers=Promote),
    )

    def __init__(self, options: LayerKVOptions) -> None:
        super().__init__()
        self.horizon, self.one_block_a_step = options.horizon_steps, options.printed
        self.lengths_known = options.lengths_known
        self._threshold_share = options.threshold
        # Which sequences end, by the median prediction, at which of the batch's steps.
        self._expected: dict[int, list[Sequence]] = {}
        self._expected_step: dict[Sequence, int] = {}
        # Free host blocks with which not even half of any member's layers fitted; members only grow until one joins.
        self._full_at = -1
        # The batch's step at which this step's forecast runs short; 0: it does not.
        self._short_at = 0

    @classmethod
    def build(cls, b: "Builder") -> Self:
        return cls(b.options(LayerKVOptions))

    def bind(self, scheduler: "Scheduler") -> None:
        super().bind(scheduler)
        memory, stage = scheduler.memory, scheduler.stage
        assert isinstance(memory, LayerBlocks)
        assert isinstance(stage, Promote)
        self.blocks, self.parking = memory, stage
        self.layers = memory.num_groups
        self._floor = int(self._threshold_share * memory.gpu.num_blocks)
        per_sequence = self.horizon if self.one_block_a_step else -(-self.horizon // memory.block_size)
        self._growth_per_sequence = self.layers * per_sequence
        self.gpu, self.host = scheduler.gpu, scheduler.host
        self.tally = scheduler.counters.policy

    # -- what the forecast keeps free ----------------------------------------------------------------------------------

    def _threshold(self, members: int) -> int:
        """Layer-blocks that the forecast wants free: one a member, or its share of the pool."""
        return members if members > self._floor else self._floor

    def headroom(self) -> int:
        """The threshold, and the most that the forecast may see allocated if one more sequence joins."""
        members, floor = len(self.batch.members), self._floor
        joining = members + len(self.parking.promoting) + 1
        return (members if members > floor else floor) + joining * self._growth_per_sequence

    # -- Eq. 5 -------------------------------------------------------------------------------------------------------

    def prepare(self, now_s: float) -> None:
        self._short_at = 0
        members = len(self.batch.members)
        if members:
            available = self.gpu.free + self.blocks.releasing - self._threshold(members)
            if available < members * self._growth_per_sequence:
                self._forecast(available)

    def _forecast(self, available: int) -> None:
        """Offload if Eq. 5 falls below the threshold within the horizon."""
        batch, layers = self.batch, self.layers
        if not self.one_block_a_step and available >= batch.blocks_needed(self.horizon) * layers:
            return
        size, growth, block_size = len(batch.members), batch.growth, batch.block_size
        due = batch.due if self.lengths_known else self._expected
        lowest = available
        for step in range(batch.step, batch.step + self.horizon):
            available -= (size if self.one_block_a_step else growth[step % block_size]) * layers
            if available < lowest:
                if available < 0 <= lowest:
                    self._short_at = step + 1
                lowest = available
            if step + 1 in due:
                available += self._predicted_releases(step + 1)
        if lowest < 0:
            self._short_at = self._short_at or batch.step + 1
            self.tally["forecast_shortages"] += 1
            self._offload_retained(-lowest)

    def _predicted_releases(self, step: int) -> int:
        """Layer-blocks freed as the batch reaches `step` by sequences whose median predicted length ends there."""
        batch, groups = self.batch, self.blocks.groups_on_gpu
        ending = batch.finishing_at(step) if self.lengths_known else self._expected[step]
        return sum(batch.num_blocks_of(seq) * len(groups[seq]) for seq in ending) if ending else 0

    def joined(self, seq: Sequence) -> None:
        self._full_at = -1
        self._expect_end(seq)

    def _expect_end(self, seq: Sequence) -> None:
        """Note at which of the batch's steps the median prediction lets `seq` end; the batch knows if it is right."""
        if self.lengths_known:
            return
        self.left(seq)
        end = self.batch.step + seq.predicted_median_tokens - self.batch.num_generated_of(seq)
        if end > self.batch.step:
            self._expected_step[seq] = end
            self._expected.setdefault(end, []).append(seq)

    def moved(self, seq: Sequence) -> None:
        self._expect_end(seq)

    def left(self, seq: Sequence) -> None:
        if (end := self._expected_step.pop(seq, None)) is not None:
            self._expected[end].remove(seq)
            if not self._expected[end]:
                del self._expected[end]

    def _offload_retained(self, shortage: int) -> None:
        """Half of the retained layers, most recently processed sequence first; if that is not enough, all of them."""
        copies, groups = self.blocks.copies_of, self.blocks.groups_on_gpu
        for share in (2, 1):
            for seq in list(reversed(self.parking.retaining)):
                if shortage <= 0 or not self.host.free:
                    return
                if seq not in copies:
                    shortage -= self.parking.offload(seq, -(-len(groups[seq]) // share))
        batch, host = self.batch, self.host
        fits_none = True
        if shortage <= 0 or host.free <= self._full_at or self._cannot_offload():
            return
        for seq in list(reversed(batch.members)):
            kept = len(groups[seq])
            if not kept or seq in copies:
                fits_none = False
                continue
            blocks = batch.num_blocks_of(seq)
            half = -(-kept // 2)
            if half * blocks > host.free:
                continue
            fits_none = False
            layers = half if half * blocks >= shortage else kept
            if layers * blocks <= host.free:
                self._park_member(seq)
                shortage -= self.parking.offload(seq, layers)
                if shortage <= 0 or self._cannot_offload():
                    return
        if fits_none:
            self._full_at = host.free

    def _cannot_offload(self) -> bool:
        """The host has no room for a block of every layer, or only one sequence is left, which goes on."""
        return self.host.free < self.layers or len(self.batch.members) == 1

    def _park_member(self, seq: Sequence) -> None:
        """A decoding sequence is parked; it was here before all that wait, so it stands first among them."""
        scheduler = self.scheduler
        scheduler.take_out(seq)
        scheduler.counters.preemptions += 1
        scheduler.changed = True
        seq.num_preemptions += 1
        self.parking.park(seq, first=True)

    def repeats(self, plan: IterationPlan, steps: int) -> int:
        """No further than the forecast is sure to find enough, or as long as it is short and nothing can be done."""
        batch, horizon, members = self.batch, self.horizon, len(self.batch.members)
        if self._short_at:
            return steps if self._stays_short() else 1
        # The first iteration's blocks are taken already.
        available = (
            self.gpu.free + self.blocks.releasing - self._threshold(members) + batch.blocks_needed(1) * self.layers
        )
        spare = available // self.layers
        if self.one_block_a_step:
            spare -= members * horizon
            horizon = 0
        if spare // members * batch.block_size - horizon >= steps:
            return steps
        if self.lengths_known and not self.one_block_a_step:
            return self._enough_for(available, steps)
        return max(1, min(steps, batch.steps_within(spare) - horizon)) if spare >= 0 else 1

    def _stays_short(self) -> bool:
        """Whether every forecast until a sequence ends will be short, and no layer of any fits on the host."""
        batch = self.batch
        if not self.lengths_known or self.one_block_a_step or self._short_at > batch.step + batch.steps_to_finish():
            return False
        return self.host.free <= self._full_at or self._cannot_offload()

    def _enough_for(self, available: int, steps: int) -> int:
        """After how many iterations, 1 to `steps`, the first forecast may be short: Eq. 5 from today's lengths.

        Members grow until they end, so that later forecasts see no less released than this one.
        """
        batch, horizon = self.batch, self.horizon
        growth, block_size, due, layers = batch.growth, batch.block_size, batch.due, self.layers
        begin = batch.step
        for step in range(begin, begin + steps - 1 + horizon):
            available -= growth[step % block_size] * layers
            if available < 0:
                return max(1, step + 1 - begin - horizon)
            if step + 1 in due:
                available += self._predicted_releases(step + 1)
        return steps

    def committed(self, plan: IterationPlan, times: StepTimes) -> None:
        if self._short_at and times.iterations > 1:
            # Each of them would have seen the shortage.
            self.tally["forecast_shortages"] += times.iterations - 1

    # -- the forecast came too late ------------------------------------------------------------------------------------

    def evict(self, seq: Sequence, plan: IterationPlan) -> None:
        if seq.prefilling:
            super().evict(seq, plan)
            return
        if seq in self.parking.streaming or seq.num_blocks * self.layers > self.host.free:
            self.scheduler.counters.swap_space_exhausted += 1
            super().evict(seq, plan)
            return
        self.blocks.offload_now(seq, plan)
        seq.num_preemptions += 1
        self.parking.park(seq, first=True)
        self.tally["emergency_offloads"] += 1
