"""`BlockIds`: which blocks of a pool are free, by number, and how many use each of the others."""

from collections.abc import Iterable

from sim.errors import InvariantError


class OutOfBlocks(Exception):
    """More blocks were asked for than are free; nothing was allocated."""


class BlockIds:
    """The free list of one pool: the block freed last goes out first, those of a fresh pool in ascending order."""

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks - 1, -1, -1))
        self._users = [0] * num_blocks
        self.num_blocks = num_blocks
        self.borrows = False
        """Whether more blocks can be taken than are free, to be `repaid`."""

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can still give."""
        return len(self._free)

    def allocate(self, n: int) -> list[int]:
        """Take `n` blocks; raises `OutOfBlocks` and takes none if fewer are free."""
        if self.borrows and n > len(self._free):
            borrowed = range(len(self._users), len(self._users) + n - len(self._free))
            self._users += [1] * len(borrowed)
            return [*self.allocate(len(self._free)), *borrowed]
        if n < 0 or n > len(self._free):
            raise OutOfBlocks(f"{n} blocks asked for, {len(self._free)} of {self.num_blocks} free")
        cut = len(self._free) - n
        ids = self._free[cut:]
        ids.reverse()
        del self._free[cut:]
        for block in ids:
            self._users[block] = 1
        return ids

    def share(self, ids: Iterable[int]) -> None:
        """One more uses each of these blocks, and is to give it back; InvariantError if one is free or none of ours."""
        for block in ids:
            if not self.num_users(block):
                raise InvariantError(f"block {block} shared, but it is not allocated")
            self._users[block] += 1

    def free(self, ids: Iterable[int]) -> None:
        """Give blocks back, the first of them to be allocated first; InvariantError if one is free or none of ours.

        A block that others use stays theirs.
        """
        for block in reversed(list(ids)):
            if not self.num_users(block):
                raise InvariantError(f"block {block} given back, but it is not allocated")
            self._users[block] -= 1
            if not self._users[block] and block < self.num_blocks:
                self._free.append(block)

    def repay(self) -> dict[int, int]:
        """Let free blocks take the place of those that were borrowed and are in use: their number for each of these.

        Raises:
            OutOfBlocks: more are borrowed than are free.
        """
        self.borrows = False
        borrowed = [block for block in range(self.num_blocks, len(self._users)) if self._users[block]]
        numbers = dict(zip(borrowed, self.allocate(len(borrowed)), strict=True))
        for block, number in numbers.items():
            self._users[number] = self._users[block]
        del self._users[self.num_blocks :]
        return numbers

    def num_users(self, block: int) -> int:
        """How often a block was taken and not given back; 0 for none of ours."""
        return self._users[block] if 0 <= block < len(self._users) else 0

    def check(self) -> None:
        """InvariantError unless every free block is listed exactly once."""
        listed = set(self._free)
        if len(listed) != len(self._free) or listed != {i for i, users in enumerate(self._users) if not users}:
            raise InvariantError(f"{len(self._free)} blocks listed free, {self._users.count(0)} marked free")
