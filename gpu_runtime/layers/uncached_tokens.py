"""Passes that bring uncached tokens back, between the layers (eLLM, contiguous order).

The first layers compute it again into lots of scratch (`uncached_placement`), in kernels of their own before those that
decode; before the last ones it is copied in from the host. What becomes cached again goes to its own blocks on the same
way.
"""

from collections import abc

from torch import Tensor

from gpu_runtime.device_stream import to_device
from gpu_runtime.kv.block_ids import BlockIds
from gpu_runtime.kv.copies import KVCopies
from gpu_runtime.kv.copy_engine import CopyHandle
from gpu_runtime.kv.pool import KVPool
from gpu_runtime.kv.replay.held import BlockCopy
from gpu_runtime.kv.replay.uncached_placement import UncachedPlacement
from gpu_runtime.layers.layer_pass import Graphs, LayerPass
from gpu_runtime.layers.pass_members import BlockTables, Member
from gpu_runtime.model.attention_batch import AttentionBatch
from gpu_runtime.model.decoder import Decoder, Scores
from sim.engine.changes import Direction, Rebuilt
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence
from sim.errors import InvariantError


class UncachedTokens:
    """The uncached tokens of one device's sequences.

    Args:
        placement: of their blocks.
        copies: between the tiers.
        layer_group: layers in a block.
        budget: tokens that are computed at a time.
    """

    def __init__(self, placement: UncachedPlacement, copies: KVCopies, layer_group: int, budget: int) -> None:
        self.placement, self.copies = placement, copies
        self.layer_group, self.budget = layer_group, budget
        self.record: Rebuilt | None = None
        """What the plan that is executed says of the pass."""
        self.new_groups: dict[Sequence, tuple[int, ...]] = {}
        """Layer groups of decodes that go to the host as soon as they are there."""

    def release(self) -> None:
        """There is no memory to give back."""

    def begin(self, plan: IterationPlan) -> None:
        """Note what a plan brings back."""
        self.record = next((record for record in plan.streamed if isinstance(record, Rebuilt)), None)
        if self.record is not None:
            if self.record.recomputed != tuple(range(len(self.record.recomputed))):
                raise InvariantError(f"layers {self.record.recomputed} compute again: the first ones alone can")
            self.new_groups = self.placement.begin_pass(self.record)

    def end(self) -> None:
        """The plan's pass is over."""
        if self.record is not None:
            self.placement.end_pass(self.record)

    def new_pass(self) -> "RebuildingPass":
        """A pass over the layers that brings KV back."""
        return RebuildingPass(self)


class RebuildingPass(LayerPass):
    """A pass that brings KV back in front of its layers, and behind which the uncached KV of prompts leaves."""

    def __init__(self, uncached: UncachedTokens) -> None:
        super().__init__(uncached.placement, BlockIds(0), uncached.copies)
        self._uncached, self._group = uncached, uncached.layer_group
        self._of = uncached.placement.uncached
        record = uncached.record
        self._tokens = dict(record.tokens) if record is not None else {}
        self._first = len(record.recomputed) if record is not None else 0
        """The first layer that is copied."""
        self._ids: dict[Sequence, abc.Sequence[int]] = {}
        # Token ids of decodes.
        self._back: list[Member] = []
        # Members whose KV is brought back.
        self._out: dict[Member, tuple[int, ...]] = {}
        # Layer groups that leave, by member.
        self._again: list[tuple[list[Member], AttentionBatch, Tensor]] = []
        # Members whose tokens are computed again together, their batch, and their inputs to the next layer.

    def add_decode(self, seq: Sequence, num_tokens: int, tokens: abc.Sequence[int], num_new: int = 1) -> None:
        super().add_decode(seq, num_tokens, tokens, num_new)
        self._ids[seq] = tokens

    def run(self, decoder: Decoder, pool: KVPool, tables: BlockTables, graphs: Graphs) -> Scores:
        self._decoder, self._pool = decoder, pool
        for member in self.members:
            if member.cached and member.seq in self._tokens:
                self._back.append(member)
                self._out[member] = self._uncached.new_groups[member.seq]
            elif not member.cached and member.seq in self._of:
                self._out[member] = tuple(self._of[member.seq].host)
        return super().run(decoder, pool, tables, graphs)

    # -- computing again -----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        super()._start()
        for group in self._copied():
            self._bring([(m, group) for m in self._back if self._before(m, group) is None])
        some: list[Member] = []
        for member in self._back if self._first else ():
            if some and sum(self._tokens[m.seq] for m in (*some, member)) > self._uncached.budget:
                self._again.append(self._together(some))
                some = []
            some.append(member)
        if some:
            self._again.append(self._together(some))

    def _together(self, members: list[Member]) -> tuple[list[Member], AttentionBatch, Tensor]:
        """Embedded tokens of some members, and where their KV goes."""
        counts = [self._tokens[member.seq] for member in members]
        tables = [[member.held.gpu[group] for member in members] for group in range(self._placement.num_groups)]
        batch = AttentionBatch.build(counts, [0] * len(counts), tables, self._pool.block_tokens, self._pool.device)
        ids = [token for member, n in zip(members, counts, strict=True) for token in self._ids[member.seq][:n]]
        return members, batch, self._decoder.embed(to_device(ids, self._pool.device))

    def _compute_again(self, layer: int) -> None:
        """The KV of a layer, and the inputs of the next if that computes again as well."""
        block = self._decoder.layers[layer]
        for i, (members, batch, hidden) in enumerate(self._again):
            if layer + 1 < self._first:
                self._again[i] = members, batch, block.forward(hidden, batch, self._pool, layer)
            else:
                block.restore_kv(hidden, batch, self._pool, layer)
            for member in members:
                member.num_rebuilt += self._tokens[member.seq]

    # -- copies --------------------------------------------------------------------------------------------------------

    def _copied(self) -> range:
        """Layer groups that come from the host."""
        return range(self._first // self._group, self._placement.num_groups)

    def _before(self, member: Member, group: int) -> int | None:
        """The layer group that had its scratch of a member before."""
        tables = member.held.gpu
        return next((g for g in reversed(range(group)) if tables[g][0] == tables[group][0]), None)

    def _bring(self, wanted: list[tuple[Member, int]], after: CopyHandle | None = None) -> None:
        """Copy layer groups of members in, as one."""
        if not wanted:
            return
        copies = []
        for member, group in wanted:
            mine = self._of[member.seq]
            source, target = mine.host[group][: mine.lacking], member.held.gpu[group][: mine.lacking]
            member.num_read += len(source)
            copies.append(BlockCopy(member.seq, (group,), Direction.H2D, tuple(source), tuple(target)))
        handle = self._copies.start(*copies) if after is None else self._copies.start_after(after, *copies)
        for member, group in wanted:
            member.arriving[group] = handle

    def _before_layer(self, layer: int) -> None:
        super()._before_layer(layer)
        group, within = divmod(layer, self._group)
        if not within:
            for member in self._back:
                if group in member.arriving:
                    self._copies.wait_in_stream([member.seq], member.arriving[group])
            for member in self._out:
                earlier = self._before(member, group)
                if earlier in member.leaving:
                    self._copies.wait_in_stream([member.seq], member.leaving[earlier])
        if layer < self._first:
            self._compute_again(layer)

    def _computed(self, layer: int, entered: Tensor, batch: AttentionBatch, pool: KVPool) -> None:
        super()._computed(layer, entered, batch, pool)
        group, left = divmod(layer + 1, self._group)
        if left:
            return
        group -= 1
        here = [member for member, groups in self._out.items() if group in groups]
        leaving = self._copies.start(*(self._copy_away(member, group) for member in here)) if here else None
        for member in here:
            assert leaving is not None
            member.leaving[group] = leaving
        for later in self._copied():
            self._bring([(m, later) for m in self._back if self._before(m, later) == group], leaving)

    def _copy_away(self, member: Member, group: int) -> BlockCopy:
        target = self._of[member.seq].host[group]
        source = member.held.gpu[group][: len(target)]
        member.num_sent += len(source)
        return BlockCopy(member.seq, (group,), Direction.D2H, tuple(source), tuple(target))

    def abandon(self) -> None:
        for member in (*self._back, *self._out):
            self._copies.wait(member.seq, [*member.arriving.values(), *member.leaving.values()])
        super().abandon()
