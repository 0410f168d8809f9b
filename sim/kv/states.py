"""`StateMemory`: layers that keep KV and layers that keep a state, as in vLLM 0.33's hybrid KV cache manager.

A block is as large as a state: `block_size` tokens of one group of layers that attend, or the state of one group of
layers that keep one, at the end of so many tokens (`MambaManager` of `single_type_kv_cache_manager.py`).

- Prefixes not cached (`mamba_cache_mode` none): a sequence has one block of each state group while it runs.
- Cached (`align`): a state group has blocks where a chunk or a block ends, none between. The token after the next gives
  the last but one back. So far that is `HybridMemory` with a window of two tokens. Chunks of prompts end where blocks
  do (`_mamba_block_aligned_split`), and where the state is cached: at the last block's end before the prompt's last
  token, and at a junction. GPUs whose kernels write a state out amid a chunk need no chunk's end at the former, but a
  block more. A request that would hit a state cached in this very step waits for the next.
"""

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Self

from sim.engine.limits import Limits, WindowLimits
from sim.engine.sequence import Sequence
from sim.errors import InvariantError, UserError
from sim.kv.hybrid import HybridMemory
from sim.kv.hybrid_table import Table
from sim.kv.index.block_cache import Key
from sim.parts.batching.unified_options import VllmV1Options

if TYPE_CHECKING:
    from sim.systems.builder import Builder


class StateMemory(HybridMemory):
    """Windowed groups are those that keep a state."""

    unexecutable: ClassVar[str] = "layers that keep a state are not computed on a device: simulate"

    @classmethod
    def build(cls, b: "Builder") -> Self:
        if b.offloading.offloads:
            raise UserError(
                f"--kv-offloading-size: {b.deployment.model.name} has layers that keep a state; leave it out"
            )
        budget = b.limits.max_num_batched_tokens
        most = min(budget, b.options(VllmV1Options).long_prefill_token_threshold or budget)
        return cls(b.limits, schedules_ahead=b.policy.schedules_ahead, most_prompt_tokens=most)

    def __init__(self, limits: Limits, *, schedules_ahead: bool, most_prompt_tokens: int) -> None:
        """`most_prompt_tokens`: of one prompt in a step; where blocks are longer, chunks end within them."""
        states = limits.states
        if states is None:
            raise InvariantError("memory of states needs groups of layers that keep one")
        self._aligned = limits.enable_prefix_caching
        read_tokens = 2 if self._aligned else 2 * limits.max_model_len
        # The first layer of all models read here keeps a state.
        window = WindowLimits(read_tokens, states.num_full, states.num_state, 1, window_first=True)
        super().__init__(replace(limits, window=window), schedules_ahead=schedules_ahead)
        self._exports = states.exports_within_chunks and self._aligned
        self._most_prompt_tokens = most_prompt_tokens
        if not self._aligned:
            self._num_growing = states.num_full
        self._cached_now: set[Key] = set()
        """States that this step caches: they are not computed yet."""

    def prepare(self, now_s: float) -> None:
        super().prepare(now_s)
        self._cached_now.clear()

    # -- chunks ------------------------------------------------------------------------------------------------------

    def cut_chunk(self, seq: Sequence, num_computed: int, num_new: int) -> int:
        start, end, size = num_computed, num_computed + num_new, self.block_size
        prefill_end = max(seq.request.prompt_tokens, seq.num_tokens - 1)
        if not self._aligned or start >= prefill_end:
            return num_new
        last = (seq.num_tokens - 1) // size * size
        if end >= prefill_end and self._is_exported(start, end, (prefill_end - 1) // size * size):
            last = 0
        if end < prefill_end:
            aligned = end // size * size
            if aligned > start or size <= self._most_prompt_tokens:
                end = aligned
        table = self._tables.get(seq)
        junction = size * (table.junction if table and table.end else self._match(seq).junction)
        within_block = (start // size + 1) * size if start % size else 0
        at_junction = start + (junction - start) // size * size if start < junction < end else 0
        stops = [stop for stop in (within_block, last, at_junction) if start < stop < end]
        return max(0, min(stops, default=end) - start)

    def _is_exported(self, start: int, end: int, position: int) -> bool:
        """Whether the state at `position`, a block's end, is written out by the chunk from `start` to `end`."""
        return self._exports and start % self.block_size == 0 and start + self.block_size <= position < end

    def _new_states(self, seq: Sequence, start: int, num_tokens: int) -> int:
        """Blocks that a state group takes where a chunk begins a block."""
        prefill_end = max(seq.request.prompt_tokens, seq.num_tokens - 1)
        position = (num_tokens - 1) // self.block_size * self.block_size
        return 2 if num_tokens >= prefill_end and self._is_exported(start, num_tokens, position) else 1

    # -- blocks ------------------------------------------------------------------------------------------------------

    def _taken(self, seq: Sequence, start: int, num_tokens: int, held: int) -> int:
        """Pool blocks that a sequence of `held` blocks takes when it computes from `start` to `num_tokens`."""
        new = -(-num_tokens // self.block_size) - held
        if new <= 0:
            return 0
        states = self._new_states(seq, start, num_tokens) if self._aligned else int(not held)
        return len(self._full) * new + len(self._windowed) * states

    def blocks_for(self, seq: Sequence) -> int:
        return self._taken(seq, 0, seq.num_tokens, 0)

    def blocks_wanted(self, seq: Sequence, num_tokens: int) -> int:
        match = self._match(seq)
        start = match.num_blocks * self.block_size
        return self._taken(seq, start, num_tokens, match.num_blocks) + match.num_idle

    def blocks_to_admit(self, seq: Sequence, num_tokens: int, *, whole: bool) -> int:
        match = self._match(seq)
        if match.num_blocks and self._table(seq).key(match.num_blocks - 1) in self._cached_now:
            return self.gpu.num_blocks + 1
        wanted = self.blocks_wanted(seq, num_tokens)
        return max(wanted, self.blocks_wanted(seq, seq.num_tokens)) if whole else wanted

    def blocks_missing(self, seq: Sequence, num_tokens: int) -> int:
        return self._taken(seq, seq.num_computed, num_tokens, self._tables[seq].end)

    def take(self, seq: Sequence, num_tokens: int) -> None:
        self.look_up(seq)
        hit = self._match(seq).num_blocks
        self._tables[seq].states = [hit - 1] if hit else []
        super().take(seq, num_tokens)

    def _extend(self, table: Table, num_tokens: int) -> None:
        end = -(-num_tokens // self.block_size)
        if end <= table.end:
            return
        # A decode takes one, as a chunk of one token does.
        start = table.seq.num_computed if table.seq not in self.batch.members else num_tokens - 1
        self.gpu.allocate(self._taken(table.seq, start, num_tokens, table.end))
        if self._aligned:
            table.states += range(end - self._new_states(table.seq, start, num_tokens), end)
        elif not table.end:
            table.states = [0]
        table.end = end

    def _unread(self, table: Table, begin: int) -> Seq[int]:
        unread = [place for place in reversed(table.states) if place < begin]
        table.states = [place for place in table.states if place >= begin]
        return unread

    def _has(self, table: Table, place: int) -> bool:
        return place in table.states

    def _cache_windows(self, table: Table, place: int, key: Key) -> None:
        super()._cache_windows(table, place, key)
        self._cached_now.add(key)

    def held_blocks(self, seq: Sequence) -> int:
        table = self._tables[seq]
        return len(self._full) * table.end + len(self._windowed) * len(table.states)
