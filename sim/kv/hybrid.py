"""`HybridMemory`: layers that keep all and layers that keep a window, as in vLLM v1's hybrid KV cache manager.

Layers of one kind are cut into groups; a block holds `block_size` tokens of one group, and any block serves any group
(`kv_cache_coordinator.py`, `single_type_kv_cache_manager.py` of vLLM 0.33). A sequence takes blocks for every group as
it is computed, and gives back those of windowed groups that its next token no longer reads.

Where prefixes are cached, a prompt hits as many blocks as the full groups have of it and whose last window all windowed
groups have, too. Windowed groups cache only what can be hit so: the window before the prompt's last token, and the one
before a junction, where a prompt left a prefix that only the full groups had (vLLM's default, a
`prefix_cache_retention_interval` of 0). Whatever else leaves a window is used again first.
"""

from collections.abc import Sequence as Seq
from heapq import heappop, heappush
from typing import TYPE_CHECKING, ClassVar, Self

from sim.engine.batch import DecodeBatch
from sim.engine.changes import Place, Release
from sim.engine.limits import Limits
from sim.engine.pipelined import PipelinedScheduler
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence
from sim.errors import InvariantError
from sim.kv.block_pool import BlockPool
from sim.kv.hybrid_table import NOT_DUE, NOTHING, Match, Table
from sim.kv.index.block_cache import BlockCache, CachedBlock, Key, chained
from sim.kv.index.block_keys import BlockKeys
from sim.kv.memory import ALL_LAYERS, Memory

if TYPE_CHECKING:
    from sim.systems.builder import Builder


class HybridMemory(Memory):
    """Pool blocks are those of one group; `unit` is a whole block's, one for each group."""

    name: ClassVar[str] = "paged"
    # Of the heap, what is out of date alone goes when it is asked.
    memoized = ("_looked_up", "_heap")
    can_receive = False

    @classmethod
    def build(cls, b: "Builder") -> Self:
        return cls(b.limits, schedules_ahead=b.policy.schedules_ahead)

    def __init__(self, limits: Limits, *, schedules_ahead: bool) -> None:
        """`schedules_ahead`: a step's blocks are taken while the step before it runs."""
        window = limits.window
        if window is None or window.blocks is None:
            raise InvariantError("hybrid memory needs groups of layers with a window")
        super().__init__(limits, window.num_full + window.num_window)
        full, windowed = range(window.num_full), range(window.num_full, self.num_groups)
        self._full, self._windowed, self._window = full, windowed, window.tokens
        self._in_order = (*windowed, *full) if window.window_first else (*full, *windowed)
        self.caches_prefixes = limits.enable_prefix_caching
        self.cache = BlockCache(self.num_groups)
        self.gpu = BlockPool(self.gpu.name, self.gpu.num_blocks, self.cache)
        self._hit_blocks = -(-(window.tokens - 1) // self.block_size)
        """Blocks of a windowed group that a sequence that goes on from a block's end reads."""
        in_flight = limits.max_num_batched_tokens * (limits.stages + schedules_ahead)
        self._most_in_window = -(-min(window.tokens - 1 + in_flight, limits.max_model_len) // self.block_size) + 1
        self._lag = 1 if schedules_ahead else 0
        self._keys = BlockKeys(self.block_size)
        self._tables: dict[Sequence, Table] = {}
        self._heap: list[tuple[int, int, Table]] = []
        self._num_growing = self.num_groups
        """Groups that take a block when a decode begins one."""
        self._num_taken = self._step = 0
        self._looked_up: tuple[Sequence | None, int, int, Match] = (None, 0, -1, NOTHING)

    def prepare(self, now_s: float) -> None:
        self._step += 1

    # -- looking up --------------------------------------------------------------------------------------------------

    def look_up(self, seq: Sequence, *, is_next: bool = True) -> None:
        if seq not in self._tables:
            self._tables[seq] = self._table(seq)

    def _table(self, seq: Sequence) -> Table:
        """Where it has none yet, the one that it would have."""
        if (table := self._tables.get(seq)) is not None:
            return table
        named = seq.request.hash_block_tokens and self.caches_prefixes
        keys = list(chained(self._keys.of(seq.request))) if named else []
        return Table(seq, keys, self.num_groups)

    def cached_tokens(self, seq: Sequence) -> int:
        return self._match(seq).num_blocks * self.block_size

    def _match(self, seq: Sequence) -> Match:
        if not self.caches_prefixes:
            return NOTHING
        known, tokens, version, match = self._looked_up
        if known is not seq or tokens != seq.num_tokens or version != self.cache.version:
            match = self._look_up(self._table(seq), (seq.num_tokens - 1) // self.block_size)
            self._looked_up = (seq, seq.num_tokens, self.cache.version, match)
        return match

    def _look_up(self, table: Table, limit: int) -> Match:
        """At most `limit` blocks."""
        limit = min(limit, table.num_named)
        find, key = self.cache.find, table.key
        longest = limit
        if self._full:
            longest = 0
            while longest < limit and all(find(group, key(longest)) for group in self._full):
                longest += 1
        hit = begin = 0
        for begin in range(longest - 1, -1, -1):
            if not all(find(group, key(begin)) for group in self._windowed):
                hit = 0
                continue
            hit = hit or begin + 1
            if hit - begin >= self._hit_blocks:
                break
        first = self._num_left(hit * self.block_size)
        cached = tuple(
            {place: found for place in range(begin, hit) if (found := find(group, key(place)))}
            for group, begin in enumerate([0] * len(self._full) + [first] * len(self._windowed))
        )
        return Match(hit, cached, longest if self._full and hit < longest else 0)

    def _num_left(self, num_computed: int) -> int:
        """Blocks of a windowed group that the token after so many no longer reads."""
        return max(0, num_computed - self._window + 1) // self.block_size

    # -- prompts -----------------------------------------------------------------------------------------------------

    def blocks_for(self, seq: Sequence) -> int:
        blocks = -(-seq.num_tokens // self.block_size)
        return len(self._full) * blocks + len(self._windowed) * min(blocks, self._most_in_window)

    def blocks_wanted(self, seq: Sequence, num_tokens: int) -> int:
        match, blocks = self._match(seq), -(-num_tokens // self.block_size)
        return self.num_groups * (blocks - match.num_blocks) + match.num_idle

    def blocks_to_admit(self, seq: Sequence, num_tokens: int, *, whole: bool) -> int:
        wanted = self.blocks_wanted(seq, num_tokens)
        if not whole:
            return wanted
        match, blocks = self._match(seq), -(-seq.num_tokens // self.block_size)
        # The most that a windowed group ever holds is counted from the prompt's beginning, hits or not.
        windowed = max(0, min(blocks, self._most_in_window) - match.num_blocks)
        full = blocks - match.num_blocks
        return max(wanted, len(self._full) * full + len(self._windowed) * windowed + match.num_idle)

    def place(self, seq: Sequence, num_tokens: int) -> None:
        self.take(seq, num_tokens)
        self.count_hits(seq, seq.num_computed)

    def take(self, seq: Sequence, num_tokens: int) -> None:
        self.look_up(seq)
        match, table = self._match(seq), self._tables[seq]
        idle = match.num_idle
        for group, cached in enumerate(match.cached):
            table.cached[group] = cached.copy()
            for block in cached.values():
                self.cache.hold(block)
        self.gpu.allocate(idle)
        self._num_taken += 1
        table.number, table.junction = self._num_taken, match.junction
        table.end = table.num_published = match.num_blocks
        table.begin = self._num_left(match.num_blocks * self.block_size)
        seq.num_computed = match.num_blocks * self.block_size
        self._extend_by_chunk(table, num_tokens)
        self.scheduler.changes.append(Place(seq, ALL_LAYERS, self.held_blocks(seq), 0))

    def blocks_missing(self, seq: Sequence, num_tokens: int) -> int:
        return self.num_groups * max(0, -(-num_tokens // self.block_size) - self._tables[seq].end)

    def take_chunk(self, seq: Sequence, num_tokens: int) -> None:
        self.drop_unread(seq)
        self._extend_by_chunk(self._tables[seq], num_tokens)

    def _extend_by_chunk(self, table: Table, num_tokens: int) -> None:
        self._extend(table, num_tokens)
        table.seq.num_blocks = table.end
        if num_tokens > table.seq.num_computed:
            table.chunk, table.chunk_step = num_tokens - table.seq.num_computed, self._step

    # -- what computing on does to blocks ----------------------------------------------------------------------------

    def drop_unread(self, seq: Sequence) -> None:
        table = self._tables[seq]
        computed = seq.num_computed
        if seq in self.batch.members:
            computed = self.batch.num_tokens_of(seq) - 1
        self._leave(table, computed - self._num_in_flight(table))

    def _num_in_flight(self, table: Table) -> int:
        """Tokens that the step under way computes while the next one is scheduled."""
        if not self.scheduler.in_flight:
            return 0
        if isinstance(self.scheduler, PipelinedScheduler):
            return self.scheduler.tokens_in_flight(table.seq)
        if table.chunk_step == self._step - 1:
            return table.chunk
        return self.scheduler.num_unknown(table.seq) if table.seq in self.batch.members else 0

    def _leave(self, table: Table, num_computed: int) -> None:
        """Give back what is not read by a computation that goes on from there."""
        # Asked at nearly each step: most often the window begins in the block where it did.
        if num_computed - self._window + 1 < (table.begin + 1) * self.block_size:
            return
        begin = min(self._num_left(num_computed), table.end)
        if begin <= table.begin:
            return
        unread = self._unread(table, begin)
        for group in self._in_order:
            if group in self._windowed:
                self._give_back(table.cached[group], unread)
        table.begin = begin

    def _unread(self, table: Table, begin: int) -> Seq[int]:
        """Places of a windowed group's blocks that are given back, from the last to the first, when it begins there."""
        return range(begin - 1, table.begin - 1, -1)

    def _give_back(self, cached: dict[int, CachedBlock], places: Seq[int]) -> None:
        """Blocks of one group, in this order."""
        freed = len(places)
        for place in places if cached else ():
            block = cached.pop(place, None)
            if block is not None and not self.cache.let_go(block):
                freed -= 1
        self.gpu.release(freed)

    def _extend(self, table: Table, num_tokens: int) -> None:
        end = -(-num_tokens // self.block_size)
        if end > table.end:
            self.gpu.allocate(self.num_groups * (end - table.end))
            table.end = end

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        self._publish(self._tables[seq], num_tokens // self.block_size)

    def _publish(self, table: Table, num_full: int) -> None:
        """The first `num_full` blocks are full, or are about to be."""
        if not self.caches_prefixes or num_full <= table.num_published:
            return
        begin, hit = table.num_published, self._hit_blocks
        self._cache_full(table, begin, min(num_full, table.num_named))
        ends = (table.seq.request.prompt_tokens - 1) // self.block_size, table.junction
        for place in sorted({p for end in ends for p in range(max(begin, end - hit), min(num_full, end))}):
            if self._has(table, place):
                self._cache_windows(table, place, table.key(place))
        table.num_published = num_full

    def _cache_full(self, table: Table, begin: int, end: int) -> None:
        """Blocks of full groups, one by one."""
        for place in range(begin, end):
            for group in self._full:
                table.cached[group][place] = self.cache.add(group, table.key(place))

    def _has(self, table: Table, place: int) -> bool:
        """Whether windowed groups have a block there."""
        return place >= table.begin

    def _cache_windows(self, table: Table, place: int, key: Key) -> None:
        for group in self._windowed:
            table.cached[group][place] = self.cache.add(group, key)

    # -- decodes -----------------------------------------------------------------------------------------------------

    def joined(self, seq: Sequence) -> None:
        self._tables[seq].due = self.batch.step
        self._push(self._tables[seq])

    def moved(self, seq: Sequence) -> None:
        self.joined(seq)

    def _push(self, table: Table) -> None:
        heappush(self._heap, (table.due, table.number, table))

    def _due(self, step: int) -> Table | None:
        """A sequence to whose blocks something may happen by `step`, in order of steps and admission."""
        heap = self._heap
        while heap:
            due, number, table = heap[0]
            if table.due == due and table.number == number:
                return table if due <= step else None
            heappop(heap)
        return None

    def _pop_due(self, step: int) -> Table | None:
        """The same, which is no longer listed."""
        table = self._due(step)
        if table is not None:
            heappop(self._heap)
        return table

    def _decode(self, table: Table, step: int, num_in_flight: int, num_unknown: int) -> None:
        """The token of a member at that step of the batch."""
        tokens, size = table.seq.batch_offset + step, self.block_size
        self._leave(table, tokens - 1 - num_in_flight)
        if tokens > table.end * size:
            self._extend(table, tokens)
        if table.num_published < table.num_named:
            self._publish(table, (tokens - num_unknown) // size)
        due = min(table.end * size + 1, (table.begin + 1) * size + self._window)
        if table.num_published < table.num_named:
            due = min(due, (table.num_published + 1) * size)
        table.due = max(step + 1, due - table.seq.batch_offset)
        self._push(table)

    def decode_blocks(self) -> int:
        return self._num_growing * self.batch.blocks_needed(1)

    def decode_blocks_of(self, seq: Sequence) -> int:
        return self._num_growing if self.batch.num_tokens_of(seq) > self._tables[seq].end * self.block_size else 0

    def append(self, seq: Sequence) -> None:
        self._extend(self._tables[seq], self.batch.num_tokens_of(seq))

    def take_decodes(self, num_blocks: int) -> None:
        batch, due = self.batch, list[Table]()
        while (table := self._pop_due(batch.step)) is not None:
            due.append(table)
        # Some may be overdue, having joined in the middle of a step: all go in order of admission.
        for table in sorted(due, key=lambda table: table.number):
            self._decode(table, batch.step, self._num_in_flight(table), self.scheduler.num_unknown(table.seq))

    def grow_further(self, batch: DecodeBatch, steps: int) -> None:
        last = batch.step + steps - 1
        while (table := self._pop_due(last)) is not None:
            self._decode(table, max(table.due, batch.step), self._lag, self._lag)

    def repeats(self, plan: IterationPlan, steps: int) -> int:
        """As long as there are blocks, whatever is given back; where requests wait, until something happens to any."""
        batch = self.batch
        # The first iteration's blocks are taken already.
        spare = self.gpu.free // self._num_growing + batch.blocks_needed(1)
        if batch.blocks_needed(steps) > spare:
            steps = max(1, batch.steps_within(spare))
        if self.scheduler.order.waiting and (table := self._due(batch.step + steps - 1)) is not None:
            steps = max(1, table.due - batch.step)
        return steps

    def catch_up(self) -> None:
        members = self.batch.members
        for table in sorted((self._tables[seq] for seq in members), key=lambda table: table.number):
            tokens = self.batch.num_tokens_of(table.seq) - 1 - self.scheduler.num_unknown(table.seq)
            self._publish(table, tokens // self.block_size)

    # -- the way out -------------------------------------------------------------------------------------------------

    def await_last_token(self, seq: Sequence) -> None:
        # What is known of it has been published.
        self._tables[seq].due = NOT_DUE

    def release(self, seq: Sequence) -> None:
        table = self._tables[seq]
        computed = seq.num_computed if seq.prefilling else max(seq.num_computed, seq.num_tokens - 1)
        self._publish(table, min(computed // self.block_size, table.end))
        ended, num_left = seq.num_generated >= seq.output_tokens, table.num_published - table.num_named
        if num_left > 0 and not ended:
            self._cache_full(table, table.num_named, table.num_published)
            table.num_named = table.num_published
        unread, whole = self._unread(table, table.end), range(table.end - 1, -1, -1)
        for group in self._in_order:
            if ended and num_left > 0 and group in self._full:
                self.cache.let_go_own(num_left)
            self._give_back(table.cached[group], unread if group in self._windowed else whole)
            table.cached[group].clear()
        table.begin = table.end = table.num_published = seq.num_blocks = 0
        table.due = NOT_DUE
        if ended:
            del self._tables[seq]
        self.scheduler.changes.append(Release(seq))

    def forget(self, seq: Sequence) -> None:
        self._tables.pop(seq, None)

    def held_blocks(self, seq: Sequence) -> int:
        table = self._tables[seq]
        return self.num_groups * table.end - len(self._windowed) * table.begin

    @property
    def num_evicted(self) -> int:
        return self.cache.num_evicted

    def recount(self) -> tuple[int, int]:
        own, shared = 0, set[CachedBlock]()
        for seq, table in self._tables.items():
            held = [block for cached in table.cached for block in cached.values()]
            own += self.held_blocks(seq) - len(held)
            shared.update(held)
        return own + len(shared), 0
