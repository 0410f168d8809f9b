"""`Quanta`: the first `max_num_seqs` of a multi-level feedback queue run, and may be preempted at any iteration.

FastServe's iteration-level preemption: a sequence that is overtaken pauses with its KV where it is. One that has run
for its level's quantum is demoted. Prompts are computed whole, in one iteration with the decodes (assumed: as in Orca).

Memory goes in the same order. A prompt, or one of the first `max_num_seqs` that is on the host, takes the blocks it
lacks from those behind it, the last first. It takes none where that is not enough (those before it hold the rest, the
host has no room, or one fills the GPU and could not return), or where copies under way will do (it waits for them).
Then none behind it takes any either, not even free ones; nor does one behind a sequence that has just lost its own.
"""

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import TYPE_CHECKING, ClassVar

from sim.engine.changes import Move, Tier
from sim.engine.plan import IterationPlan, Origin, StepTimes
from sim.engine.sequence import Sequence, Status
from sim.kv.memory import Swaps
from sim.parts.batching.base import NEVER_FITS, TOO_LONG, TOO_LONG_AGAIN, Batching
from sim.parts.needs import Need
from sim.systems.fastserve.mlfq import Mlfq

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler

TIE_S = 1e-9
"""Quanta used up to this much count as used up: sums of floats differ by less."""


class Quanta(Batching):
    """What runs is chosen anew whenever the order or memory has changed, else all go on."""

    name: ClassVar[str] = "quanta"
    needs: ClassVar[tuple[Need, ...]] = (
        Need("order", "preempts by level", offers=Mlfq),
        Need("stage", "pauses whole sequences", lacks="brings_layers_back"),
        Need("eviction", "calls no victim back", lacks="returns_when_asked"),
    )

    levels: Mlfq

    def __init__(self) -> None:
        # Seconds for which the engine has computed; each member's quantum ends at a reading of this clock.
        self._busy_s = 0.0
        self._expiry_s: dict[Sequence, float] = {}
        self._expiries: list[tuple[float, int, Sequence]] = []
        # What is left of the quanta of those that pause.
        self._left_s: dict[Sequence, float] = {}
        self._chosen_version = -1
        self._memory_changed = False
        self._may_admit = self._may_take = False
        # Whether a prompt was refused for what the next iteration has anew.
        self._refused = False
        # Place of the first that has lost its blocks to one before it: here a choice ends.
        self._end: tuple[int, int]
        self.paused: dict[Sequence, None] = {}

    def bind(self, scheduler: "Scheduler") -> None:
        super().bind(scheduler)
        assert isinstance(scheduler.order, Mlfq)
        self.levels = scheduler.order

    @property
    def num_paused(self) -> int:
        return len(self.paused)

    def holders(self) -> Iterable[tuple[Sequence, Tier]]:
        return ((seq, Tier.GPU) for seq in self.paused)

    # -- one step ----------------------------------------------------------------------------------------------------

    def fill(self, plan: IterationPlan, now_s: float) -> None:
        self.expire()
        resumed: list[Sequence] = []
        if self._must_choose or self._refused:
            resumed = self._choose(plan, now_s)
            self._chosen_version, self._memory_changed = self.levels.version, False
        if self.batch.members:
            self._make_room(plan)
        for seq in resumed:
            # A sequence that had to make room at once has waited on.
            if seq in self.batch.members:
                del self.levels.idle_since_s[seq]
        if self.batch.members:
            self.decode_all(plan)
        self.eviction.requeue_victims()
        if not plan.chunks:
            self.scheduler.allow_jump(plan)

    @property
    def _must_choose(self) -> bool:
        """Whether others may be first since the last choice."""
        return self._memory_changed or self._chosen_version != self.levels.version

    def _is_here(self, seq: Sequence) -> bool:
        """Whether it is on the GPU, and could decode or lose its blocks."""
        return seq in self.paused or seq in self.batch.members

    def _choose(self, plan: IterationPlan, now_s: float) -> list[Sequence]:
        """Let the first in the order run that can: residents on the GPU, and prompts as long as they fit.

        Returns those that had paused.
        """
        seats, budget = self.limits.max_num_seqs, self.budget
        self._may_admit = bool(self.levels) and self.eviction.may_admit()
        self._may_take, self._refused = True, False
        self._end = (len(self.levels.quanta_s), 0)
        chosen: dict[Sequence, None] = {}
        # Blocks that those chosen so far begin in this step; how many of the first are away.
        growth = num_away = 0
        for seq in self.levels.in_order(self._wants_prompts):
            num_chosen = len(chosen) + len(plan.chunks)
            if num_chosen >= seats or self.levels.place_of(seq) >= self._end:
                break
            if self._is_here(seq):
                chosen[seq] = None
                growth += self.memory.needs_block(seq)
            elif seq.status is not Status.WAITING:
                if num_chosen + num_away < seats:
                    self._call_back(seq, plan, growth)
                num_away += 1
            elif self._wants_prompts():
                num_new = seq.num_tokens
                self._start(seq, plan, budget, now_s, growth)
                if seq.status is Status.RUNNING:
                    budget -= num_new
        running = dict.fromkeys(self.batch.members)
        for seq in running:
            if seq not in chosen:
                self._pause(seq, now_s)
        resumed = [seq for seq in chosen if seq not in running]
        for seq in resumed:
            self._resume(seq)
        return resumed

    def _wants_prompts(self) -> bool:
        return self._may_admit and self._may_take

    def _start(self, seq: Sequence, plan: IterationPlan, budget: int, now_s: float, growth: int) -> None:
        """Admit a prompt, or let it and all other prompts wait.

        `growth` blocks are left to those that stand before it and decode.
        """
        reason = ""
        if self._caches:
            self.memory.look_up(seq, is_next=False)
        if seq.num_tokens > self.prompt_limit:
            reason = TOO_LONG_AGAIN if seq.num_generated else TOO_LONG
        elif not self.memory.ever_fits(seq, self.admission.keep_free):
            reason = NEVER_FITS
        if reason:
            self.levels.remove(seq)
            self.scheduler.ignore(seq, reason)
        elif seq.num_tokens > budget:
            self._refused, self._may_take = True, False
        elif self.admission.delays(seq):
            self.admission.delayed(seq)
            self._refused, self._may_admit = True, False
        elif self._take(seq, plan, self.memory.fits, self.admission.keep_free + growth):
            if not self.admission.admits(seq):
                self.admission.delayed(seq)
                self._may_admit = False
                return
            self.levels.keep(seq)
            self.scheduler.start(seq, now_s)
            plan.add_chunk(seq, seq.num_tokens - seq.num_computed, Origin.ADMITTED)
            self._run(seq)

    def _call_back(self, seq: Sequence, plan: IterationPlan, growth: int) -> None:
        """One of the first is on the host, or on the way: let it return, however many blocks shall be free."""
        if not self._may_take or not self.eviction.is_out(seq):
            return
        assert isinstance(self.memory, Swaps), "what is out was swapped"
        if self._take(seq, plan, self.memory.can_swap_in, growth):
            self.eviction.call_back(seq)

    def _take(self, seq: Sequence, plan: IterationPlan, fits: Callable[[Sequence, int], bool], keep_free: int) -> bool:
        """Let `seq` fit at the expense of those behind it, as the module says; whether it does."""
        memory = self.memory
        if fits(seq, keep_free):
            return True
        self._may_take = False
        if fits(seq, keep_free - memory.releasing // memory.unit):
            return False
        victims: list[Sequence] = []
        taken, room = 0, self.eviction.room()
        for victim in filter(self._is_here, self.levels.residents_behind(seq)):
            victims.append(victim)
            taken += memory.held_blocks(victim)
            if taken > room or memory.outgrew_gpu(victim):
                return False
            if fits(seq, keep_free - taken // memory.unit):
                break
        else:
            return False
        self._may_take, self._end = True, self.levels.place_of(victims[-1])
        for victim in victims:
            self.preempt(victim, plan)
        return True

    def _make_room(self, plan: IterationPlan) -> None:
        """Where the batch cannot grow, those that would run last give up their blocks."""
        while self.batch.members and not self.memory.grow(self.batch, spare=0):
            self.preempt(next(filter(self._is_here, self.levels.residents_from_last())), plan)

    def preempt(self, seq: Sequence, plan: IterationPlan) -> None:
        self._stop(seq)
        super().preempt(seq, plan)

    # -- quanta --------------------------------------------------------------------------------------------------------

    def _run(self, seq: Sequence) -> None:
        """Its quantum runs from now on."""
        level = self.levels.level_of(seq)
        if level + 1 < len(self.levels.quanta_s):
            left_s = self._left_s.pop(seq, self.levels.quanta_s[level])
            expiry_s = self._expiry_s[seq] = self._busy_s + left_s
            heappush(self._expiries, (expiry_s, seq.request.request_id, seq))

    def _stop(self, seq: Sequence) -> None:
        """Its quantum stands still."""
        expiry_s = self._expiry_s.pop(seq, None)
        if expiry_s is not None:
            self._left_s[seq] = expiry_s - self._busy_s
            self._drop_stale()

    def _drop_stale(self) -> None:
        """The first of the heap is a quantum that runs."""
        heap = self._expiries
        while heap and self._expiry_s.get(heap[0][2]) != heap[0][0]:
            heappop(heap)

    def _pause(self, seq: Sequence, now_s: float) -> None:
        self._stop(seq)
        self.scheduler.take_out(seq)
        self.paused[seq] = None
        self.levels.idle_since_s[seq] = now_s
        self.scheduler.park(seq)
        self.scheduler.counters.policy["paused"] += 1

    def _resume(self, seq: Sequence) -> None:
        del self.paused[seq]
        self._run(seq)
        self.scheduler.join(seq)

    def _next_expiry_s(self) -> float | None:
        """The first end of a member's quantum, on the busy clock; None if none ends."""
        return self._expiries[0][0] if self._expiries else None

    def expire(self) -> None:
        """Demote those that have used their quanta up; one that was promoted while it did not run has a whole one."""
        for seq in self.levels.promoted:
            self._left_s.pop(seq, None)
        self.levels.promoted.clear()
        while due := self._take_due():
            # Those that step down together keep their order: sums of floats tell nothing about ends this close.
            for seq in sorted(due, key=self.levels.place_of):
                self.levels.demote(seq)
                self._run(seq)
                self.scheduler.counters.policy["demotions"] += 1

    def _take_due(self) -> list[Sequence]:
        """Those whose quanta have ended."""
        due: list[Sequence] = []
        while (expiry_s := self._next_expiry_s()) is not None and expiry_s <= self._busy_s + TIE_S:
            seq = heappop(self._expiries)[2]
            del self._expiry_s[seq]
            self._drop_stale()
            due.append(seq)
        return due

    def committed(self, plan: IterationPlan, times: StepTimes) -> None:
        self._busy_s += times.end_s - self.scheduler.now_s

    def repeats(self, plan: IterationPlan, steps: int) -> int:
        """Until the first quantum of a member ends; not at all after a preemption, which makes room."""
        if self._must_choose:
            return 1
        expiry_s = self._next_expiry_s()
        if expiry_s is not None:
            plan.until_s = min(plan.until_s, self.scheduler.now_s + (expiry_s - self._busy_s))
        return steps

    # -- what changes which may run ------------------------------------------------------------------------------------

    def transferred(self, move: Move) -> None:
        self._memory_changed = True

    def left(self, seq: Sequence) -> None:
        self._memory_changed = True
        if self._expiry_s.pop(seq, None) is not None:
            self._drop_stale()
        self._left_s.pop(seq, None)
        self.paused.pop(seq, None)
