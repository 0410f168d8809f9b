"""Iterations recovered from the times of tokens.

Every token of an iteration comes at its end. So the scheduler is replayed on the server's clock: it decides what the
next iteration computes, and the tokens that this gives say when the server ended it. No duration is predicted, except
of iterations that give no token which the client saw.
"""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache
from math import inf
from statistics import median
from typing import NamedTuple

import numpy as np

from calib.robust import Array
from sim.clock.arrivals import TIE_S, Arrivals
from sim.clock.tokeniser import Tokeniser
from sim.cost.model import CostModel
from sim.engine.plan import IterationPlan, PrefillChunk, StepTimes
from sim.engine.sequence import Sequence
from sim.run.prepare import Setup
from sim.run.runs import Recording, build_engine
from traces.served import ServedRun

DISAGREEMENT = 0.2
"""Share of an iteration by which its tokens' times may differ: beyond it the server computed something else."""


Price = Callable[[IterationPlan], float]


class _Flight(NamedTuple):
    """An iteration, its end, and, scheduled ahead, the requests that end with it."""

    plan: IterationPlan
    times: StepTimes
    ended: list[Sequence] | None


@dataclass(frozen=True)
class Step:
    """What the engine computed between two ends that the client saw, usually one iteration.

    Attributes:
        plans: the iterations.
        seconds: how long they took.
        before: the iteration that they followed at once, behind which host time may be hidden; None after a pause.
    """

    plans: tuple[IterationPlan, ...]
    seconds: float
    before: IterationPlan | None = None


@dataclass(frozen=True)
class Replay:
    """The steps whose tokens agree about their end, and how many were seen in all."""

    steps: list[Step]
    num_seen: int

    @property
    def matched(self) -> float:
        """Share of the steps that agree."""
        return len(self.steps) / self.num_seen if self.num_seen else 0.0


def replay(setup: Setup, served: ServedRun, known: int) -> Replay:
    """Recover the iterations.

    Scheduled ahead, an iteration is decided when the GPU begins the one before, so two are in flight.

    Args:
        setup: the engine as the server had it; its prices stand in for what was not seen.
        known: only the tokens of the first so many requests are looked at.
    """
    parts = build_engine(setup, None, Recording())
    front_end_s, s_per_token = setup.front_end
    engine, arrivals, cost = parts.engine, Arrivals(served.requests), setup.cost
    if s_per_token:
        arrivals = Tokeniser(arrivals, s_per_token)
    most = 2 if engine.schedules_ahead else 1
    times_s = [[at_s - front_end_s for at_s in served.token_times_s(i)] for i in range(known)]
    left = sum(map(len, times_s))
    flying: deque[_Flight] = deque()
    # When the last iteration ended; when the GPU began the last that is scheduled, and what it was.
    now_s = end_s = start_s = begin_s = 0.0
    before: IterationPlan | None = None
    follows: IterationPlan | None = None
    plans: list[IterationPlan] = []
    steps: list[Step] = []
    num_seen, is_clean = 0, True
    while left > 0:
        arrivals.deliver(now_s + TIE_S, engine.add_request)
        plan = engine.schedule(now_s) if len(flying) < most else None
        if plan is not None:
            seen_s = _seen(plan, times_s, parts.scheduler.num_generated_of)
            left -= len(seen_s)
            frozen = _frozen(plan)
            plans.append(frozen)
            # Copies beside the computation are not in its price.
            is_clean = is_clean and not (plan.has_swaps or plan.beside or plan.behind or plan.streamed)
            if most > 1:
                begin_s = max(end_s, (now_s if before is None else begin_s) + _host_s(cost, plan))
            end_s = max(end_s, median(seen_s) if seen_s else max(now_s, end_s) + _plan_s(cost, plan, before))
            before = frozen
            if seen_s:
                num_seen += 1
                seconds = end_s - start_s
                # Without the outermost tenth at each end.
                cut = len(seen_s) // 10
                apart_s = max(abs(second - end_s) for second in seen_s[cut : len(seen_s) - cut])
                if is_clean and seconds > 0.0 and apart_s <= DISAGREEMENT * seconds:
                    steps.append(Step(tuple(plans), seconds, follows))
                start_s, follows = end_s, frozen
                plans, is_clean = [], True
            times = StepTimes(1, end_s, 0.0, 0.0, end_s, 1)
            flying.append(_Flight(plan, times, engine.commit_ahead(plan, times) if most > 1 else None))
        if flying and (plan is None or len(flying) == most):
            landed = flying.popleft()
            if landed.ended is None:
                engine.commit(landed.plan, landed.times)
            else:
                engine.deliver(landed.ended)
            for move in landed.plan.beside:
                engine.transfer_done(move)
            now_s = landed.times.end_s
        elif plan is None:
            if arrivals.next_s == inf:
                break
            now_s = end_s = start_s = max(now_s, arrivals.next_s)
            before = follows = None
            plans.clear()
        now_s = max(now_s, begin_s)
    return Replay(steps, num_seen)


def _seen(plan: IterationPlan, times_s: Seq[Seq[float]], num_generated_of) -> list[float]:  # noqa: ANN001
    """When the tokens of a plan came that the client saw, sorted."""
    giving: list[Sequence] = [c.seq for c in plan.chunks if c.num_cached + c.num_new == c.seq.num_tokens]
    giving += plan.decodes
    found = []
    for seq in giving:
        i, n = seq.request.request_id, num_generated_of(seq)
        if i < len(times_s) and n < len(times_s[i]):
            found.append(times_s[i][n])
    return sorted(found)


def _host_s(cost: CostModel, plan: IterationPlan) -> float:
    """The host's part of an iteration, s."""
    return 0.0 if cost.host is None else cost.host.seconds(plan.num_decodes + len(plan.chunks))


def _plan_s(cost: CostModel, plan: IterationPlan, before: IterationPlan | None, price: Price | None = None) -> float:
    """An iteration with the host's part of it, less what is hidden behind the GPU's work `before`, s."""
    price = price or cost.iteration_s
    seconds, host_s = price(plan), _host_s(cost, plan)
    if cost.host is not None and cost.host.hidden and before is not None:
        host_s = max(0.0, host_s - price(before))
    return seconds + host_s


def _frozen(plan: IterationPlan) -> IterationPlan:
    """The plan as a price needs it, whatever becomes of its sequences."""
    kept = plan.copy()
    kept.decodes, kept.chunks = (), ()
    for chunk in plan.chunks:
        seq = Sequence(chunk.seq.request)
        seq.num_tokens = chunk.seq.num_tokens
        kept.chunks += (PrefillChunk(seq, chunk.num_new, chunk.num_cached, chunk.origin),)
    return kept


def predict_steps_s(cost: CostModel, steps: Seq[Step]) -> Array:
    """Seconds of each step, shape (steps,)."""
    price = cache(cost.iteration_s)
    pairs = (zip(step.plans, (step.before, *step.plans[:-1]), strict=True) for step in steps)
    return np.array([sum(_plan_s(cost, plan, before, price) for plan, before in pair) for pair in pairs])
