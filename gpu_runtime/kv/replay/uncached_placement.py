"""Which blocks belong to tokens without KV on the GPU (eLLM, contiguous order).

In a sequence's tables they are *lots* of scratch, which its layer groups share in turn. What becomes cached again goes
to blocks of its own.
"""

from collections import abc
from collections.abc import Iterator
from dataclasses import dataclass, field

from gpu_runtime.kv.block_ids import BlockIds
from gpu_runtime.kv.replay.held import BlockCopy
from gpu_runtime.kv.replay.placement import Placement
from sim.engine.changes import Direction, Place, Rebuilt, Uncache
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

    def __init__(self, gpu: BlockIds, host: BlockIds, *, num_groups: int, block_tokens: int) -> None:
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
        ids, source, target = self.held[change.seq].gpu, list[int](), list[int]()
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
        held, own = self.held[seq], dict[int, list[int]]()
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
        held, blocks = self.held[change.seq], change.num_tokens // self.block_tokens
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

    def _host_lists(self) -> Iterator[abc.Sequence[int]]:
        yield from super()._host_lists()
        for mine in self.uncached.values():
            yield from mine.host.values()

    # -- a pass that brings KV back ----------------------------------------------------------------------------------

    def begin_pass(self, record: Rebuilt) -> dict[Sequence, tuple[int, ...]]:
        """Make room on the host for what the pass is to leave there; its layer groups by sequence."""
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
