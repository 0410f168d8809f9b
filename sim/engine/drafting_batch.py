"""`DraftingBatch`: a decode batch whose members take several tokens an iteration, each as many as were accepted of it.

Slots are taken ahead, for what is drafted, and those of rejected tokens are used again: a member holds more blocks than
its tokens fill, and the batch knows how many. No two iterations are alike, so nothing is known in advance.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sim.engine.batch import DecodeBatch
from sim.engine.sequence import Sequence
from sim.errors import InvariantError

if TYPE_CHECKING:
    from sim.engine.itl import GapCollector


class DraftingBatch(DecodeBatch):
    """Members advance by different counts of tokens; `blocks` says what each holds."""

    __slots__ = ("blocks",)

    def __init__(self, block_size: int, gaps: "GapCollector") -> None:
        super().__init__(block_size, gaps)
        self.blocks: dict[Sequence, int] = {}

    def add(self, seq: Sequence, *, first: bool = False, num_hosted: int = 0) -> None:
        super().add(seq, first=first, num_hosted=num_hosted)
        self.blocks[seq] = seq.num_blocks

    def remove(self, seq: Sequence) -> None:
        super().remove(seq)
        del self.blocks[seq]

    def num_blocks_of(self, seq: Sequence) -> int:
        return self.blocks[seq]

    @property
    def num_blocks_ahead(self) -> int:
        return sum(held - DecodeBatch.num_blocks_of(self, seq) for seq, held in self.blocks.items())

    def steps_to_finish(self) -> int:
        """Of iterations that can be told in advance: one."""
        return 1

    def advance_unevenly(self, tokens: Mapping[Sequence, int], end_s: float) -> list[Sequence]:
        """Give members so many tokens each, which come together; take out and return those that are complete."""
        finished = []
        late, log, gaps = self._late, self.token_log, self.gaps
        for seq, count in tokens.items():
            left = seq.finish_step - self.step
            if not 0 < count <= left:
                raise InvariantError(f"{seq}: cannot take {count} tokens, {left} are left")
            gaps.add(end_s - late.get(seq, self.last_token_s), 0.0, 1, 1)
            if count > 1:
                gaps.add(0.0, 0.0, 1, count - 1)
            late[seq] = end_s
            if log is not None:
                log[seq.request.request_id].extend([end_s] * count)
            self._advance_one(seq, count)
            if count == left:
                self.remove(seq)
                finished.append(seq)
        gaps.bound_memory()
        return finished

    def _advance_one(self, seq: Sequence, count: int) -> None:
        growth, size = self._growth, self.block_size
        residue = (1 - seq.batch_offset) % size
        growth[residue] -= 1
        growth[(residue - count) % size] += 1
        seq.batch_offset += count
        self.context_tokens += count
        seq.finish_step -= count

    def _schedule_finish(self, seq: Sequence, finish_step: int) -> None:
        seq.finish_step = finish_step
