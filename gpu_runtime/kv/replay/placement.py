"""`Placement`: which physical blocks have which layers of which sequence. The ids behind the scheduler's counts.

The scheduler counts blocks and decides; a plan's `changes` say in order what it took and gave back, and here that
becomes block ids and copies. A *group* is the layers of a block: all of them for vLLM, one for LayerKV.
Nothing is inferred: what a plan does not say does not happen, but for the blocks that computed tokens need.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq

from gpu_runtime.kv.block_ids import BlockIds
from gpu_runtime.kv.replay.cached_blocks import CachedBlocks
from gpu_runtime.kv.replay.held import BlockCopy, Held, Holders, Transfer
from gpu_runtime.kv.replay.hosted_blocks import Filling, HostedBlocks
from gpu_runtime.kv.replay.prefix_blocks import PrefixBlocks
from sim.engine.changes import (
    Direction,
    Drop,
    Evict,
    Grow,
    Hit,
    Keep,
    Load,
    Move,
    Place,
    Release,
    Restore,
    Save,
    Split,
    Store,
    Tier,
    Uncache,
    Unsave,
)
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence
from sim.errors import InvariantError


class Placement:
    """Block ids of all sequences of one instance.

    Args:
        gpu, host: pools of ids, of the blocks that the scheduler counts.
        num_groups: groups of layers; 1 for vLLM.
        block_tokens: tokens of a block.
        hosted: what the host's cache keeps; None: blocks of its own of `host`.
    """

    def __init__(
        self, gpu: BlockIds, host: BlockIds, *, num_groups: int, block_tokens: int, hosted: HostedBlocks | None = None
    ) -> None:
        self.gpu, self.host = gpu, host
        self.num_groups, self.block_tokens = num_groups, block_tokens
        self.held = Holders()
        self.cached = CachedBlocks(gpu)
        self.hosted = HostedBlocks(host) if hosted is None else hosted
        self.prefixes = PrefixBlocks(gpu, self.cached, self.hosted, self.held, block_tokens)
        self.under_way: dict[Transfer, None] = {}
        """Copies that have begun and not been ended, in order."""

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks of each group that `num_tokens` tokens fill."""
        return -(-num_tokens // self.block_tokens)

    # -- before the computation ----------------------------------------------------------------------------------

    def replay(self, plan: IterationPlan, await_copies: Callable[[Sequence], None]) -> list[BlockCopy]:
        """Carry out the plan's changes in order; returns the copies to make, one after the other, before computing.

        `await_copies` waits for those of a sequence, which is about to give its blocks back.
        """
        copies: list[BlockCopy] = []
        # A radix tree evicts once a step, for all blocks that the step has given out, less own
        # copies of what is computed in it.
        self.gpu.borrows = any(type(change) in (Evict, Hit) for change in plan.changes)
        for change in plan.changes:
            match change:
                case Place():
                    self._place(change)
                case Grow(seq, num_blocks):
                    self.grow(((seq, num_blocks * self.block_tokens),))
                case Release(seq):
                    await_copies(seq)
                    self._release(seq)
                case Move():
                    copies.append(self._move_at_once(change))
                case Restore():
                    copies.append(self._restore(change))
                case Keep():
                    self.prefixes.keep(change)
                case Hit():
                    self.prefixes.hit(change)
                case Split(run, first, num_blocks):
                    self.cached.split(run, first, num_blocks)
                case Evict(run, num_left):
                    self.cached.evict(run, num_left)
                case Save() | Unsave():
                    self._note_states(change)
                case Store():
                    self._store(change)
                case Load():
                    self.prefixes.load(change)
                case Drop(keys):
                    self._await_fillings(keys, await_copies)
                    self.hosted.drop(keys)
                case Uncache():
                    copies += self._uncache(change)
        if self.gpu.borrows:
            self._repay()
        return copies

    def _repay(self) -> None:
        """Blocks that were taken before others were given up have the ids of these."""
        numbers = self.gpu.repay()
        if numbers:
            for held in self.held.values():
                for ids in held.gpu.values():
                    if not numbers.keys().isdisjoint(ids):
                        ids[:] = [numbers.get(block, block) for block in ids]
                        held.version += 1
            self.cached.renumber(numbers)

    def leave(self, computed: Iterable[tuple[Sequence, int]]) -> None:
        """Hear where the next token of each sequence stands that is about to be computed: nothing leaves here."""

    def grow(self, computed: Iterable[tuple[Sequence, int]]) -> None:
        """Take the blocks that sequences lack for the tokens they have once these are computed, where each group is."""
        for seq, num_tokens in computed:
            held = self.held[seq]
            if num_tokens <= held.room and held.room_of == held.version:
                continue
            blocks = self.blocks_for(num_tokens)
            self._grown(seq, blocks)
            for tier, lists in ((self.gpu, held.gpu), (self.host, held.host)):
                for ids in lists.values():
                    if len(ids) < blocks:
                        ids += tier.allocate(blocks - len(ids))
                        held.version += 1
            held.room, held.room_of = blocks * self.block_tokens, held.version

    def _grown(self, seq: Sequence, blocks: int) -> None:
        """A sequence has, or is about to have, so many blocks of each group."""

    def _place(self, place: Place) -> None:
        seq, blocks = place.seq, place.num_blocks
        if seq in self.held:
            raise InvariantError(f"{seq} is given blocks and holds some already")
        held = self.held[seq] = Held()
        for group in range(self.num_groups):
            if group in place.gpu_groups:
                held.gpu[group] = self.prefixes.take(seq, held, blocks)
            else:
                held.host[group] = self.host.allocate(blocks)
        held.slots = [self.gpu.allocate(blocks) for _ in range(place.num_buffers)]

    def _release(self, seq: Sequence) -> None:
        """Everything but what is leaving: the scheduler counts that until it hears that the copy has ended."""
        held = self.held[seq]
        del self.held[seq]
        load = self.hosted.loading.pop(seq, None)
        for ids in (*held.gpu.values(), *held.slots):
            self.gpu.free(ids)
        if load is not None:
            # What others may hit has not come.
            self.cached.unwritten.update(block for block in load.target if self.gpu.num_users(block))
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

    def _store(self, store: Store) -> None:
        source = [block for run in store.runs for block in self.cached.ids_of(run)]
        self.hosted.store(store, source)
        self._lose_unwritten(store, source)

    def _lose_unwritten(self, store: Store, source: Seq[int] = ()) -> None:
        """What was never computed, since its sequence failed, shall not be loaded."""
        if source:
            written = [block not in self.cached.unwritten for block in source]
        else:
            held = self.held[store.seq]
            written = [self.prefixes.is_written(held, place) for place in store.places]
        self.hosted.lose(key for key, is_there in zip(store.keys, written, strict=True) if not is_there)

    def _await_fillings(self, keys: Seq[int], await_copies: Callable[[Sequence], None]) -> None:
        """Blocks on the host that a copy still fills are free once it has ended."""
        for transfer in list(self.under_way):
            if not set(keys).isdisjoint(transfer.stored):
                await_copies(transfer.move.seq)

    def _note_states(self, change: Save | Unsave) -> None:
        raise InvariantError(f"{change.seq}: this device keeps no states on the host")

    def _uncache(self, change: Uncache) -> list[BlockCopy]:
        raise InvariantError(f"{change.seq}: this device keeps KV of all tokens")

    def _restore(self, restore: Restore) -> BlockCopy:
        if restore.computes:
            raise InvariantError(
                f"{restore.seq}: {len(restore.hidden_groups)} layer groups from hidden states and "
                f"{len(restore.recomputed_groups)} to be computed again: this device restores copied KV only"
            )
        return self._change_tier(restore.seq, restore.kv_groups, Direction.H2D, self.blocks_for(restore.num_tokens))

    def _change_tier(self, seq: Sequence, groups: tuple[int, ...], direction: Direction, blocks: int) -> BlockCopy:
        held = self.held[seq]
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
        if (filling := self.hosted.begin(move.seq)) is not None:
            return self._fill(move, filling)
        seq, held, blocks = move.seq, self.held[move.seq], self.blocks_for(move.end_token)
        source: list[int] = []
        target: list[int] = []
        transfer = Transfer(move, held)
        for group in move.groups:
            if move.target is Tier.HOST:
                ids = _next_piece(seq, held, group, move.first_token // self.block_tokens, blocks)
                transfer.leaving += ids
                arrived = self.host.allocate(len(ids))
                held.host.setdefault(group, []).extend(arrived)
                target += arrived
            else:
                ids = _whole_group(seq, held.host, group, blocks)
                transfer.arriving[group] = self.gpu.allocate(blocks)
                target += transfer.arriving[group]
            source += ids
        held.version += 1
        self.under_way[transfer] = None
        return transfer, BlockCopy(seq, move.groups, move.direction, tuple(source), tuple(target))

    def _fill(self, move: Move, filling: Filling) -> tuple[Transfer, BlockCopy]:
        store, source, target = filling
        # The sequence that had a cached run may have gone.
        held = Held() if source else self.held[move.seq]
        source = source or tuple(held.gpu[0][place] for place in store.places)
        transfer = Transfer(move, held, stored=store.keys, is_lost=not self.hosted.has(filling))
        self.under_way[transfer] = None
        return transfer, BlockCopy(move.seq, move.groups, move.direction, source, target)

    def begin_behind(self, move: Move) -> Transfer:
        """The last copies behind a prefill are under way: the send buffer is theirs until `end`."""
        held = self.held[move.seq]
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

    @property
    def num_idle_hosted(self) -> int:
        """Host blocks in use that the scheduler does not count."""
        return 0

    def check(self) -> None:
        """InvariantError if two sequences or copies hold the same block, unless it is shared."""
        host = Counter(block for ids in self._host_lists() for block in ids)
        twice = [block for block, count in host.items() if count > 1]
        gpu = Counter(block for ids in (*self._gpu_lists(), *self.cached.lists()) for block in ids)
        for tier, ids in (("host", twice), ("gpu", [i for i, count in gpu.items() if count != self.gpu.num_users(i)])):
            if ids:
                raise InvariantError(f"{tier} blocks {sorted(ids)} are held by more or fewer than took them")

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
        yield self.hosted.ids()


def _whole_group(seq: Sequence, lists: dict[int, list[int]], group: int, blocks: int) -> list[int]:
    """The blocks of a group, all of which are to be moved."""
    ids = lists.get(group)
    if ids is None or len(ids) != blocks:
        there = "nothing" if ids is None else f"{len(ids)} blocks"
        raise InvariantError(f"{seq}: {blocks} blocks of layer group {group} are to be moved, {there} is there")
    return ids


def _next_piece(seq: Sequence, held: Held, group: int, first: int, end: int) -> list[int]:
    """Take blocks `first` to `end` of a group, which leave for the host; those before them have."""
    ids, gone = held.gpu.get(group, []), len(held.host.get(group, ()))
    if gone != first or not 0 < end - first <= len(ids):
        raise InvariantError(
            f"{seq}: blocks {first} to {end} of layer group {group} are to be moved, {gone} have gone and {len(ids)} "
            "are there"
        )
    piece, left = ids[: end - first], ids[end - first :]
    if left:
        held.gpu[group] = left
    else:
        del held.gpu[group]
    return piece
