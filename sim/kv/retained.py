"""`RetentionMemory`: conversations in chunks, kept on the GPU and the host by what computing them again would cost.

Yu et al., "Stateful Large Language Model Serving with Pensieve" (EuroSys 2025). A prompt hits whatever chunks of its
conversation are left, contiguous or not. What of them is on the host is loaded layer by layer in the iteration that
computes the rest, if that is not slower than computing it all, by price; what was dropped before them is computed
again, each gap as a chunk of its own (section 4.3.4). Before blocks run out, chunks are copied to the host (4.3.2).
"""

from itertools import groupby
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

from sim.engine.changes import Hit, Keep, Load, Move, Place, Release, Store, Streamed, Tier
from sim.engine.limits import Limits, TierCounters
from sim.engine.plan import IterationPlan, StepTimes
from sim.engine.sequence import Sequence
from sim.kv.block_pool import BlockPool
from sim.kv.gaps import Span, gaps, split_by_gap
from sim.kv.index.block_chain import FIRST_PRIVATE_KEY, BlockChain
from sim.kv.index.retained_chunks import DIRTY, Chunk, ChunkStore
from sim.kv.memory import ALL_LAYERS, Memory
from sim.kv.tiered_options import RetentionOptions
from sim.kv.tiers.worth import Worth

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler
    from sim.systems.builder import Builder


class Found(NamedTuple):
    """Places of a prompt's blocks that need not be computed, and how many of those on the GPU are idle."""

    on_gpu: tuple[int, ...]
    to_load: tuple[int, ...]
    num_idle: int


NOTHING = Found((), (), 0)


class RetentionMemory(Memory):
    """Blocks on demand; those of a conversation outlive its turns one by one."""

    name: ClassVar[str] = "retained"
    options: ClassVar[type | None] = RetentionOptions
    can_cache_prefixes: ClassVar[bool] = True
    always_caches: ClassVar[bool] = True
    memoized = ("_looked_up", "_growth")
    caches_prefixes = True

    @classmethod
    def build(cls, b: "Builder") -> Self:
        b.refuse_windows("memory=retained")
        return cls(b.limits, Worth.of(b), b.options(RetentionOptions).swap_out_threshold)

    def __init__(self, limits: Limits, worth: Worth, threshold: float) -> None:
        """`threshold`: share of the GPU's blocks that are to be free or to have a copy on the host."""
        super().__init__(limits)
        self.worth = worth
        self.store = ChunkStore(limits.num_cpu_blocks, self._cost_s)
        self.gpu = BlockPool(self.gpu.name, self.gpu.num_blocks, self.store)
        self.least_spare = int(threshold * limits.num_gpu_blocks)
        self.chain = BlockChain(limits.block_size)
        self.tier = TierCounters(num_blocks=limits.num_cpu_blocks)
        self._growth: tuple[float, float] | None = None
        self._keys: dict[Sequence, tuple[int, ...]] = {}
        # Of sequences with blocks: the chunks that were hit; and, while there is something to compute, where they are.
        self._hits: dict[Sequence, list[Chunk]] = {}
        self._places: dict[Sequence, tuple[int, ...]] = {}
        self._looked_up: tuple[Sequence | None, int, Found] = (None, -1, NOTHING)
        self._loading: list[Chunk] = []
        # One preempted twice may send the same out again before it has arrived: of equal moves the first ends first.
        self._leaving: dict[Move, list[list[Chunk]]] = {}
        self._tells = False
        # The store's version when chunks were to be copied to the host last, and it had no room.
        self._stuck_at = -1

    def bind(self, scheduler: "Scheduler") -> None:
        super().bind(scheduler)
        scheduler.counters.tiers["host"] = self.tier

    def tell_blocks(self) -> None:
        from sim.kv.telling import TellingChunks  # noqa: PLC0415

        self.store = self.gpu.index = TellingChunks(self.store.num_host, self._cost_s, self.scheduler)
        self._tells = True

    def name_blocks(self, seq: Sequence, keys: tuple[int, ...]) -> None:
        known = self._keys[seq]
        named = self.chain.named((key for key in known if key < FIRST_PRIVATE_KEY), keys)
        self._keys[seq] = (*named, *known[len(named) :])

    @property
    def num_cached_on_host(self) -> int:
        return self.store.num_host - self.store.host_free

    def _cost_s(self, place: int) -> float:
        """Of computing the block at a place again: b s + c s (2 x + s) of a prefill that takes a + b x + c x^2."""
        if self._growth is None:
            length = max(4, self.limits.max_model_len // 4 * 4)
            quarter_s, half_s, whole_s = (self.worth.spans_s(((0, length // part),)) for part in (4, 2, 1))
            square = max(0.0, (whole_s - 3 * half_s + 2 * quarter_s) * 8 / 3 / length**2)
            self._growth = max(1e-9, 2 * (whole_s - half_s) / length - 1.5 * square * length), square
        linear, square = self._growth
        size = self.block_size
        return linear * size + square * size * (2 * place * size + size)

    # -- looking up --------------------------------------------------------------------------------------------------

    def look_up(self, seq: Sequence, *, is_next: bool = True) -> None:
        if seq not in self._keys:
            self._keys[seq] = self.chain.of(seq)

    def cached_tokens(self, seq: Sequence) -> int:
        found = self._find(seq)
        return (len(found.on_gpu) + len(found.to_load)) * self.block_size

    def _find(self, seq: Sequence) -> Found:
        known, version, found = self._looked_up
        if known is seq and version == self.store.version:
            return found
        chunks, on_gpu, to_load, num_idle = self.store.chunks, [], [], 0
        keys = self._keys[seq] if seq in self._keys else self.chain.named_of(seq.request)
        for place, key in enumerate(keys[: (seq.num_tokens - 1) // self.block_size]):
            chunk = chunks.get(key)
            if chunk is not None and chunk.on_gpu:
                on_gpu.append(place)
                num_idle += not chunk.users
            elif chunk is not None and chunk.on_host:
                to_load.append(place)
        if to_load and self._saved_s(seq, on_gpu, to_load) < 0.0:
            to_load = []
        found = Found(tuple(on_gpu), tuple(to_load), num_idle)
        self._looked_up = seq, self.store.version, found
        return found

    def _saved_s(self, seq: Sequence, on_gpu: list[int], to_load: list[int]) -> float:
        """By how much it is sooner computed, alone and in one iteration, if blocks are loaded for it, s."""
        without = self._gaps(seq, on_gpu)
        loaded = self._gaps(seq, sorted((*on_gpu, *to_load)))
        return self.worth.spans_s(without) - self.worth.spans_s(loaded, len(to_load))

    def _gaps(self, seq: Sequence, places: list[int] | tuple[int, ...]) -> list[Span]:
        """Tokens of a prompt that are in none of these blocks."""
        return gaps(places, self.block_size, seq.num_tokens)

    # -- prompts -----------------------------------------------------------------------------------------------------

    def blocks_wanted(self, seq: Sequence, num_tokens: int) -> int:
        found = self._find(seq)
        return self._blocks_through(found, num_tokens) - len(found.on_gpu) + found.num_idle

    def _blocks_through(self, found: Found, num_tokens: int) -> int:
        """Those of so many tokens that count as computed, and of the gaps before what is hit: its place is held."""
        last_hit = max((*found.on_gpu[-1:], *found.to_load[-1:]), default=-1)
        return max(self.blocks_holding(num_tokens), last_hit + 1)

    def take(self, seq: Sequence, num_tokens: int) -> None:
        self.look_up(seq)
        found, store = self._find(seq), self.store
        keys, size = self._keys[seq], self.block_size
        places = sorted((*found.on_gpu, *found.to_load))
        if found.to_load:
            self.tier.num_loads += 1
            self.tier.hit_tokens += len(found.to_load) * size
            self.tier.saved_s += self._saved_s(seq, list(found.on_gpu), list(found.to_load))
        store.now(self.scheduler.now_s)
        hits = self._hits[seq] = [store.chunks[keys[place]] for place in places]
        self._places[seq] = tuple(places)
        num_idle = sum([store.hold(chunk) for chunk in hits])
        for place in found.to_load:
            chunk = store.chunks[keys[place]]
            chunk.copies += 1
            self._loading.append(chunk)
        blocks = seq.num_blocks = self._blocks_through(found, num_tokens)
        self.gpu.allocate(num_idle)
        self.gpu.allocate(blocks - len(found.on_gpu))
        seq.num_computed = len(places) * size
        missed = sum(end - begin for begin, end in self._gaps(seq, places)[:-1])
        if missed:
            self.scheduler.counters.policy["refilled_tokens"] += missed
        if self._tells:
            self.scheduler.changes += (Hit(seq, place, 1, store.chunks[keys[place]]) for place in found.on_gpu)
        self.scheduler.changes.append(Place(seq, ALL_LAYERS, blocks, 0))
        if self._tells:
            self._tell_loads(seq, [store.chunks[keys[place]] for place in found.to_load])

    def receive(self, seq: Sequence, num_tokens: int) -> int:
        self.look_up(seq)
        return super().receive(seq, num_tokens)

    def _tell_loads(self, seq: Sequence, chunks: list[Chunk]) -> None:
        """They come to the GPU, and are cached there from now on."""
        changes = self.scheduler.changes
        changes += (Load(seq, chunk.place, (chunk.key,)) for chunk in chunks)
        changes += (Keep(seq, chunk.place, 1, chunk) for chunk in chunks)

    def complete(self, plan: IterationPlan) -> None:
        if self._loading:
            plan.streamed += (Streamed(1, len(self._loading), 0),)
        split_by_gap(plan, self._places, self.block_size)

    def committed(self, plan: IterationPlan, times: StepTimes) -> None:
        for chunk in self._loading:
            chunk.copies -= 1
        self._loading.clear()

    # -- the way out -------------------------------------------------------------------------------------------------

    def release(self, seq: Sequence) -> None:
        ended = self.has_left(seq)
        keys, hits = self._keys[seq], self._hits.pop(seq, [])
        store = self.store
        store.now(seq.last_token_s if ended else self.scheduler.now_s)
        held = {chunk.key for chunk in hits}
        computed = [place for place in self._computed(seq) if place < len(keys) and keys[place] not in held]
        kept = [place for place in computed if not ended or keys[place] < FIRST_PRIVATE_KEY]
        self.gpu.release(seq.num_blocks - len(hits) + sum(chunk.users == 1 for chunk in hits))
        for chunk in hits:
            store.let_go(chunk, seq)
        for place in kept:
            store.put(keys[place], place, seq)
        seq.num_blocks = 0
        self._places.pop(seq, None)
        if ended:
            self.forget(seq)
        self.scheduler.changes.append(Release(seq))

    def _computed(self, seq: Sequence) -> list[int]:
        """Places of full blocks whose KV is there."""
        size, places = self.block_size, self._places.get(seq, ())
        if not seq.prefilling:
            return list(range(max(seq.num_computed, seq.num_tokens - 1) // size))
        hit, done = set(places), seq.num_computed - len(places) * size
        others = (place for place in range(seq.num_tokens // size) if place not in hit)
        return [*places, *(place for place, _ in zip(others, range(done // size), strict=False))]

    def forget(self, seq: Sequence) -> None:
        for key in self._keys.pop(seq, ()):
            if key >= FIRST_PRIVATE_KEY:
                self.store.drop(key)

    @property
    def num_evicted(self) -> int:
        return self.store.num_evicted

    def recount(self) -> tuple[int, int]:
        gpu, host = super().recount()
        held = [chunk for hits in self._hits.values() for chunk in hits]
        return gpu - len(held) + len(set(held)), host

    # -- ahead of need -----------------------------------------------------------------------------------------------

    @property
    def _spare(self) -> int:
        """Blocks that are free, or whose content the host has or is being given."""
        return self.gpu.free - self.store.num[DIRTY]

    def prepare(self, now_s: float) -> None:
        lacking = self.least_spare - self._spare
        chosen = self.store.send_out(lacking) if lacking > 0 else []
        self._stuck_at = self.store.version if lacking > 0 and not chosen else -1
        self.tier.stored_blocks += len(chosen)
        self.tier.evicted_blocks = self.store.num_evicted_host
        chosen.sort(key=lambda chunk: (chunk.owner.request.request_id, chunk.place))
        for _, group in groupby(chosen, key=lambda chunk: chunk.owner.request.request_id):
            chunks, size = list(group), self.block_size
            begin, end = chunks[0].place * size, (chunks[-1].place + 1) * size
            if self._tells:
                places, keys = (tuple(chunk.place for chunk in chunks), tuple(chunk.key for chunk in chunks))
                self.scheduler.changes.append(Store(chunks[0].owner, places, keys, tuple(chunks)))
            move = Move(chunks[0].owner, ALL_LAYERS, begin, end, Tier.GPU, Tier.HOST, len(chunks), 0, True)
            self._leaving.setdefault(move, []).append(chunks)
            self.scheduler.beside.append(move)

    def repeats(self, plan: IterationPlan, steps: int) -> int:
        steps = 1 if self._loading else super().repeats(plan, steps)
        if steps > 1 and self.store.num[DIRTY] and self.store.num_host:
            room = self._spare - self.least_spare
            if self._stuck_at == self.store.version:
                # Until something is evicted, which makes room on the host.
                room = self.gpu.free - self.store.num_idle
            # The first iteration's blocks are taken already.
            return max(1, min(steps, self.batch.steps_within(room + self.batch.blocks_needed(1)))) if room >= 0 else 1
        return steps

    def transfer_done(self, move: Move) -> None:
        under_way = self._leaving[move]
        self.store.arrived(under_way.pop(0))
        if not under_way:
            del self._leaving[move]
