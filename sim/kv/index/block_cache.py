"""`BlockCache`: cached blocks of several groups of layers, one by one, and which of them give way first.

A key names what a block and all before it hold. Each group of layers has blocks of its own under the same keys, as in
vLLM's hybrid KV cache manager: what leaves a window gives back the blocks of some groups and keeps those of others.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from hashlib import blake2b

from sim.kv.block_pool import Evicts

Key = Hashable


def chained(keys: tuple[int, ...]) -> Iterator[Key]:
    """Keys that name a block with all before it, from keys that name it where all before it is the same."""
    before = b""
    for key in keys:
        before = blake2b(b"%s %d" % (before, key), digest_size=16).digest()
        yield before


class CachedBlock:
    """A block whose content others may hit. In the LRU order while no sequence holds it.

    Without a key it stands for `num_blocks` that nothing can hit any more.
    """

    __slots__ = ("group", "key", "num_blocks", "num_holders")

    def __init__(self, group: int, key: Key | None, num_blocks: int = 1) -> None:
        self.group = group
        self.key = key
        self.num_blocks = num_blocks
        self.num_holders = 1


class BlockCache(Evicts):
    """Content that was computed twice is kept twice, and the older copy is found."""

    def __init__(self, num_groups: int) -> None:
        self._found: tuple[dict[Key, list[CachedBlock]], ...] = tuple({} for _ in range(num_groups))
        self._idle: OrderedDict[CachedBlock, None] = OrderedDict()
        self.num_idle = self.num_evicted = 0
        self.version = 0
        """Grows with every change of what is found."""

    def find(self, group: int, key: Key) -> CachedBlock | None:
        """The oldest block of a group with that content."""
        copies = self._found[group].get(key)
        return copies[0] if copies else None

    def add(self, group: int, key: Key) -> CachedBlock:
        """A block, held by one sequence, is full."""
        block = CachedBlock(group, key)
        self._found[group].setdefault(key, []).append(block)
        self.version += 1
        return block

    def hold(self, block: CachedBlock) -> None:
        """One more sequence holds `block`."""
        if not block.num_holders:
            del self._idle[block]
            self.num_idle -= 1
        block.num_holders += 1

    def let_go(self, block: CachedBlock) -> bool:
        """One sequence less does; whether none is left, and it is the last to give way so far."""
        block.num_holders -= 1
        if block.num_holders:
            return False
        self._idle[block] = None
        self.num_idle += 1
        return True

    def let_go_own(self, num_blocks: int) -> None:
        """So many blocks of a sequence that has ended, which no other has: they give way in their turn, unfound."""
        self._idle[CachedBlock(0, None, num_blocks)] = None
        self.num_idle += num_blocks

    def evict(self, num_blocks: int) -> None:
        """Give up so many idle blocks, the longest idle first."""
        self.num_idle -= num_blocks
        self.num_evicted += num_blocks
        self.version += 1
        while num_blocks:
            block = next(iter(self._idle))
            taken = min(num_blocks, block.num_blocks)
            block.num_blocks -= taken
            num_blocks -= taken
            if block.num_blocks:
                return
            del self._idle[block]
            if block.key is not None:
                copies = self._found[block.group]
                copies[block.key].remove(block)
                if not copies[block.key]:
                    del copies[block.key]
