"""`HostedBlocks`: the block ids of what the host's cache keeps (`plan.Store`, `plan.Load`, `plan.Drop`), by key."""

from collections.abc import Iterable
from typing import Protocol

from gpu_runtime.kv.held import BlockCopy, Held
from sim.engine.changes import Direction, Load, Move, Store
from sim.engine.sequence import Sequence
from sim.errors import InvariantError


class Blocks(Protocol):
    """A pool of block ids that nobody shares (`gpu_runtime.kv.pool.KVPool`)."""

    num_blocks: int

    @property
    def num_free(self) -> int:
        """Ids that can still be taken."""
        ...

    def check(self) -> None:
        """InvariantError unless every free id is listed once."""
        ...

    def allocate(self, n: int) -> list[int]:
        """Take `n` ids."""
        ...

    def free(self, ids: Iterable[int]) -> None:
        """Give ids back."""
        ...


class HostedBlocks:
    """Blocks of a host's pool that outlive their sequences."""

    def __init__(self, pool: Blocks) -> None:
        self._pool = pool
        self._ids: dict[int, int] = {}
        self._lost: set[int] = set()
        # Keys whose blocks hold nothing, since the copy to them failed.
        self._stores: dict[Sequence, Store] = {}
        # Whose copies are about to begin.
        self.loading: dict[Sequence, BlockCopy] = {}
        """What is to come layer by layer while a sequence is computed."""

    @property
    def num_blocks(self) -> int:
        """Blocks that are cached."""
        return len(self._ids)

    def ids(self) -> list[int]:
        """Of all of them."""
        return list(self._ids.values())

    def store(self, store: Store) -> None:
        """Take blocks for keys that have none."""
        self._name(store, self._pool.allocate(len(store.keys)))
        self._stores[store.seq] = store

    def _name(self, store: Store, ids: Iterable[int]) -> None:
        if any(key in self._ids for key in store.keys):
            raise InvariantError(f"{store.seq} is stored on the host under keys that have blocks there")
        self._ids.update(zip(store.keys, ids, strict=True))

    def begin(self, move: Move, held: Held) -> tuple[tuple[int, ...], BlockCopy] | None:
        """The copy that fills what was taken for its sequence, and the keys; None where it fills nothing here."""
        store = self._stores.pop(move.seq, None)
        if store is None:
            return None
        source, target = (held.gpu[0][place] for place in store.places), (self._of(key) for key in store.keys)
        return store.keys, BlockCopy(move.seq, move.groups, move.direction, tuple(source), tuple(target))

    def load(self, load: Load, ids: list[int]) -> list[int]:
        """Fill blocks of the GPU with what is cached; which of them cannot be filled."""
        found = [(self._of(key), block) for key, block in zip(load.keys, ids, strict=True) if key not in self._lost]
        source, target = (block for block, _ in found), (block for _, block in found)
        self.loading[load.seq] = BlockCopy(load.seq, (0,), Direction.H2D, tuple(source), tuple(target))
        return [block for key, block in zip(load.keys, ids, strict=True) if key in self._lost]

    def drop(self, keys: Iterable[int]) -> None:
        """They are given up."""
        for key in keys:
            self._pool.free([self._of(key)])
            del self._ids[key]
            self._lost.discard(key)

    def lose(self, keys: Iterable[int]) -> None:
        """Their blocks hold nothing: what was to be saved there was never computed, or the copy failed."""
        self._lost.update(keys)

    def _of(self, key: int) -> int:
        if key not in self._ids:
            raise InvariantError("a block is asked of the host's cache that is not there")
        return self._ids[key]
