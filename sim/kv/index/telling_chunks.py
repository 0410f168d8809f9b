"""`TellingChunks`: chunks that put into the plan what becomes of their blocks, for those who keep the ids."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from sim.engine.changes import Drop, Evict, Keep
from sim.engine.sequence import Sequence
from sim.kv.index.retained_chunks import Chunk, ChunkStore

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler


class TellingChunks(ChunkStore):
    """Appends to the scheduler's changes, in order. On the GPU a chunk is a cached run of a block."""

    def __init__(self, num_host: int, cost_s: Callable[[int], float], scheduler: "Scheduler") -> None:
        super().__init__(num_host, cost_s)
        self._scheduler = scheduler

    def put(self, key: int, place: int, owner: Sequence) -> bool:
        is_new = super().put(key, place, owner)
        if is_new:
            self._scheduler.changes.append(Keep(owner, place, 1, self.chunks[key]))
        return is_new

    def left_gpu(self, chunk: Chunk) -> None:
        self._scheduler.changes.append(Evict(chunk, 0))

    def left_host(self, chunk: Chunk) -> None:
        self._scheduler.changes.append(Drop((chunk.key,)))
