"""`SavedStates`: paged blocks of sequences whose states are on the host while they run (HCache).

A victim's blocks are free at once, since everything about it has been saved; it comes back layer by layer in up to
three ways (`sim.cost.restoring`). `TieredStates` keeps states of ended turns instead, for the next turn. Either way
they leave behind the layers that compute them: KV does not give them back.

What decodes save, a token a step, is not priced: 41 MB for 100 sequences of Llama-2-13B, 8 % of what a link of 25 GB/s
carries in a step of 20 ms.
"""

from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING, ClassVar, Self

from sim.cost.lanes import restored_s
from sim.cost.model import CostModel
from sim.cost.restoring import LayerSplit, StateBytes, restore_times
from sim.engine.batch import DecodeBatch
from sim.engine.changes import Move, Restore, Save, Tier, Unsave
from sim.engine.limits import Limits
from sim.engine.plan import IterationPlan, PrefillChunk
from sim.engine.sequence import Sequence
from sim.errors import UserError
from sim.kv.block_pool import BlockPool
from sim.kv.gaps import Places
from sim.kv.memory import ALL_LAYERS
from sim.kv.paged import PagedMemory
from sim.kv.prefix import PrefixMemory
from sim.kv.tiered import HostTier
from sim.kv.tiers.worth import Worth
from sim.parts.needs import Need
from sim.systems.hcache.preset import StatesOptions, split_of

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler
    from sim.systems.builder import Builder


def restore_of(seq: Sequence, num_tokens: int, num_blocks: int, split: LayerSplit) -> Restore:
    """The first `num_tokens` tokens of `seq` come back, their KV in `num_blocks` whole blocks."""
    first, last = split.recomputed, split.recomputed + split.hidden
    layers = range(sum(split))
    ways = tuple(layers[first:last]), tuple(layers[last:]), tuple(layers[:first])
    return Restore(seq, num_tokens, *ways, num_blocks * split.copied)


def add_restore(plan: IterationPlan, seq: Sequence, num_tokens: int, num_blocks: int, split: LayerSplit) -> Restore:
    """Let a plan begin with a restore: a copy of KV where nothing else is kept, priced as vLLM's swap-in."""
    if split.copied == sum(split):
        plan.swapped_in_blocks += num_blocks
        return Restore(seq, num_tokens, (), ALL_LAYERS, (), num_blocks)
    restore = restore_of(seq, num_tokens, num_blocks, split)
    plan.mixed_restores += (restore,)
    return restore


def save_behind(plan: IterationPlan, chunk: PrefillChunk, block_size: int, split: LayerSplit, share: float) -> None:
    """States of a prompt's tokens leave behind their layers; `share` as for `SavedStates`."""
    seq, num_new, cached = chunk.seq, chunk.num_new, chunk.num_cached
    blocks = ceil(-(-num_new // block_size) * share)
    plan.behind += (Move(seq, ALL_LAYERS, cached, cached + num_new, Tier.GPU, Tier.HOST, blocks, 0, False),)
    plan.behind_blocks += blocks
    plan.behind_groups = split.hidden + split.copied


class SavedStates(PagedMemory):
    """Blocks on demand. Host blocks have the states of as many tokens; a sequence that finds none runs unsaved.

    Args:
        limits: of the engine.
        split: how layers are restored, and so what is saved of them.
        share: bytes saved of a token, of those of its KV: the host has room for that many more.
    """

    name: ClassVar[str] = "saved-states"
    options: ClassVar[type | None] = StatesOptions
    needs: ClassVar[tuple[Need, ...]] = (
        Need("eviction", "needs no copies to let go of a sequence", names=("swap", "recompute")),
    )
    can_cache_prefixes: ClassVar[bool] = False
    can_receive: ClassVar[bool] = False

    @classmethod
    def build(cls, b: "Builder") -> Self:
        b.refuse_unlike_layers()
        split, share, _ = split_of(b.deployment, b.limits)
        return cls(b.limits, split, share)

    def __init__(self, limits: Limits, split: LayerSplit, share: float) -> None:
        super().__init__(limits)
        self.split, self.share = split, share
        self.host = BlockPool("host blocks of states", int(limits.num_cpu_blocks / share))
        self.saved: dict[Sequence, None] = {}
        """Sequences that run and have their states on the host, the last to be placed last."""
        self._unsaved: dict[Sequence, None] = {}
        self._tells = False

    def tell_blocks(self) -> None:
        self._tells = True

    # -- saving ------------------------------------------------------------------------------------------------------

    def blocks_wanted(self, seq: Sequence, num_tokens: int) -> int:
        # The whole prompt's, whose states have room on the host or not.
        return self.blocks_for(seq)

    def blocks_missing(self, seq: Sequence, num_tokens: int) -> int:
        return 0

    def place(self, seq: Sequence, num_tokens: int) -> None:
        super().place(seq, seq.num_tokens)
        if seq.num_blocks <= self.host.free:
            self.host.allocate(seq.num_blocks)
            self.saved[seq] = None
            if self._tells:
                self.scheduler.changes.append(Save(seq))
        else:
            self._unsaved[seq] = None

    def joined(self, seq: Sequence) -> None:
        """Where the last token of a prompt is left for a decode, so is the block that it begins."""
        surplus = seq.num_blocks - self.held_blocks(seq)
        if surplus > 0:
            self.gpu.release(surplus)
            if seq in self.saved:
                self.host.release(surplus)

    def _forget_newest(self) -> None:
        """The host is full: the last that was placed runs unsaved."""
        seq, _ = self.saved.popitem()
        self.host.release(self.held_blocks(seq))
        self._unsaved[seq] = None
        self.scheduler.counters.policy["unsaved"] += 1
        if self._tells:
            self.scheduler.changes.append(Unsave(seq))

    def take_decodes(self, num_blocks: int) -> None:
        super().take_decodes(num_blocks)
        if num_blocks:
            needs_block = self.batch.needs_block
            while (wanted := num_blocks - sum(map(needs_block, self._unsaved_members()))) > self.host.free:
                self._forget_newest()
            self.host.allocate(wanted)

    def _unsaved_members(self) -> list[Sequence]:
        return [seq for seq in self._unsaved if seq in self.batch.members]

    def append(self, seq: Sequence) -> None:
        if self.batch.needs_block(seq):
            self.gpu.allocate(1)
            while seq in self.saved and not self.host.free:
                self._forget_newest()
            if seq in self.saved:
                self.host.allocate(1)

    def grow_further(self, batch: DecodeBatch, steps: int) -> None:
        super().grow_further(batch, steps)
        size = self.block_size
        wanted = batch.blocks_needed(steps) - batch.blocks_needed(1)
        for seq in self._unsaved_members():
            tokens = batch.num_tokens_of(seq)
            wanted -= -(-(tokens + steps - 1) // size) - -(-tokens // size)
        self.host.allocate(wanted)

    def repeats(self, plan: IterationPlan, steps: int) -> int:
        # As if all were saved, the step that is planned among them: a bound.
        return max(1, min(super().repeats(plan, steps), self.batch.steps_within(self.host.free)))

    def complete(self, plan: IterationPlan) -> None:
        """States of prompts leave behind their layers."""
        for chunk in plan.chunks:
            if chunk.seq in self.saved and chunk.num_new > 1:
                save_behind(plan, chunk, self.block_size, self.split, self.share)

    # -- to the host and back ----------------------------------------------------------------------------------------

    def can_swap_out(self, seq: Sequence) -> bool:
        return seq in self.saved

    def swap_out(self, seq: Sequence, plan: IterationPlan) -> None:
        blocks = self.held_blocks(seq)
        self.gpu.release(blocks)
        del self.saved[seq]
        self.scheduler.counters.swap_out_blocks += blocks
        tokens = blocks * self.block_size
        self.scheduler.changes.append(Move(seq, ALL_LAYERS, 0, tokens, Tier.GPU, Tier.HOST, 0, 0, False))

    def swap_in(self, seq: Sequence, plan: IterationPlan) -> None:
        blocks = self.held_blocks(seq)
        self.gpu.allocate(blocks)
        self.saved[seq] = None
        self.scheduler.counters.swap_in_blocks += blocks
        tokens = blocks * self.block_size
        if self.split.copied < sum(self.split):
            tokens = seq.num_computed if seq.prefilling else seq.num_tokens - 1
        self.scheduler.changes.append(add_restore(plan, seq, tokens, blocks, self.split))

    def release(self, seq: Sequence) -> None:
        if seq in self.saved:
            del self.saved[seq]
            self.host.release(seq.num_blocks)
        self._unsaved.pop(seq, None)
        super().release(seq)

    def recount(self) -> tuple[int, int]:
        gpu, host = super().recount()
        return gpu, host + sum(map(self.held_blocks, self.saved))


class TieredStates(HostTier):
    """`HostTier` that keeps states of ended turns instead of their KV, and restores them before the new tokens.

    States of all that the GPU has have room of their own on the host, since it is not known which ends next: a turn
    that ends leaves its there, and its blocks are free at once.

    Args:
        limits: of the engine; its host blocks are of KV.
        worth: prices what is computed.
        cost: of the engine's device.
        split, share: as for `SavedStates`.
        state: bytes that are copied.
    """

    name: ClassVar[str] = "tiered-states"
    options: ClassVar[type | None] = StatesOptions
    # KV from another engine comes without its states.
    can_receive: ClassVar[bool] = False

    @classmethod
    def build(cls, b: "Builder") -> PagedMemory:
        b.refuse_unlike_layers()
        split, share, state = split_of(b.deployment, b.limits)
        states = cls(b.limits, Worth.of(b), b.deployment.cost, split, share, state)
        return PrefixMemory(states.limits, states)

    def __init__(
        self, limits: Limits, worth: Worth, cost: CostModel, split: LayerSplit, share: float, state: StateBytes
    ) -> None:
        kept = max(0, int(limits.num_cpu_blocks / share) - limits.num_gpu_blocks)
        self.limits = replace(limits, num_cpu_blocks=kept)
        super().__init__(self.limits, worth)
        self.split, self.share, self.state, self._cost = split, share, state, cost

    def bind(self, scheduler: "Scheduler") -> None:
        super().bind(scheduler)
        if scheduler.stage.pulls:
            raise UserError("memory=tiered-states: KV from another engine comes without its states; use memory=tiered")

    def _restore_s(self, places: Places) -> float:
        times = restore_times(self._cost, self.split, len(places) * self.block_size, len(places), self.state)
        return restored_s(times)

    def _saved_s(self, seq: Sequence, places: Places) -> float:
        begin, end = places[0] * self.block_size, (places[-1] + 1) * self.block_size
        return self.worth.recompute_s(seq, begin, end) - self._restore_s(places)

    def _load(self, plan: IterationPlan, loads: list[tuple[Sequence, Places]]) -> None:
        for seq, places in loads:
            tokens = len(places) * self.block_size
            self.scheduler.changes.append(add_restore(plan, seq, tokens, len(places), self.split))

    def complete(self, plan: IterationPlan) -> None:
        super().complete(plan)
        for chunk in plan.chunks if self.cache.num_chunks else ():
            if chunk.num_new > 1:
                save_behind(plan, chunk, self.block_size, self.split, self.share)

    def _save(self, seq: Sequence, taken: list[int], keys: list[int]) -> None:
        """It has been saved as it was computed."""
        self._tell_save(seq, taken, keys)
        self.cache.written(keys)
        self.blocks.give_back(seq)
