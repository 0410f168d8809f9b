"""`CacheAware`: requests that hit the most of the cache come first (SGLang's cache-aware scheduling).

- `lpm`: the longest cached prefix first (the paper's Algorithm 1).
- `dfs-weight`: the order of a depth-first walk through the tree, into the branch for which the most wait first.

The queue is sorted in place at every step, stably; the preempted go to its end (SGLang 0.3's code). Above
`longest` that wait, `lpm` leaves the queue as it is and looks nothing up (the code since 0.4). Where nothing is cached,
both are first come, first served. `lpm` sorts by what any memory has cached; memory without a radix tree does not say
when that has changed, so that no jump goes on while a request waits.
"""

from typing import TYPE_CHECKING, ClassVar, Self

from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence
from sim.kv.index.branches import by_branch
from sim.kv.radix import RadixMemory
from sim.parts.needs import Need
from sim.parts.order.fcfs import Fcfs
from sim.systems.radix.preset import RadixOptions

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler
    from sim.systems.builder import Builder


class CacheAware(Fcfs):
    """`lpm`, which sorts up to `longest` (0: any number) sequences."""

    name: ClassVar[str] = "lpm"
    options: ClassVar[type | None] = RadixOptions
    sticky: ClassVar[bool] = False
    by_branch: ClassVar[bool] = False
    ranks_uncached: ClassVar[bool] = False
    """Whether it ranks where nothing is cached, too."""

    def __init__(self, longest: int = 0) -> None:
        super().__init__()
        self.longest = longest
        self._radix: RadixMemory | None = None
        self.has_looked_up = False
        """Whether this step has looked up all that wait."""
        # What the last sorting saw; the tree's clock after it.
        self._is_sorted = False
        self._clock = -1

    @classmethod
    def build(cls, b: "Builder") -> Self:
        return cls(b.options(RadixOptions).lpm_longest)

    def bind(self, scheduler: "Scheduler") -> None:
        super().bind(scheduler)
        if isinstance(self.memory, RadixMemory):
            self._radix = self.memory
        self._looks_anew = self._radix is None and self.memory.caches_prefixes

    def prepare(self, now_s: float) -> None:
        radix, queue = self._radix, self._queue
        looks_up = not 0 < self.longest < len(queue)
        self.has_looked_up = looks_up and radix is not None
        if not queue or not looks_up or not (self.memory.caches_prefixes or self.ranks_uncached):
            return
        if radix is not None and self._is_sorted and radix.tree.clock == self._clock:
            return
        for seq in queue:
            self.memory.look_up(seq)
        if self.by_branch and radix is not None:
            seqs = list(queue)
            ranked = [seqs[place] for place in by_branch(radix.tree.root, [radix.end_of(seq) for seq in seqs])]
        else:
            ranked = sorted(queue, key=self._rank)
        queue.clear()
        queue.extend(ranked)
        if radix is not None:
            self._is_sorted, self._clock = True, radix.tree.clock

    def _rank(self, seq: Sequence) -> tuple[float, ...]:
        return (-self.memory.cached_tokens(seq),)

    def repeats(self, plan: IterationPlan, steps: int) -> int:
        return 1 if self._looks_anew and self._queue else steps

    def add(self, seq: Sequence) -> None:
        super().add(seq)
        self._is_sorted = False

    def put_back(self, seqs: list[Sequence]) -> None:
        self._queue.extend(seqs)
        self._is_sorted = False


class ByBranch(CacheAware):
    """`dfs-weight`, however many wait."""

    name: ClassVar[str] = "dfs-weight"
    options: ClassVar[type | None] = None
    needs: ClassVar[tuple[Need, ...]] = (
        Need("memory", "walks through a radix tree", offers=RadixMemory, lacks="caches_prefixes"),
    )
    by_branch: ClassVar[bool] = True

    @classmethod
    def build(cls, b: "Builder") -> Self:
        return cls()
