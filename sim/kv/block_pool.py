"""`BlockPool`: the KV blocks of one tier, kept as counts that cannot go wrong silently."""

from abc import ABC, abstractmethod

from sim.errors import InvariantError


class Evicts(ABC):
    """What is cached in a pool. A class, not a protocol: compiled code finds what it has by place, not by name."""

    num_idle: int
    """Cached blocks that no sequence holds."""

    @abstractmethod
    def evict(self, num_blocks: int, /) -> None:
        """Give up so many of them."""


class BlockPool:
    """Free and used blocks of one tier, with the ledger LayerKV's Eq. 5 speaks of.

    A block is `block_tokens x layer_group` (group = all layers for vLLM, 1 for LayerKV); the pool only counts.
    `num_allocated` and `num_released` are running totals: Avail(t+1) = Avail(t) + Released(t) - Allocated(t).
    Idle cached blocks, which are in `index`, count as free: they give way when the others run out.
    """

    __slots__ = ("free", "index", "name", "num_allocated", "num_blocks", "num_released")

    def __init__(self, name: str, num_blocks: int, index: Evicts | None = None) -> None:
        self.name = name
        self.num_blocks = num_blocks
        self.index = index
        self.free = num_blocks
        self.num_allocated = 0
        self.num_released = 0

    def allocate(self, count: int) -> None:
        """Take `count` blocks; more than are free is a bug of the caller, which must have asked first."""
        free = self.free - count
        if count < 0 or free < 0:
            raise InvariantError(f"{self.name}: {count} blocks asked for, {self.free} of {self.num_blocks} free")
        self.free = free
        self.num_allocated += count
        if self.index is not None and self.index.num_idle > free:
            self.index.evict(self.index.num_idle - free)

    def release(self, count: int) -> None:
        """Give back `count` blocks."""
        self.free += count
        self.num_released += count
        if count < 0 or self.free > self.num_blocks:
            raise InvariantError(f"{self.name}: {count} blocks given back, {self.free} of {self.num_blocks} free")
