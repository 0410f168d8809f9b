"""`TreeMemory`: pages shared through SGLang's radix tree (`tree`), and what each sequence has of it.

A prompt enters the tree chunk by chunk, what was generated when its sequence ends; where the tree has that content, the
own copy is freed, and the sequence goes on with the tree's. Pages of the tree that nothing holds count as free: they
give way, leaf by leaf, when a step lacks pages. A retracted sequence leaves nothing but what was in the tree.
Source: sglang 0.5.23, `mem_cache/common.py`, `allocation.py`, `unified_radix_cache.py` (`checkpoint_into_tree`).
"""

from math import inf
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

from sim.engine.batch import DecodeBatch
from sim.engine.changes import D2H, H2D, Gathered, Move, Place, Release, Tier
from sim.engine.limits import Limits, TierCounters
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence, Status
from sim.kv.index.block_keys import BlockKeys
from sim.kv.memory import ALL_LAYERS, Memory
from sim.kv.tiers.worth import Worth
from sim.parts.needs import Need
from sim.systems.sglang.options import SglangOptions
from sim.systems.sglang.tree import EvictionRules, Match, Node, PrefixTree, TreeSettings, Writing, parent_of

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler
    from sim.systems.builder import Builder
    from sim.systems.sglang.storage import HostStorage
    from sim.systems.sglang.window_memory import WindowBudget

LEAST_LOAD_TOKENS = 10
"""A hit on the host of fewer tokens is computed again (`load_back_threshold`)."""


class Copies(NamedTuple):
    """Seconds of copies to the GPU and from it, of a page and of a mark (`MarkedTree`), and when they are worth it."""

    load_s: float
    write_s: float
    mark_load_s: float
    mark_write_s: float
    worth: Worth


class Held:
    """What one sequence has of the tree: its first `protected` pages, up to `node`.

    Where layers have a pool of their own, `branch`: tokens up to which others' pages went on beyond its hit, or 0. Of
    windows `slid`: its first tokens of which it has given pages back, or the tree has them; `known`: its tokens when
    one was last decoded; `num_chunks`, `num_decoded`: steps. Of states `num_states`: slots that it has; `tracked`:
    tokens of the state that it tracked last, or 0; `begun`: tokens beyond which decodes may have tracked another;
    `copies`: it has a slot for its copy of what it hits.
    """

    __slots__ = (
        "begun", "branch", "copies", "counted", "fed_last", "keys", "known", "known_tokens", "match", "node",
        "num_chunks", "num_decoded", "num_states", "protected", "since", "slid", "tracked",
    )  # fmt: skip

    def __init__(self, keys: tuple[int, ...], match: Match) -> None:
        self.keys = keys
        self.match = match
        """When it was looked up last."""
        self.node = match.node
        self.protected = self.counted = self.since = 0
        self.known_tokens = 0
        """Its tokens when it was last looked at to be admitted: SGLang preempts for no more than these."""
        self.fed_last = False
        """Its last token, a stop, was fed before it was known to be one."""
        self.branch = self.num_states = self.tracked = self.begun = 0
        self.copies = False
        self.slid = self.known = self.num_chunks = self.num_decoded = 0


class TreeMemory(Memory):
    """Pages on demand, shared through SGLang's tree."""

    name: ClassVar[str] = "sglang-tree"
    options: ClassVar[type | None] = SglangOptions
    needs: ClassVar[tuple[Need, ...]] = (
        Need("batching", "asks for pages as SGLang's scheduler does", names=("extend-first",)),
    )
    can_cache_prefixes: ClassVar[bool] = True
    unexecutable: ClassVar[str] = "memory=sglang-tree is not told to a device yet; serve with --policy radix"
    copies_a_mark: ClassVar[int] = 1
    """How often a mark that is loaded is copied."""
    tree: PrefixTree
    storage: "HostStorage | None"
    entered: list[Sequence] | None
    """Requests that have entered the queue since it was last looked at, where storage wants to know."""

    @classmethod
    def build(cls, b: "Builder") -> Memory:
        return cls(b.limits, b.options(SglangOptions), cls.copies(b)).with_storage(b)

    @staticmethod
    def copies(b: "Builder") -> Copies:
        # SGLang's kernels copy at the link's rate, however small the pages.
        page, mark = b.options(SglangOptions).page_and_mark_bytes(b.limits)
        cost = b.deployment.cost
        load_s, write_s = cost.copy_s(page, 0, H2D), cost.copy_s(page, 0, D2H)
        return Copies(load_s, write_s, cost.copy_s(mark, 0, H2D), cost.copy_s(mark, 0, D2H), Worth.of(b, load_s))

    def __init__(self, limits: Limits, options: SglangOptions, copies: Copies) -> None:
        super().__init__(limits)
        self._copies = copies
        self.caches_prefixes = limits.enable_prefix_caching
        size, pages = limits.block_size, limits.num_gpu_blocks
        host_pages, host_marks = options.num_on_host(limits)
        least_load = -(-LEAST_LOAD_TOKENS // size)
        self.tree = self._new_tree(
            TreeSettings(
                options.radix_eviction_policy,
                host_pages,
                host_marks,
                options.hicache_write_policy,
                least_load,
                EvictionRules(*options.eviction_rules(size)),
            )
        )
        self.storage = self.entered = None
        self.tier = TierCounters(num_blocks=host_pages)
        self._num_loading = self._marks_loading = 0
        """Pages that the step being planned brings to the GPU, and marks."""
        self._writer: Sequence | None = None
        self._num_copied = 0
        self._writes: dict[Move, list[Writing]] = {}
        self._ended_writes: list[Writing] = []
        self._by_priority = options.enable_priority_scheduling
        self.unused = pages
        """Pages without content."""
        self.block_keys = BlockKeys(size)
        self._held: dict[Sequence, Held] = {}
        # A trace has no negative ids.
        self._next_private_key = -1
        self._stops: dict[int, int] = {}
        """Of a page whose last token is a stop, by what it would be without."""

    def with_storage(self, b: "Builder") -> Self:
        """With what is behind the host, if anything is."""
        options = b.options(SglangOptions)
        if options.hicache_storage_backend is not None:
            from sim.systems.sglang.storage import HostStorage  # noqa: PLC0415 - few runs have any

            page, mark = options.page_and_mark_bytes(b.limits)
            gpus = b.block_bytes / b.limits.block_bytes
            self.storage = HostStorage(self, options, page * gpus, mark * gpus)
            self.entered = self.storage.entered
        return self

    def bind(self, scheduler: "Scheduler") -> None:
        super().bind(scheduler)
        if self.tree.has_host:
            scheduler.counters.tiers["host"] = self.tier
        if self.storage is not None:
            scheduler.counters.tiers["disk"] = self.storage.counters

    def _new_tree(self, settings: TreeSettings) -> PrefixTree:
        return PrefixTree(settings)

    def _settle(self) -> None:
        """The pool's books: what is unused or idle is free."""
        more = self.unused + self.tree.num_idle - self.gpu.free
        if more > 0:
            self.gpu.release(more)
        elif more:
            self.gpu.allocate(-more)

    # -- looking up ----------------------------------------------------------------------------------------------------

    def held(self, seq: Sequence) -> Held:
        """What it has; made when first asked for."""
        found = self._held.get(seq)
        if found is None:
            root = self.tree.root
            found = self._held[seq] = Held(self._keys_of(seq), Match(root, 0, root, 0))
        return found

    def _keys_of(self, seq: Sequence) -> tuple[int, ...]:
        """Of all pages that it will fill: those that the trace names, then its own."""
        if not self.caches_prefixes:
            return ()
        request = seq.request
        most = (request.prompt_tokens + request.output_tokens) // self.block_size
        keys = self.block_keys.of(request)[:most] if request.hash_ids else ()
        first = self._next_private_key
        self._next_private_key = last = first - (most - len(keys))
        return keys + tuple(range(first, last, -1))

    def search(self, seq: Sequence, num_tokens: int) -> Match:
        """The longest prefix of its first `num_tokens` tokens that is cached; that is a use of it."""
        held = self.held(seq)
        if self.caches_prefixes:
            held.match = self.tree.match(held.keys, min(num_tokens // self.block_size, len(held.keys)))
        return held.match

    def look_up(self, seq: Sequence, *, is_next: bool = True) -> None:
        self.search(seq, seq.num_tokens - 1)
        self._held[seq].known_tokens = seq.num_tokens

    def look_up_next(self, seq: Sequence) -> bool:
        """Look `seq` up to admit it; False: it waits for something else than room, and others may pass."""
        storage = self.storage
        if storage is not None and not storage.end_prefetch(seq):
            return False
        self._look_up_to_admit(seq)
        if storage is None or not storage.ask_for_lost(seq):
            return True
        self.passed_over(seq)
        return False

    def passed_over(self, seq: Sequence) -> None:
        """`seq`, which was looked up, waits for storage; others pass."""

    def refused(self, seq: Sequence) -> None:
        """`seq`, which was looked up, is not admitted."""

    def _look_up_to_admit(self, seq: Sequence) -> None:
        self.look_up(seq)

    def ask_for_entered(self) -> None:
        """Requests have entered the queue."""
        if self.storage is not None:
            self.storage.ask_for_entered()

    def share_keys(self, first: "TreeMemory", private: int) -> None:
        """What is the same here and in `first` has the same key; this one's own begin `private` further on."""
        self.block_keys = first.block_keys
        self._next_private_key -= private

    def touch(self, seq: Sequence) -> None:
        """What it would hit counts as used; when it was looked up last stays as it was."""
        held = self.held(seq)
        self.tree.match(held.keys, min(seq.num_tokens // self.block_size, len(held.keys)))

    def cached_tokens(self, seq: Sequence) -> int:
        found = self._held.get(seq)
        return found.match.pages * self.block_size if found is not None else 0

    # -- room ----------------------------------------------------------------------------------------------------------

    @property
    def free_tokens(self) -> int:
        """Tokens for which there are pages, unused or idle."""
        return (self.unused + self.tree.num_idle) * self.block_size

    def window_budget(self) -> "WindowBudget | None":
        """What a look at the prompts may take of the pool of windows; None: they have none (`WindowTreeMemory`)."""
        return None

    def make_room(self, pages: int) -> bool:
        """Evict until so many pages are unused; whether they are."""
        if self.unused < pages and self.tree.num_idle:
            self.unused += self.tree.evict(pages - self.unused)
            self._settle()
        return self.unused >= pages

    def _take(self, pages: int) -> None:
        self.unused -= pages
        self._settle()

    # -- prompts -------------------------------------------------------------------------------------------------------

    def load(self, seq: Sequence) -> int:
        """Bring what it hits on the host to the GPU; returns tokens that it hits now beyond, all of them or 0."""
        held, tree = self._held[seq], self.tree
        match, anchor = held.match, held.match.best
        nodes, marks = tree.nodes_to_load(anchor), tree.marks_to_load(anchor)
        pages = sum(len(node.keys) for node in nodes)
        if pages < tree.least_load and not marks:
            return 0
        if any(node.loading not in (None, anchor) for node in marks):
            # Others bring them already, with more.
            return 0
        pin, since = tree.pin(anchor), tree.lock(anchor)
        has_room = self._room_to_load(seq, pages, match.host_marks)
        tree.unlock(anchor, since)
        if not has_room:
            tree.unpin(anchor, pin)
            return 0
        self.unused -= pages
        tree.loaded(anchor, pin)
        self._settle()
        self._num_loading += pages
        self._marks_loading += match.host_marks * self.copies_a_mark
        found = 0
        while anchor is not match.node:
            found += len(anchor.keys)
            anchor = parent_of(anchor)
        self._count_load(seq, match.pages, found)
        held.match = Match(match.best, match.pages + found, match.best, 0)
        return found * self.block_size

    def _room_to_load(self, seq: Sequence, pages: int, marks: int) -> bool:
        """Evict until there is room for so many pages and marks; whether there is."""
        return self.make_room(pages)

    def _count_load(self, seq: Sequence, first: int, pages: int) -> None:
        tier, begin, end = self.tier, first * self.block_size, (first + pages) * self.block_size
        worth = self._copies.worth
        saved_s = worth.recompute_s(seq, begin, end) - worth.load_s(pages)
        tier.num_loads += 1
        tier.hit_tokens += end - begin
        tier.saved_s += max(0.0, saved_s)
        tier.lost_s += max(0.0, -saved_s)

    # -- copies --------------------------------------------------------------------------------------------------------

    @property
    def is_copying(self) -> bool:
        """Whether any copy is under way, or about to begin."""
        return self.tree.is_copying or (self.storage is not None and self.storage.is_copying)

    @property
    def counts_passes(self) -> bool:
        """Whether what those that wait do depends on how many steps go by."""
        return self.storage is not None and self.storage.counts_passes

    def wakes_s(self) -> float:
        return inf if self.storage is None else self.storage.wakes_s()

    def begin_step(self, now_s: float) -> None:
        """See what copies have ended, and begin those that are due (`check_hicache_events`).

        A copy to the host waits for the steps launched before: it begins with the one being planned.
        """
        tree, scheduler = self.tree, self.scheduler
        if not tree.has_host:
            return
        drain = self.storage.begin_step(now_s) if self.storage is not None else None
        begun = tree.begin_writing()
        if begun and self._copies.write_s:
            move = self._copy(sum([one.pages for one in begun]), sum([one.marks for one in begun]))
            self._writes[move] = begun
            scheduler.beside.append(move)
        else:
            self._ended_writes += begun
        ended, self._ended_writes = self._ended_writes, []
        tree.written(ended)
        tree.finish_loads(in_flight=bool(self._copies.load_s and scheduler.in_flight))
        self._settle()
        if drain is not None:
            drain()

    def _copy(self, pages: int, marks: int) -> Move:
        assert self._writer is not None, "what is written has been computed"
        num, s_each = mixed(pages, self._copies.write_s, marks, self._copies.mark_write_s)
        # Of several nodes: the tokens say which copy it is.
        begin = self._num_copied
        self._num_copied = end = begin + num * self.block_size
        return Move(self._writer, ALL_LAYERS, begin, end, Tier.GPU, Tier.HOST, num, 0, True, s_each)

    def transfer_done(self, move: Move) -> None:
        self._ended_writes += self._writes.pop(move, ())

    def plan_loads(self, plan: IterationPlan) -> None:
        """All prompts of a step are admitted: what its layers wait for begins when room for that is written back."""
        copies = self._copies
        if (self._num_loading or self._marks_loading) and copies.load_s:
            self._plan_written_back(plan)
            num, s_each = mixed(self._num_loading, copies.load_s, self._marks_loading, copies.mark_load_s)
            plan.streamed += (Gathered(1, num, 0, s_each, len(plan.awaited)),)
        self._num_loading = self._marks_loading = 0

    def plan_copies(self, plan: IterationPlan) -> None:
        """Of a step that is planned: what is written back before it begins."""
        self._plan_written_back(plan)
        self.tier.stored_blocks, self.tier.evicted_blocks = self.tree.num_written, self.tree.num_host_evicted

    def _plan_written_back(self, plan: IterationPlan) -> None:
        tree = self.tree
        if (tree.num_written_back or tree.marks_written_back) and self._copies.write_s:
            move = self._copy(tree.num_written_back, tree.marks_written_back)
            self.scheduler.beside.append(move)
            plan.awaited += (move,)
        tree.num_written_back = tree.marks_written_back = 0

    def hold(self, seq: Sequence) -> int:
        """`seq` is admitted: what it hits is its own. Returns how many tokens that are."""
        if self.storage is not None:
            self.storage.forget(seq)
        held = self._held[seq]
        held.node, held.protected, held.counted, held.fed_last = held.match.node, held.match.pages, 0, False
        held.since = self.tree.lock(held.node)
        self._settle()
        seq.num_computed = held.protected * self.block_size
        seq.num_blocks = held.protected
        if self.caches_prefixes:
            self.count_hits(seq, seq.num_computed)
        return seq.num_computed

    def extend(self, chunks: list[tuple[Sequence, int]]) -> None:
        """Pages for a step's prompts, of each so many tokens more. All are evicted for at once."""
        size = self.block_size
        tokens, pages = 0, 0
        for seq, num_new in chunks:
            tokens += num_new
            blocks = -(-(seq.num_computed + num_new) // size)
            pages += blocks - seq.num_blocks
            if not seq.num_computed or seq.num_blocks * size <= seq.num_computed:
                self.scheduler.changes.append(Place(seq, ALL_LAYERS, blocks - seq.num_blocks, 0))
            seq.num_blocks = blocks
        # SGLang counts a page more for each, where pages have more tokens than one.
        self.make_room(-(-(tokens + len(chunks) * size) // size) if size > 1 else tokens)
        self._take(pages)

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """The first `num_tokens` tokens of `seq`, which runs on, are computed: they can be hit."""
        if self.caches_prefixes:
            self._insert(seq, self._held[seq], num_tokens)
            self._settle()

    def _insert(self, seq: Sequence, held: Held, num_tokens: int) -> None:
        tree, pages = self.tree, num_tokens // self.block_size
        self._writer = seq
        node, copies = self._enter(seq, held, pages, seq.request.priority if self._by_priority else 0)
        self.unused += copies
        held.counted = max(held.counted, pages)
        tree.unlock(held.node, held.since)
        held.since = tree.lock(node)
        held.node, held.protected = node, pages

    def _enter(self, seq: Sequence, held: Held, pages: int, priority: int) -> tuple[Node, int]:
        """The tree has its first pages. Returns where they end, and how many were there as others' copies."""
        tree = self.tree
        entered = tree.insert(held.keys, pages, held=held.protected, counted=held.counted, priority=priority)
        prompt = seq.request.prompt_tokens // self.block_size
        if 0 < prompt < pages:
            # A node ends where the prompt does: its answer may be evicted alone.
            tree.insert(held.keys, prompt, held=prompt, counted=prompt, priority=priority + 1)
        return entered

    # -- decodes -------------------------------------------------------------------------------------------------------

    def decode(self, num_seqs: int, pages: int) -> None:
        """A token of each of `num_seqs` sequences, with `pages` pages for which `make_room` found room."""
        if self.block_size > 1:
            self.make_room(num_seqs)
        self._take(pages)

    def ride(self, seq: Sequence, known_tokens: int) -> None:
        """`seq` decodes in a step that prefills, too, with so many tokens that the scheduler knows of."""
        self._held[seq].known_tokens = known_tokens

    def needs_page(self, seq: Sequence) -> bool:
        """Whether the next token of one that may have ended, in no batch, begins a page."""
        return (seq.num_tokens - 1) % self.block_size == 0

    def feed_last(self, seq: Sequence) -> None:
        """`seq`, whose last token is in flight, is fed it; pages have been taken."""
        self._held[seq].fed_last = True
        seq.num_computed = seq.num_tokens - 1
        seq.num_blocks += self.needs_page(seq)

    def grow_further(self, batch: DecodeBatch, steps: int) -> None:
        before, total, members = batch.blocks_needed(1), batch.blocks_needed(steps), len(batch.members)
        spare = members if self.block_size > 1 else 0
        if self.unused >= total - before + spare:
            self._take(total - before)
            return
        for step in range(2, steps + 1):
            needed = batch.blocks_needed(step)
            self.make_room(needed - before)
            self.decode(members, needed - before)
            before = needed

    def repeats(self, plan: IterationPlan, steps: int) -> int:
        """While all find a page, of the idle ones too; one step where idle ones are first written back."""
        if self.tree.writes_back and self.gpu.free > self.unused:
            return 1
        return max(1, min(steps, self.batch.steps_within(self.gpu.free + self.batch.blocks_needed(1))))

    # -- the way out ---------------------------------------------------------------------------------------------------

    def release(self, seq: Sequence) -> None:
        held = self.held(seq)
        if seq.status is not Status.WAITING and self.caches_prefixes and not seq.error:
            # The last token's KV is there where it was fed before it was known to be the last.
            tokens = seq.num_tokens - 1
            if held.fed_last:
                tokens += 1
                if tokens % self.block_size == 0:
                    held.keys = (*held.keys[: tokens // self.block_size - 1], self._stop(held.keys, tokens))
            if tokens := self.cached_at_end(seq, held, tokens):
                self._insert(seq, held, tokens)
        self._give_back(seq, held)
        self.tree.unlock(held.node, held.since)
        self._settle()
        seq.num_blocks = 0
        root = self.tree.root
        held.node, held.protected, held.since, held.match = root, 0, 0, Match(root, 0, root, 0)
        if seq.status is not Status.WAITING:
            self.forget(seq)
        self.scheduler.changes.append(Release(seq))

    def cached_at_end(self, seq: Sequence, held: Held, num_tokens: int) -> int:
        """Of so many computed tokens of `seq`, which has ended, those that enter the tree."""
        return num_tokens

    def _give_back(self, seq: Sequence, held: Held) -> None:
        """The pages of `seq` that the tree does not have are unused."""
        self.unused += seq.num_blocks - held.protected

    def _stop(self, keys: tuple[int, ...], num_tokens: int) -> int:
        """The key of the page that a stop token fills."""
        key = keys[num_tokens // self.block_size - 1]
        if key not in self._stops:
            self._stops[key] = self._next_private_key
            self._next_private_key -= 1
        return self._stops[key]

    def forget(self, seq: Sequence) -> None:
        if self.storage is not None:
            self.storage.forget(seq)
        self._held.pop(seq, None)

    @property
    def num_evicted(self) -> int:
        return self.tree.num_evicted

    def recount(self) -> tuple[int, int]:
        gpu, host = super().recount()
        holders = [*self.batch.members, *(seq for seq, _ in self.scheduler.holders())]
        shared = sum(self._held[seq].protected for seq in holders)
        locked = sum(len(node.keys) for node in self.tree.nodes() if node.lock and node.on_gpu)
        return gpu - shared + locked, host


def mixed(pages: int, page_s: float, marks: int, mark_s: float) -> tuple[int, float]:
    """How many are copied together, and the time of each, as if they were alike."""
    if not marks:
        return pages, page_s
    return pages + marks, (pages * page_s + marks * mark_s) / (pages + marks)
