"""`PrefixGroups`: requests that share a prefix go together, the most output for the prompts first (BatchLLM).

Zheng et al., "BatchLLM: Optimizing Large Batched LLM Inference with Global Prefix Sharing and Throughput-oriented Token
Batching", 2024; arXiv 2412.03594.

All prompts that wait are one prefix tree, which is brought down to one level of prefixes: from the leaves up, a child
parts from its node if what its requests save by its tokens is more than the node's tokens, which are then computed once
more: (requests - 1) * tokens of the child > tokens of the node. That is a local rule, not always the best there is.
Each prefix is a group. Groups go by tokens to generate over tokens to compute, the prefix counted once: what decodes
long starts early, and prompts are left to mix with it.

With memory that is told (`prefix-groups`) a prefix stays as long as its group runs; with another that caches prefixes
the group finds it there, as far as it has not been given up.

A request that arrives while a plan is carried out waits for the next one.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from sim.engine.sequence import Sequence
from sim.kv.index.block_keys import BlockKeys
from sim.kv.index.prefix_index import Keys
from sim.kv.shared_reads import GroupMemory
from sim.parts.order.fcfs import Fcfs
from traces.hash_ids import num_shared

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler

Group = tuple[int, list[int]]
"""How many keys its members have in common, and which they are."""


class _Node:
    """A prefix of `depth` keys: the requests that stay with it, and the groups that hang below it."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.members: list[int] = []
        self.groups: list[Group] = []

    def close(self, above: "_Node | None") -> list[Group]:
        """Its own group and those that part from it, `above` being the node that it hangs on."""
        own = self.depth - above.depth if above else 0
        found: list[Group] = []
        for depth, members in self.groups:
            if (len(members) - 1) * (depth - self.depth) > own:
                found.append((depth, members))
            else:
                self.members += members
        if self.members:
            found.append((self.depth, self.members))
        return found


def one_level(prompts: list[Keys]) -> list[Group]:
    """Groups of prompts, by place in the list: each in one, those that share nothing in that of depth 0, if any."""
    stack = [_Node(0)]
    before: Keys = ()
    for i in sorted(range(len(prompts)), key=prompts.__getitem__):
        keys = prompts[i]
        shared = num_shared(before, 0, keys, 0, len(keys))
        while stack[-1].depth > shared:
            node = stack.pop()
            if stack[-1].depth < shared:
                stack.append(_Node(shared))
            stack[-1].groups += node.close(stack[-1])
        if stack[-1].depth < len(keys):
            stack.append(_Node(len(keys)))
        stack[-1].members.append(i)
        before = keys
    while len(stack) > 1:
        node = stack.pop()
        stack[-1].groups += node.close(stack[-1])
    return stack[0].close(None)


class PrefixGroups(Fcfs):
    """A plan over all that wait, then first come, first served by it."""

    name: ClassVar[str] = "prefix-groups"

    def __init__(self) -> None:
        super().__init__()
        self._arrived: list[Sequence] = []
        self._groups: GroupMemory | None = None

    def bind(self, scheduler: "Scheduler") -> None:
        super().bind(scheduler)
        if isinstance(self.memory, GroupMemory):
            self._groups = self.memory
        self._size = self.memory.block_size
        self._keys = BlockKeys(self._size)

    def prepare(self, now_s: float) -> None:
        if self._arrived and not self._queue:
            self._plan(self._arrived)
            self._arrived = []

    def _plan(self, seqs: list[Sequence]) -> None:
        """Group `seqs`, tell the memory what they share, and queue them."""
        size = self._size
        # The last token of a prompt is always computed.
        prompts = [self._keys.of(seq.request)[: (seq.num_tokens - 1) // size] for seq in seqs]
        ranked: list[tuple[float, int, list[int]]] = []
        for depth, members in one_level(prompts):
            members.sort()
            if not depth:
                ranked += [(-_ratio([seqs[i]], 0), i, [i]) for i in members]
                continue
            group = [seqs[i] for i in members]
            if self._groups is not None and len(group) > 1:
                self._groups.share(group, depth)
            ranked.append((-_ratio(group, depth * size if self.memory.caches_prefixes else 0), members[0], members))
        for _, _, members in sorted(ranked):
            self._queue.extend(seqs[i] for i in members)

    def add(self, seq: Sequence) -> None:
        self._arrived.append(seq)

    def remove(self, seq: Sequence) -> bool:
        if seq not in self._arrived:
            return super().remove(seq)
        self._arrived.remove(seq)
        return True

    def __len__(self) -> int:
        return super().__len__() + len(self._arrived)

    def __iter__(self) -> Iterator[Sequence]:
        yield from super().__iter__()
        yield from self._arrived


def _ratio(seqs: list[Sequence], shared_tokens: int) -> float:
    """Tokens to generate over tokens to compute, where the first `shared_tokens` of each are computed once."""
    prompts = sum(seq.num_tokens for seq in seqs) - (len(seqs) - 1) * shared_tokens
    return sum(seq.output_tokens for seq in seqs) / prompts
