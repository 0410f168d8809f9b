"""`StateTreeMemory`: pages of KV, and a pool of states where layers keep one (Gated DeltaNet, Mamba).

A request that runs has a state of its own, and slots in which it tracks some for the tree (`extra_buffer`). A hit is
copied into a slot of its own. A chunk of a prompt leaves a state where the last of the kernels' chunks in it ends, or
where others' pages went on further than its hit; a decode leaves one every so many tokens. What is cached of a request
ends with such a state. Without tracking (`no_buffer`) that is where its chunk, and in the end itself, do.
Source: sglang 0.5.23, `mem_cache/unified_cache/components/mamba.py`, `memory_pool.py` (`HybridReqToTokenPool`),
`allocation.py` (`ensure_mamba_capacity`), `schedule_batch.py` (`_mamba_radix_cache_v2_req_prepare_for_extend`).
"""

from math import lcm
from typing import ClassVar

from sim.engine.limits import Limits
from sim.engine.sequence import Sequence
from sim.errors import InvariantError, UserError
from sim.systems.sglang.marked_tree import StateTree
from sim.systems.sglang.memory import Copies, Held, TreeMemory
from sim.systems.sglang.options import SglangOptions
from sim.systems.sglang.tree import Node, PrefixTree, TreeSettings


class StateTreeMemory(TreeMemory):
    """`gpu` is the pool of the layers that attend."""

    copies_a_mark: ClassVar[int] = 2
    """To the tree, and to the slot of its own."""

    def __init__(self, limits: Limits, options: SglangOptions, copies: Copies) -> None:
        if limits.states is None or limits.states.own_slots is None:
            raise InvariantError("a pool of states needs to know how many it has")
        super().__init__(limits, options, copies)
        assert isinstance(self.tree, StateTree), "as it was made"
        self._states = self.tree
        self.num_states = limits.states.own_slots
        self._own_states = 0
        """Slots of the pool that sequences have, those of the tree aside."""
        page, chunk = self.block_size, limits.states.chunk_tokens
        if max(page, chunk) % min(page, chunk):
            raise UserError(
                f"sglang page-size: {page} and the {chunk} tokens of a chunk of the kernels that compute states: "
                "one must divide the other; take a power of two"
            )
        self._num_tracked = options.tracked_states(page) if self.caches_prefixes else 0
        self._chunk_tokens, self._grid = chunk, max(page, chunk)
        self._interval = lcm(self._grid, options.mamba_track_interval)

    def _new_tree(self, settings: TreeSettings) -> PrefixTree:
        return StateTree(settings, 1)

    # -- the pool of states --------------------------------------------------------------------------------------------

    @property
    def states_unused(self) -> int:
        """Slots that neither the tree nor a sequence has."""
        return self.num_states - self._states.num_marked - self._own_states

    def _evict_states(self, num: int) -> bool:
        """Evict until so many slots are unused; whether they are."""
        if self.states_unused < num:
            self.unused += self._states.evict_marks(num - self.states_unused)
            self._settle()
        return self.states_unused >= num

    def _find_states(self, num: int) -> None:
        if not self._evict_states(num):
            raise InvariantError(f"{num} states are needed, {self.states_unused} of {self.num_states} are left")

    # -- prompts -------------------------------------------------------------------------------------------------------

    def _look_up_to_admit(self, seq: Sequence) -> None:
        self.look_up(seq)
        held, tree = self.held(seq), self._states
        match, reached = held.match, tree.reached * self.block_size // self._grid * self._grid
        held.branch = reached if reached > (match.pages + match.host_pages) * self.block_size else 0
        # What the host has is copied when it is loaded.
        held.copies = match.best is not tree.root and not match.host_marks
        if held.copies and not held.num_states:
            # A slot for its copy of what it hits, whether it is admitted or not.
            since = tree.lock(match.best)
            self._find_states(1)
            tree.unlock(match.best, since)
            self._settle()

    def passed_over(self, seq: Sequence) -> None:
        self._take_slot(self.held(seq))

    def _take_slot(self, held: Held) -> None:
        """The slot for its copy is its own."""
        if held.copies and not held.num_states:
            held.num_states = 1
            self._own_states += 1

    def refused(self, seq: Sequence) -> None:
        self._own_states -= self.held(seq).num_states
        self.held(seq).num_states = 0

    def forget(self, seq: Sequence) -> None:
        if seq in self._held:
            self.refused(seq)
        super().forget(seq)

    def _room_to_load(self, seq: Sequence, pages: int, marks: int) -> bool:
        held = self.held(seq)
        slots = 1 - held.num_states
        self._find_states(slots)
        self._own_states += slots
        held.copies = self.make_room(pages) and self._evict_states(marks)
        self._own_states -= slots
        return held.copies

    def hold(self, seq: Sequence) -> int:
        held = self.held(seq)
        held.tracked = held.begun = 0
        self._take_slot(held)
        return super().hold(seq)

    def extend(self, chunks: list[tuple[Sequence, int]]) -> None:
        wanted, found = 1 + self._num_tracked, [self.held(seq) for seq, _ in chunks]
        needed = sum(wanted - held.num_states for held in found)
        self._find_states(needed)
        self._own_states += needed
        for held, (seq, tokens) in zip(found, chunks, strict=True):
            held.num_states = wanted
            self._track(held, seq.num_computed, tokens)
        super().extend(chunks)

    def _track(self, held: Held, begin: int, tokens: int) -> None:
        """A chunk of so many tokens leaves a state where the last of the kernels' chunks in it ends, or at a branch."""
        held.begun = end = begin + tokens
        if not self._num_tracked or tokens < self._grid:
            return
        held.tracked = begin + tokens // self._grid * self._grid
        is_last = held.tracked == begin + tokens // self._chunk_tokens * self._chunk_tokens
        before = end if is_last else held.tracked + 1
        if begin < held.branch < before and (held.branch - begin) % self._grid == 0:
            held.tracked = held.branch

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        if not self.caches_prefixes:
            return
        held = self.held(seq)
        if self._num_tracked:
            num_tokens, held.tracked = held.tracked, 0
        if num_tokens:
            # The tree has that state, and the sequence another slot.
            self._find_states(1)
            super().publish(seq, num_tokens)

    def _enter(self, seq: Sequence, held: Held, pages: int, priority: int) -> tuple[Node, int]:
        return self.tree.insert(held.keys, pages, held=held.protected, counted=held.counted, priority=priority)

    # -- decodes, and the way out --------------------------------------------------------------------------------------

    def ride(self, seq: Sequence, known_tokens: int) -> None:
        super().ride(seq, known_tokens)
        held, tokens = self.held(seq), seq.request.prompt_tokens + self.scheduler.num_generated_of(seq)
        if tokens % self._interval == 0:
            # Nothing is tracked in a step that prefills, too.
            held.tracked, held.begun = self._tracked_before(held, tokens), tokens

    def _tracked_before(self, held: Held, num_tokens: int) -> int:
        """Tokens of the state that was tracked last before it had so many."""
        last = (num_tokens - 1) // self._interval * self._interval
        return last if last > held.begun else held.tracked

    def cached_at_end(self, seq: Sequence, held: Held, num_tokens: int) -> int:
        return self._tracked_before(held, seq.num_tokens) if self._num_tracked else num_tokens

    def _give_back(self, seq: Sequence, held: Held) -> None:
        super()._give_back(seq, held)
        self.refused(seq)

    def recount(self) -> tuple[int, int]:
        own, tree = sum(held.num_states for held in self._held.values()), self._states
        found, counted = (self._own_states, tree.num_marked, tree.num_marked_idle), (own, *tree.recounted())
        if found != counted:
            raise InvariantError(f"states (sequences', the tree's, idle) are {found}, counted {counted}")
        return super().recount()
