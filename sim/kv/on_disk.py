"""`DiskTier`: a disk below the host, and windows over the queue (CachedAttention, section 3.3).

What is saved on the host is written to the disk as well, so that it can give way on the host at once. Of requests
within the prefetch window, what is on the disk alone is fetched to the host while others compute (3.3.1); on both tiers
blocks that a request within the eviction window waits for give way last, those of the last in it first (3.3.2).

A prompt admitted before that waits for what it needs of the disk, where that is not slower than computing it, by price:
all reads that are under way count as if they had just begun.
"""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, ClassVar

from sim.engine.changes import Move, Tier
from sim.engine.limits import Limits, TierCounters
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence
from sim.kv.gaps import Places
from sim.kv.memory import ALL_LAYERS
from sim.kv.tiered import HostTier
from sim.kv.tiered_options import TieredOptions
from sim.kv.tiers.drive import Drive
from sim.kv.tiers.host_cache import HostCache
from sim.kv.tiers.replacement import Access
from sim.kv.tiers.worth import Worth

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler


class DiskTier(HostTier):
    """The host's cache behind the GPU's, and the disk's behind that."""

    unexecutable: ClassVar[str] = (
        "disk-space: runs on a device have no disk below the host yet: give disk-space=0, or simulate it"
    )

    def __init__(self, limits: Limits, worth: Worth, options: TieredOptions, block_bytes: float) -> None:
        """Of blocks that take `block_bytes` on all GPUs together; others as for `HostTier`."""
        super().__init__(limits, worth)
        self.disk_cache, self.look_ahead = HostCache(options.num_disk_blocks(block_bytes)), options.look_ahead
        self.drive = Drive(
            block_bytes,
            read_bytes_per_s=options.disk_read_gb_per_s * 1e9,
            write_bytes_per_s=options.disk_write_gb_per_s * 1e9,
            latency_s=options.disk_latency_us / 1e6,
            s_per_block=options.disk_block_us / 1e6,
        )
        self.disk_tier = TierCounters(num_blocks=self.disk_cache.num_chunks)
        self._writes: dict[Move, list[int]] = {}
        self._reads: dict[Move, list[int]] = {}
        # Key -> the read that brings it, and how many prompts wait for it.
        self._coming: dict[int, Move] = {}
        self._claims: dict[int, int] = {}
        self._awaited: dict[Move, None] = {}
        self._num_saves = self._saved_blocks = 0
        # Requests within the window, the keys of each by place in it, the first place of each key (None: not asked for
        # yet); what the last look for fetches saw.
        self._window: tuple[Sequence, ...] = ()
        self._keys_within: list[tuple[int, tuple[int, ...]]] = []
        self._places: dict[int, int] | None = None
        self._looked_ahead: tuple[object, int, int] = ((), -1, -1)

    def bind(self, scheduler: "Scheduler") -> None:
        super().bind(scheduler)
        scheduler.counters.tiers["disk"] = self.disk_tier

    @property
    def versions(self) -> tuple[int, ...]:
        return (*super().versions, self.disk_cache.version, len(self._reads))

    def _keys_in_use(self) -> Iterator[int]:
        yield from super()._keys_in_use()
        yield from self.disk_cache.keys()

    # -- loads -------------------------------------------------------------------------------------------------------

    def _worth_loading(self, seq: Sequence, first: int) -> range:
        hosted = super()._worth_loading(seq, first)
        if not seq.request.hash_ids:
            return hosted
        keys, end, room = self._names(seq), first, self.cache.num_free + self.cache.num_idle + 1
        for place in self._nameable(seq, first):
            room = self._reach(keys[place], room)
            if not room:
                break
            end = place + 1
        if end <= max(first, hosted.stop):
            return hosted
        whole = range(first, end)
        least_s = self._saved_s(seq, hosted) if hosted else 0.0
        return whole if self._saved_s(seq, whole) >= least_s else hosted

    def _reach(self, key: int, room: int) -> int:
        """Room on the host, 1 more than blocks, beside a block and those before it; 0 where it cannot be loaded."""
        if key in self._coming:
            return room
        chunk = self.cache.get(key)
        if chunk is not None:
            return room - (chunk.num_copies == 0) if chunk.num_copies >= 0 else 0
        return room - 1 if self._on_disk(key) else 0

    def _on_disk(self, key: int) -> bool:
        chunk = self.disk_cache.get(key)
        return chunk is not None and chunk.num_copies >= 0

    def _saved_s(self, seq: Sequence, places: Places) -> float:
        keys = self._names(seq)[places[0] : places[-1] + 1]
        read = [key for key in keys if self.cache.get(key) is None]
        waits = read or any(key in self._coming for key in keys)
        wait_s = sum([move.num_blocks * (move.s_per_block or 0.0) for move in self._reads]) if waits else 0.0
        return super()._saved_s(seq, places) - wait_s - (self.drive.read_s(len(read)) if read else 0.0)

    def _begin_load(self, seq: Sequence, access: Access, places: Places) -> None:
        """Some of the blocks may be on their way to the host, or have to be read before the computation begins."""
        keys = access.keys
        saved_s = self._saved_s(seq, places)
        coming = [place for place in places if keys[place] in self._coming]
        read = [place for place in places if self.cache.get(keys[place]) is None]
        ready = sorted(set(places).difference(coming, read))
        self.cache.read(access, ready)
        for place in coming:
            self._awaited[self._coming[keys[place]]] = None
        if read:
            move = self._fetch(seq, access, read)
            assert move is not None, "there is room for what can be loaded"
            self._awaited[move] = None
            self.disk_tier.num_loads += 1
            self.disk_tier.hit_tokens += len(read) * self.block_size
        for place in (*coming, *read):
            self._claims[keys[place]] = self._claims.get(keys[place], 0) + 1
        self.tier.num_loads += len(read) < len(places)
        self.tier.hit_tokens += (len(places) - len(read)) * self.block_size
        (self.disk_tier if read else self.tier).saved_s += saved_s

    def _fetch(self, seq: Sequence, access: Access, places: list[int], before: int = -1) -> Move | None:
        """Copy blocks from the disk to the host; None: there is no room."""
        taken = self.cache.offer(access, places, self._wanted, before)
        if taken is None:
            return None
        keys = [access.keys[place] for place in taken]
        self.tier.evicted_blocks = self.cache.num_evicted
        self.disk_cache.pin(keys)
        move = self._copy(seq, taken, Tier.DISK, Tier.HOST, self.drive.read_s(len(taken)))
        self._reads[move] = keys
        self._coming.update(dict.fromkeys(keys, move))
        return move

    def _copy(self, seq: Sequence, places: list[int], source: Tier, target: Tier, seconds: float) -> Move:
        begin, end, count = places[0] * self.block_size, (places[-1] + 1) * self.block_size, len(places)
        move = Move(seq, ALL_LAYERS, begin, end, source, target, count, 0, True, seconds / count)
        self.scheduler.beside.append(move)
        return move

    def complete(self, plan: IterationPlan) -> None:
        if self.look_ahead:
            self._prefetch()
            # Arrivals are looked at as they come.
            plan.cut_on_arrival = True
            if self.scheduler.beside:
                plan.max_steps = 1
        super().complete(plan)
        if self._awaited:
            plan.awaited += tuple(self._awaited)
            self._awaited.clear()

    # -- windows over the queue --------------------------------------------------------------------------------------

    def _within(self, num_blocks: int) -> tuple[Sequence, ...]:
        """The first that wait, as many as have room in so many blocks if they are as long as turns are on average."""
        if not self.look_ahead or not self._saved_blocks:
            return ()
        return tuple(islice(self.scheduler.order, int(num_blocks * self._num_saves / self._saved_blocks)))

    def _look_ahead(self) -> None:
        """Note which requests wait within the eviction window."""
        window = self._within(self.cache.num_chunks + self.disk_cache.num_chunks)
        if window != self._window:
            self._window, self._places = window, None
            named = ((place, seq) for place, seq in enumerate(window) if seq.request.hash_ids)
            self._keys_within = [(place, self._access(seq).keys) for place, seq in named]

    def _wanted(self) -> Mapping[int, int]:
        """Of each block that is wanted within the eviction window, the first place in the queue."""
        if self._places is None:
            self._places = {}
            for place, keys in reversed(self._keys_within):
                self._places.update(dict.fromkeys(keys, place))
        return self._places

    def _prefetch(self) -> None:
        """Fetch what those within the prefetch window will load, as long as that takes nothing from those before."""
        self._look_ahead()
        now = self._window, self.cache.version, self.disk_cache.version
        if now[0] is self._looked_ahead[0] and now[1:] == self._looked_ahead[1:]:
            return
        self._looked_ahead = now
        for before, seq in enumerate(self._within(self.cache.num_chunks)):
            if not seq.request.hash_ids:
                continue
            access, first = self._access(seq), self.blocks.published_match(seq).num_blocks
            read = self._unhosted(access.keys, self._nameable(seq, first))
            if read and super()._saved_s(seq, range(first, read[-1] + 1)) >= 0.0:
                if self._fetch(seq, access, read, before) is None:
                    return
                self.scheduler.counters.policy["prefetched_blocks"] += len(read)

    def _unhosted(self, keys: tuple[int, ...], places: range) -> list[int]:
        """Of the blocks that can be had without computing, those that only the disk has."""
        found = []
        for place in places:
            if self.cache.get(keys[place]) is None:
                if not self._on_disk(keys[place]):
                    break
                found.append(place)
        return found

    # -- saves -------------------------------------------------------------------------------------------------------

    def _offer(self, seq: Sequence, access: Access, num_blocks: int) -> list[int]:
        self._num_saves += 1
        self._saved_blocks += num_blocks
        self._look_ahead()
        return self.cache.offer(access, range(num_blocks), self._wanted) or []

    def transfer_done(self, move: Move) -> None:
        if move.target is Tier.DISK:
            keys = self._writes.pop(move)
            self.disk_cache.written(keys)
            self.cache.done_reading(keys)
        elif move.source is Tier.DISK:
            keys = self._reads.pop(move)
            self.disk_cache.done_reading(keys)
            self.cache.written(keys)
            for key in keys:
                del self._coming[key]
                for _ in range(self._claims.pop(key, 0)):
                    self.cache.pin((key,))
        else:
            seq, named = move.seq, self.keys_of(move.seq)
            super().transfer_done(move)
            self._write(seq, named[: -(-move.end_token // self.block_size)])

    def _write(self, seq: Sequence, keys: tuple[int, ...]) -> None:
        """Copy to the disk what it lacks of a turn that is on the host."""
        access = Access(keys)
        hosted = ((place, self.cache.get(key)) for place, key in enumerate(keys))
        ready = [place for place, chunk in hosted if chunk is not None and chunk.num_copies >= 0]
        self._look_ahead()
        taken = self.disk_cache.offer(access, ready, self._wanted)
        self.disk_cache.finish(access)
        self.disk_tier.evicted_blocks = self.disk_cache.num_evicted
        if taken:
            written = [keys[place] for place in taken]
            self.cache.pin(written)
            self._writes[self._copy(seq, taken, Tier.HOST, Tier.DISK, self.drive.write_s(len(taken)))] = written
            self.disk_tier.stored_blocks += len(taken)
