"""`Table`: the blocks of one sequence in `HybridMemory`, and `Match`: those that a prompt hits."""

from typing import NamedTuple

from sim.engine.sequence import Sequence
from sim.kv.index.block_cache import CachedBlock, Key

NOT_DUE = -1


class Match(NamedTuple):
    """What a prompt hits: so many blocks from its beginning, of each group those that it goes on with, by place.

    `junction`: where it leaves a prefix that only the full groups have, in blocks; 0: nowhere.
    """

    num_blocks: int = 0
    cached: tuple[dict[int, CachedBlock], ...] = ()
    junction: int = 0

    @property
    def num_idle(self) -> int:
        """Blocks of these that no sequence holds: they count as free until they are taken."""
        return sum(not block.num_holders for cached in self.cached for block in cached.values())


NOTHING = Match()


class Table:
    """The blocks of one sequence: 0 to `end` of each full group, `begin` to `end` of each windowed one."""

    __slots__ = (
        "begin", "cached", "chunk", "chunk_step", "due", "end", "junction", "keys", "num_named", "num_published",
        "number", "seq", "states",
    )  # fmt: skip

    def __init__(self, seq: Sequence, keys: list[Key], num_groups: int) -> None:
        self.seq = seq
        self.keys = keys
        self.number = 0
        """Grows from one admission to the next."""
        self.cached: list[dict[int, CachedBlock]] = [{} for _ in range(num_groups)]
        """Of each group the blocks that others may hit, by their place; all others are its own."""
        self.num_named = len(keys)
        """Blocks that may be hit: those the trace names; once preempted, all. Of later ones full groups count alone."""
        self.begin = self.end = self.num_published = self.junction = 0
        self.due = NOT_DUE
        """The batch's step before which nothing happens to these blocks."""
        self.chunk = 0
        self.chunk_step = NOT_DUE
        """Tokens of the last chunk, and the step of the engine that scheduled it."""
        self.states: list[int] = []
        """Places of each state group's blocks, rising (`StateMemory`)."""

    def key(self, place: int) -> Key:
        """Of the block there. What the trace does not name is the sequence's own."""
        return self.keys[place] if place < len(self.keys) else (self.seq.request.request_id, place)
