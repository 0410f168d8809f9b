"""`BlockIds`: which blocks of a pool are free, by number."""

from collections.abc import Iterable

from sim.errors import InvariantError


class OutOfBlocks(Exception):
    """More blocks were asked for than are free; nothing was allocated."""


class BlockIds:
    """The free list of one pool: the block freed last goes out first, those of a fresh pool in ascending order."""

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks - 1, -1, -1))
        self._is_free = bytearray(b"\1") * num_blocks
        self.num_blocks = num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can still give."""
        return len(self._free)

    def allocate(self, n: int) -> list[int]:
        """Take `n` blocks; raises `OutOfBlocks` and takes none if fewer are free."""
        if n < 0 or n > len(self._free):
            raise OutOfBlocks(f"{n} blocks asked for, {len(self._free)} of {len(self._is_free)} free")
        cut = len(self._free) - n
        ids = self._free[cut:]
        ids.reverse()
        del self._free[cut:]
        for block in ids:
            self._is_free[block] = 0
        return ids

    def free(self, ids: Iterable[int]) -> None:
        """Give blocks back, the first of them to be allocated first; InvariantError if one is free or none of ours."""
        for block in reversed(list(ids)):
            if not 0 <= block < len(self._is_free) or self._is_free[block]:
                raise InvariantError(f"block {block} given back, but it is not allocated")
            self._is_free[block] = 1
            self._free.append(block)

    def check(self) -> None:
        """InvariantError unless every free block is listed exactly once."""
        listed = set(self._free)
        if len(listed) != len(self._free) or listed != {i for i, free in enumerate(self._is_free) if free}:
            raise InvariantError(f"{len(self._free)} blocks listed free, {sum(self._is_free)} marked free")
