"""`HostCache`: the chunks of KV that the host keeps, as vLLM 0.33 keeps them (`CPUOffloadingManager`).

A chunk is some consecutive blocks of a sequence. Its key names its content and all before it.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

from sim.kv.tiers.replacement import REPLACEMENTS, Access, Chunk, Lru, Named

MOST_OFFERED = 64_000
"""Keys whose offers are counted; the longest not offered is forgotten first (vLLM's `max_tracker_size`)."""

Wanted = Callable[[], Mapping[int, int]]
"""Says of keys how far from the head of a queue the first stands that wants them; asked where a block must give way."""


class HostCache:
    """A pool of chunks, and what is in them.

    Args:
        num_chunks: that it holds.
        eviction_policy: which of them give way.
        store_threshold: how often a chunk must be offered before it is taken; below 2: at once.
    """

    def __init__(self, num_chunks: int, eviction_policy: Named = "lru", store_threshold: int = 0) -> None:
        self.num_chunks = self.num_free = num_chunks
        self.num_idle = 0
        """Chunks that no copy reads or writes."""
        self.num_evicted = 0
        self.version = 0
        """Grows with every change to what can be read."""
        self._chunks = REPLACEMENTS[eviction_policy](num_chunks)
        self._threshold = store_threshold
        # How often each was offered, the last one last.
        self._offers: OrderedDict[int, int] = OrderedDict()

    def get(self, key: int) -> Chunk | None:
        """The chunk of that key, perhaps still being written."""
        return self._chunks.get(key)

    def keys(self) -> Iterable[int]:
        """Of all chunks, and of those given up that may still count as seen."""
        yield from self._chunks.keys()
        yield from self._offers

    # -- to the GPU --------------------------------------------------------------------------------------------------

    def read(self, access: Access, places: Sequence[int]) -> None:
        """A copy of chunks that are there, and written, begins for a request."""
        self.pin(access.keys[place] for place in places)
        self._saw(access, places, places)

    def pin(self, keys: Iterable[int]) -> None:
        """A copy of them begins, which is no use of them: they stay until `done_reading`."""
        for key in keys:
            chunk = self._of(key)
            if not chunk.num_copies:
                self._chunks.busy(key)
                self.num_idle -= 1
            chunk.num_copies += 1

    def done_reading(self, keys: Iterable[int]) -> None:
        """It has ended."""
        for key in keys:
            chunk = self._of(key)
            chunk.num_copies -= 1
            if not chunk.num_copies:
                self._idle(key)

    # -- from the GPU ------------------------------------------------------------------------------------------------

    def offer(
        self,
        access: Access,
        places: Sequence[int],
        wanted: Wanted | None = None,
        before: int = -1,
    ) -> list[int] | None:
        """Take chunks that are not there yet; which, to be written now. None: there is no room, nothing is taken.

        What is `wanted` gives way after all others, the farthest first, and not at all up to the place `before`.
        """
        if self._threshold > 1:
            self._count(access, places)
        taken, ready = [], []
        for place in places:
            chunk = self._chunks.get(access.keys[place])
            if chunk is None:
                if self._threshold < 2 or self._offers.get(access.keys[place], 0) >= self._threshold:
                    taken.append(place)
            elif chunk.num_copies >= 0:
                ready.append(place)
        if new := [place for place in taken if place not in access.missed]:
            self._chunks.missed(access, new)
            access.missed.update(new)
        self._saw(access, sorted((*taken, *ready)), ready)
        lacking = len(taken) - self.num_free
        if lacking > 0:
            if lacking > self.num_idle or not self.evict(lacking, access, places, wanted, before):
                return None
            self.num_idle -= lacking
            self.num_free += lacking
            self.num_evicted += lacking
            self.version += 1
        self.num_free -= len(taken)
        for place in taken:
            self._chunks.insert(access, place)
        access.inserted.update(taken)
        return taken

    def evict(self, count: int, access: Access, places: Sequence[int], wanted: Wanted | None, before: int) -> list[int]:
        """Let so many give way to what `offer` is offered; their keys, none if there are too few."""
        protected = (access.keys[place] for place in places)
        if wanted is None or not (queue := wanted()):
            return self._chunks.evict(count, protected)
        assert isinstance(self._chunks, Lru), "only LRU looks ahead"
        return self._chunks.evict_unwanted(count, protected, queue, before)

    def written(self, keys: Iterable[int]) -> None:
        """The copy of chunks that were taken has ended: they can be read."""
        self.version += 1
        for key in keys:
            self._of(key).num_copies = 0
            self._idle(key)

    def finish(self, access: Access) -> None:
        """A request has ended: that is one use of what it read and wrote."""
        self._chunks.finish(access)

    # ----------------------------------------------------------------------------------------------------------------

    def _of(self, key: int) -> Chunk:
        chunk = self._chunks.get(key)
        assert chunk is not None, "chunks that are copied are not evicted"
        return chunk

    def _idle(self, key: int) -> None:
        self.num_idle += 1
        self._chunks.idle(key)

    def _saw(self, access: Access, places: Iterable[int], reused: Iterable[int]) -> None:
        new = [place for place in places if place not in access.seen]
        access.seen.update(new)
        if new:
            self._chunks.saw(access, new)
        access.reused.update(place for place in reused if place not in access.inserted)

    def _count(self, access: Access, places: Sequence[int]) -> None:
        """Count an offer, which pushes none of its own keys out."""
        offers = self._offers
        keys = [access.keys[place] for place in places]
        known = [key for key in keys if key in offers]
        for key in known:
            offers.move_to_end(key)
            offers[key] += 1
        others = len(offers) - len(known)
        for key in keys:
            if key not in offers:
                if len(offers) >= MOST_OFFERED:
                    if not others:
                        continue
                    offers.popitem(last=False)
                    others -= 1
                offers[key] = 1
