"""`RadixMemory`: blocks shared through a radix tree (RadixAttention; Zheng et al., "SGLang", NeurIPS 2024).

Blocks of one token, or pages of any size. A prompt is admitted with the longest cached prefix, but for its last token.
Its own blocks enter the tree when they are computed, what it generates when it ends; where the tree has that content
already, its own copy is freed. A preempted sequence loses what it has generated, not its prompt.

Evictions are those of one allocation a step, as in SGLang 0.3: where too few blocks are unused, leaves go until as many
are free as the whole step takes. What others have not locked by then may be among them.
"""

from typing import TYPE_CHECKING, ClassVar

from sim.engine.batch import DecodeBatch
from sim.engine.changes import Place, Release
from sim.engine.limits import Limits
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence
from sim.kv.block_pool import BlockPool
from sim.kv.index.block_keys import BlockKeys
from sim.kv.index.prefix_index import Keys
from sim.kv.index.radix_tree import Node, RadixTree
from sim.kv.memory import ALL_LAYERS, Memory
from sim.kv.paged import PagedMemory

if TYPE_CHECKING:
    from sim.systems.builder import Builder


class RadixPool(BlockPool):
    """A pool in which idle blocks of the tree count as free. They give way once the step is complete."""

    __slots__ = ("_pending", "tree")

    def __init__(self, name: str, num_blocks: int, tree: RadixTree) -> None:
        super().__init__(name, num_blocks)
        self.tree = tree
        self._pending = 0

    @property
    def unused(self) -> int:
        """Blocks that hold nothing."""
        return self.free - self.tree.num_idle

    def allocate(self, count: int) -> None:
        super().allocate(count)
        self._pending += count

    def take_idle(self, count: int) -> None:
        """Idle blocks, no longer so, are used as they are."""
        super().allocate(count)

    def evict_deferred(self) -> None:
        """Evict what was allocated since the last time, where too few blocks were unused."""
        if self._pending:
            if self.unused < 0:
                self.tree.evict(self._pending)
            self._pending = 0


class Prefix:
    """What the tree has of one sequence: the first `num_blocks` blocks of `keys`, up to `node`."""

    __slots__ = ("keys", "node", "num_blocks", "version")

    def __init__(self, keys: Keys, root: Node) -> None:
        self.keys = keys
        self.node = root
        self.num_blocks = 0
        self.version = -1
        """Of the tree, when it was looked up."""


class RadixMemory(Memory):
    """Blocks on demand, shared through a radix tree."""

    name: ClassVar[str] = "radix"
    can_cache_prefixes: ClassVar[bool] = True
    caches_prefixes = True
    shares_reads: ClassVar[bool] = False
    """Whether kernels read what several decodes share once a step, for all of them."""

    @classmethod
    def build(cls, b: "Builder") -> Memory:
        """Paged memory where prefixes are not to be cached."""
        return cls(b.limits) if b.limits.enable_prefix_caching else PagedMemory.build(b)

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.tree = RadixTree()
        self.gpu = self.pool = RadixPool(self.gpu.name, self.gpu.num_blocks, self.tree)
        self.block_keys = BlockKeys(limits.block_size)
        self._prefixes: dict[Sequence, Prefix] = {}
        # A trace has no negative ids.
        self._next_private_key = -1
        # Keys of what was generated, of those that run, where they are known by content.
        self._named: dict[Sequence, Keys] = {}
        # Where reads are shared, sequences that decode, and where what the tree has of each ends.
        self._reading: dict[Sequence, Node] = {}

    def tell_blocks(self) -> None:
        # Runs that are not executed have no ids to keep.
        from sim.kv.telling import TellingTree  # noqa: PLC0415

        self.tree = self.pool.tree = TellingTree(self.scheduler)

    def name_blocks(self, seq: Sequence, keys: tuple[int, ...]) -> None:
        # What is generated is never hit where reads are shared.
        if not self.shares_reads:
            self._named[seq] = self._named.get(seq, ()) + keys

    # -- looking up --------------------------------------------------------------------------------------------------

    def keys_of(self, seq: Sequence) -> Keys:
        """Keys of all blocks that a sequence will fill: those that the trace names, then its own."""
        keys = self.named_keys(seq)
        return keys + self.private_keys(self._most_blocks(seq) - len(keys))

    def named_keys(self, seq: Sequence) -> Keys:
        """Of those blocks that others may have, too."""
        request = seq.request
        return self.block_keys.of(request)[: self._most_blocks(seq)] if request.hash_ids else ()

    def _most_blocks(self, seq: Sequence) -> int:
        return (seq.request.prompt_tokens + seq.output_tokens) // self.block_size

    def private_keys(self, count: int) -> Keys:
        """Keys that no other sequence has."""
        first = self._next_private_key
        self._next_private_key = first - count
        return tuple(range(first, first - count, -1))

    def _prefix(self, seq: Sequence) -> Prefix:
        prefix = self._prefixes.get(seq)
        if prefix is None:
            prefix = self._prefixes[seq] = Prefix(self.keys_of(seq), self.tree.root)
        return prefix

    def end_of(self, seq: Sequence) -> Node:
        """Where what a sequence hits ends, when it was looked up last."""
        return self._prefixes[seq].node

    def _hits(self, seq: Sequence) -> tuple[int, int]:
        """Blocks that a sequence would hit, and how many of them are unused."""
        prefix, tree = self._prefixes.get(seq), self.tree
        if prefix is None:
            prefix = Prefix(self.named_keys(seq), tree.root)
        if prefix.version == tree.version:
            return prefix.num_blocks, tree.num_idle_until(prefix.node)
        return tree.count(prefix.keys, prefix.node, prefix.num_blocks, self._limit(seq, prefix))

    def _limit(self, seq: Sequence, prefix: Prefix) -> int:
        """Blocks that it may hit: the last token has to be computed."""
        return min((seq.num_tokens - 1) // self.block_size, len(prefix.keys))

    def _advance(self, seq: Sequence) -> Prefix:
        """Move the end of what it would hit to where that is by now."""
        prefix, tree = self._prefix(seq), self.tree
        if prefix.version != tree.version:
            limit = self._limit(seq, prefix)
            prefix.node, prefix.num_blocks = tree.advance(prefix.keys, prefix.node, prefix.num_blocks, limit)
            prefix.version = tree.version
        return prefix

    def look_up(self, seq: Sequence, *, is_next: bool = True) -> None:
        """That is the latest use of the prefix, too."""
        self.tree.touch(self._advance(seq).node)

    def cached_tokens(self, seq: Sequence) -> int:
        return self._hits(seq)[0] * self.block_size

    # -- prompts -------------------------------------------------------------------------------------------------------

    def blocks_wanted(self, seq: Sequence, num_tokens: int) -> int:
        hit, idle = self._hits(seq)
        # Idle hits are free blocks as well, until they are taken.
        return self.blocks_holding(num_tokens) - hit + idle

    def take(self, seq: Sequence, num_tokens: int) -> None:
        prefix = self._advance(seq)
        blocks = seq.num_blocks = self.blocks_holding(num_tokens)
        self.pool.take_idle(self.tree.lock_for(seq, prefix.node))
        self.pool.allocate(blocks - prefix.num_blocks)
        seq.num_computed = prefix.num_blocks * self.block_size
        self.scheduler.changes.append(Place(seq, ALL_LAYERS, blocks, 0))

    def complete(self, plan: IterationPlan) -> None:
        self.pool.evict_deferred()
        for chunk in plan.chunks:
            self.publish(chunk.seq, chunk.num_cached + chunk.num_new)
        if self._reading and plan.num_decodes:
            shared = self.tree.num_reread
            if plan.num_decodes < len(self._reading):
                shared = self.tree.num_reread_by(self._reading[seq] for seq in plan.decodes)
            plan.decode_shared_tokens = shared * self.block_size

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """The first `num_tokens` tokens of `seq` are computed. What is generated waits for its end."""
        if seq not in self.batch.members:
            self._insert(seq, self._prefix(seq), num_tokens // self.block_size)

    def _insert(self, seq: Sequence, prefix: Prefix, num_blocks: int) -> None:
        end = min(num_blocks, len(prefix.keys))
        if end > prefix.num_blocks:
            prefix.node, used = self.tree.insert_for(seq, prefix.keys, prefix.node, prefix.num_blocks, end)
            prefix.num_blocks = end
            # Of what others use, the own copy is free; what was idle takes its own copy's place.
            self.pool.release(used)

    # -- decodes -------------------------------------------------------------------------------------------------------

    def joined(self, seq: Sequence) -> None:
        if self.shares_reads and seq not in self._reading:
            node = self._reading[seq] = self._prefix(seq).node
            self.tree.begin_reading(node)

    def left(self, seq: Sequence) -> None:
        node = self._reading.pop(seq, None)
        if node is not None:
            self.tree.end_reading(node)

    def grow_further(self, batch: DecodeBatch, steps: int) -> None:
        pool, before = self.pool, batch.blocks_needed(1)
        if pool.unused >= batch.blocks_needed(steps) - before:
            pool.take_idle(batch.blocks_needed(steps) - before)
            return
        for step in range(2, steps + 1):
            needed = batch.blocks_needed(step)
            pool.allocate(needed - before)
            pool.evict_deferred()
            before = needed

    def repeats(self, plan: IterationPlan, steps: int) -> int:
        """While requests wait, not beyond the blocks without content: then what they would hit may go."""
        steps = super().repeats(plan, steps)
        if steps > 1 and self.scheduler.order.waiting:
            # The first iteration's blocks are taken already, but its evictions are deferred.
            unused = self.pool.unused
            return 1 if unused < 0 else min(steps, self.batch.steps_within(unused + self.batch.blocks_needed(1)))
        return steps

    # -- the way out ---------------------------------------------------------------------------------------------------

    def release(self, seq: Sequence) -> None:
        prefix = self._prefix(seq)
        ended = seq.num_generated >= seq.output_tokens
        if named := self._named.get(seq):
            first = seq.request.prompt_tokens // self.block_size
            prefix.keys = (*prefix.keys[:first], *named, *prefix.keys[first + len(named) :])
        if ended:
            # The last token's KV was never computed.
            self._insert(seq, prefix, (seq.num_tokens - 1) // self.block_size)
        own = seq.num_blocks - prefix.num_blocks
        self.pool.release(own + self.tree.unlock(prefix.node))
        seq.num_blocks = 0
        if ended:
            self.forget(seq)
        else:
            prefix.node, prefix.num_blocks, prefix.version = self.tree.root, 0, -1
        self.scheduler.changes.append(Release(seq))

    def forget(self, seq: Sequence) -> None:
        self._prefixes.pop(seq, None)
        self._named.pop(seq, None)

    @property
    def num_evicted(self) -> int:
        return self.tree.num_evicted

    def recount(self) -> tuple[int, int]:
        gpu, host = super().recount()
        holders = [*self.batch.members, *(seq for seq, _ in self.scheduler.holders())]
        shared = sum(self._prefixes[seq].num_blocks for seq in holders if seq in self._prefixes)
        locked = sum(len(node.keys) for node in self.tree.nodes() if node.lock_ref)
        return gpu - shared + locked, host
