"""`HostedBlocks`: the block ids of what the host's cache keeps (`plan.Store`, `plan.Load`, `plan.Drop`), by key."""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from gpu_runtime.kv.block_ids import BlockIds
from gpu_runtime.kv.replay.held import BlockCopy
from sim.engine.changes import Direction, Load, Store
from sim.engine.sequence import Sequence
from sim.errors import InvariantError


class Filling(NamedTuple):
    """Blocks that a copy to the host is about to fill; `source` is empty where they are its sequence's own."""

    store: Store
    source: tuple[int, ...]
    target: tuple[int, ...]


class HostedBlocks:
    """Blocks of a host's pool that outlive their sequences."""

    def __init__(self, pool: BlockIds) -> None:
        self._pool = pool
        self._ids: dict[int, int] = {}
        self._lost: set[int] = set()
        # Keys whose blocks are empty, since the copy to them failed.
        self._fillings: dict[Sequence, list[Filling]] = {}
        # Whose copies are about to begin, in order.
        self.loading: dict[Sequence, BlockCopy] = {}
        """What is to come layer by layer while a sequence is computed."""

    @property
    def num_blocks(self) -> int:
        """Blocks that are cached."""
        return len(self._ids)

    def ids(self) -> list[int]:
        """Of all of them."""
        return list(self._ids.values())

    def store(self, store: Store, source: Iterable[int] = ()) -> None:
        """Take blocks for keys that have none; `source` are the GPU blocks of its runs."""
        target = self._pool.allocate(len(store.keys))
        self._name(store, target)
        self._fillings.setdefault(store.seq, []).append(Filling(store, tuple(source), tuple(target)))

    def _name(self, store: Store, ids: Iterable[int]) -> None:
        if any(key in self._ids for key in store.keys):
            raise InvariantError(f"{store.seq} is stored on the host under keys that have blocks there")
        self._ids.update(zip(store.keys, ids, strict=True))
        self._lost.difference_update(store.keys)

    def begin(self, seq: Sequence) -> Filling | None:
        """What the next copy of a sequence fills; None where it fills nothing here."""
        fillings = self._fillings.get(seq)
        if not fillings:
            return None
        found = fillings.pop(0)
        if not fillings:
            del self._fillings[seq]
        return found

    def has(self, filling: Filling) -> bool:
        """Whether all that it fills is still wanted."""
        keys = filling.store.keys
        return all(self._ids.get(key) == block for key, block in zip(keys, filling.target, strict=True))

    def load(self, load: Load, ids: list[int]) -> list[int]:
        """Fill blocks of the GPU with what is cached; which of them cannot be filled."""
        found = [(self._of(key), block) for key, block in zip(load.keys, ids, strict=True) if key not in self._lost]
        source, target = (block for block, _ in found), (block for _, block in found)
        copy = BlockCopy(load.seq, (0,), Direction.H2D, tuple(source), tuple(target))
        if (before := self.loading.get(load.seq)) is not None:
            copy = replace(copy, source=before.source + copy.source, target=before.target + copy.target)
        self.loading[load.seq] = copy
        return [block for key, block in zip(load.keys, ids, strict=True) if key in self._lost]

    def drop(self, keys: Iterable[int]) -> None:
        """They are given up."""
        for key in keys:
            self._pool.free([self._of(key)])
            del self._ids[key]
            self._lost.discard(key)

    def lose(self, keys: Iterable[int]) -> None:
        """Their blocks are empty: what was to be saved there was never computed, or the copy failed."""
        self._lost.update(keys)

    def _of(self, key: int) -> int:
        if key not in self._ids:
            raise InvariantError("a block is asked of the host's cache that is not there")
        return self._ids[key]
