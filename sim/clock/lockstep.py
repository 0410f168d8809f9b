"""`Lockstep`: data-parallel ranks of an engine whose experts lie on the GPUs of all, which iterate together.

Each `Rank` is a member of the cluster with a scheduler and KV of its own. At a boundary, the same for all, each decides
on its plan; then all begin at once, and end when the slowest has ended: they meet at every layer with experts. A rank
that has nothing to do computes a dummy batch of one token meanwhile (vLLM's `execute_dummy_batch`) or an idle batch of
none (SGLang's MLP sync), and sees what arrives at the next boundary. Nothing is jumped: what one rank does, all others
wait for.

Not modelled: the 31 dummy iterations that vLLM goes on with when all ranks have become idle.
"""

from math import inf
from typing import Any

from sim.clock.ahead import AheadMember, Flight
from sim.clock.member import Member
from sim.cost.spread_experts import SpreadExpertsCost
from sim.engine.plan import IterationPlan, StepTimes
from sim.engine.sequence import Sequence

DUMMY: list[Sequence] = []
"""What ends with a dummy batch, of which the engine knows nothing."""


class Lockstep:
    """What the ranks of an engine share: the next boundary, and the iteration that they begin there."""

    def __init__(self, cost: SpreadExpertsCost) -> None:
        self.cost = cost
        self.ranks: list[Rank] = []
        self.end_s = inf
        """The next boundary of all, s."""
        self.starts_s = 0.0
        """When the latest iteration begins, s."""
        self.decides_s = inf
        """When the next may be decided where ranks schedule ahead, s; infinite where none had anything to do."""
        self.in_step: tuple[int, ...] = ()
        """Places of the ranks in the cluster."""
        self._plans: list[IterationPlan | None] = []

    def join(self, rank: "Rank", place: int) -> None:
        """`rank` is the next one, at `place` of the cluster."""
        self.ranks.append(rank)
        self.in_step = (*self.in_step, place)

    def propose(self, plan: IterationPlan | None) -> None:
        """What the next rank in order will do; with the last one's, all begin."""
        self._plans.append(plan)
        if len(self._plans) == len(self.ranks):
            plans, self._plans = self._plans, []
            self._begin(plans)

    def _begin(self, plans: list[IterationPlan | None]) -> None:
        if all(plan is None for plan in plans):
            self.decides_s = inf
            for rank in self.ranks:
                rank.engine.scheduler.batching.all_idle()
        else:
            for rank, plan, times in zip(self.ranks, plans, self._times(plans), strict=True):
                rank.begin(plan, times)
        self.end_s = self.ranks[0].boundary_s

    def _times(self, plans: list[IterationPlan | None]) -> list[StepTimes]:
        """Price the iteration; it ends at the same time for all."""
        cost, start_s, ends = self.cost, self.starts_s, []
        idle_tokens = self.ranks[0].engine.scheduler.batching.idle_tokens
        for rank, plan, others_s in zip(self.ranks, plans, cost.set_together(plans, idle_tokens), strict=True):
            if plan is not None:
                cost.others_s = others_s
                ends.append(rank.pricer.step(plan, start_s).end_s)
        cost.others_s = 0.0
        end_s = max(ends)
        self.decides_s = start_s
        for rank in self.ranks:
            # Whatever a GPU has done before, it begins the next with the others.
            rank.lanes.compute.free_s = end_s
            self.decides_s = max(self.decides_s, rank.lanes.host.free_s)
        return [StepTimes(1, end_s, 0.0, 0.0, end_s, 1)] * len(plans)

    @property
    def wakes_s(self) -> float:
        """When idle ranks may have something to do, s."""
        return min(rank.own_wakes_s for rank in self.ranks)


class Rank(Member):
    """A rank whose iterations are scheduled one after the other."""

    def __init__(self, *args: Any, lockstep: Lockstep, place: int, **options: Any) -> None:  # noqa: ANN401
        """As `Member`, at `place` of the cluster."""
        self.lockstep = lockstep
        options["jump"] = False
        super().__init__(*args, **options)
        lockstep.join(self, place)

    @property
    def in_step(self) -> tuple[int, ...]:
        return self.lockstep.in_step

    @property
    def end_s(self) -> float:
        return self.lockstep.end_s

    @end_s.setter
    def end_s(self, at_s: float) -> None:
        self.lockstep.end_s = at_s

    @property
    def own_wakes_s(self) -> float:
        """When this rank has something to do next if nothing comes, s."""
        return self._wakes_s

    @property
    def is_under_way(self) -> bool:
        """Whether the ranks compute."""
        return any(rank._plan is not None for rank in self.lockstep.ranks)

    @property
    def boundary_s(self) -> float:
        """When there is anything to settle or decide next, s."""
        for rank in self.lockstep.ranks:
            if rank._times is not None:
                return rank._times.end_s
        return self.lockstep.wakes_s

    def decide(self) -> None:
        self._settled = False
        now_s = self._began_s = self.lockstep.starts_s = self.end_s
        self._take_events(now_s)
        self.lockstep.propose(self._schedule(now_s))

    def begin(self, plan: IterationPlan | None, times: StepTimes) -> None:
        """`plan` is under way, or a dummy batch."""
        if plan is not None:
            self._plan, self._times = plan, times
            if plan.awaited:
                self._tell_started()

    def _wake_at(self, at_s: float) -> bool:
        if self._settled or self.is_under_way:
            return False
        end_s = self.end_s
        self.end_s = min(end_s, at_s)
        return self.end_s < end_s


class AheadRank(Rank, AheadMember):
    """A rank that schedules an iteration while the one before it runs; a dummy batch counts as one."""

    @property
    def is_under_way(self) -> bool:
        return bool(self._flying) or self.lockstep.decides_s < inf

    @property
    def boundary_s(self) -> float:
        flying, decides_s = self._flying, self.lockstep.decides_s
        if flying:
            return min(decides_s, flying[0].end_s)
        return decides_s if decides_s < inf else self.lockstep.wakes_s

    def settle(self) -> None:
        self._settled = True
        now_s, flying = self.end_s, self._flying
        if flying and flying[0].end_s <= now_s and (len(flying) == 2 or self.lockstep.decides_s > now_s):
            ended = flying.popleft().ended
            if ended is not DUMMY:
                self.engine.deliver(ended)

    def decide(self) -> None:
        self._settled = False
        now_s, flying, lockstep = self.end_s, self._flying, self.lockstep
        if now_s < lockstep.decides_s < inf:
            # An iteration has ended; the next is under way, and its host time not over.
            if lockstep.ranks[-1] is self:
                self.end_s = self.boundary_s
            return
        lockstep.starts_s = max(now_s, flying[0].end_s) if flying else now_s
        self._take_events(now_s)
        lockstep.propose(self._schedule(now_s))

    def begin(self, plan: IterationPlan | None, times: StepTimes) -> None:
        if plan is None:
            self._flying.append(Flight(times.end_s, DUMMY, []))
            return
        self.lockstep.decides_s = max(self.lockstep.decides_s, self._launched_s(plan, self.end_s))
        self._starts_s = self.lockstep.starts_s
        self._count(plan, times)


def rank_class(*, ahead: bool) -> type[Rank]:
    """What drives a rank."""
    return AheadRank if ahead else Rank
