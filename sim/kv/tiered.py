"""`HostTier`: cached prefixes that outlive their GPU blocks on the host (`limits.num_cpu_blocks` of them).

When a turn ends, what it filled is saved beside later computation; its blocks are free when that has ended. A prompt
whose prefix goes on there is loaded layer by layer while its rest is computed, in one iteration, where that is not
slower than computing it all, by price. Only blocks that the trace names are saved: no request could hit others.
"""

from typing import TYPE_CHECKING, ClassVar

from sim.engine.changes import Load, Move, Store, Streamed, Tier
from sim.engine.limits import Limits, TierCounters
from sim.engine.plan import IterationPlan, StepTimes
from sim.engine.sequence import Sequence, Status
from sim.errors import UserError
from sim.kv.backing import NOWHERE, Backing
from sim.kv.gaps import Places
from sim.kv.index.block_chain import NamedChain
from sim.kv.index.prefix_index import Keys
from sim.kv.memory import ALL_LAYERS
from sim.kv.paged import PagedMemory
from sim.kv.prefix import PrefixMemory
from sim.kv.tiered_options import TieredOptions
from sim.kv.tiers.host_cache import HostCache
from sim.kv.tiers.replacement import Access
from sim.kv.tiers.replacement import Named as Replaced
from sim.kv.tiers.worth import Worth
from sim.parts.catalogue import class_at

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from sim.engine.scheduler import Scheduler
    from sim.systems.builder import Builder


class HostTier(Backing):
    """The host's cache behind the GPU's."""

    name: ClassVar[str] = "tiered"
    options: ClassVar[type | None] = TieredOptions
    always_caches: ClassVar[bool] = True
    memoized = ("_looked_on_host",)

    @classmethod
    def build(cls, b: "Builder") -> PagedMemory:
        """With a disk where one is asked for."""
        if b.offloading.offloads:
            raise UserError("--kv-offloading-size: goes with memory=paged, not tiered, which keeps prefixes itself")
        b.refuse_windows("memory=tiered")
        options = b.options(TieredOptions)
        if options.num_disk_blocks(b.block_bytes):
            if options.replacement != "lru":
                raise UserError(
                    f"replacement={options.replacement}: beside a disk (disk-space) what the queue wants is kept, then "
                    "what was used last; leave one of them out"
                )
            disk = class_at("sim.kv.on_disk:DiskTier")(b.limits, Worth.of(b), options, b.block_bytes)
            return PrefixMemory.build(b, disk)
        return PrefixMemory.build(b, cls(b.limits, Worth.of(b), options.replacement))

    def __init__(self, limits: Limits, worth: Worth, replacement: Replaced = "lru") -> None:
        """`worth` prices loads; `replacement`: what gives way on the host."""
        self.block_size = limits.block_size
        self.chain = NamedChain(limits.block_size)
        self.worth = worth
        self.cache = HostCache(limits.num_cpu_blocks, replacement)
        self._replacement: Replaced = replacement
        self.tier = TierCounters(num_blocks=limits.num_cpu_blocks)
        # Of sequences with named blocks: what they did to the host's cache.
        self._accesses: dict[Sequence, Access] = {}
        # The last prompt that was looked up, what both caches were then, and which blocks it would load.
        self._looked_on_host: tuple[Sequence | None, tuple[int, ...], range] = (None, (), NOWHERE)
        # With the sequence: places of its blocks that come within the iteration.
        self._loading: list[tuple[Sequence, Access, Places]] = []
        self._saving: dict[Sequence, list[int]] = {}
        self._tells = False

    def bind(self, scheduler: "Scheduler") -> None:
        super().bind(scheduler)
        scheduler.counters.tiers["host"] = self.tier

    def holders(self) -> "Iterable[tuple[Sequence, Tier]]":
        return ((seq, Tier.GPU) for seq in self._saving)

    def tell_blocks(self) -> None:
        from sim.kv.telling import TellingCache  # noqa: PLC0415

        self.cache = TellingCache(self.cache.num_chunks, self.scheduler, self._replacement)
        self._tells = True

    def keys_of(self, seq: Sequence) -> Keys:
        return self.chain.of(seq.request)

    def name_blocks(self, seq: Sequence, keys: Keys) -> Keys:
        access = self._access(seq)
        known = len(access.keys)
        access.keys = self.chain.extended(access.keys, keys)
        return access.keys[known:]

    @property
    def num_cached_on_host(self) -> int:
        return self.cache.num_chunks - self.cache.num_free

    @property
    def versions(self) -> tuple[int, ...]:
        """Of all that can be loaded: equal if nothing has changed."""
        return self.blocks.index.version, self.cache.version

    # -- loads -------------------------------------------------------------------------------------------------------

    def look_up(self, seq: Sequence) -> None:
        if seq.request.hash_ids:
            self._access(seq)

    def found(self, seq: Sequence, first: int) -> Places:
        known, versions, places = self._looked_on_host
        now = self.versions
        if known is seq and versions == now:
            return places
        places = self._worth_loading(seq, first)
        self._looked_on_host = (seq, now, places)
        return places

    def _worth_loading(self, seq: Sequence, first: int) -> range:
        if not seq.request.hash_ids:
            return NOWHERE
        keys, end = self._names(seq), first
        for place in self._nameable(seq, first):
            chunk = self.cache.get(keys[place])
            if chunk is None or chunk.num_copies < 0:
                break
            end = place + 1
        return range(first, end) if end > first and self._saved_s(seq, range(first, end)) >= 0.0 else NOWHERE

    def _nameable(self, seq: Sequence, first: int) -> range:
        """Blocks from `first` on that have names; the last token has to be computed."""
        return range(first, min((seq.num_tokens - 1) // self.block_size, len(self._names(seq))))

    def _saved_s(self, seq: Sequence, places: Places) -> float:
        begin, end = places[0] * self.block_size, (places[-1] + 1) * self.block_size
        return self.worth.computed_s(seq, begin) - self.worth.streamed_s(seq, end, len(places))

    def _names(self, seq: Sequence) -> tuple[int, ...]:
        access = self._accesses.get(seq)
        return self.keys_of(seq) if access is None else access.keys

    def _access(self, seq: Sequence) -> Access:
        access = self._accesses.get(seq)
        if access is None:
            access = self._accesses[seq] = Access(self.keys_of(seq))
        return access

    def taken(self, seq: Sequence, found: Places) -> None:
        if found:
            access = self._access(seq)
            if self._tells:
                self.scheduler.changes.append(Load(seq, found[0], access.keys[found[0] : found[-1] + 1]))
            self._begin_load(seq, access, found)
            self._loading.append((seq, access, found))

    def _begin_load(self, seq: Sequence, access: Access, places: Places) -> None:
        self.cache.read(access, places)
        self.tier.num_loads += 1
        self.tier.hit_tokens += len(places) * self.block_size
        self.tier.saved_s += self._saved_s(seq, places)

    def complete(self, plan: IterationPlan) -> None:
        # But for those that have lost their blocks in this step.
        if self._loading and (loads := {seq: places for seq, _, places in self._loading if seq.num_blocks}):
            self._load(plan, list(loads.items()))

    def _load(self, plan: IterationPlan, loads: "list[tuple[Sequence, Places]]") -> None:
        """Layer by layer, while the rest is computed."""
        plan.streamed += (Streamed(1, sum(len(places) for _, places in loads), 0),)

    def repeats(self, plan: IterationPlan, steps: int) -> int:
        return 1 if self._loading else steps

    def committed(self, plan: IterationPlan, times: StepTimes) -> None:
        for _, access, places in self._loading:
            self.cache.done_reading(access.keys[place] for place in places)
        self._loading.clear()

    # -- saves -------------------------------------------------------------------------------------------------------

    def keeps(self, seq: Sequence) -> bool:
        if not self.blocks.has_left(seq) or not (seq.request.hash_ids or seq in self._accesses):
            return False
        self.chain.forget(self._keys_in_use)
        access = self._access(seq)
        del self._accesses[seq]
        full = self.blocks.full_blocks(seq)
        is_preempted = seq.status is Status.WAITING
        if self._replacement == "pgdsf":
            prompt, cached = seq.request.prompt_tokens, seq.num_cached_tokens
            access.cost_s = self.worth.spans_s(((cached, prompt),)) / (prompt - cached)
        taken = [] if is_preempted else self._offer(seq, access, min(full, len(access.keys)))
        self.cache.finish(access)
        self.tier.evicted_blocks = self.cache.num_evicted
        if taken:
            self.tier.stored_blocks += len(taken)
            self._save(seq, taken, [access.keys[place] for place in taken])
        return bool(taken)

    def _save(self, seq: Sequence, taken: list[int], keys: list[int]) -> None:
        """Copy blocks of a turn that has ended; `seq` gives its blocks back when that is done."""
        self.blocks.publish(seq, self.blocks.full_blocks(seq) * self.block_size)
        self._tell_save(seq, taken, keys)
        self._saving[seq] = keys
        first, end = taken[0] * self.block_size, (taken[-1] + 1) * self.block_size
        move = Move(seq, ALL_LAYERS, first, end, Tier.GPU, Tier.HOST, len(taken), seq.num_blocks, True)
        self.scheduler.beside.append(move)

    def _tell_save(self, seq: Sequence, taken: list[int], keys: list[int]) -> None:
        if self._tells:
            self.scheduler.changes.append(Store(seq, tuple(taken), tuple(keys)))

    def _offer(self, seq: Sequence, access: Access, num_blocks: int) -> list[int]:
        """Which of the first blocks are to be saved."""
        return self.cache.offer(access, range(num_blocks)) or []

    def transfer_done(self, move: Move) -> None:
        self.cache.written(self._saving.pop(move.seq))
        self.blocks.give_back(move.seq)

    def forget(self, seq: Sequence) -> None:
        self._accesses.pop(seq, None)

    def _keys_in_use(self) -> "Iterator[int]":
        """Of all that is cached, and of sequences that have not ended."""
        yield from self.blocks.index.keys()
        yield from self.cache.keys()
        for access in self._accesses.values():
            yield from access.keys
        for holding in self.blocks.holdings.values():
            yield from holding.keys
