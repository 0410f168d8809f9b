"""`Placement`: which physical blocks hold which layers of which sequence. The ids behind the scheduler's counts.

The scheduler counts blocks and decides; a plan's `changes` say in order what it took and gave back, and here that
becomes block ids and copies. A *group* is what a block holds of the layers: all of them for vLLM, one for LayerKV.
Nothing is inferred: what a plan does not say does not happen, but for the blocks that computed tokens need.
"""

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from sim.engine.plan import Direction, IterationPlan, Move, Place, Release, Restore, Tier
from sim.engine.sequence import Sequence
from sim.errors import InvariantError


class Blocks(Protocol):
    """A pool of block ids (`gpu_runtime.kv.block_ids.BlockIds`, `gpu_runtime.kv.pool.KVPool`)."""

    def allocate(self, n: int) -> list[int]:
        """Take `n` ids."""
        ...

    def free(self, ids: Iterable[int]) -> None:
        """Give ids back."""
        ...


@dataclass(frozen=True)
class BlockCopy:
    """A copy of a sequence's blocks between the tiers, id by id."""

    seq: Sequence
    groups: tuple[int, ...]
    direction: Direction
    source: tuple[int, ...]
    target: tuple[int, ...]


@dataclass
class Held:
    """What one sequence holds: ids by group on each tier; `slots` are the send buffer of a prefill, a list each."""

    gpu: dict[int, list[int]] = field(default_factory=dict)
    host: dict[int, list[int]] = field(default_factory=dict)
    slots: list[list[int]] = field(default_factory=list)
    version: int = 0
    """Goes up whenever `gpu` changes."""


@dataclass(eq=False)
class Transfer:
    """A copy beside or behind the computation whose end the engine is to hear of.

    `leaving` are GPU blocks that it reads and nobody holds any more: free when it ends. `arriving` are GPU blocks of
    each group that it writes: the sequence's when it ends.
    """

    move: Move
    held: Held
    leaving: list[int] = field(default_factory=list)
    arriving: dict[int, list[int]] = field(default_factory=dict)


class Placement:
    """Block ids of all sequences of one instance.

    Args:
        gpu, host: pools of ids, of the blocks that the scheduler counts.
        num_groups: groups of layers; 1 for vLLM.
        block_tokens: tokens a block holds.
    """

    def __init__(self, gpu: Blocks, host: Blocks, *, num_groups: int, block_tokens: int) -> None:
        self.gpu, self.host = gpu, host
        self.num_groups, self.block_tokens = num_groups, block_tokens
        self.held: dict[Sequence, Held] = {}
        self.under_way: dict[Transfer, None] = {}
        """Copies that have begun and not been ended, in order."""

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks of each group that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_tokens)

    # -- before the computation ----------------------------------------------------------------------------------

    def replay(self, plan: IterationPlan, settle: Callable[[Sequence], None]) -> list[BlockCopy]:
        """Carry out the plan's changes in order; returns the copies to make, one after the other, before computing.

        `settle` waits for the copies of a sequence, which is about to give its blocks back.
        """
        copies: list[BlockCopy] = []
        for change in plan.changes:
            match change:
                case Place():
                    self._place(change)
                case Release(seq):
                    settle(seq)
                    self._release(seq)
                case Move():
                    copies.append(self._move_at_once(change))
                case Restore():
                    copies.append(self._restore(change))
        return copies

    def grow(self, computed: Iterable[tuple[Sequence, int]]) -> None:
        """Take the blocks that sequences lack for the tokens they have once these are computed, where each group is."""
        for seq, num_tokens in computed:
            held, blocks = self._held_by(seq), self.blocks_for(num_tokens)
            for tier, lists in ((self.gpu, held.gpu), (self.host, held.host)):
                for ids in lists.values():
                    if len(ids) < blocks:
                        ids += tier.allocate(blocks - len(ids))
                        held.version += 1

    def _held_by(self, seq: Sequence) -> Held:
        held = self.held.get(seq)
        if held is None:
            raise InvariantError(f"{seq} holds no blocks")
        return held

    def _place(self, place: Place) -> None:
        seq, gpu_groups, blocks, num_buffers = place
        if seq in self.held:
            raise InvariantError(f"{seq} is given blocks and holds some already")
        held = self.held[seq] = Held()
        for group in range(self.num_groups):
            if group in gpu_groups:
                held.gpu[group] = self.gpu.allocate(blocks)
            else:
                held.host[group] = self.host.allocate(blocks)
        held.slots = [self.gpu.allocate(blocks) for _ in range(num_buffers)]

    def _release(self, seq: Sequence) -> None:
        """Everything but what is leaving: the scheduler counts that until it hears that the copy has ended."""
        held = self._held_by(seq)
        del self.held[seq]
        for ids in (*held.gpu.values(), *held.slots):
            self.gpu.free(ids)
        for ids in held.host.values():
            self.host.free(ids)
        held.host.clear()
        for transfer in self.under_way:
            if transfer.held is held:
                for ids in transfer.arriving.values():
                    self.gpu.free(ids)
                transfer.arriving.clear()

    def _move_at_once(self, move: Move) -> BlockCopy:
        """What it leaves is free at once: copies before the computation are over before anything else is written."""
        if move.is_reported:
            raise InvariantError(f"{move.seq}: a copy before the computation ends with it and is not reported")
        return self._change_tier(move.seq, move.groups, move.direction, self.blocks_for(move.end_token))

    def _restore(self, restore: Restore) -> BlockCopy:
        seq, num_tokens, hidden, groups, recomputed, _ = restore
        if hidden or recomputed:
            raise InvariantError(
                f"{seq}: {len(hidden)} layer groups from hidden states and {len(recomputed)} to be computed again: "
                "this device restores copied KV only"
            )
        return self._change_tier(seq, groups, Direction.H2D, self.blocks_for(num_tokens))

    def _change_tier(self, seq: Sequence, groups: tuple[int, ...], direction: Direction, blocks: int) -> BlockCopy:
        held = self._held_by(seq)
        source: list[int] = []
        target: list[int] = []
        to_host = direction is Direction.D2H
        here, there = (held.gpu, held.host) if to_host else (held.host, held.gpu)
        here_pool, there_pool = (self.gpu, self.host) if to_host else (self.host, self.gpu)
        for group in groups:
            ids = _whole_group(seq, here, group, blocks)
            source += ids
            there[group] = there_pool.allocate(blocks)
            target += there[group]
            del here[group]
            here_pool.free(ids)
        held.version += 1
        return BlockCopy(seq, groups, direction, tuple(source), tuple(target))

    # -- copies beside and behind the computation ------------------------------------------------------------------

    def begin(self, move: Move) -> tuple[Transfer, BlockCopy]:
        """Reserve where a copy beside the computation goes; `end` follows when it has ended."""
        seq, held, blocks = move.seq, self._held_by(move.seq), self.blocks_for(move.end_token)
        source: list[int] = []
        target: list[int] = []
        transfer = Transfer(move, held)
        for group in move.groups:
            if move.target is Tier.HOST:
                ids = _whole_group(seq, held.gpu, group, blocks)
                del held.gpu[group]
                transfer.leaving += ids
                held.host[group] = self.host.allocate(blocks)
                target += held.host[group]
            else:
                ids = _whole_group(seq, held.host, group, blocks)
                transfer.arriving[group] = self.gpu.allocate(blocks)
                target += transfer.arriving[group]
            source += ids
        held.version += 1
        self.under_way[transfer] = None
        return transfer, BlockCopy(seq, move.groups, move.direction, tuple(source), tuple(target))

    def begin_behind(self, move: Move) -> Transfer:
        """The last copies behind a prefill are under way: the send buffer is theirs until `end`."""
        held = self._held_by(move.seq)
        transfer = Transfer(move, held, leaving=[block for ids in held.slots for block in ids])
        held.slots = []
        self.under_way[transfer] = None
        return transfer

    def end(self, transfer: Transfer) -> None:
        """A copy has ended: what it left is free, what it brought is in its place."""
        del self.under_way[transfer]
        self.gpu.free(transfer.leaving)
        held = transfer.held
        for group, ids in transfer.arriving.items():
            held.gpu[group] = ids
            self.host.free(held.host.pop(group))
        held.version += 1

    # -- checks --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """InvariantError if two sequences or copies hold the same block."""
        for tier, lists in (("gpu", self._gpu_lists()), ("host", self._host_lists())):
            seen: set[int] = set()
            for ids in lists:
                if seen.intersection(ids) or len(set(ids)) != len(ids):
                    raise InvariantError(f"{tier} blocks {sorted(seen.intersection(ids)) or ids} are held twice")
                seen.update(ids)

    def _gpu_lists(self) -> Iterator[Seq[int]]:
        for held in self.held.values():
            yield from held.gpu.values()
            yield from held.slots
        for transfer in self.under_way:
            yield transfer.leaving
            yield from transfer.arriving.values()

    def _host_lists(self) -> Iterator[Seq[int]]:
        for held in self.held.values():
            yield from held.host.values()


def _whole_group(seq: Sequence, lists: dict[int, list[int]], group: int, blocks: int) -> list[int]:
    """The blocks of a group, all of which are to be moved."""
    ids = lists.get(group)
    if ids is None or len(ids) != blocks:
        there = "nothing" if ids is None else f"{len(ids)} blocks"
        raise InvariantError(f"{seq}: {blocks} blocks of layer group {group} are to be moved, {there} is there")
    return ids
