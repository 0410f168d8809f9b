"""What `kvtwin compare` says beside its policies: how much of the reachable they reach, and what binds them."""

from collections.abc import Iterator, Sequence
from itertools import islice

from sim.bounds.goodput import GoodputBound, goodput_bound
from sim.bounds.lifted import LIFTED
from sim.errors import UserError
from sim.options.scenario import Scenario
from sim.parts.catalogue import STAGES
from sim.results.goodput import Goodput
from sim.results.report import metric_values
from sim.results.result import assemble
from sim.results.schema import Bounds, Result
from sim.run.prepare import Setup
from sim.run.simulate import build_run, execute_all
from sim.run.traffic import traffic

BY_DEFAULT = 20_000
"""Requests below which the bound is found without being asked for."""


def bounds_of(
    setups: Sequence[Setup], results: Sequence[Result], found: GoodputBound | None, *, lifted: bool
) -> Bounds | None:
    """Shares of the bound that was found, and runs with a limit lifted where these are asked for."""
    goodput = None if found is None else found.goodput
    if goodput is None and not lifted:
        return None
    return Bounds(
        goodput_bound=goodput,
        bound_shares={r.policy: (r.request_goodput or 0.0) / goodput for r in results if _served_all(r)}
        if goodput
        else {},
        lifted={setup.label: dict(_lifted(setup)) for setup in setups} if lifted else {},
    )


def _served_all(result: Result) -> bool:
    """Whether its goodput compares with the bound: a run that refuses requests may end before the last arrives."""
    return result.complete and result.completed == result.num_prompts


def best_bound(setups: Sequence[Setup], *, asked: bool = True) -> GoodputBound | None:
    """The greatest bound of engines that differ in limits and host time; UserError if `asked` for and there is none.

    Not asked for, it is found below `BY_DEFAULT` requests alone.
    """
    scenario = setups[0].scenario
    reason = _why_none(scenario)
    if reason is None and any(STAGES[setup.policy.names["stage"]].drafts for setup in setups):
        reason = "is for engines that decode one token of a sequence at a time, and one of these drafts (spec-method)"
    if reason is None:
        requests = list(islice(traffic(scenario), None if asked else BY_DEFAULT))
        if not asked and len(requests) == BY_DEFAULT:
            return None
        if scenario.goodput or any(request.slos for request in requests):
            slo, engines = Goodput.parse(scenario.goodput), scenario.num_engines
            bounds = [goodput_bound(requests, setup.limits, setup.cost, slo, engines) for setup in setups]
            known = [bound for bound in bounds if bound is not None]
            if known and len(known) == len(bounds):
                return max(known, key=lambda bound: bound.goodput)
            reason = "prices of these forms have no linear ones below them"
        else:
            reason = "no request has SLOs; give --goodput, or a trace whose requests have slos"
    if asked:
        raise UserError(f"--bound: {reason}; leave it out")
    return None


def _why_none(scenario: Scenario) -> str | None:
    if scenario.max_concurrency is not None or scenario.closed_sessions:
        return "in a closed loop arrivals depend on the policy"
    if scenario.data_parallel_size not in (None, 1):
        return "is for engines that do not wait for one another"
    if scenario.prefill_replicas is not None or scenario.pipeline_parallel_size not in (None, 1):
        return "is for engines that do all the work of a request"
    return None


def _lifted(setup: Setup) -> Iterator[tuple[str, dict[str, float | None]]]:
    for name, lift in LIFTED.items():
        other = lift(setup)
        if other is not None:
            yield name, metric_values(assemble(execute_all(build_run(other, traffic(other.scenario)))))
