"""`Mlfq`: a skip-join multi-level feedback queue (Wu et al., "Fast Distributed Inference Serving for LLMs", FastServe).

Level i has a quantum of base * factor^i. A request joins the first level whose quantum covers its prefill; when it has
used its quantum up, it goes to the tail of the next level (`Quanta` says when); preempted, it keeps its place. Every
`check_every` iterations all that have waited `starvation_s` or longer go to level 0.

Within a level requests stand by a key, so that those which hold KV (`residents`) and those which do not can be walked
in one order without touching thousands that wait. Not sticky: an arrival may overtake a refused head.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import TYPE_CHECKING, ClassVar, Self

from sim.engine.plan import IterationPlan, StepTimes
from sim.engine.sequence import Sequence, Status
from sim.parts.base import Order
from sim.systems.fastserve.preset import MlfqOptions

if TYPE_CHECKING:
    from sim.systems.builder import Builder

Entry = tuple[int, int, Sequence]
"""Key within the level, request id, sequence."""


class Mlfq(Order):
    """Levels of requests that wait, and of those that a batching keeps in their place while they hold KV.

    `prefill_s` predicts the prefill of so many tokens, s.
    """

    name: ClassVar[str] = "mlfq"
    options: ClassVar[type | None] = MlfqOptions
    sticky: ClassVar[bool] = False
    follows_all: ClassVar[bool] = True

    def __init__(self, prefill_s: Callable[[int], float], options: MlfqOptions) -> None:
        self._prefill_s = prefill_s
        levels = range(options.num_levels)
        self.quanta_s = [options.quantum_ms / 1e3 * options.quantum_factor**level for level in levels]
        self.starvation_s, self.check_every = options.starvation_s, options.starvation_check
        self._queues: list[OrderedDict[Sequence, int]] = [OrderedDict() for _ in levels]
        self._residents: list[list[Entry]] = [[] for _ in levels]
        self._level: dict[Sequence, int] = {}
        self._key: dict[Sequence, int] = {}
        self.idle_since_s: dict[Sequence, float] = {}
        """Sequences that do not run, and since when."""
        self.promoted: list[Sequence] = []
        """Residents that have come to level 0 since the batching last looked: their quanta begin anew."""
        self.version = 0
        """Changes whenever the order does."""
        self._size = 0
        self._front = self._tail = 0
        self._iterations = 0
        self._next_check = self.check_every
        self._gone: list[Sequence] = []

    @classmethod
    def build(cls, b: "Builder") -> Self:
        return cls(b.deployment.cost.prefill_s, b.options(MlfqOptions))

    # -- as an order of those that wait ------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        last = len(self.quanta_s) - 1
        level = min(last, bisect_left(self.quanta_s, self._prefill_s(seq.num_tokens)))
        self._append(seq, level, seq.request.arrival_s)

    def _append(self, seq: Sequence, level: int, since_s: float) -> None:
        self._tail += 1
        self._level[seq] = level
        self._queues[level][seq] = self._key[seq] = self._tail
        self.idle_since_s[seq] = since_s
        self._size += 1
        self.version += 1

    def put_back(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            if seq not in self._key:
                # It was popped: it comes first in its level.
                self._front -= 1
                self._key[seq] = self._front
            self._insert(seq)
            self.idle_since_s.setdefault(seq, self.scheduler.now_s)
            self._size += 1
            self.version += 1

    def _insert(self, seq: Sequence) -> None:
        """To its place in its level, past those that wait before it."""
        level, key = self.place_of(seq)
        queue = self._queues[level]
        ahead = list(takewhile(lambda other: queue[other] < key, queue))
        queue[seq] = key
        for other in (seq, *reversed(ahead)):
            queue.move_to_end(other, last=False)

    def head(self) -> Sequence:
        return next(iter(self))

    def pop(self) -> Sequence:
        seq = self.head()
        self.remove(seq)
        del self._key[seq]
        return seq

    def remove(self, seq: Sequence) -> bool:
        level = self._level.get(seq)
        if level is None or seq not in self._queues[level]:
            return False
        queue = self._queues[level]
        del queue[seq]
        self.idle_since_s.pop(seq, None)
        self._size -= 1
        self.version += 1
        self._gone.append(seq)
        return True

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._queues:
            yield from queue

    # -- those that hold KV, for batchings that preempt --------------------------------------------------------------

    def keep(self, seq: Sequence) -> None:
        """The head, or another that waits, starts and keeps its place."""
        self.remove(seq)
        insort(self._residents[self._level[seq]], (self._key[seq], seq.request.request_id, seq))

    def level_of(self, seq: Sequence) -> int:
        """Its level, 0 the first."""
        return self._level[seq]

    def place_of(self, seq: Sequence) -> tuple[int, int]:
        """Sorts all that hold KV or wait: level, and key within it."""
        return self._level[seq], self._key[seq]

    def demote(self, seq: Sequence) -> None:
        """A resident has used its quantum up: to the tail of the next level."""
        self._take_resident(seq)
        self._tail += 1
        self._level[seq] += 1
        self._key[seq] = self._tail
        self._residents[self._level[seq]].append((self._tail, seq.request.request_id, seq))
        self.version += 1

    def _take_resident(self, seq: Sequence) -> bool:
        residents = self._residents[self._level[seq]]
        entry = (self._key.get(seq, 0), seq.request.request_id, seq)
        at = bisect_left(residents, entry[:2], key=lambda e: e[:2])
        if at == len(residents) or residents[at][2] is not seq:
            return False
        del residents[at]
        return True

    def left(self, seq: Sequence) -> None:
        if self._take_resident(seq):
            self.version += 1
        self._gone.append(seq)

    def in_order(self, wanted: Callable[[], bool] | None = None) -> Iterator[Sequence]:
        """Residents, the first to run first, and between them those that wait, as long as they are `wanted`.

        One that waits and is not kept after it was given out stops all behind it in its level.
        """
        for queue, residents in zip(self._queues, self._residents, strict=True):
            entries, at = list(residents), 0
            while wanted is not None and queue and wanted():
                seq, key = next(iter(queue.items()))
                while at < len(entries) and entries[at][0] < key:
                    yield entries[at][2]
                    at += 1
                yield seq
                if seq in queue:
                    break
            yield from [entry[2] for entry in entries[at:]]

    def residents_from_last(self) -> Iterator[Sequence]:
        """Those that hold KV, the last to run first."""
        for residents in reversed(self._residents):
            yield from [entry[2] for entry in reversed(residents)]

    def residents_behind(self, seq: Sequence) -> Iterator[Sequence]:
        """Those that hold KV and stand behind `seq`, the last to run first."""
        level, key = self.place_of(seq)
        for residents in reversed(self._residents[level + 1 :]):
            yield from [entry[2] for entry in reversed(residents)]
        yield from [entry[2] for entry in reversed(self._residents[level]) if entry[0] > key]

    # -- starvation --------------------------------------------------------------------------------------------------

    def prepare(self, now_s: float) -> None:
        for seq in self._gone:
            if seq.status in (Status.FINISHED, Status.IGNORED):
                for of_seq in (self._level, self._key, self.idle_since_s):
                    of_seq.pop(seq, None)
        self._gone.clear()
        if self._iterations >= self._next_check:
            # Looks that a jump passed while none waited are over.
            self._next_check = (self._iterations // self.check_every + 1) * self.check_every
            if self._iterations % self.check_every == 0:
                self._promote_starving(now_s)

    def _promote_starving(self, now_s: float) -> None:
        for seq, since_s in list(self.idle_since_s.items()):
            if now_s - since_s < self.starvation_s - STARVATION_TIE_S or not self._level[seq]:
                continue
            if seq in self._queues[self._level[seq]]:
                self.remove(seq)
                self._append(seq, 0, since_s)
            else:
                self._take_resident(seq)
                self._tail += 1
                self._level[seq], self._key[seq] = 0, self._tail
                self._residents[0].append((self._tail, seq.request.request_id, seq))
                self.version += 1
                self.promoted.append(seq)
            self.scheduler.counters.policy["starvation_promotions"] += 1

    def committed(self, plan: IterationPlan, times: StepTimes) -> None:
        self._iterations += times.iterations

    def repeats(self, plan: IterationPlan, steps: int) -> int:
        """Until the next look for those that starve, if any could."""
        return min(steps, self._next_check - self._iterations) if self.idle_since_s else steps


STARVATION_TIE_S = 1e-9
"""Waits this close to the bound count as reaching it: sums of floats differ by less."""
