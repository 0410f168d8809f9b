"""`DocumentMemory`: KV of parts of prompts on the host, hit by content wherever they stand, a share computed again.

Yao et al., "CacheBlend: Fast Large Language Model Serving for RAG with Cached Knowledge Fusion" (EuroSys 2025). KV of a
passage that was computed behind other text lacks attention to what stands before it now. So a share of the tokens hit,
those that deviate most, is computed again in each layer while the next layer's KV is loaded. Which these are is found
by computing all of them in the first layer. Without a share it is Prompt Cache (Gim et al., MLSys 2024).

The trace's `hash_ids` say what is equal. Each prompt has GPU blocks of its own: positions, and so keys, differ.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Self

from sim.engine.changes import Move, Streamed, Tier
from sim.engine.limits import Limits, TierCounters
from sim.engine.plan import IterationPlan, StepTimes
from sim.engine.sequence import Sequence, Status
from sim.errors import UserError
from sim.kv.document_options import DocumentOptions
from sim.kv.gaps import gaps, split_by_gap
from sim.kv.index.block_keys import BlockKeys
from sim.kv.memory import ALL_LAYERS
from sim.kv.paged import PagedMemory
from sim.kv.tiers.host_cache import HostCache
from sim.kv.tiers.replacement import Access
from sim.kv.tiers.worth import Worth

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler
    from sim.systems.builder import Builder

Places = tuple[int, ...]


class DocumentMemory(PagedMemory):
    """Blocks on demand, and a cache of their contents on the host."""

    name: ClassVar[str] = "documents"
    options: ClassVar[type | None] = DocumentOptions
    always_caches: ClassVar[bool] = True
    unexecutable: ClassVar[str] = (
        "memory=documents takes KV from other places of other prompts, which the runtime does not turn to new "
        "positions; serve with --policy vllm-v1"
    )
    caveat: ClassVar[str] = (
        "memory=documents: KV is reused behind other text than it was computed behind; memory and time alone, what it "
        "does to answers is not simulated"
    )
    memoized = ("_looked_up",)
    can_swap = False
    caches_prefixes = True

    @classmethod
    def build(cls, b: "Builder") -> Self:
        b.refuse_windows("memory=documents")
        if b.offloading.offloads:
            raise UserError("--kv-offloading-size: goes with memory=paged, not documents, which has its own host cache")
        share, layers = b.options(DocumentOptions).recompute_share, b.deployment.model.num_layers
        return cls(b.limits, Worth.of(b), share + (1.0 - share) / layers if share else 0.0)

    def __init__(self, limits: Limits, worth: Worth, share: float) -> None:
        """`share`: of the blocks hit, those computed again, the first layer's included."""
        super().__init__(limits)
        self.worth, self.share = worth, share
        self.cache = HostCache(limits.num_cpu_blocks)
        self.tier = TierCounters(num_blocks=limits.num_cpu_blocks)
        self._block_keys = BlockKeys(limits.block_size)
        # Of sequences that were looked up or run: what they did to the cache.
        self._accesses: dict[Sequence, Access] = {}
        # The last prompt that was looked up, the cache's version then, the blocks it would load, and the s saved.
        self._looked_up: tuple[Sequence | None, int, Places, float] = (None, -1, (), 0.0)
        # Of sequences with blocks: those that count as computed though they were loaded.
        self._places: dict[Sequence, Places] = {}
        self._loading: list[tuple[Sequence, Access, Places]] = []
        self._saving: dict[Sequence, list[int]] = {}

    def bind(self, scheduler: "Scheduler") -> None:
        super().bind(scheduler)
        scheduler.counters.tiers["host"] = self.tier

    def holders(self) -> Iterable[tuple[Sequence, Tier]]:
        return ((seq, Tier.GPU) for seq in self._saving)

    @property
    def num_cached_on_host(self) -> int:
        return self.cache.num_chunks - self.cache.num_free

    # -- what a prompt hits ------------------------------------------------------------------------------------------

    def look_up(self, seq: Sequence, *, is_next: bool = True) -> None:
        if seq not in self._accesses:
            self._accesses[seq] = Access(self._keys_of(seq))

    def _keys_of(self, seq: Sequence) -> tuple[int, ...]:
        request = seq.request
        return self._block_keys.of(request)[: request.prompt_tokens // self.block_size] if request.hash_ids else ()

    def cached_tokens(self, seq: Sequence) -> int:
        return len(self._kept(self._hits(seq)[0])) * self.block_size

    def _hits(self, seq: Sequence) -> tuple[Places, float]:
        """Blocks that are loaded, and the s saved, by price; none where computing the whole prompt is sooner."""
        known, version, places, saved_s = self._looked_up
        if known is not seq or version != self.cache.version:
            access = self._accesses.get(seq)
            keys = self._keys_of(seq) if access is None else access.keys
            chunks = enumerate(map(self.cache.get, keys[: (seq.num_tokens - 1) // self.block_size]))
            places = tuple(place for place, chunk in chunks if chunk is not None and chunk.num_copies >= 0)
            saved_s = self._saved_s(seq, places) if places else 0.0
            if saved_s < 0.0:
                places = ()
            self._looked_up = seq, self.cache.version, places, saved_s
        return places, saved_s

    def _kept(self, places: Places) -> Places:
        """Of blocks that are loaded, those that are not computed again; the others are spread evenly."""
        share = self.share
        return tuple(place for i, place in enumerate(places) if int((i + 1) * share) == int(i * share))

    def _saved_s(self, seq: Sequence, places: Places) -> float:
        """By how much it is sooner computed, alone and in one iteration, with these loaded, s."""
        left = gaps(self._kept(places), self.block_size, seq.num_tokens)
        return self.worth.spans_s(((0, seq.num_tokens),)) - self.worth.spans_s(left, len(places))

    # -- prompts -----------------------------------------------------------------------------------------------------

    def take(self, seq: Sequence, num_tokens: int) -> None:
        self.look_up(seq)
        hits, saved_s = self._hits(seq)
        super().take(seq, num_tokens)
        if hits:
            kept = self._places[seq] = self._kept(hits)
            seq.num_computed = len(kept) * self.block_size
            access, tier = self._accesses[seq], self.tier
            tier.num_loads += 1
            tier.hit_tokens += seq.num_computed
            tier.saved_s += saved_s
            self.scheduler.counters.policy["blended_tokens"] += (len(hits) - len(kept)) * self.block_size
            self.cache.read(access, hits)
            self._loading.append((seq, access, hits))

    def complete(self, plan: IterationPlan) -> None:
        # But for those that have lost their blocks in this step.
        if num_loaded := sum(len(places) for seq, _, places in self._loading if seq.num_blocks):
            plan.streamed += (Streamed(1, num_loaded, 0),)
        split_by_gap(plan, self._places, self.block_size)

    def repeats(self, plan: IterationPlan, steps: int) -> int:
        return 1 if self._loading else super().repeats(plan, steps)

    def committed(self, plan: IterationPlan, times: StepTimes) -> None:
        for _, access, places in self._loading:
            self.cache.done_reading(access.keys[place] for place in places)
        self._loading.clear()

    # -- the way out -------------------------------------------------------------------------------------------------

    def release(self, seq: Sequence) -> None:
        self._places.pop(seq, None)
        access = self._accesses.get(seq)
        if access is None or not self.has_left(seq):
            super().release(seq)
            return
        del self._accesses[seq]
        # A passage that stands twice in a prompt is kept once.
        places = sorted({key: place for place, key in reversed(tuple(enumerate(access.keys)))}.values())
        # Preempted with its last token in flight: its blocks are needed now.
        taken = [] if seq.status is Status.WAITING else self.cache.offer(access, places)
        self.cache.finish(access)
        self.tier.evicted_blocks = self.cache.num_evicted
        if not taken:
            super().release(seq)
            return
        self.tier.stored_blocks += len(taken)
        self._saving[seq] = [access.keys[place] for place in taken]
        first, end = taken[0] * self.block_size, (taken[-1] + 1) * self.block_size
        move = Move(seq, ALL_LAYERS, first, end, Tier.GPU, Tier.HOST, len(taken), seq.num_blocks, True)
        self.scheduler.beside.append(move)

    def transfer_done(self, move: Move) -> None:
        self.cache.written(self._saving.pop(move.seq))
        super().release(move.seq)

    def forget(self, seq: Sequence) -> None:
        super().forget(seq)
        self._accesses.pop(seq, None)
