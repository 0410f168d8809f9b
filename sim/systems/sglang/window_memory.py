"""`WindowTreeMemory`: pages of two pools, where layers with a sliding window have one of their own.

A token takes a page's slot of both. Of the pool of windows a sequence gives back, while it is computed, what it has of
pages before its window: in a decode once `SLIDE_TOKENS` have left it. A prefix that the layers that keep all have
further than the others is computed again from there; it enters the tree no further at first, so that the next to have
it hits all of it.
Source: sglang 0.5.23, `schedule_batch.py` (`maybe_evict_swa`), `mem_cache/common.py`, `allocator/swa.py`,
`prefill_budget.py` (`SWAPrefillBudget`), `unified_cache/components/swa.py`.
"""

from math import inf
from typing import TYPE_CHECKING

from sim.engine.batch import DecodeBatch
from sim.engine.limits import Limits
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence
from sim.errors import InvariantError
from sim.kv.memory import Memory
from sim.systems.sglang.marked_tree import WindowTree
from sim.systems.sglang.memory import Copies, Held, TreeMemory
from sim.systems.sglang.options import SLIDE_TOKENS, SglangOptions
from sim.systems.sglang.tree import Match, Node, PrefixTree, TreeSettings

if TYPE_CHECKING:
    from sim.systems.builder import Builder


class WindowTreeMemory(TreeMemory):
    """`gpu` is the pool of the layers that keep all."""

    @classmethod
    def build(cls, b: "Builder") -> Memory:
        """Of a model with states, `StateTreeMemory`; with one pool, `TreeMemory`."""
        if b.limits.states is not None:
            from sim.systems.sglang.state_memory import StateTreeMemory  # noqa: PLC0415 - few models have any

            return StateTreeMemory.build(b)
        if b.limits.window is None or b.limits.window.own_blocks is None:
            return TreeMemory.build(b)
        ahead = b.policy.schedules_ahead
        return cls(b.limits, b.options(SglangOptions), cls.copies(b), schedules_ahead=ahead).with_storage(b)

    def __init__(self, limits: Limits, options: SglangOptions, copies: Copies, *, schedules_ahead: bool) -> None:
        window = limits.window
        if window is None or window.own_blocks is None:
            raise InvariantError("two pools need to know the window and its pool")
        # SGLang's window leaves the query's own token out.
        self.window_tokens = window.tokens - 1
        super().__init__(limits, options, copies)
        assert isinstance(self.tree, WindowTree), "as it was made"
        self._windows = self.tree
        self.num_window_pages = window.own_blocks
        self._own_windows = 0
        """Pages of the pool of windows that sequences have, those of the tree aside."""
        size = self.block_size
        whole_pages = -(-max(self.window_tokens, size) // size) * size
        self._kept_tokens = whole_pages if self.caches_prefixes else self.window_tokens
        """Tokens before its last that a sequence keeps."""
        chunk = limits.max_num_batched_tokens if limits.enable_chunked_prefill else 0
        self._chunk_in_flight = chunk if schedules_ahead else 0
        self._first_slide = 2 if schedules_ahead else 0
        """Chunks of a prompt before which its windows do not move, where the tree does not see to it."""

    def _new_tree(self, settings: TreeSettings) -> PrefixTree:
        return WindowTree(settings, -(-self.window_tokens // self.block_size))

    def search(self, seq: Sequence, num_tokens: int) -> Match:
        match = super().search(seq, num_tokens)
        reached = self._windows.reached
        self.held(seq).branch = reached * self.block_size if reached > match.pages + match.host_pages else 0
        return match

    def _room_to_load(self, seq: Sequence, pages: int, marks: int) -> bool:
        return super().make_room(pages) and self._find_windows(marks)

    # -- room ----------------------------------------------------------------------------------------------------------

    @property
    def window_unused(self) -> int:
        """Pages of the pool of windows without content."""
        return self.num_window_pages - self._windows.num_marked - self._own_windows

    @property
    def window_free_tokens(self) -> int:
        """Tokens for which that pool has pages, unused or idle."""
        return (self.window_unused + self._windows.num_marked_idle) * self.block_size

    def window_budget(self) -> "WindowBudget":
        return WindowBudget(self)

    def make_room(self, pages: int) -> bool:
        has_room = super().make_room(pages)
        return self._find_windows(pages) and has_room

    def _find_windows(self, pages: int) -> bool:
        """Evict until so many pages of the pool of windows are unused; whether they are."""
        if self.window_unused < pages and self._windows.num_marked_idle:
            self.unused += self._windows.evict_marks(pages - self.window_unused)
            self._settle()
        return self.window_unused >= pages

    def _take(self, pages: int) -> None:
        self._own_windows += pages
        super()._take(pages)

    # -- windows that move on ------------------------------------------------------------------------------------------

    def _slide(self, held: Held, num_tokens: int) -> None:
        """Of what is before the window of its token number `num_tokens`, give pages back."""
        size = self.block_size
        if num_tokens - self.window_tokens <= held.slid:
            return
        begin = max(held.slid, held.protected * size)
        held.slid = max(begin, num_tokens - self._kept_tokens) // size * size
        self._own_windows -= (held.slid - begin) // size

    def _slides_at(self, held: Held) -> int:
        """Its tokens from which a decode moves its window."""
        return held.slid + self.window_tokens + SLIDE_TOKENS + 1

    def slide(self, known_tokens: dict[Sequence, int]) -> None:
        for seq, known in known_tokens.items():
            held = self.held(seq)
            held.known = known
            # Before its first decode its prompt may be in flight.
            if held.num_decoded and known >= self._slides_at(held):
                self._slide(held, known - 1)
            held.num_decoded += 1

    def grow_further(self, batch: DecodeBatch, steps: int) -> None:
        before, total, members = batch.blocks_needed(1), batch.blocks_needed(steps), len(batch.members)
        needed = total - before + (members if self.block_size > 1 else 0)
        held = [self.held(seq) for seq in batch.members]
        if min(self.unused, self.window_unused) >= needed:
            self._take(total - before)
            for one in held:
                known, last = one.known, one.known + steps - 1
                while (known := max(self._slides_at(one), known + 1)) <= last:
                    self._slide(one, known - 1)
                one.known = last
            return
        for step in range(2, steps + 1):
            needed = batch.blocks_needed(step)
            self.make_room(needed - before)
            self.slide({seq: self.held(seq).known + 1 for seq in batch.members})
            self.decode(members, needed - before)
            before = needed

    def repeats(self, plan: IterationPlan, steps: int) -> int:
        """As long as both pools have pages, whatever is given back meanwhile."""
        idle = 0 if self.tree.writes_back else self._windows.num_marked_idle
        within = self.batch.steps_within(self.window_unused + idle + self.batch.blocks_needed(1))
        return max(1, min(super().repeats(plan, steps), within))

    # -- prompts -------------------------------------------------------------------------------------------------------

    def hold(self, seq: Sequence) -> int:
        held = self.held(seq)
        held.slid = held.known = held.num_chunks = held.num_decoded = 0
        return super().hold(seq)

    def extend(self, chunks: list[tuple[Sequence, int]]) -> None:
        for seq, _ in chunks:
            held = self.held(seq)
            if not self.caches_prefixes and held.num_chunks >= self._first_slide:
                self._slide(held, seq.num_computed - self._chunk_in_flight)
            held.num_chunks += 1
        super().extend(chunks)

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        if not self.caches_prefixes:
            return
        held = self.held(seq)
        ends_at_branch = self._has_branch(held, num_tokens)
        self._slide(held, (held.branch if ends_at_branch else num_tokens) - 1)
        super().publish(seq, num_tokens)
        if ends_at_branch:
            held.branch = 0
            self._slide(held, num_tokens - 1)

    def _has_branch(self, held: Held, num_tokens: int) -> bool:
        """Whether no more than up to its branch is cached of so many tokens."""
        return held.protected * self.block_size < held.branch <= num_tokens

    def _insert(self, seq: Sequence, held: Held, num_tokens: int) -> None:
        super()._insert(seq, held, held.branch if self._has_branch(held, num_tokens) else num_tokens)

    def _enter(self, seq: Sequence, held: Held, pages: int, priority: int) -> tuple[Node, int]:
        slid = held.slid // self.block_size
        entered = self._windows.insert(
            held.keys, pages, held=held.protected, counted=held.counted, priority=priority, since=slid
        )
        self._own_windows -= max(0, pages - max(held.protected, slid))
        return entered

    def _give_back(self, seq: Sequence, held: Held) -> None:
        super()._give_back(seq, held)
        self._own_windows -= self._own_of(seq)

    def _own_of(self, seq: Sequence) -> int:
        held = self.held(seq)
        return seq.num_blocks - max(held.protected, held.slid // self.block_size)

    def recount(self) -> tuple[int, int]:
        batch = self.batch
        own = sum(batch.num_blocks_of(seq) - seq.num_blocks + self._own_of(seq) for seq in batch.members)
        own += sum(self._own_of(seq) for seq, _ in self.scheduler.holders())
        tree = self._windows
        found, counted = (self._own_windows, tree.num_marked, tree.num_marked_idle), (own, *tree.recounted())
        if found != counted:
            raise InvariantError(f"windows' pages (sequences', the tree's, idle) are {found}, counted {counted}")
        return super().recount()


class WindowBudget:
    """What one look at the prompts may take of the pool of windows."""

    def __init__(self, memory: WindowTreeMemory) -> None:
        self._memory, self._window, self._page = memory, memory.window_tokens, memory.block_size
        self._size = memory.num_window_pages * memory.block_size
        self._taken = 0

    @property
    def left(self) -> int:
        """Tokens."""
        return self._memory.window_free_tokens - self._taken

    def needed(self, tokens: int, answer: int, chunk: float, loaded: int = 0) -> int:
        """Most tokens of the pool that a prompt of so many takes, in chunks of `chunk`, and its answer after it.

        `loaded`: tokens of it that come from the host.
        """
        beyond = max(int(min(tokens, chunk)) - self._window, 0)
        return beyond + min(tokens + answer, self._window) + self._page + loaded

    def take(self, tokens: int, answer: int, chunk: float) -> None:
        """A prompt is admitted, or goes on."""
        self._taken += self.needed(tokens, answer, chunk)

    def chunk_of(self, tokens: int, answer: int, chunk: float, loaded: int = 0) -> float:
        """Most tokens of such a prompt that can be computed now; 0: none.

        One that never fits has chunks that do; one that does not fit now waits.
        """
        needed = self.needed(tokens, answer, chunk, loaded)
        if needed < self.left:
            return chunk
        if needed < self._size or chunk == inf:
            return 0.0
        most = self.left - self.needed(0, answer, chunk, loaded)
        return min(chunk, float(max(0, most // self._page * self._page)))
