"""`Promote`: sequences with layers on the host wait after their first token; once these are back, they join.

LayerKV leaves open how they decode; this is its reading (ii), "included in the batch if the available blocks are
sufficient". First come, first served; those that were in the batch before stand first.
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, ClassVar

from sim.engine.changes import GPU, Move, Tier
from sim.engine.sequence import IGNORED, PROMOTING, Sequence
from sim.parts.base import Stage
from sim.parts.needs import Need
from sim.systems.layerkv.layer_blocks import LayerBlocks
from sim.systems.layerkv.preset import LayerKVOptions

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler


class Promote(Stage):
    """`waiting` for layers, oldest first; `retaining` those of them with layers on the GPU that could go."""

    name: ClassVar[str] = "promote"
    options: ClassVar[type | None] = LayerKVOptions
    needs: ClassVar[tuple[Need, ...]] = (Need("memory", "moves single layers", offers=LayerBlocks),)
    brings_layers_back: ClassVar[bool] = True

    def __init__(self) -> None:
        self.waiting: OrderedDict[Sequence, None] = OrderedDict()
        self.retaining: OrderedDict[Sequence, None] = OrderedDict()
        self.promoting: dict[Sequence, None] = {}
        self.streaming: dict[Sequence, None] = {}
        """Sequences that decode with layers on the host meanwhile (`Stream`)."""

    def bind(self, scheduler: "Scheduler") -> None:
        super().bind(scheduler)
        assert isinstance(scheduler.memory, LayerBlocks)
        self.blocks = scheduler.memory
        self.layers = self.blocks.num_groups
        self.gpu = scheduler.gpu
        self.tally = scheduler.counters.policy
        self.max_num_seqs = scheduler.limits.max_num_seqs

    @property
    def has_parked(self) -> bool:
        return bool(self.waiting)

    @property
    def num_parked(self) -> int:
        return len(self.waiting) + len(self.promoting)

    @property
    def num_returning(self) -> int:
        return len(self.promoting)

    def holders(self) -> Iterable[tuple[Sequence, Tier]]:
        return ((seq, Tier.GPU) for seq in chain(self.waiting, self.promoting))

    # -- parking -----------------------------------------------------------------------------------------------------

    def enter(self, seq: Sequence, *, first: bool = False) -> None:
        if self.blocks.num_hosted(seq):
            self.park(seq)
            self.tally["parked"] += 1
        else:
            self.scheduler.join(seq, first=first)

    def park(self, seq: Sequence, *, first: bool = False) -> None:
        """Let `seq` wait for its layers, last or (if it was in the batch before) first of all."""
        self.waiting[seq] = None
        if first:
            self.streaming.pop(seq, None)
            self.waiting.move_to_end(seq, last=False)
        if self.blocks.groups_on_gpu[seq]:
            self.retaining[seq] = None
        self.scheduler.park(seq)

    def unpark(self, seq: Sequence) -> None:
        """`seq` waits no longer."""
        self.waiting.pop(seq, None)
        self.retaining.pop(seq, None)

    def left(self, seq: Sequence) -> None:
        if self.streaming:
            self.streaming.pop(seq, None)

    # -- bringing layers back ----------------------------------------------------------------------------------------

    def prepare(self, now_s: float) -> None:
        # While something decodes, promotion has to wait for memory or a seat most of the time: seen at a glance.
        if self.streaming or (self.waiting and (not self.batch.members or self._head_may_return())):
            self._promote()

    def _head_may_return(self) -> bool:
        """Whether there is a seat and memory for the oldest parked sequence."""
        head, free, blocks = next(iter(self.waiting)), self.gpu.free, self.blocks
        # A head whose copies are still on their way lets others pass: look closer.
        if head not in blocks.copies_of:
            missing = blocks.num_hosted(head) * head.num_blocks
            if missing > free or missing > free - self.scheduler.eviction.headroom():
                return False
        return self.scheduler.num_seated < self.max_num_seqs

    def _promote(self) -> None:
        """Copy the missing layers of parked sequences back, first come first served, while memory lasts."""
        scheduler, batch, blocks = self.scheduler, self.batch, self.blocks
        seats = self.max_num_seqs - self.scheduler.num_seated
        idle = not (batch.members or self.promoting or blocks.releasing or scheduler.batching.partials)
        while (seq := self._next_promotable()) is not None:
            if seq in self.streaming:
                seq.num_blocks = batch.num_blocks_of(seq)
            elif seats <= 0:
                return
            missing = blocks.num_hosted(seq) * seq.num_blocks
            if self.gpu.free - missing < scheduler.eviction.headroom() and not (idle and self._make_room(seq, missing)):
                return
            idle = False
            if seq.status is not IGNORED:
                seats -= seq not in self.streaming
                self._start_promotion(seq)

    def _next_promotable(self) -> Sequence | None:
        """The oldest sequence whose copies to the host are complete."""
        copies = self.blocks.copies_of
        for seq in chain(self.streaming, self.waiting) if self.streaming else self.waiting:
            if seq not in copies:
                return seq
        return None

    def _make_room(self, seq: Sequence, missing: int) -> bool:
        """Nothing runs and `seq` does not fit above the threshold: let it use the rest, or push others' layers out."""
        if missing + self.layers <= self.gpu.free:
            return True
        if seq.num_blocks * self.layers + self.layers > self.gpu.num_blocks:
            self._give_up(seq)
            return True
        for other in list(reversed(self.retaining)):
            if other is not seq and other not in self.blocks.copies_of:
                self.offload(other, len(self.blocks.groups_on_gpu[other]))
        if not self.blocks.releasing:
            # The host is full too, and none is on the way: the last that came is computed again.
            self._recompute_last(seq)
        return False

    def offload(self, seq: Sequence, layers: int) -> int:
        """Start copying `layers` retained layers of a parked sequence to the host; layer-blocks that will be freed."""
        freed = self.blocks.offload(seq, layers)
        if not self.blocks.groups_on_gpu[seq]:
            self.retaining.pop(seq, None)
        self.tally["offloaded_by_forecast_layer_blocks"] += freed
        return freed

    def _give_up(self, seq: Sequence) -> None:
        """A sequence that outgrew the GPU can never decode again."""
        self.unpark(seq)
        self.scheduler.release(seq)
        self.scheduler.ignore(seq, "sequence outgrew the GPU blocks")

    def _recompute_last(self, spared: Sequence) -> None:
        for seq in reversed(self.waiting):
            if seq is not spared:
                self.unpark(seq)
                self.drop(seq)
                self.scheduler.order.put_back([seq])
                return

    def drop(self, seq: Sequence) -> None:
        """Give up the KV of `seq`, for which the host has no room; it is to be computed again."""
        scheduler = self.scheduler
        scheduler.recompute(seq)
        scheduler.counters.preemptions += 1
        scheduler.counters.swap_space_exhausted += 1
        scheduler.changed = True

    def _start_promotion(self, seq: Sequence) -> None:
        if seq in self.streaming:
            del self.streaming[seq]
            self.scheduler.take_out(seq)
            self.scheduler.park(seq)
        else:
            self.unpark(seq)
        seq.status = PROMOTING
        self.promoting[seq] = None
        self.tally["promoted"] += 1
        self.tally["promoted_layer_blocks"] += self.blocks.bring_in(seq)

    def transferred(self, move: Move) -> None:
        if move.target is GPU:
            del self.promoting[move.seq]
            self.scheduler.join(move.seq)
