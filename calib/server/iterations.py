"""Iterations recovered from the times of tokens.

Every token of an iteration comes at its end. So the scheduler is replayed on the server's clock: it decides what the
next iteration computes, and the tokens that this gives say when the server ended it. No duration is predicted, except
of iterations that give no token which the client saw.
"""

from collections.abc import Sequence as Seq
from copy import copy
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import NamedTuple, cast

import numpy as np

from calib.robust import Array
from sim.clock.arrivals import TIE_S, Arrivals
from sim.cost.model import CostModel
from sim.engine.plan import IterationPlan, make_times
from sim.engine.sequence import Sequence
from sim.errors import UserError
from sim.prepare import Setup
from sim.runs import Keep, build_engine
from traces.served import ServedRun

DISAGREEMENT = 0.2
"""Share of an iteration by which its tokens' times may differ: beyond it the server computed something else."""


class _Length(NamedTuple):
    """What a price asks of a sequence."""

    num_tokens: int


@dataclass(frozen=True)
class Step:
    """What the engine computed between two ends that the client saw, usually one iteration, and how long it took, s."""

    plans: tuple[IterationPlan, ...]
    seconds: float


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

    Args:
        setup: the engine as the server had it; its prices stand in for what was not seen.
        known: only the tokens of the first so many requests are looked at.

    Raises:
        UserError: the engine schedules ahead of its tokens, or stands still.
    """
    parts = build_engine(setup, None, Keep())
    engine, arrivals = parts.engine, Arrivals(served.requests)
    if engine.schedules_ahead:
        raise UserError("--async-scheduling: iterations overlap, their tokens do not say when each began; leave it out")
    front_end_s = setup.engine_profile.value("front_end_s") if setup.engine_profile else 0.0
    times_s = [[at_s - front_end_s for at_s in served.token_times_s(i)] for i in range(known)]
    left = sum(map(len, times_s))
    now_s = start_s = 0.0
    plans: list[IterationPlan] = []
    steps: list[Step] = []
    num_seen, is_clean = 0, True
    while left > 0:
        arrivals.deliver(now_s + TIE_S, engine.add_request)
        plan = engine.schedule(now_s)
        if plan is None:
            if arrivals.next_s == inf:
                break
            now_s = start_s = max(now_s, arrivals.next_s)
            plans.clear()
            continue
        seen_s = _seen(plan, times_s, parts.scheduler.num_generated_of)
        left -= len(seen_s)
        plans.append(_frozen(plan))
        # Copies beside the computation are not in its price.
        is_clean = is_clean and not (plan.has_swaps or plan.beside or plan.behind or plan.streamed)
        end_s = median(seen_s) if seen_s else now_s + _plan_s(setup.cost, plan)
        if seen_s:
            num_seen += 1
            seconds = end_s - start_s
            apart_s = max(abs(second - end_s) for second in _middle(seen_s))
            if is_clean and seconds > 0.0 and apart_s <= DISAGREEMENT * seconds:
                steps.append(Step(tuple(plans), seconds))
            start_s = max(end_s, now_s)
            plans, is_clean = [], True
        now_s = max(end_s, now_s)
        engine.commit(plan, make_times((1, now_s, 0.0, 0.0, now_s, 1)))
        for move in plan.beside:
            engine.transfer_done(move)
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


def _middle(seconds: list[float]) -> list[float]:
    """Sorted values without the outermost tenth at each end."""
    cut = len(seconds) // 10
    return seconds[cut : len(seconds) - cut]


def _plan_s(cost: CostModel, plan: IterationPlan) -> float:
    """An iteration with the host's part of it, s."""
    return cost.iteration_s(plan) + cost.added_host_s(plan.num_decodes + len(plan.chunks))


def _frozen(plan: IterationPlan) -> IterationPlan:
    """The plan as a price needs it, whatever becomes of its sequences."""
    kept = copy(plan)
    kept.decodes = ()
    kept.chunks = tuple(c._replace(seq=cast(Sequence, _Length(c.seq.num_tokens))) for c in plan.chunks)
    return kept


def predict_steps_s(cost: CostModel, steps: Seq[Step]) -> Array:
    """Seconds of each step, shape (steps,)."""
    return np.array([sum(_plan_s(cost, plan) for plan in step.plans) for step in steps])
