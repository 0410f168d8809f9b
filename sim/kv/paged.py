"""`PagedMemory`: whole blocks taken as sequences grow (PagedAttention; vLLM 0.5.5's BlockSpaceManagerV1).

A prompt gets all its blocks at admission, a decode one more whenever its last block is full. A block spans all layers.
"""

from itertools import pairwise
from typing import ClassVar

from sim.engine.changes import Move, Restore, Tier, make_place, make_release
from sim.engine.limits import Limits
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence
from sim.kv.memory import Memory

ALL_LAYERS = (0,)
"""The one layer group of memory whose blocks span the model."""


class PagedMemory(Memory):
    """Blocks on demand; sequences go to the host and come back whole."""

    can_swap: ClassVar[bool] = True
    takes_chunks: ClassVar[bool] = True
    """Whether a prompt's blocks may be taken chunk by chunk."""
    can_receive: ClassVar[bool] = True

    def __init__(self, limits: Limits, num_groups: int = 1) -> None:
        super().__init__(limits, num_groups)
        # GPU blocks that those hold yet who are copied out piece by piece.
        self._to_send: dict[Sequence, int] = {}

    def blocks_holding(self, num_tokens: int) -> int:
        """Pool blocks that hold so many tokens of a sequence."""
        return -(-num_tokens // self.block_size)

    def may_leave(self, seq: Sequence) -> bool:
        """Whether the blocks of a sequence are its own, so that it can be moved."""
        return True

    def blocks_for(self, seq: Sequence) -> int:
        return -(-seq.num_tokens // self.block_size)

    def held_blocks(self, seq: Sequence) -> int:
        return self.batch.num_blocks_of(seq) if seq in self.batch.members else seq.num_blocks

    def ever_fits(self, seq: Sequence, keep_free: int) -> bool:
        return self.gpu.num_blocks + seq.num_tokens // -self.block_size >= keep_free

    def fits(self, seq: Sequence, keep_free: int) -> bool:
        return self.gpu.free + seq.num_tokens // -self.block_size >= keep_free

    def place(self, seq: Sequence, keep_free: int) -> None:
        blocks = seq.num_blocks = -(-seq.num_tokens // self.block_size)
        self.gpu.allocate(blocks)
        self.scheduler.changes.append(make_place((seq, ALL_LAYERS, blocks, 0)))

    # -- prompts chunk by chunk --------------------------------------------------------------------------------------

    def cut_chunk(self, seq: Sequence, num_computed: int, num_new: int) -> int:
        """How many of the next `num_new` tokens of a prompt are computed in one step; 0: none in this one."""
        return num_new

    def place_chunk(self, seq: Sequence, num_tokens: int) -> None:
        """Take the blocks of the first `num_tokens` tokens of a prompt that starts, what it hits among them."""
        self.take(seq, num_tokens)

    def take(self, seq: Sequence, num_tokens: int) -> None:
        """The same of one that may not start yet: its hits are not counted."""
        seq.num_blocks = -(-num_tokens // self.block_size)
        blocks = self.blocks_wanted(seq, num_tokens)
        self.gpu.allocate(blocks)
        self.scheduler.changes.append(make_place((seq, ALL_LAYERS, blocks, 0)))

    def count_hits(self, seq: Sequence, num_tokens: int) -> None:
        """`seq` starts, or starts again, with `num_tokens` of its tokens computed."""
        counters = self.scheduler.counters
        if seq.first_scheduled_s < 0.0:
            seq.num_cached_tokens = num_tokens
            counters.prefix_query_tokens += seq.num_tokens
            counters.prefix_hit_tokens += num_tokens
        else:
            counters.prefix_rehit_tokens += num_tokens

    def blocks_wanted(self, seq: Sequence, num_tokens: int) -> int:
        """Free blocks that the first `num_tokens` tokens of a prompt that waits take."""
        return self.blocks_holding(num_tokens)

    def blocks_to_admit(self, seq: Sequence, num_tokens: int, *, whole: bool) -> int:
        """Free blocks that must be there when a prompt starts with `num_tokens` tokens; `whole`: with room for all."""
        return self.blocks_wanted(seq, seq.num_tokens if whole else num_tokens)

    def drop_unread(self, seq: Sequence) -> None:
        """`seq` is about to compute on: what it no longer reads is free."""

    def blocks_missing(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks that a half-done prompt lacks for its first `num_tokens` tokens."""
        return -(-num_tokens // self.block_size) - seq.num_blocks

    def decode_blocks(self) -> int:
        """Blocks that the next token of everybody in the batch takes."""
        return self.batch.blocks_needed(1)

    def decode_blocks_of(self, seq: Sequence) -> int:
        """Blocks that the next token of one of them takes."""
        return int(self.batch.needs_block(seq))

    def take_next(self, seq: Sequence) -> bool:
        """Take the blocks of the next token of one of them; False where they are not free."""
        blocks = self.decode_blocks_of(seq)
        if blocks > self.gpu.free:
            return False
        if blocks:
            self.gpu.allocate(blocks)
        return True

    def take_chunk(self, seq: Sequence, num_tokens: int) -> None:
        """Take them."""
        blocks = self.blocks_missing(seq, num_tokens)
        if blocks > 0:
            self.gpu.allocate(blocks)
            seq.num_blocks = -(-num_tokens // self.block_size)

    def receive(self, seq: Sequence) -> int:
        blocks = seq.num_blocks = -(-(seq.num_tokens - 1) // self.block_size)
        self.gpu.allocate(blocks)
        self.scheduler.changes.append(make_place((seq, ALL_LAYERS, blocks, 0)))
        return blocks

    def decodes_taken(self) -> None:
        """The whole batch decodes in this step, and has its blocks."""

    def catch_up(self) -> None:
        """From now on, not all who decode may do so in each step."""

    def release(self, seq: Sequence) -> None:
        self.gpu.release(seq.num_blocks)
        seq.num_blocks = 0
        self.scheduler.changes.append(make_release((seq,)))

    # -- to the host and back ----------------------------------------------------------------------------------------

    def can_swap_out(self, seq: Sequence) -> bool:
        return self.held_blocks(seq) <= self.host.free

    def swap_out(self, seq: Sequence, plan: IterationPlan) -> None:
        blocks = self.held_blocks(seq)
        self.gpu.release(blocks)
        self.host.allocate(blocks)
        self.scheduler.counters.swap_out_blocks += blocks
        plan.swapped_out_blocks += blocks
        move = Move(seq, ALL_LAYERS, 0, blocks * self.block_size, Tier.GPU, Tier.HOST, blocks, 0, False)
        self.scheduler.changes.append(move)

    def can_swap_in(self, seq: Sequence, keep_free: int) -> bool:
        return self.gpu.free - (self.held_blocks(seq) + 1) >= keep_free

    def swap_in(self, seq: Sequence, plan: IterationPlan) -> None:
        blocks = self.held_blocks(seq)
        self.host.release(blocks)
        self.gpu.allocate(blocks)
        self.scheduler.counters.swap_in_blocks += blocks
        plan.swapped_in_blocks += blocks
        self.scheduler.changes.append(Restore(seq, blocks * self.block_size, (), ALL_LAYERS, (), blocks))

    def send_out(self, seq: Sequence, num_pieces: int = 1) -> None:
        blocks, size = self.held_blocks(seq), self.block_size
        self.host.allocate(blocks)
        self.copies_of[seq] = num_pieces
        self._to_send[seq] = blocks
        self.releasing += blocks
        self.scheduler.counters.swap_out_blocks += blocks
        for first, end in pairwise(blocks * i // num_pieces for i in range(num_pieces + 1)):
            count = end - first
            move = Move(seq, ALL_LAYERS, first * size, end * size, Tier.GPU, Tier.HOST, count, count, True)
            self.scheduler.beside.append(move)

    def bring_in(self, seq: Sequence) -> int:
        blocks = self.held_blocks(seq)
        self.gpu.allocate(blocks)
        self.copies_of[seq] = 1
        self.scheduler.counters.swap_in_blocks += blocks
        move = Move(seq, ALL_LAYERS, 0, blocks * self.block_size, Tier.HOST, Tier.GPU, blocks, 0, True)
        self.scheduler.beside.append(move)
        return blocks

    def transfer_done(self, move: Move) -> None:
        seq = move.seq
        left = self.copies_of.pop(seq) - 1
        if left:
            self.copies_of[seq] = left
        if move.target is Tier.HOST:
            self.releasing -= move.num_freed
            self.gpu.release(move.num_freed)
            self._to_send[seq] -= move.num_freed
            if not left:
                del self._to_send[seq]
        else:
            self.host.release(move.num_blocks)

    def outgrew_gpu(self, seq: Sequence) -> bool:
        return self.gpu.num_blocks < self.held_blocks(seq) + 1

    def drop_swapped(self, seq: Sequence) -> None:
        self.host.release(self.held_blocks(seq))
        seq.num_blocks = 0
        self.scheduler.changes.append(make_release((seq,)))

    def recount(self) -> tuple[int, int]:
        batch = self.batch
        gpu = sum(self.blocks_holding(batch.num_tokens_of(seq) - 1) for seq in batch.members)
        host = 0
        for seq, tier in self.scheduler.holders():
            if tier is Tier.GPU:
                gpu += self._to_send.get(seq, self.held_blocks(seq))
            else:
                host += self.held_blocks(seq)
        return gpu, host
