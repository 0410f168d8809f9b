"""`DocumentTier`: KV of parts of prompts on the host, hit by content wherever they stand, a share computed again.

Yao et al., "CacheBlend: Fast Large Language Model Serving for RAG with Cached Knowledge Fusion" (EuroSys 2025). KV of a
passage that was computed behind other text lacks attention to what stands before it now. So a share of the tokens hit,
those that deviate most, is computed again in each layer while the next layer's KV is loaded. Which these are is found
by computing all of them in the first layer. Without a share it is Prompt Cache (Gim et al., MLSys 2024).

The trace's `hash_ids` say what is equal. Each prompt has GPU blocks of its own: positions, and so keys, differ.
"""

from typing import TYPE_CHECKING, ClassVar

from sim.engine.limits import Limits
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence
from sim.errors import UserError
from sim.kv.document_options import DocumentOptions
from sim.kv.gaps import Places, gaps, split_by_gap
from sim.kv.index.block_keys import BlockKeys
from sim.kv.index.prefix_index import Keys
from sim.kv.paged import PagedMemory
from sim.kv.prefix import PrefixMemory
from sim.kv.tiered import HostTier
from sim.kv.tiers.replacement import Access
from sim.kv.tiers.worth import Worth

if TYPE_CHECKING:
    from sim.systems.builder import Builder


class DocumentTier(HostTier):
    """A cache of contents on the host; on the GPU nothing is shared."""

    name: ClassVar[str] = "documents"
    options: ClassVar[type | None] = DocumentOptions
    shares: ClassVar[bool] = False
    unexecutable: ClassVar[str] = (
        "memory=documents takes KV from other places of other prompts, which the runtime does not turn to new "
        "positions; serve with --policy vllm-v1"
    )
    caveat: ClassVar[str] = (
        "memory=documents: KV is reused behind other text than it was computed behind; memory and time alone, what it "
        "does to answers is not simulated"
    )
    memoized = ("_looked_up",)

    @classmethod
    def build(cls, b: "Builder") -> PagedMemory:
        b.refuse_windows("memory=documents")
        if b.offloading.offloads:
            raise UserError("--kv-offloading-size: goes with memory=paged, not documents, which has its own host cache")
        share, layers = b.options(DocumentOptions).recompute_share, b.deployment.model.num_layers
        share = share + (1.0 - share) / layers if share else 0.0
        return PrefixMemory.build(b, cls(b.limits, Worth.of(b), share))

    def __init__(self, limits: Limits, worth: Worth, share: float) -> None:
        """`share`: of the blocks hit, those computed again, the first layer's included."""
        super().__init__(limits, worth)
        self.share = share
        self._block_keys = BlockKeys(limits.block_size)
        # The last prompt that was looked up, the cache's version then, the blocks it would load, and the s saved.
        self._looked_up: tuple[Sequence | None, int, Places, float] = (None, -1, (), 0.0)
        # Of sequences with blocks: those that count as computed though they were loaded.
        self._kept_of: dict[Sequence, Places] = {}

    def keys_of(self, seq: Sequence) -> Keys:
        request = seq.request
        return self._block_keys.of(request)[: request.prompt_tokens // self.block_size] if request.hash_ids else ()

    # -- what a prompt hits ------------------------------------------------------------------------------------------

    def found(self, seq: Sequence, first: int) -> Places:
        return self._kept(self._hits(seq)[0])

    def _hits(self, seq: Sequence) -> tuple[Places, float]:
        """Blocks that are loaded, and the s saved, by price; none where computing the whole prompt is sooner."""
        known, version, places, saved_s = self._looked_up
        if known is not seq or version != self.cache.version:
            chunks = enumerate(map(self.cache.get, self._names(seq)[: (seq.num_tokens - 1) // self.block_size]))
            places = tuple(place for place, chunk in chunks if chunk is not None and chunk.num_copies >= 0)
            saved_s = self._sooner_s(seq, places) if places else 0.0
            if saved_s < 0.0:
                places = ()
            self._looked_up = seq, self.cache.version, places, saved_s
        return places, saved_s

    def _kept(self, places: Places) -> Places:
        """Of blocks that are loaded, those that are not computed again; the others are spread evenly."""
        share = self.share
        return tuple(place for i, place in enumerate(places) if int((i + 1) * share) == int(i * share))

    def _sooner_s(self, seq: Sequence, places: Places) -> float:
        """By how much it is sooner computed, alone and in one iteration, with these loaded, s."""
        left = gaps(self._kept(places), self.block_size, seq.num_tokens)
        return self.worth.spans_s(((0, seq.num_tokens),)) - self.worth.spans_s(left, len(places))

    def taken(self, seq: Sequence, found: Places) -> None:
        hits, saved_s = self._hits(seq)
        if hits:
            self._kept_of[seq] = found
            access, tier = self._access(seq), self.tier
            tier.num_loads += 1
            tier.hit_tokens += len(found) * self.block_size
            tier.saved_s += saved_s
            self.scheduler.counters.policy["blended_tokens"] += (len(hits) - len(found)) * self.block_size
            self.cache.read(access, hits)
            self._loading.append((seq, access, hits))

    def complete(self, plan: IterationPlan) -> None:
        super().complete(plan)
        split_by_gap(plan, self._kept_of, self.block_size)

    # -- the way out -------------------------------------------------------------------------------------------------

    def keeps(self, seq: Sequence) -> bool:
        self._kept_of.pop(seq, None)
        return super().keeps(seq)

    def _offer(self, seq: Sequence, access: Access, num_blocks: int) -> list[int]:
        # A passage that stands twice in a prompt is kept once.
        places = sorted({key: place for place, key in reversed(tuple(enumerate(access.keys)))}.values())
        return self.cache.offer(access, places) or []
