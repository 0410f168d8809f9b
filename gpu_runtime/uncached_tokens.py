"""Tokens without KV on the GPU, and passes that bring theirs back between the layers (eLLM, contiguous order).

Their blocks in a sequence's tables are *lots* of scratch, which its layer groups share in turn. In there the first
layers compute the KV again, in kernels of their own before those that decode; before the last ones it is copied in from
the host. What becomes cached again goes to blocks of its own on the same way.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpu_runtime.kv.block_ids import BlockIds
from gpu_runtime.kv.copies import KVCopies
from gpu_runtime.kv.copy_engine import CopyHandle
from gpu_runtime.kv.hosted_blocks import Blocks
from gpu_runtime.kv.placement import BlockCopy, Placement
from gpu_runtime.kv.pool import KVPool
from gpu_runtime.layer_pass import LayerPass, Member
from gpu_runtime.model.attention_batch import AttentionBatch
from gpu_runtime.model.decode_graph import DecodeGraph
from gpu_runtime.model.decoder import Decoder
from gpu_runtime.pass_members import BlockTables
from sim.engine.plan import Direction, IterationPlan, Place, Rebuilt, Uncache
from sim.engine.sequence import Sequence
from sim.errors import InvariantError


@dataclass
class Uncached:
    """What a sequence has of tokens that are uncached, the first ones."""

    num_blocks: int = 0
    """That have no place of their own in the GPU's pool."""
    lacking: int = 0
    """Whose KV is on no GPU before the next pass; those beyond `num_blocks` have their place already."""
    host: dict[int, list[int]] = field(default_factory=dict)
    """By layer group, where on the host the first `lacking` blocks are."""


class UncachedPlacement(Placement):
    """`Placement` in which the first blocks of sequences may be lots of scratch."""

    def __init__(self, gpu: BlockIds, host: Blocks, *, num_groups: int, block_tokens: int) -> None:
        super().__init__(gpu, host, num_groups=num_groups, block_tokens=block_tokens)
        self.uncached: dict[Sequence, Uncached] = {}
        self._coming: dict[Sequence, Uncache] = {}

    def _place(self, place: Place) -> None:
        super()._place(place)
        if (change := self._coming.pop(place.seq, None)) is not None:
            blocks = change.num_tokens // self.block_tokens
            mine = self.uncached[place.seq] = Uncached(blocks, blocks)
            mine.host = {group: self.host.allocate(mine.lacking) for group in change.groups}
            self._deal(change, mine, self.held[place.seq].gpu)

    def _uncache(self, change: Uncache) -> list[BlockCopy]:
        seq, blocks = change.seq, change.num_tokens // self.block_tokens
        if seq not in self.held:
            self._coming[seq] = change
            return []
        mine = self.uncached.setdefault(seq, Uncached())
        for group in set(mine.host).difference(change.groups):
            self.host.free(mine.host.pop(group))
        copies = self._leave(change, mine, blocks) if blocks > mine.lacking else []
        self._deal(change, mine, self._take_lots(seq, mine))
        return copies

    def _leave(self, change: Uncache, mine: Uncached, blocks: int) -> list[BlockCopy]:
        """Blocks that have KV on the GPU leave for the host, if it takes any of their layers."""
        ids, source, target = self._held_by(change.seq).gpu, list[int](), list[int]()
        if mine.lacking and set(mine.host) != set(change.groups):
            raise InvariantError(f"{change}: of the tokens before the host has layer groups {sorted(mine.host)}")
        for group in change.groups:
            found = self.host.allocate(blocks - mine.lacking)
            source += ids[group][mine.lacking : blocks]
            target += found
            mine.host[group] = mine.host.get(group, []) + found
        mine.lacking = blocks
        copy = BlockCopy(change.seq, change.groups, Direction.D2H, tuple(source), tuple(target))
        return [copy] if source else []

    def _take_lots(self, seq: Sequence, mine: Uncached) -> dict[int, list[int]]:
        """Take a sequence's scratch away; its own blocks by layer group, from block `mine.num_blocks` on."""
        held, own = self._held_by(seq), dict[int, list[int]]()
        for group, ids in held.gpu.items():
            self.gpu.free(ids[: mine.num_blocks])
            own[group] = ids[mine.num_blocks :]
        for ids in held.slots:
            self.gpu.free(ids)
        return own

    def _deal(self, change: Uncache, mine: Uncached, own: dict[int, list[int]]) -> None:
        """Put a sequence's tables together of scratch and of own blocks; give and take what these are too many or few.

        Of several lots, one is for the groups that compute again, and those that are copied take turns in the others,
        so that copies can run ahead.
        """
        held, blocks = self._held_by(change.seq), change.num_tokens // self.block_tokens
        more, mine.num_blocks = blocks - mine.num_blocks, blocks
        for ids in own.values() if more > 0 else ():
            self.gpu.free(ids[:more])
            del ids[:more]
        lots = [self.gpu.allocate(blocks) for _ in range(change.num_scratch)]
        unused = dict(enumerate(lots))
        first = self.num_groups - len(change.groups)
        for group, ids in own.items():
            if more < 0:
                ids[:0] = self.gpu.allocate(-more)
            turn = 1 + (group - first) % (len(lots) - 1) if group >= first and len(lots) > 1 else 0
            if lots and unused.pop(turn, None) is None:
                self.gpu.share(lots[turn])
            held.gpu[group] = lots[turn] + ids if lots else ids
        held.slots = list(unused.values())
        held.version += 1

    def _release(self, seq: Sequence) -> None:
        super()._release(seq)
        if (mine := self.uncached.pop(seq, None)) is not None:
            for ids in mine.host.values():
                self.host.free(ids)

    def _host_lists(self) -> Iterator[Seq[int]]:
        yield from super()._host_lists()
        for mine in self.uncached.values():
            yield from mine.host.values()

    # -- a pass that brings KV back ----------------------------------------------------------------------------------

    def begin_pass(self, record: Rebuilt) -> dict[Sequence, tuple[int, ...]]:
        """Make room on the host for what the pass is to leave there; which layer groups of whom that is."""
        lacking = {seq: mine.lacking * self.block_tokens for seq, mine in self.uncached.items() if mine.lacking}
        told = dict(record.tokens)
        if any(lacking.get(seq) != tokens for seq, tokens in told.items()):
            raise InvariantError(f"KV of {told} is to be brought back, that of {lacking} is not there")
        new: dict[Sequence, tuple[int, ...]] = {}
        for change in record.after if told else ():
            mine = self.uncached[change.seq]
            new[change.seq] = tuple(g for g in change.groups if g not in mine.host) if change.num_tokens else ()
            for group in new[change.seq]:
                mine.host[group] = self.host.allocate(change.num_tokens // self.block_tokens)
        return new

    def end_pass(self, record: Rebuilt) -> None:
        """What was brought back for good need not be on the host any longer."""
        for change in record.after:
            mine = self.uncached[change.seq]
            mine.lacking = change.num_tokens // self.block_tokens
            for ids in mine.host.values():
                self.host.free(ids[mine.lacking :])
                del ids[mine.lacking :]
            if not mine.lacking:
                del self.uncached[change.seq]
            elif mine.num_blocks != mine.lacking or len(mine.host) != len(change.groups):
                raise InvariantError(f"{change}: {mine} is what is there")


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
        """Take notice of what a plan brings back."""
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
        record = uncached.record
        self._tokens = dict(record.tokens) if record is not None else {}
        self._first = len(record.recomputed) if record is not None else 0
        """The first layer that is copied."""
        self._ids: dict[Sequence, Seq[int]] = {}
        # Token ids of decodes.
        self._back: list[Member] = []
        # Those whose KV is brought back.
        self._out: dict[Member, tuple[int, ...]] = {}
        # Layer groups that leave, of whom.
        self._again: list[tuple[list[Member], AttentionBatch, Tensor]] = []
        # Whose tokens compute again together, and their inputs to the next layer.

    def add_decode(self, seq: Sequence, num_tokens: int, tokens: Seq[int], num_new: int = 1) -> None:
        super().add_decode(seq, num_tokens, tokens, num_new)
        self._ids[seq] = tokens

    def run(self, decoder: Decoder, pool: KVPool, tables: BlockTables, graph: DecodeGraph | None) -> Tensor:
        self._decoder, self._pool = decoder, pool
        for member in self.members:
            if member.cached and member.seq in self._tokens:
                self._back.append(member)
                self._out[member] = self._uncached.new_groups[member.seq]
            elif not member.cached and (mine := self._mine(member)) is not None:
                self._out[member] = tuple(mine.host)
        return super().run(decoder, pool, tables, graph)

    def _mine(self, member: Member) -> Uncached | None:
        return self._uncached.placement.uncached.get(member.seq)

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
        return members, batch, self._decoder.embed(torch.tensor(ids, device=self._pool.device))

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
            mine = self._mine(member)
            assert mine is not None
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
        mine = self._mine(member)
        assert mine is not None
        target = mine.host[group]
        source = member.held.gpu[group][: len(target)]
        member.num_sent += len(source)
        return BlockCopy(member.seq, (group,), Direction.D2H, tuple(source), tuple(target))

    def abandon(self) -> None:
        for member in (*self._back, *self._out):
            self._copies.wait(member.seq, [*member.arriving.values(), *member.leaving.values()])
        super().abandon()
