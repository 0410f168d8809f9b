"""Eq. 5 as eLLM solves it: SciPy's SLSQP over a continuous b and r. Kept to compare the exact solver with."""

import numpy as np
from scipy.optimize import minimize

from sim.systems.ellm.equations import Configuration, Floats, StepCosts
from sim.systems.ellm.solver import Batch, Choice, Memory, feasible_ratios


def solve(
    times: StepCosts,
    batch: Batch,
    memory: Memory,
    budget_s: float,
    start: tuple[float, float],
    *,
    configuration: Configuration,
    all_recomputed: bool = False,
) -> Choice | None:
    """b, rounded down, and r from `start` = (b, r), for the first configuration of `memory`; None where infeasible.

    Sums over the first b sequences are interpolated between whole b. What SLSQP may miss of a bound is made good:
    rounded down, b needs no more memory, and r is raised to the least that memory allows.
    """
    swapped = 1.0 - configuration.recomputed_share
    shares = (0.0, 1.0) if all_recomputed else (swapped, configuration.recomputed_share)
    scratch, n = memory.scratch[0], len(batch.seqs)
    grown = batch.seqs * batch.longest if memory.by_longest else batch.tokens
    lost = memory.lost_tokens * (1.0 + scratch)

    def first(b: float, values: Floats) -> Floats:
        return np.asarray(np.interp(b, batch.seqs, values))

    def step_s(b: float, r: float) -> float:
        sums = first(b, batch.tokens), first(b, batch.squares)
        return float(times.step_s(np.asarray(b), *sums, np.asarray(r), shares))

    def room(x: np.ndarray) -> float:
        stored, whole = first(x[0], batch.stored), first(x[0], grown)
        used = stored - x[1] * first(x[0], batch.tokens) + (lost * x[0] if x[1] > 0.0 else 0.0) + scratch * x[1] * whole
        return float(memory.gpu_tokens - used) / memory.gpu_tokens

    found = minimize(
        lambda x: step_s(*x) / x[0],
        np.array(start),
        method="SLSQP",
        bounds=[(1.0, float(n)), (0.0, 1.0)],
        constraints=[
            {"type": "ineq", "fun": lambda x: (budget_s - step_s(*x)) / budget_s},
            {"type": "ineq", "fun": room},
        ],
    )
    b = min(max(int(found.x[0] + 1e-9), 1), n)
    r = min(max(float(found.x[1]), 0.0), 1.0)
    ratios, feasible = feasible_ratios(batch, memory._replace(scratch=memory.scratch[:1]), (configuration,))
    r = max(r, float(ratios[0, b - 1]))
    seconds = step_s(b, r)
    host = swapped * (r * batch.tokens[b - 1] + (memory.lost_tokens * b if r > 0.0 else 0.0))
    if not feasible[0, b - 1] or r > 1.0 or seconds > budget_s or host > memory.host_tokens:
        return None
    return Choice(b, r, configuration, seconds)
