"""`PrefixBlocks`: blocks that sequences share with each other and with the caches, and what of them is yet to compute.

Blocks here are of all layers, and a sequence's are those of its one group.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from gpu_runtime.kv.block_ids import BlockIds
from gpu_runtime.kv.replay.cached_blocks import CachedBlocks
from gpu_runtime.kv.replay.held import Held, Holders
from gpu_runtime.kv.replay.hosted_blocks import HostedBlocks
from sim.engine.changes import Hit, Keep, Load
from sim.engine.sequence import Sequence

Span = tuple[Sequence, int, int]
"""Tokens [first, end) of a sequence."""


class PrefixBlocks:
    """Carries out the changes of a plan that share blocks.

    Args:
        gpu: the pool of ids.
        cached, hosted: what is cached of that pool, and of the host's.
        held: what sequences hold.
        block_tokens: tokens of a block.
    """

    def __init__(
        self, gpu: BlockIds, cached: CachedBlocks, hosted: HostedBlocks, held: Holders, block_tokens: int
    ) -> None:
        self._gpu, self._cached, self._hosted, self._held = gpu, cached, hosted, held
        self._block_tokens = block_tokens
        # Blocks that those about to be placed hit, by place.
        self._hits: dict[Sequence, dict[int, int]] = {}

    def take(self, seq: Sequence, held: Held, num_blocks: int) -> list[int]:
        """The blocks of a sequence that is placed now: what it hits, and new ones."""
        hits = self._hits.pop(seq, {})
        ids = self._gpu.allocate(num_blocks - len(hits))
        for place in sorted(hits):
            ids.insert(place, hits[place])
        self._there(held, hits)
        return ids

    def _there(self, held: Held, places: Iterable[int]) -> None:
        """The KV of blocks at these places is there, whatever is missing before them."""
        size = self._block_tokens
        held.ahead.update(place for place in places if place * size >= held.num_written)
        while held.num_written // size in held.ahead:
            held.ahead.remove(held.num_written // size)
            held.num_written = (held.num_written // size + 1) * size

    def hit(self, hit: Hit) -> None:
        """A sequence has a cached run in its place: one that is about to be placed, or instead of its own blocks."""
        seq, first, num_blocks = hit.seq, hit.first_block, hit.num_blocks
        ids = self._cached.hit(hit.run, num_blocks)
        if (held := self._held.get(seq)) is None:
            self._hits.setdefault(seq, {}).update(enumerate(ids, first))
            return
        own = slice(first, first + num_blocks)
        self._gpu.free(held.gpu[0][own])
        held.gpu[0][own] = ids
        held.version += 1

    def keep(self, keep: Keep) -> None:
        """Blocks of a sequence are cached."""
        self._cached.keep(keep.run, self._blocks_of(keep.seq, keep.first_block, keep.num_blocks))

    def load(self, load: Load) -> None:
        """What it fills can be hit at once: a sequence that reads it is computed in the same pass, or later."""
        held, first = self._held[load.seq], load.first_block
        end = first + len(load.keys)
        self._cached.unwritten.update(self._hosted.load(load, held.gpu[0][first:end]))
        self._there(held, range(first, end))

    def _blocks_of(self, seq: Sequence, first: int, count: int) -> list[int]:
        """Some blocks of a sequence, which are or will be cached; those that it is yet to grow by among them."""
        held = self._held[seq]
        ids, end = held.gpu[0], first + count
        if len(ids) < end:
            ids += self._gpu.allocate(end - len(ids))
            held.version += 1
        # A prompt's blocks can be hit before they are computed, in the same iteration.
        begin = max(first, held.num_written // self._block_tokens)
        self._cached.unwritten.update(ids[place] for place in range(begin, end) if place not in held.ahead)
        return ids[first:end]

    def is_written(self, held: Held, place: int) -> bool:
        """Whether the KV of a full block at a place is there."""
        return place < held.num_written // self._block_tokens or place in held.ahead

    # -- what is computed --------------------------------------------------------------------------------------------

    def to_compute(self, spans: Seq[Span]) -> Seq[Span]:
        """The spans that sequences are to compute, each begun early enough that all it reads is there.

        What a plan leaves out as cached may never have been computed: the sequence that was to do so was
        preempted in the same step, or failed.
        """
        unwritten = self._cached.unwritten
        if not unwritten:
            return spans
        size = self._block_tokens
        missing = unwritten - {block for span in spans for block in self._written_by(*span)}
        found: list[Span] = []
        for seq, first, end in spans:
            before = self._held[seq].gpu[0][: first // size]
            early = next((i * size for i, block in enumerate(before) if block in missing), first)
            found.append((seq, early, end))
        return found

    def computed(self, spans: Seq[Span]) -> None:
        """These spans have been computed: their KV is there."""
        for seq, first, end in spans:
            held = self._held[seq]
            if held.num_written >= first:
                held.num_written = max(end, held.num_written)
                if held.ahead:
                    self._there(held, ())
                self._cached.unwritten.difference_update(self._written_by(seq, first, end))

    def _written_by(self, seq: Sequence, first: int, end: int) -> list[int]:
        return self._held[seq].gpu[0][first // self._block_tokens : -(-end // self._block_tokens)]

    def spoil(self, seq: Sequence, blocks: set[int]) -> None:
        """The KV of `blocks` was lost on its way here, and with it what `seq` has computed after them."""
        held = self._held[seq]
        ids = held.gpu[0]
        first = next(place for place, block in enumerate(ids) if block in blocks)
        self._cached.unwritten.update(ids[first:])
        held.num_written = min(held.num_written, first * self._block_tokens)
        held.ahead = {place for place in held.ahead if place < first}
