"""`CachingMemory`: blocks on demand of which a sequence may hit some, which others hold or left."""

from sim.engine.sequence import Sequence
from sim.kv.paged import PagedMemory


class CachingMemory(PagedMemory):
    """What a sequence wants is what it does not hit (`blocks_wanted`); what it hits is counted when it starts."""

    def fits(self, seq: Sequence, keep_free: int) -> bool:
        return self.gpu.free - self.blocks_wanted(seq, seq.num_tokens) >= keep_free

    def place(self, seq: Sequence, keep_free: int) -> None:
        self.place_chunk(seq, seq.num_tokens)

    def place_chunk(self, seq: Sequence, num_tokens: int) -> None:
        self.take(seq, num_tokens)
        self.count_hits(seq, seq.num_computed)
