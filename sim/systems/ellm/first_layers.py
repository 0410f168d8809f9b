"""`FirstLayersAgain`: eLLM's memory, plans of which can be executed: first layers compute again, last ones are copied.

To compute a layer's KV again takes the layer's inputs, and these take all layers before it. In the paper's windows
(section 4.3.1) copied layers lie between those that compute, and nothing gives their outputs; of contiguous layers the
first can compute again and the others be copied (as HCache orders them). As many layers do either as in the windows.

Whole blocks are uncached, so that each leaves once and for all: none has tokens on both tiers.
"""

from collections.abc import Iterable
from operator import itemgetter

from sim.engine.changes import Uncache
from sim.engine.sequence import Sequence
from sim.systems.ellm.equations import Configuration
from sim.systems.ellm.token_wise import TokenWiseMemory


class FirstLayersAgain(TokenWiseMemory):
    """`TokenWiseMemory` in contiguous order.

    The host has the uncached tokens of a sequence in its last layer groups, as many as the configuration says. Where it
    has fewer (it is full, or had fewer when the configuration changed), the pass computes more layers again; what it
    makes then goes to the host if there is room.
    """

    unexecutable = ""

    def _uncached_of(self, num_tokens: int) -> int:
        return super()._uncached_of(num_tokens) // self.block_size * self.block_size

    def _kept(self, seq: Sequence) -> int:
        """Layer groups in which the host has the tokens that a sequence lacks."""
        return self._hosted_blocks[seq] * self.block_size // self.lacking[seq]

    def _uncache(self, seq: Sequence, num_tokens: int, kept: int, num_blocks: int) -> Uncache:
        scratch = self._scratch if num_tokens else 0
        return Uncache(seq, num_tokens, scratch, self.all_groups[self.num_groups - kept :], num_blocks)

    # -- prompts -----------------------------------------------------------------------------------------------------

    def place(self, seq: Sequence, num_tokens: int) -> None:
        if uncached := self._uncached_of(seq.num_tokens):
            self.scheduler.changes.append(self._uncache(seq, uncached, self._hosted, 0))
        super().place(seq, num_tokens)

    def _sent_behind(self, seq: Sequence, num_tokens: int) -> tuple[tuple[int, ...], int]:
        return self.all_groups[self.num_groups - self._kept(seq) :], self.uncached[seq]

    # -- decodes -----------------------------------------------------------------------------------------------------

    def choose(self, ratio: float, configuration: Configuration) -> None:
        batch = self.batch
        if ratio == 0.0 and not self.uncached:
            self.ratio = ratio
            return
        before = {seq: self._gpu_blocks(0, self.uncached.get(seq, 0)) for seq in batch.members}
        if ratio > 0.0:
            self._set(configuration)
        self.ratio = ratio
        wanted = {seq: self._uncached_of(batch.num_tokens_of(seq)) for seq in batch.members}
        more = [(self._gpu_blocks(0, wanted[seq]) - held, seq) for seq, held in before.items()]
        # Those that give up blocks come first: others may need these.
        for blocks, seq in sorted(more, key=itemgetter(0)):
            self._leave(seq, wanted[seq], blocks)

    def _leave(self, seq: Sequence, uncached: int, more_on_gpu: int) -> None:
        """`uncached` tokens of a sequence are, which takes so many more GPU blocks; new ones among them leave."""
        lacking, host = self.lacking.get(seq, 0), self.host
        blocks = max(lacking, uncached) // self.block_size
        if not blocks:
            return
        held, had = self._hosted_blocks.get(seq, 0), self._kept(seq) if lacking else self._hosted
        # What the host has no room for is computed again.
        kept = min(had, self._hosted, (held + host.free) // blocks)
        leaving = (blocks - lacking // self.block_size) * kept
        if more_on_gpu or leaving or kept != had or uncached != self.uncached.get(seq, 0):
            self.scheduler.changes.append(self._uncache(seq, uncached, kept, leaving))
        self._swapped_out += leaving
        self._hold_on_host(seq, blocks * kept)
        if more_on_gpu > 0:
            self.gpu.allocate(more_on_gpu)
        else:
            self.gpu.release(-more_on_gpu)
        self.lacking[seq] = blocks * self.block_size
        if uncached:
            self.uncached[seq] = uncached
        else:
            self.uncached.pop(seq, None)

    def _hold_on_host(self, seq: Sequence, blocks: int) -> None:
        more = blocks - self._hosted_blocks.get(seq, 0)
        if more > 0:
            self.host.allocate(more)
        else:
            self.host.release(-more)
        self._hosted_blocks[seq] = blocks

    def _recomputed(self, lacking: Iterable[Sequence]) -> tuple[int, ...]:
        kept = min(map(self._kept, lacking))
        own = self.configuration.recomputed_layers(self.num_layers)
        return tuple(range(max(own, (self.num_groups - kept) * self.layers_per_block)))

    def _update_host(self, lacking: dict[Sequence, int]) -> tuple[int, tuple[Uncache, ...]]:
        after: list[Uncache] = []
        for seq, tokens in lacking.items():
            uncached, had = self.uncached.get(seq, 0), self._kept(seq)
            more = uncached // self.block_size * (self._hosted - had)
            kept = self._hosted if more <= self.host.free else had
            after.append(self._uncache(seq, uncached, kept, uncached // self.block_size * (kept - had)))
            self._hold_on_host(seq, tokens // self.block_size * had + after[-1].num_blocks)
        # What the pass reads is free once it has what comes.
        for change in after:
            self._hold_on_host(change.seq, change.num_tokens // self.block_size * len(change.groups))
        return sum(change.num_blocks for change in after), tuple(after)
