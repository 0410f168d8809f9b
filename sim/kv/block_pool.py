"""`BlockPool`, `CachingPool`: the KV blocks of one tier, kept as counts that cannot go wrong silently."""

from abc import ABC, abstractmethod

from sim.errors import InvariantError


class BlockPool:
    """Free and used blocks of one tier, with the ledger LayerKV's Eq. 5 speaks of.

    A block is `block_tokens x layer_group` (group = all layers for vLLM, 1 for LayerKV); the pool only counts.
    `num_allocated` and `num_released` are running totals: Avail(t+1) = Avail(t) + Released(t) - Allocated(t).
    """

    __slots__ = ("free", "name", "num_allocated", "num_blocks", "num_released")

    def __init__(self, name: str, num_blocks: int) -> None:
        self.name = name
        self.num_blocks = num_blocks
        self.free = num_blocks
        self.num_allocated = 0
        self.num_released = 0

    def allocate(self, count: int) -> None:
        """Take `count` blocks; more than are free is a bug of the caller, which must have asked first."""
        if count < 0 or count > self.free:
            raise InvariantError(f"{self.name}: {count} blocks asked for, {self.free} of {self.num_blocks} free")
        self.free -= count
        self.num_allocated += count

    def release(self, count: int) -> None:
        """Give back `count` blocks."""
        self.free += count
        self.num_released += count
        if count < 0 or self.free > self.num_blocks:
            raise InvariantError(f"{self.name}: {count} blocks given back, {self.free} of {self.num_blocks} free")


class Evicts(ABC):
    """What is cached in a pool. A class, not a protocol: compiled code finds what it has by place, not by name."""

    num_idle: int
    """Cached blocks that no sequence holds."""

    @abstractmethod
    def evict(self, num_blocks: int, /) -> None:
        """Give up so many of them."""


class CachingPool(BlockPool):
    """A pool in which idle cached blocks count as free: the oldest of them give way when the others run out."""

    __slots__ = ("index",)

    def __init__(self, name: str, num_blocks: int, index: Evicts) -> None:
        super().__init__(name, num_blocks)
        self.index = index

    def allocate(self, count: int) -> None:
        BlockPool.allocate(self, count)
        num_lacking = self.index.num_idle - self.free
        if num_lacking > 0:
            self.index.evict(num_lacking)
