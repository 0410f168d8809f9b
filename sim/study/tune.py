"""`tune`: the policy and the knobs that reach most under SLOs, what binds them, and what would buy more.

Goals: `load`, the most traffic; `gpus`, the fewest GPUs for the traffic as it is; `cost`, the cheapest; `goodput`, the
most requests within their SLOs at the traffic as it is.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf, sqrt
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, get_args

from msgspec import Struct

from sim.errors import UserError
from sim.options.scenario import GOES_WITH, Scenario
from sim.options.values import convert
from sim.study.axes import MOST_RUNS, Study, Value, options_at, read_study
from sim.study.limits import SPEED_ERRORS, Gain, bound_by, changes, faster, gains_of
from sim.study.points import policy_of, setup_of
from sim.study.search import (
    DEFAULT_SLO,
    PRECISION,
    Ran,
    Reached,
    Search,
    Slo,
    answers,
    check_slos,
    fewest_engines,
    fewest_pools,
    most_load,
    worst_of,
)
from sim.study.sweep import Means, Store, Told
from sim.systems.builder import HAND_OVER

Goal = Literal["load", "gpus", "cost", "goodput"]
ENGINES = ("replicas", "prefill_replicas", "decode_replicas")
GOALS: tuple[Goal, ...] = get_args(Goal)
EXTRA = {"goal": str, "slo": tuple[str, ...], "trials": int, "storage": str}


class Candidate(Struct, frozen=True):
    """One policy with its knobs, and what it reached."""

    point: dict[str, Value]
    reached: Reached
    value: float | None
    """What is best most or least, by the goal; None where no run met the SLOs."""

    @property
    def ran(self) -> Ran | None:
        """The run that shows it, of the worst seed."""
        return self.reached.ran

    @property
    def refusal(self) -> str | None:
        """Why it could not run, or could not be told apart from any other; None where it ran and missed the SLOs."""
        if self.value is not None:
            return None
        error = self.reached.failing.outcome.error if self.reached.failing is not None else None
        return error or self.reached.unknown or None


class Tuned(Struct, frozen=True):
    """The answer of a search.

    Attributes:
        candidates: the best first; those that never met the SLOs last, in the file's order.
        gains: of the best, by what was changed.
        low, high: the best's value on a GPU that much slower and faster than its profile says.
        slack: most load over the traffic as it is that the best sustains.
    """

    study: Study
    goal: Goal
    slos: tuple[Slo, ...]
    candidates: list[Candidate]
    gains: list[Gain]
    low: float | None
    high: float | None
    speed_error: float
    slack: float | None

    @property
    def best(self) -> Candidate | None:
        """The best candidate; None where none met the SLOs."""
        return self.candidates[0] if self.candidates and self.candidates[0].value is not None else None

    @property
    def tied(self) -> list[Candidate]:
        """Candidates that cannot be told from the best: within the search's precision, or two standard errors."""
        best = self.best
        others = [c for c in self.candidates if c is not best and c.value is not None]
        return [c for c in others if best is not None and abs(c.value - best.value) <= self._noise(best)]  # type: ignore[operator]

    def _noise(self, best: Candidate) -> float:
        """By how much a value may differ from the best's and be as good, in the goal's unit."""
        if self.goal == "load":
            return PRECISION * (best.value or 0.0)
        if self.goal != "goodput" or best.ran is None or best.ran.result is None:
            return 1e-9 * (best.value or 0.0)
        count, share = best.ran.result["num_prompts"], best.ran.result["goodput_attainment"] or 0.0
        # Each request is in time or not: a binomial count; at least one of them may have fallen otherwise.
        return max(2.0 * sqrt(count * share * (1.0 - share)), 1.0) / max(best.ran.result["duration"], 1e-9)

    @property
    def indifferent(self) -> list[str]:
        """Axes on which a tied candidate differs from the best and from nothing else: there they make no difference."""
        point = self.best.point if self.best is not None else {}
        apart = [[name for name in point if c.point.get(name) != point[name]] for c in self.tied]
        return list(dict.fromkeys(names[0] for names in apart if len(names) == 1))

    @property
    def binds(self) -> str | None:
        """The limit that binds the best."""
        return bound_by(self.gains)


class Asked(Struct, frozen=True):
    """What a `[tune]` table asks for."""

    study: Study
    goal: Goal
    slos: tuple[Slo, ...]
    prices: dict[str, float] = {}
    """Of an hour by GPU, in any currency."""
    trials: int | None = None
    """Candidates that Optuna draws of the axes' values; None: every combination."""
    storage: str | None = None


def read_tune(table: Mapping[str, Any], where: str) -> Asked:
    """What is asked for. UserError for a goal or an SLO that is none, or a goal that lacks what it needs."""
    own = table.get("tune", {})
    price = own.get("price") if isinstance(own, dict) else None
    if price is not None:
        table = {**table, "tune": {key: value for key, value in own.items() if key != "price"}}
    study = read_study(table, "tune", where, EXTRA)
    extra = study.extra
    goal = extra.get("goal", "load")
    if goal not in GOALS:
        raise UserError(f"{where}: tune.goal = {goal!r} is not one of {', '.join(GOALS)}")
    words = extra.get("slo", ())
    if not words and not study.fixed.get("goodput"):
        raise UserError(f"{where}: no SLO is given: write slo = ['p99_ttft_ms:3000'] into [tune], or goodput = [...]")
    if goal == "goodput" and not study.fixed.get("goodput"):
        raise UserError(f"{where}: tune.goal = 'goodput' counts requests within goodput = ['ttft:3000', ...]; give it")
    slos = tuple(Slo.parse(word, f"{where}: tune.slo") for word in words or (DEFAULT_SLO,))
    check_slos(slos, f"{where}: tune.slo", counts_goodput="goodput" in study.fixed or "goodput" in study.axes)
    if (goal == "cost") != (price is not None):
        raise UserError(f"{where}: goal = 'cost' and price = (of a GPU and hour) go together; give both or neither")
    if goal in ("gpus", "cost"):
        _check_engines(study)
    trials = extra.get("trials")
    if trials is not None and trials < 1:
        raise UserError(f"{where}: tune.trials = {trials}; give 1 or more, or leave it out for every combination")
    if trials is not None and trials > MOST_RUNS:
        raise UserError(f"{where}: tune.trials = {trials} is more than {MOST_RUNS:,}; give fewer")
    if extra.get("storage") and trials is None:
        raise UserError(f"{where}: tune.storage is where trials are kept; give trials, or leave it out")
    return Asked(study, goal, slos, _prices(price, study), trials, extra.get("storage"))


def _prices(given: object, study: Study) -> dict[str, float]:
    """Price of an hour by GPU; UserError where one is missing or no price."""
    where = f"{study.where}: tune.price"
    gpus = sorted({str(gpu) for gpu in study.values("gpu") or [study.fixed.get("gpu", Scenario.gpu)]})
    if given is None:
        return {}
    table = given if isinstance(given, dict) else dict.fromkeys(gpus, given)
    found = {gpu: convert(f"{where} {gpu}", price, float) for gpu, price in table.items()}
    for gpu in gpus:
        if not found.get(gpu, 0.0) > 0:
            raise UserError(f"{where}: {gpu} has none above 0; write price = {{ {gpu} = 1.5 }}")
    return found


def _check_engines(study: Study) -> None:
    for name in ENGINES:
        if name in study.fixed or name in study.axes:
            shown = name.replace("_", "-")
            raise UserError(f"{study.where}: {shown!r} is what the goal looks for; leave it out")
    for name in ("prefill_gpu", "decode_gpu"):
        if study.extra.get("goal") == "cost" and (name in study.fixed or name in study.axes):
            shown = name.replace("_", "-")
            raise UserError(f"{study.where}: {shown!r}: goal = 'cost' prices one kind of GPU; leave it out")


def tune(asked: Asked, folder: Path, means: Means, begin: Callable[[int], Told] | None = None) -> Tuned:
    """Search, then see what binds the best. Runs are kept in `folder` as those of a sweep are.

    Raises:
        UserError: every candidate is refused, a worker died, or the folder cannot be written.
    """
    store = Store(folder)
    study = asked.study

    def reach(points: Sequence[dict[str, Value]]) -> list[Candidate]:
        reached = answers([_search(asked, point, {}) for point in points], store, means, begin)
        return [Candidate(p, h, _value(asked, h)) for p, h in zip(points, reached, strict=True)]

    if asked.trials is None:
        found = reach(study.points)
    else:
        from sim.study.knobs import by_trials  # noqa: PLC0415 - optuna is slow to import

        found = by_trials(asked, folder, reach, means.jobs)
    refused = {c.refusal for c in found}
    if len(refused) == 1 and (reason := refused.pop()) is not None:
        raise UserError(f"{study.where}: every candidate is refused: {reason}")
    found = ranked(asked, found)
    return _explained(asked, found, store, means, begin)


def ranked(asked: Asked, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The best first, of equals the one furthest from its SLOs; those that never met them last, in their order."""
    sign = -1.0 if asked.goal in ("load", "goodput") else 1.0
    known = [((sign * c.value, _margin(asked, c)), c) for c in candidates if c.value is not None]
    known.sort(key=itemgetter(0))
    return [c for _, c in known] + [c for c in candidates if c.value is None]


def _explained(
    asked: Asked, found: list[Candidate], store: Store, means: Means, begin: Callable[[int], Told] | None
) -> Tuned:
    """What binds the best, what more would buy, and how its answer hangs on the GPU's speed."""
    best = found[0]
    if best.value is None or best.ran is None:
        return Tuned(asked.study, asked.goal, asked.slos, found, [], None, None, 0.0, None)
    engines: dict[str, Any] = {}
    if asked.goal in ("gpus", "cost"):
        engines = {name: best.ran.options[name] for name in (*ENGINES, "router") if name in best.ran.options}
    base = _options(asked, best.point, 0, engines)
    what_if = changes(base)
    error = SPEED_ERRORS[setup_of(base).profile.status]
    speeds = [faster(base, factor) for factor in (1.0 - error, 1.0 + error)]
    searches = [_loaded(asked, best.point, {**engines, **more}) for more in ({}, *(c.options for c in what_if))]
    searches += [_search(asked, best.point, more) for more in speeds]
    reached = answers(searches, store, means, begin)
    at_first, changed, (slow, fast) = reached[0], reached[1:-2], reached[-2:]
    gains = gains_of(what_if, at_first, changed)
    return Tuned(
        asked.study, asked.goal, asked.slos, found, gains, _value(asked, slow), _value(asked, fast),
        error, None if asked.goal == "goodput" else at_first.most,
    )  # fmt: skip


def _hands_over(options: Mapping[str, Any]) -> bool:
    try:
        return policy_of(options)[1].names["stage"] == HAND_OVER
    except UserError:
        # As the run will say.
        return False


def _options(asked: Asked, point: Mapping[str, Value], repeat: int, more: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a run. Where engines are searched, those of pools are left to the policies that hand over."""
    found = {**dict(options_at(asked.study, point, repeat)), **more}
    if asked.goal not in ("gpus", "cost") or _hands_over(found):
        return found
    return {name: value for name, value in found.items() if GOES_WITH.get(name) != "prefill_replicas"}


def _search(asked: Asked, point: Mapping[str, Value], more: Mapping[str, Any]) -> Search[Reached]:
    """The goal's search for a candidate, the worst of its seeds."""
    if asked.goal in ("gpus", "cost"):
        given = [_options(asked, point, r, more) for r in range(asked.study.repeats)]
        fewest = fewest_pools if _hands_over(given[0]) else fewest_engines
        return worst_of([fewest(options, asked.slos) for options in given], lambda a, b: a < b)
    return _loaded(asked, point, more)


def _loaded(asked: Asked, point: Mapping[str, Value], more: Mapping[str, Any]) -> Search[Reached]:
    """How much load a deployment sustains, or its goodput where that is the goal."""
    given = [_options(asked, point, r, more) for r in range(asked.study.repeats)]
    if asked.goal == "goodput":
        return worst_of([_goodput(options) for options in given], lambda a, b: a > b)
    return worst_of([most_load(options, asked.slos) for options in given], lambda a, b: a > b)


def _goodput(options: dict[str, Any]) -> Search[Reached]:
    ran = yield options
    if ran.result is None:
        return Reached(0.0, None, 1.0, ran)
    return Reached(ran.result["request_goodput"], ran, None, None)


def _value(asked: Asked, reached: Reached) -> float | None:
    """What the goal counts: load in requests/s, GPUs, their price an hour, or goodput in requests/s."""
    ran = reached.ran
    if ran is None or ran.result is None:
        return None
    if asked.goal == "load":
        return offered_per_s(ran.result)
    if asked.goal == "goodput":
        return reached.most
    price = asked.prices[ran.options.get("gpu", Scenario.gpu)] if asked.goal == "cost" else 1.0
    return ran.num_gpus * price


def offered_per_s(result: Mapping[str, Any]) -> float:
    """Requests/s that arrived in a run: its requests over the time from the first arrival to the last.

    Of more requests than are kept, over the duration.
    """
    span_s = result["arrival_span_s"] or result["duration"]
    return result["num_prompts"] / span_s if span_s else 0.0


def _margin(asked: Asked, candidate: Candidate) -> float:
    """How near to its SLOs the run of a candidate comes, of those that reach as much as one another; less is better.

    1 is at the bound of one, whether that is a least or a most.
    """
    result = (candidate.ran and candidate.ran.result) or {}
    values = [(slo, result.get(slo.metric) or 0.0) for slo in asked.slos]
    return max((slo.bound / v if v else inf) if slo.at_least else v / slo.bound for slo, v in values)
