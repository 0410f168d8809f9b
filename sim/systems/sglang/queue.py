"""`SglangQueue`: the waiting requests, sorted in place whenever prompts are looked at (SGLang 0.5's `SchedulePolicy`).

- `fcfs`: as they came; what is retracted or preempted comes last. With priorities, the urgent first.
- `lof`: the longest output that is asked for first.
- `lpm`: the longest cached prefix first. A request that has next to nothing cached and begins like another before it
  comes last: it will hit what that one computes. More than `MOST_MATCHED` that wait are left as they are.
- `dfs-weight`: a walk through the tree, first into the branch that the most wait for.
- `shortest-prefill-first`: the fewest tokens to compute first. `hrrn`: the most tokens computed since it came, for each
  that it computes itself; ties by the digits of its id (SGLang's ids are random).

`lpm`'s rule for requests that begin alike is that of the last two, too, and its limit that of `hrrn`.

Looking a prefix up is a use of it. Where the order does not look, prefixes of those that wait are touched now and then.
Source: sglang 0.5.23, `managers/schedule_policy.py`.
"""

from collections.abc import Callable, Iterator
from math import inf
from typing import TYPE_CHECKING, ClassVar, Self

from sim.engine.sequence import Sequence
from sim.errors import UserError
from sim.kv.index.branches import by_branch
from sim.parts.base import Order
from sim.parts.needs import Need
from sim.systems.sglang.memory import TreeMemory
from sim.systems.sglang.options import SglangOptions

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler
    from sim.systems.builder import Builder

MOST_MATCHED = 128
"""Requests that wait beyond which `lpm` and `hrrn` sort nothing, and of which prefixes are touched."""
TOUCH_INTERVAL = 32
"""Looks at the queue from one touch of prefixes to the next."""
QUEUE_FULL = "the queue has as many requests as max-queued-requests lets wait"
QUEUE_FULL_OF_URGENT = "the queue was full, and a more urgent request came"
SHORTEST = "shortest-prefill-first"
ALIKE_TOKENS = 32
"""A request with no more cached than these, which begins with so many of another's, waits for that one."""


class SglangQueue(Order):
    """A list; `sort` puts it in order."""

    name: ClassVar[str] = "sglang-queue"
    sticky: ClassVar[bool] = False
    options: ClassVar[type | None] = SglangOptions
    needs: ClassVar[tuple[Need, ...]] = (
        Need("memory", "looks prefixes up in SGLang's tree", names=("sglang-tree",)),
        Need("batching", "is sorted when SGLang's scheduler says so", names=("extend-first",)),
    )

    @classmethod
    def build(cls, b: "Builder") -> Self:
        return cls(b.options(SglangOptions))

    def __init__(self, options: SglangOptions) -> None:
        self._policy, self._by_priority = options.schedule_policy, options.enable_priority_scheduling
        self._most = options.max_queued_requests
        self._sign = 1 if options.schedule_low_priority_values_first else -1
        self._touches = options.radix_eviction_policy == "lru"
        self.max_new_tokens: Callable[[Sequence], int] = lambda seq: seq.request.output_tokens
        """What a request asks for; the batching says how."""
        self._queue: list[Sequence] = []
        self._interval = options.scheduler_recv_interval
        self.unread: list[Sequence] = []
        """What has arrived since the scheduler last looked; empty where it looks in every step."""
        self.waiting = self._queue
        self._num_entered = self._num_looks = 0
        self._entered: dict[Sequence, int] = {}
        self.ages = self._policy == "hrrn"
        """Whether the order depends on what has been computed meanwhile."""
        self.computed_tokens = 0
        self._computed_before: dict[Sequence, int] = {}
        """Of each that waits: what had been computed when it came."""

    def bind(self, scheduler: "Scheduler") -> None:
        super().bind(scheduler)
        assert isinstance(scheduler.memory, TreeMemory), "asked for by what the part needs"
        self._memory = scheduler.memory
        if not self._memory.caches_prefixes and self._policy not in ("fcfs", "lof"):
            if self._policy == SHORTEST:
                raise UserError("sglang schedule-policy: shortest-prefill-first needs the radix cache, as in SGLang")
            self._policy, self.ages = "fcfs", False

    def add(self, seq: Sequence) -> None:
        if self._interval > 1:
            self.unread.append(seq)
        else:
            self._enter(seq)

    def read(self) -> bool:
        """Whether anything had arrived; it waits in the queue now."""
        unread, self.unread = self.unread, []
        for seq in unread:
            self._enter(seq)
        return bool(unread)

    def _enter(self, seq: Sequence) -> None:
        if self._most and len(self._queue) >= self._most and self._refuse_one(seq) is seq:
            return
        self._queue.append(seq)
        self._num_entered += 1
        self._entered[seq] = self._num_entered
        if self.ages:
            self._computed_before[seq] = self.computed_tokens
        if self._memory.entered is not None:
            self._memory.entered.append(seq)

    def _refuse_one(self, seq: Sequence) -> Sequence:
        """The queue is full: refuse `seq`, or the least urgent that waits if that is less urgent."""
        refused = seq
        if self._by_priority:
            last = max(self._queue, key=lambda one: (self.urgency(one), self._entered[one]))
            if self.urgency(seq) < self.urgency(last):
                refused = last
                self._queue.remove(last)
        self.left(refused)
        self.scheduler.ignore(refused, QUEUE_FULL if refused is seq else QUEUE_FULL_OF_URGENT)
        return refused

    def put_back(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            self._enter(seq)

    def urgency(self, seq: Sequence) -> int:
        """The less, the more urgent."""
        return seq.request.priority * self._sign

    def entered(self, seq: Sequence) -> int:
        """The place of its latest arrival in the queue among all arrivals."""
        return self._entered[seq]

    def sort(self) -> None:
        """Prompts are about to be looked at."""
        queue, policy = self._queue, self._policy
        if policy == SHORTEST or (policy in ("lpm", "hrrn") and len(queue) <= MOST_MATCHED):
            self._sort_by_prefix()
        elif policy == "dfs-weight":
            ends = [self._memory.search(seq, seq.num_tokens).node for seq in queue]
            queue[:] = [queue[place] for place in by_branch(self._memory.tree.root, ends)]
        else:
            if policy == "fcfs" and self._by_priority:
                queue.sort(key=lambda seq: (self.urgency(seq), self._entered[seq]))
            elif policy == "lof":
                by_priority, asked = self._by_priority, self.max_new_tokens
                queue.sort(key=lambda seq: (by_priority and self.urgency(seq), -asked(seq)))
            self._touch()

    def _touch(self) -> None:
        """The head's prefix is touched last, and so stays longest."""
        memory = self._memory
        if not self._queue or not self._touches or not memory.caches_prefixes:
            return
        self._num_looks += 1
        if self._num_looks % TOUCH_INTERVAL == 1:
            for seq in reversed(self._queue[:MOST_MATCHED]):
                memory.touch(seq)

    def _sort_by_prefix(self) -> None:
        """Those that begin like one before them, with next to nothing cached, come last."""
        memory, size = self._memory, self._memory.block_size
        begun: set[tuple[int, ...]] = set()
        keys: dict[Sequence, tuple[float, ...] | tuple[bool, float, str]] = {}
        for seq in self._queue:
            match, is_alike = memory.search(seq, seq.num_tokens), False
            if match.pages * size <= ALIKE_TOKENS and (begins := _first_blocks(seq)):
                is_alike = begins in begun
                begun.add(begins)
            if self._policy == SHORTEST:
                keys[seq] = is_alike, self.work_tokens(seq), self._entered[seq]
            elif self.ages:
                keys[seq] = is_alike, 0.0 if is_alike else -self._response(seq), str(seq.request.request_id)
            else:
                keys[seq] = is_alike, 0 if is_alike else self.work_tokens(seq) - seq.num_tokens
        self._queue.sort(key=keys.__getitem__)

    def work_tokens(self, seq: Sequence) -> int:
        """Of its tokens those that were not cached when it was looked up; the last always counts."""
        match = self._memory.held(seq).match
        return max(1, seq.num_tokens - (match.pages + match.host_pages) * self._memory.block_size)

    def _response(self, seq: Sequence) -> float:
        """Tokens computed since it came, for each of its prompt that it has yet to compute."""
        own = self.work_tokens(seq) - seq.num_tokens + seq.request.prompt_tokens
        return (self.computed_tokens - self._computed_before[seq]) / own if own > 0 else inf

    def chunk_limit(self, left: int, budget: float, page: int) -> float:
        """Most of a budget that the half-done prompt with `left` tokens takes: shorter ones have theirs first."""
        spared = 0
        if self._policy == SHORTEST and budget >= 2 * page:
            for work in map(self.work_tokens, self._queue):
                charge = -(-work // page) * page
                if work >= left or spared + charge > budget - page:
                    break
                spared += charge
        return (budget - spared) // page * page if spared else inf

    def head(self) -> Sequence:
        return self._queue[0]

    def at(self, place: int) -> Sequence:
        """The one behind `place` others."""
        return self._queue[place]

    def pop(self, place: int = 0) -> Sequence:
        return self._queue.pop(place)

    def remove(self, seq: Sequence) -> bool:
        for among in (self._queue, self.unread):
            if seq in among:
                among.remove(seq)
                return True
        return False

    def left(self, seq: Sequence) -> None:
        self._entered.pop(seq, None)
        self._computed_before.pop(seq, None)

    def __len__(self) -> int:
        return len(self._queue) + len(self.unread)

    def __iter__(self) -> Iterator[Sequence]:
        return iter([*self._queue, *self.unread])


def _first_blocks(seq: Sequence) -> tuple[int, ...]:
    """The trace's ids of its first `ALIKE_TOKENS` tokens; empty where it has fewer, or none that others may have."""
    request = seq.request
    ids, named = request.hash_ids, request.hash_block_tokens
    if not ids or seq.num_tokens < ALIKE_TOKENS:
        return ()
    if request.output_hash_ids and len(ids) * named >= request.prompt_tokens:
        ids += request.output_hash_ids
    count = -(-ALIKE_TOKENS // named)
    return ids[:count] if len(ids) * named >= ALIKE_TOKENS else ()
