"""`PrefixMemory`: paged blocks whose content others may hit (vLLM's automatic prefix caching).

Prompts whose first `hash_ids` are equal begin alike. A prompt is admitted with the longest cached prefix, but for its
last token, which must be computed; the blocks of those that ended stay until room is needed, the longest unused first.
Blocks without ids (private prompts, generated tokens) can only be hit by their own sequence, computed again.
"""

from typing import TYPE_CHECKING, Final

from sim.engine.changes import Move, Place, Release
from sim.engine.limits import Limits
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence
from sim.kv.block_pool import BlockPool
from sim.kv.index.block_keys import BlockKeys
from sim.kv.index.prefix_index import Holding, Keys, Match, PrefixIndex
from sim.kv.memory import ALL_LAYERS
from sim.kv.paged import PagedMemory
from sim.parts.catalogue import STAGES, class_at
from sim.parts.stage.speculative_options import SpeculativeOptions

if TYPE_CHECKING:
    from sim.kv.backing import Backing
    from sim.systems.builder import Builder

NOTHING: Final = Match((), 0, 0, False)
FIRST_PRIVATE_KEY = 1 << 64
"""Beyond all ids that a trace may have."""


class PrefixMemory(PagedMemory):
    """Blocks on demand, shared where prefixes are."""

    can_swap = False
    caches_prefixes = True

    @classmethod
    def build(cls, b: "Builder", backing: "Backing | None" = None) -> PagedMemory:
        """`backing` stands behind the blocks, if anything does."""
        memory = cls(b.limits, backing, in_flight_hits=b.policy.is_unified)
        if backing is None and STAGES[b.names["stage"]].drafts and b.options(SpeculativeOptions).reads_next_token:
            memory.keys = class_at("sim.kv.lookahead:LookaheadKeys")(b.limits.block_size)
        return memory

    def __init__(self, limits: Limits, backing: "Backing | None" = None, *, in_flight_hits: bool = False) -> None:
        """`in_flight_hits`: what an iteration computes can be hit in the same one (vLLM v1)."""
        super().__init__(limits)
        self.in_flight_hits = in_flight_hits
        self.index = PrefixIndex(self.published)
        self.gpu = BlockPool(self.gpu.name, self.gpu.num_blocks, self.index)
        self.keys = BlockKeys(limits.block_size)
        self.backing = backing
        if backing is not None:
            backing.blocks = self
        # Of sequences whose blocks have keys, from their first look-up or preemption on.
        self.holdings: dict[Sequence, Holding] = {}
        self._next_private_key = FIRST_PRIVATE_KEY
        self._looked_up: tuple[Sequence | None, int, Match] = (None, -1, NOTHING)
        # Whether a sequence that decodes may lengthen what the next prompt would hit.
        self._may_grow = False
        # Tokens of each decode that are not computed yet, or, from when this step's are taken, not about to be.
        self._num_pending = 1

    def tell_blocks(self) -> None:
        if self.backing is not None:
            self.backing.tell_blocks()
        # Runs that are not executed have no ids to keep.
        from sim.kv.telling import TellingIndex  # noqa: PLC0415

        self.index = self.gpu.index = TellingIndex(self.published, self.scheduler)

    def name_blocks(self, seq: Sequence, keys: tuple[int, ...]) -> None:
        if self.backing is not None:
            keys = self.backing.name_blocks(seq, keys)
        self.index.extend(self.holdings[seq], keys)

    # -- looking up --------------------------------------------------------------------------------------------------

    def look_up(self, seq: Sequence, *, is_next: bool = True) -> None:
        if self.backing is not None:
            self.backing.look_up(seq)
        match = self.published_match(seq)
        if is_next:
            self._may_grow = match.growing

    def cached_tokens(self, seq: Sequence) -> int:
        blocks = self.match(seq).num_blocks
        if self.backing is not None:
            blocks += len(self.backing.found(seq, blocks))
        return blocks * self.block_size

    def published_match(self, seq: Sequence) -> Match:
        """`match`, with the sequences that lengthen what it hits brought up to date."""
        known, version, match = self._looked_up
        if known is seq and version == self.index.version:
            return match
        holding = self.holdings.get(seq)
        if holding is None:
            if not seq.request.hash_block_tokens:
                return NOTHING
            holding = self.holdings[seq] = Holding(seq, self._keys_of(seq))
        match = self.index.publish_and_match(holding.keys, self._limit(seq, holding.keys))
        self._looked_up = (seq, self.index.version, match)
        return match

    def match(self, seq: Sequence) -> Match:
        """What `seq` would hit of others', or of its own if computed again; all but its last token at most."""
        known, version, match = self._looked_up
        if known is seq and version == self.index.version:
            return match
        holding = self.holdings.get(seq)
        if holding is not None:
            return self.index.match(holding.keys, self._limit(seq, holding.keys))
        if not seq.request.hash_block_tokens:
            return NOTHING
        keys = self._keys_of(seq)
        return self.index.match(keys, self._limit(seq, keys))

    def _keys_of(self, seq: Sequence) -> Keys:
        if self.backing is None:
            return self.keys.of(seq.request)
        return self.backing.keys_of(seq) if self.backing.shares else ()

    def _limit(self, seq: Sequence, keys: Keys) -> int:
        return min((seq.num_tokens - 1) // self.block_size, len(keys))

    def published(self, seq: Sequence) -> tuple[int, int]:
        """Full blocks of a sequence that runs, and its tokens."""
        batch = self.batch
        if seq in batch.members:
            tokens = batch.num_tokens_of(seq)
            return (tokens - self._num_pending - self.scheduler.num_unknown(seq)) // self.block_size, tokens
        if seq in self.scheduler.last_in_flight:
            return (seq.num_tokens - 1 - self.scheduler.num_unknown(seq)) // self.block_size, seq.num_tokens
        return self.full_blocks(seq), seq.num_tokens

    def full_blocks(self, seq: Sequence) -> int:
        """Full blocks of a sequence that is in no batch: the last token's KV is yet to be computed."""
        if self.backing is not None and not self.backing.shares:
            return 0
        known = seq.num_computed if seq.prefilling else max(seq.num_computed, seq.num_tokens - 1)
        return min(known, seq.num_tokens - self.keys.num_ahead) // self.block_size

    # -- prompts ---------------------------------------------------------------------------------------------------

    def blocks_wanted(self, seq: Sequence, num_tokens: int) -> int:
        match, blocks = self.match(seq), -(-num_tokens // self.block_size)
        # Idle hits are free blocks as well, until they are taken.
        return blocks - match.num_blocks + match.num_idle

    def take(self, seq: Sequence, num_tokens: int) -> None:
        match, backing = self.published_match(seq), self.backing
        found = range(0) if backing is None else backing.found(seq, match.num_blocks)
        self.hold(seq, match, -(-num_tokens // self.block_size))
        seq.num_computed = (match.num_blocks + len(found)) * self.block_size
        self._may_grow = False
        if backing is not None:
            backing.taken(seq, found)

    def complete(self, plan: IterationPlan) -> None:
        # What can be hit in the iteration that computes it was published when that was decided.
        if self.holdings and not self.in_flight_hits:
            for chunk in plan.chunks:
                self.publish(chunk.seq, chunk.num_cached + chunk.num_new)

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """The first `num_tokens` tokens of `seq` are computed: what they fill can be hit."""
        holding = self.holdings.get(seq)
        if holding is not None:
            self.index.publish(holding, num_tokens // self.block_size)

    # -- from other engines --------------------------------------------------------------------------------------------

    def look_up_received(self, seq: Sequence) -> None:
        self._may_grow |= self.published_match(seq).growing

    def fits_received(self, seq: Sequence, keep_free: int) -> bool:
        return self.fits(seq, keep_free)

    def receive(self, seq: Sequence, num_tokens: int) -> int:
        if self.backing is not None:
            self.backing.received(seq)
        # What is cached here is not sent.
        match, blocks = self.published_match(seq), -(-num_tokens // self.block_size)
        self.hold(seq, match, blocks)
        self.scheduler.counters.policy["unsent_blocks"] += match.num_blocks
        return blocks - match.num_blocks

    def hold(self, seq: Sequence, match: Match, num_blocks: int) -> None:
        """`seq` has so many blocks, those of its match among them."""
        seq.num_blocks = num_blocks
        if (holding := self.holdings.get(seq)) is not None:
            self.index.take(holding, match)
            self.gpu.allocate(match.num_idle)
        self.gpu.allocate(num_blocks - match.num_blocks)
        self.scheduler.changes.append(Place(seq, ALL_LAYERS, num_blocks, 0))

    # -- decodes -----------------------------------------------------------------------------------------------------

    def take_decodes(self, num_blocks: int) -> None:
        """What that fills can be hit from now on, where in-flight hits are."""
        if num_blocks:
            self.gpu.allocate(num_blocks)
        if self.in_flight_hits:
            self._num_pending = 0
            if self._looked_up[2].growing:
                # It was looked up before they were taken.
                self._looked_up = (None, -1, NOTHING)

    def catch_up(self) -> None:
        """From now on the batch may not grow in step: publish what it has filled so far."""
        batch, size, late = self.batch, self.block_size, []
        members, computed = batch.members, batch.step - self._num_pending
        for seq, holding in self.holdings.items():
            # At most so many are full: most have published them, and need no closer look.
            most = (seq.batch_offset + computed) // size
            if holding.num_blocks < most and holding.num_blocks < len(holding.keys) and seq in members:
                full, tokens = self.published(seq)
                if full > holding.num_blocks:
                    late.append((-tokens, holding.number, full, holding))
        for shortest, number, full, holding in sorted(late):
            self.index.publish(holding, full, (shortest, number))

    def prepare(self, now_s: float) -> None:
        self._num_pending = 1
        self._may_grow = False
        if self._looked_up[2].growing:
            # Decodes may have lengthened it since, unseen by the index.
            self._looked_up = (None, -1, NOTHING)

    def repeats(self, plan: IterationPlan, steps: int) -> int:
        """Not beyond an iteration where the next prompt may hit what it computes."""
        return 1 if self._may_grow else super().repeats(plan, steps)

    def may_leave(self, seq: Sequence) -> bool:
        return seq not in self.holdings

    # -- the way out -----------------------------------------------------------------------------------------------

    def release(self, seq: Sequence) -> None:
        if self.backing is None or not self.backing.keeps(seq):
            self.give_back(seq)

    def give_back(self, seq: Sequence) -> None:
        """`seq` holds nothing from now on, whatever is behind."""
        self._num_pending = 1
        full = self.full_blocks(seq)
        holding = self.holdings.get(seq)
        freed, held = seq.num_blocks, 0
        ended = seq.num_generated >= seq.output_tokens
        if not ended and full > (len(holding.keys) if holding is not None else 0):
            holding = self._name_private_blocks(seq)
        if holding is not None:
            # Others have been scheduled once more than one that was kept back.
            last = seq.prefilling or (ended and self.scheduler.batching.schedules_ahead)
            self.index.publish(holding, full, None if last else (-seq.num_tokens, holding.number))
            held = holding.num_blocks
        if full > held:
            self.index.rest(full - held)
        if holding is not None:
            freed += self.index.release(holding) - held
            if self.has_left(seq):
                del self.holdings[seq]
        self.gpu.release(freed)
        seq.num_blocks = 0
        self.scheduler.changes.append(Release(seq))

    def _name_private_blocks(self, seq: Sequence) -> Holding:
        """Keys for blocks that have none: a preempted sequence may hit its own when it comes back."""
        holding = self.holdings.get(seq)
        if holding is None:
            holding = self.holdings[seq] = Holding(seq, ())
        first, count = self._next_private_key, self._most_blocks(seq) - len(holding.keys)
        holding.keys += tuple(range(first, first + count))
        self._next_private_key += count
        return holding

    def _most_blocks(self, seq: Sequence) -> int:
        return seq.most_tokens // self.block_size

    def await_last_token(self, seq: Sequence) -> None:
        self._num_pending = 1
        if (holding := self.holdings.get(seq)) is not None:
            full = (seq.num_tokens - 2) // self.block_size
            self.index.publish(holding, full, (-seq.num_tokens, holding.number))

    def forget(self, seq: Sequence) -> None:
        self.holdings.pop(seq, None)
        if self.backing is not None:
            self.backing.forget(seq)

    def transfer_done(self, move: Move) -> None:
        if self.backing is not None:
            self.backing.transfer_done(move)
        else:
            super().transfer_done(move)

    @property
    def num_evicted(self) -> int:
        return self.index.num_evicted

    def recount(self) -> tuple[int, int]:
        gpu, host = super().recount()
        runs = {run for holding in self.holdings.values() for run in holding.runs}
        shared = sum(holding.num_blocks for holding in self.holdings.values())
        return gpu - shared + sum(run.num_blocks for run in runs), host
