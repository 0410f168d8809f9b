"""`TellingCache`: a host's cache that puts into the plan what it gives up, for those who keep its blocks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sim.engine.changes import Drop
from sim.kv.tiers.host_cache import HostCache, Wanted
from sim.kv.tiers.replacement import Access

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler


class TellingCache(HostCache):
    """Appends to the scheduler's changes, before what takes the room."""

    def __init__(self, num_chunks: int, scheduler: "Scheduler") -> None:
        super().__init__(num_chunks)
        self._scheduler = scheduler

    def evict(self, count: int, access: Access, places: Sequence[int], wanted: Wanted | None, before: int) -> list[int]:
        dropped = super().evict(count, access, places, wanted, before)
        if dropped:
            self._scheduler.changes.append(Drop(tuple(dropped)))
        return dropped
