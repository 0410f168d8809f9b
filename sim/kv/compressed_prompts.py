"""`CompressedPrompts`: whole blocks on demand, some of which a prompt gives up when it has been computed (SnapKV).

A prompt that is computed, in chunks or at once, holds the blocks of all its tokens. As it joins the batch it keeps
those of `KeptOfPrompt`: from then on its context is shorter by what was dropped. One that is computed again is a
prompt with all that it had generated, and is whole until then.
"""

from typing import TYPE_CHECKING, ClassVar, Self

from sim.engine.limits import Limits
from sim.engine.sequence import Sequence
from sim.errors import InvariantError, UserError
from sim.kv.paged import PagedMemory

if TYPE_CHECKING:
    from sim.systems.builder import Builder


class CompressedPrompts(PagedMemory):
    """As `PagedMemory`; `num_tokens` of a sequence that has joined counts what is kept of its prompt."""

    can_receive: ClassVar[bool] = False

    @classmethod
    def build(cls, b: "Builder") -> Self:
        for asked, refuses in (("kv-offloading-size", b.offloading.offloads), ("pools", b.deployment.role != "both")):
            if refuses:
                raise UserError(
                    f"{asked}: --sparse-attention drops part of each prompt, and whole ones move; leave one out"
                )
        return cls(b.limits)

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        if limits.kept_of_prompt is None:
            raise InvariantError("memory that compresses prompts needs to know how far")
        self._kept = limits.kept_of_prompt
        self._dropped: dict[Sequence, int] = {}

    def joined(self, seq: Sequence) -> None:
        if seq in self._dropped:
            return
        batch = self.batch
        is_first = next(iter(batch.members)) is seq
        batch.remove(seq)
        # Its last token is yet to be fed.
        computed = seq.num_tokens - 1
        kept = self._kept.tokens(computed)
        self._dropped[seq] = computed - kept
        seq.num_tokens = kept + 1
        blocks = self.blocks_holding(kept)
        self.gpu.release(seq.num_blocks - blocks)
        seq.num_blocks = blocks
        batch.add(seq, first=is_first)

    def release(self, seq: Sequence) -> None:
        super().release(seq)
        seq.num_tokens += self._dropped.pop(seq, 0)

    def drop_swapped(self, seq: Sequence) -> None:
        super().drop_swapped(seq)
        seq.num_tokens += self._dropped.pop(seq, 0)
