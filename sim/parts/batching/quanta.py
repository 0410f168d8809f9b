"""`Quanta`: the first `max_num_seqs` of a multi-level feedback queue run, and may be preempted at any iteration.

FastServe's iteration-level preemption: who is overtaken pauses with its KV where it is. A sequence that has run for its
level's quantum is demoted. Prompts are computed whole, in one iteration with the decodes (assumed: as in Orca).
"""

from collections.abc import Iterable
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from sim.engine.plan import IterationPlan, Move, Origin, StepTimes, Tier
from sim.engine.sequence import Sequence, Status
from sim.errors import UserError
from sim.parts.batching.base import NEVER_FITS, TOO_LONG, TOO_LONG_AGAIN, Batching
from sim.parts.eviction.swap import Swap
from sim.parts.order.mlfq import Mlfq

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler

TIE_S = 1e-9
"""Quanta used up to this much count as used up: sums of floats differ by less."""


class Quanta(Batching):
    """Who runs is chosen anew whenever the order or memory has changed, else everybody goes on."""

    order: Mlfq

    def __init__(self) -> None:
        # Seconds for which the engine has computed; each member's quantum ends at a reading of this clock.
        self._busy_s = 0.0
        self._expiry_s: dict[Sequence, float] = {}
        self._expiries: list[tuple[float, int, Sequence]] = []
        # What is left of the quanta of those who pause.
        self._left_s: dict[Sequence, float] = {}
        self._chosen_version = -1
        self._memory_changed = False
        self._may_admit = False
        self.paused: dict[Sequence, None] = {}

    def bind(self, scheduler: "Scheduler") -> None:
        super().bind(scheduler)
        if not isinstance(scheduler.order, Mlfq):
            raise UserError("batching=quanta preempts by level: it goes with order=mlfq")
        if scheduler.stage.brings_layers_back:
            raise UserError("batching=quanta pauses whole sequences: it goes with memory=paged or memory=reserved")
        if isinstance(scheduler.eviction, Swap):
            raise UserError("batching=quanta calls nobody back: give eviction=recompute or =proactive-swap")
        self.order = scheduler.order

    @property
    def num_paused(self) -> int:
        return len(self.paused)

    def holders(self) -> Iterable[tuple[Sequence, Tier]]:
        return ((seq, Tier.GPU) for seq in self.paused)

    # -- one step ----------------------------------------------------------------------------------------------------

    def fill(self, plan: IterationPlan, now_s: float) -> None:
        self.expire()
        if self._must_choose:
            self._choose(plan, now_s)
            self._chosen_version, self._memory_changed = self.order.version, False
        if self.batch.members:
            self._make_room(plan)
        if self.batch.members:
            self.decode_all(plan)
        self.eviction.settle()
        if not plan.chunks:
            self.scheduler.allow_jump(plan)

    @property
    def _must_choose(self) -> bool:
        """Whether others may be first since the last choice."""
        return self._memory_changed or self._chosen_version != self.order.version

    def _choose(self, plan: IterationPlan, now_s: float) -> None:
        """The first in the order that can run: residents on the GPU, and prompts as long as they fit."""
        seats, budget = self.limits.max_num_seqs, self.budget
        self._may_admit = bool(self.order) and self.eviction.may_admit()
        chosen: dict[Sequence, None] = {}
        # Blocks that those chosen so far begin in this step.
        growth = 0
        for seq in self.order.in_order(self._wants_prompts):
            if len(chosen) + len(plan.chunks) >= seats:
                break
            if seq.status is Status.WAITING:
                num_new = seq.num_tokens
                self._may_admit = self._start(seq, plan, budget, now_s, growth)
                if seq.status is Status.RUNNING:
                    budget -= num_new
            elif seq in self.paused or seq in self.batch.members:
                chosen[seq] = None
                growth += self.memory.needs_block(seq)
        running = dict.fromkeys(self.batch.members)
        for seq in running:
            if seq not in chosen:
                self._pause(seq, now_s)
        for seq in chosen:
            if seq not in running:
                self._resume(seq)

    def _wants_prompts(self) -> bool:
        return self._may_admit

    def _start(self, seq: Sequence, plan: IterationPlan, budget: int, now_s: float, growth: int) -> bool:
        """Admit a prompt; False if it and all other prompts have to wait.

        `growth` blocks are left to those who stand before it and decode.
        """
        reason = ""
        if seq.num_tokens > self.prompt_limit:
            reason = TOO_LONG_AGAIN if seq.num_generated else TOO_LONG
        elif not self.memory.ever_fits(seq, self.admission.keep_free):
            reason = NEVER_FITS
        if reason:
            self.order.remove(seq)
            self.scheduler.ignore(seq, reason)
            return True
        if seq.num_tokens > budget:
            return False
        keep_free = self.admission.keep_free + growth
        if not self.memory.fits(seq, keep_free) or not self.admission.admits(seq):
            return False
        self.order.keep(seq)
        self.scheduler.start(seq, now_s)
        plan.add_chunk(seq, seq.num_tokens - seq.num_computed, Origin.ADMITTED)
        self._run(seq)
        return True

    def _make_room(self, plan: IterationPlan) -> None:
        """Where the batch cannot grow, those who would run last give up their blocks."""
        fresh = {chunk.seq for chunk in plan.chunks}
        while self.batch.members and not self.memory.grow(self.batch, spare=0):
            candidates = self.order.residents_from_last()
            victim = next(s for s in candidates if s not in fresh and (s in self.paused or s in self.batch.members))
            self._stop(victim)
            self.preempt(victim, plan)

    # -- quanta --------------------------------------------------------------------------------------------------------

    def _run(self, seq: Sequence) -> None:
        """Its quantum runs from now on."""
        level = self.order.level_of(seq)
        if level + 1 < len(self.order.quanta_s):
            left_s = self._left_s.pop(seq, self.order.quanta_s[level])
            expiry_s = self._expiry_s[seq] = self._busy_s + left_s
            heappush(self._expiries, (expiry_s, seq.request.request_id, seq))

    def _stop(self, seq: Sequence) -> None:
        """Its quantum stands still."""
        expiry_s = self._expiry_s.pop(seq, None)
        if expiry_s is not None:
            self._left_s[seq] = expiry_s - self._busy_s

    def _pause(self, seq: Sequence, now_s: float) -> None:
        self._stop(seq)
        self.scheduler.take_out(seq)
        self.paused[seq] = None
        self.order.idle_since_s[seq] = now_s
        self.scheduler.park(seq)
        self.scheduler.counters.policy["paused"] += 1

    def _resume(self, seq: Sequence) -> None:
        del self.paused[seq]
        del self.order.idle_since_s[seq]
        self._run(seq)
        self.scheduler.join(seq)

    def _next_expiry_s(self) -> float | None:
        """The first end of a member's quantum, on the busy clock; None if nobody's ends."""
        heap = self._expiries
        while heap and self._expiry_s.get(heap[0][2]) != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else None

    def expire(self) -> None:
        """Demote who has used its quantum up; who was promoted has a whole one."""
        for seq in self.order.promoted:
            self._left_s.pop(seq, None)
            if self._expiry_s.pop(seq, None) is not None:
                self._run(seq)
        self.order.promoted.clear()
        while (expiry_s := self._next_expiry_s()) is not None and expiry_s <= self._busy_s + TIE_S:
            seq = heappop(self._expiries)[2]
            del self._expiry_s[seq]
            self.order.demote(seq)
            self._run(seq)
            self.scheduler.counters.policy["demotions"] += 1

    def committed(self, plan: IterationPlan, times: StepTimes) -> None:
        self._busy_s += times.end_s - self.scheduler.now_s

    def holds(self, plan: IterationPlan, steps: int) -> int:
        """Until the first quantum of a member ends; not at all after a preemption, which makes room."""
        if self._must_choose:
            return 1
        expiry_s = self._next_expiry_s()
        if expiry_s is not None:
            plan.until_s = min(plan.until_s, self.scheduler.now_s + (expiry_s - self._busy_s))
        return steps

    # -- what changes who may run --------------------------------------------------------------------------------------

    def transferred(self, move: Move) -> None:
        self._memory_changed = True

    def left(self, seq: Sequence) -> None:
        self._memory_changed = True
        self._expiry_s.pop(seq, None)
        self._left_s.pop(seq, None)
        self.paused.pop(seq, None)
