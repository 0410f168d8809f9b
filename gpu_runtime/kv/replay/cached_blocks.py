"""`CachedBlocks`: the block ids of cached runs (`plan.Keep`); those that no sequence holds count as free."""

from collections.abc import Iterable

from gpu_runtime.kv.block_ids import BlockIds
from sim.errors import InvariantError


class CachedBlocks:
    """Ids by run. The cache is one more user of each of them.

    `unwritten` are blocks, held or not, that can be hit and whose KV is yet to be computed.
    """

    def __init__(self, pool: BlockIds) -> None:
        self._pool = pool
        self._ids: dict[object, list[int]] = {}
        self.unwritten: set[int] = set()

    @property
    def num_blocks(self) -> int:
        """Blocks that are cached and that no sequence holds."""
        return sum(self._pool.num_users(block) == 1 for ids in self._ids.values() for block in ids)

    def lists(self) -> Iterable[list[int]]:
        """The ids of each run."""
        return self._ids.values()

    def keep(self, run: object, ids: list[int]) -> None:
        """Blocks of a sequence are the next ones of a run."""
        self._pool.share(ids)
        self._ids.setdefault(run, []).extend(ids)

    def hit(self, run: object, num_blocks: int) -> list[int]:
        """One more sequence holds a run: its ids, and one more use of them."""
        ids = self._of(run)
        if len(ids) != num_blocks:
            raise InvariantError(f"cached run of blocks {ids}: {num_blocks} are hit")
        self._pool.share(ids)
        return list(ids)

    def ids_of(self, run: object) -> list[int]:
        """Of a run that stays cached."""
        return self._of(run)

    def renumber(self, numbers: dict[int, int]) -> None:
        """Blocks have other ids from now on."""
        for ids in self._ids.values():
            ids[:] = [numbers.get(block, block) for block in ids]
        self.unwritten = {numbers.get(block, block) for block in self.unwritten}

    def split(self, run: object, first: object, num_blocks: int) -> None:
        """The first blocks of a run become one of their own."""
        ids = self._of(run)
        self._ids[first], self._ids[run] = ids[:num_blocks], ids[num_blocks:]

    def evict(self, run: object, num_left: int) -> None:
        """The last blocks of a run are free."""
        ids = self._of(run)
        gone = ids[num_left:]
        del ids[num_left:]
        if not ids:
            del self._ids[run]
        self._pool.free(gone)
        self.unwritten.difference_update(gone)

    def _of(self, run: object) -> list[int]:
        if run not in self._ids:
            raise InvariantError("a cached run of blocks is asked for that is not there")
        return self._ids[run]
