"""`tune`: the policy and the knobs that reach most under SLOs, what binds them, and what would buy more.

Goals: `load`, the most traffic; `goodput`, the most requests within their SLOs at the traffic as it is. All candidates
are searched on that traffic; those near the best on other draws of it too (`sim.study.draws`), so that answers are
intervals. How many GPUs it takes is a question for `plan`.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from math import inf, log, sqrt
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, get_args

from msgspec import Struct
from msgspec.structs import replace

from sim.errors import UserError
from sim.parts.options import refuse_idle
from sim.study.axes import MOST_RUNS, Study, Value, options_at, read_study
from sim.study.draws import TRAFFIC, Like, like_traffic
from sim.study.intervals import apart, geometric_mean, of_another_draw
from sim.study.limits import SPEED_ERRORS, Gain, bound_by, changes, faster, gains_of
from sim.study.points import setup_of
from sim.study.search import DEFAULT_SLO, PRECISION, Ran, Reached, Search, Slo, answers, check_slos, most_load
from sim.study.sweep import Means, Store, Told, place_of

Goal = Literal["load", "goodput"]
GOALS: tuple[Goal, ...] = get_args(Goal)
NEAR = 1.2
"""Factor from the best on the traffic as it is within which a candidate is tried on every draw."""
STEP, COARSE = 1.06, 1.25
"""First steps of loads on another draw, and with something changed."""
EXTRA = {"goal": str, "slo": tuple[str, ...], "trials": int, "storage": str}


class Candidate(Struct, frozen=True):
    """One policy with its knobs, and what it reached on each draw of the traffic, the traffic as it is first.

    Attributes:
        values: requests/s, by draw: arriving, or within their SLOs; None where no run met the SLOs.
    """

    point: dict[str, Value]
    reached: tuple[Reached, ...]
    values: tuple[float | None, ...]
    goal: Goal

    @property
    def known(self) -> tuple[float, ...]:
        """The values; none where the SLOs are never met on some draw."""
        return tuple(value for value in self.values if value is not None) if None not in self.values else ()

    @property
    def value(self) -> float | None:
        """On the geometric mean of the draws."""
        return geometric_mean(self.known) if self.known else None

    @property
    def interval(self) -> tuple[float, float]:
        """Where the value of another like draw lies with 95 %."""
        return of_another_draw(self.known, PRECISION if self.goal == "load" else 0.0)

    @property
    def shown(self) -> int:
        """The draw whose run shows it: the traffic as it is, or the first draw without a value."""
        return self.values.index(None) if None in self.values else 0

    @property
    def ran(self) -> Ran | None:
        """The run that shows it."""
        return self.reached[self.shown].ran

    @property
    def refusal(self) -> str | None:
        """Why it could not run, or could not be told apart from any other; None where it ran and missed the SLOs."""
        if self.value is not None:
            return None
        reached = self.reached[self.shown]
        error = reached.failing.outcome.error if reached.failing is not None else None
        return error or reached.unknown or None


class Tuned(Struct, frozen=True):
    """The answer of a search.

    Attributes:
        candidates: the best first; those that never met the SLOs last, in the file's order.
        gains: of the best, by what was changed.
        low, high: the best's value on a GPU that much slower and faster than its profile says.
        alone: why the best was tried on one draw alone; empty where it was on more.
    """

    study: Study
    goal: Goal
    slos: tuple[Slo, ...]
    candidates: list[Candidate]
    gains: list[Gain]
    low: float | None
    high: float | None
    speed_error: float
    alone: str = ""

    @property
    def best(self) -> Candidate | None:
        """The best candidate; None where none met the SLOs."""
        return self.candidates[0] if self.candidates and self.candidates[0].value is not None else None

    @property
    def tied(self) -> list[Candidate]:
        """Candidates that cannot be told from the best, draw by draw: within two standard errors, or the noise."""
        best = self.best
        others = [c for c in self.candidates if c is not best and c.value]
        return [c for c in others if best is not None and best.value and self._tie(best, c)]

    def _tie(self, best: Candidate, other: Candidate) -> bool:
        mean, error = apart(best.known, other.known)
        return abs(mean) <= max(self._noise(best), 2.0 * error)

    def _noise(self, best: Candidate) -> float:
        """By what share a value may differ from the best's and be as good, whatever the draws say."""
        if self.goal == "load":
            return PRECISION
        if self.goal != "goodput" or best.ran is None or best.ran.result is None or len(best.values) > 1:
            return 1e-9
        count, share = best.ran.result["num_prompts"], best.ran.result["goodput_attainment"] or 0.0
        # Each request is in time or not: a binomial count; at least one of them may have fallen otherwise.
        noise = max(2.0 * sqrt(count * share * (1.0 - share)), 1.0) / max(best.ran.result["duration"], 1e-9)
        return -log(max(1.0 - noise / (best.value or noise), 1e-9))

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
    draws: int | None = None
    """Of the traffic, its own included; None: as many as are usual, one of long traffic."""
    trials: int | None = None
    """Candidates that Optuna draws of the axes' values; None: every combination."""
    storage: str | None = None


def read_tune(table: Mapping[str, Any], where: str) -> Asked:
    """What is asked for. UserError for a goal or an SLO that is none, or a goal that lacks what it needs."""
    own = table.get("tune", {})
    study = read_study(table, "tune", where, EXTRA)
    draws = study.repeats if isinstance(own, dict) and "repeats" in own else None
    # Draws are told apart by their traffic, not by the study's own seeds.
    study, extra = replace(study, repeats=1), study.extra
    goal = extra.get("goal", "load")
    if goal not in GOALS:
        raise UserError(
            f"{where}: tune.goal = {goal!r} is not one of {', '.join(GOALS)}; "
            "the fewest GPUs, and the cheapest, are what kvtwin plan finds"
        )
    words = extra.get("slo", ())
    if not words and not study.fixed.get("goodput"):
        raise UserError(f"{where}: no SLO is given: write slo = ['p99_ttft_ms:3000'] into [tune], or goodput = [...]")
    if goal == "goodput" and not study.fixed.get("goodput"):
        raise UserError(f"{where}: tune.goal = 'goodput' counts requests within goodput = ['ttft:3000', ...]; give it")
    slos = tuple(Slo.parse(word, f"{where}: tune.slo") for word in words or (DEFAULT_SLO,))
    check_slos(slos, f"{where}: tune.slo", counts_goodput="goodput" in study.fixed or "goodput" in study.axes)
    trials = extra.get("trials")
    if trials is not None and trials < 1:
        raise UserError(f"{where}: tune.trials = {trials}; give 1 or more, or leave it out for every combination")
    if trials is not None and trials > MOST_RUNS:
        raise UserError(f"{where}: tune.trials = {trials} is more than {MOST_RUNS:,}; give fewer")
    if extra.get("storage") and trials is None:
        raise UserError(f"{where}: tune.storage is where trials are kept; give trials, or leave it out")
    return Asked(study, goal, slos, draws, trials, extra.get("storage"))


def tune(asked: Asked, folder: Path, means: Means, begin: Callable[[int], Told] | None = None) -> Tuned:
    """Search, then see what binds the best. Runs are kept in `folder` as those of a sweep are.

    Raises:
        UserError: every candidate is refused, a worker died, or the folder cannot be written.
    """
    return _Tuner(asked, folder, means, begin).tune()


class _Tuner:
    def __init__(self, asked: Asked, folder: Path, means: Means, begin: Callable[[int], Told] | None) -> None:
        self.asked, self.folder, self.means, self.begin = asked, folder, means, begin
        self.store = Store(folder)
        self._traffics: dict[str, Like] = {}

    def tune(self) -> Tuned:
        asked = self.asked
        if asked.trials is None:
            places = [place_of(self._options(point), point) for point in asked.study.points]
            refuse_idle(one for place in places for one in place.conditional)
            found = self._as_it_is(asked.study.points)
        else:
            from sim.study.knobs import by_trials  # noqa: PLC0415 - optuna is slow to import

            found = by_trials(asked, self.folder, self._as_it_is, self.means.jobs)
        refused = {c.refusal for c in found}
        if len(refused) == 1 and (reason := refused.pop()) is not None:
            raise UserError(f"{asked.study.where}: every candidate is refused: {reason}")
        return self._explained(ranked(asked, self._on_every_draw(ranked(asked, found))))

    def _answers(self, searches: Sequence[Search[Reached]]) -> list[Reached]:
        return answers(searches, self.store, self.means, self.begin)

    def _as_it_is(self, points: Sequence[dict[str, Value]]) -> list[Candidate]:
        """Candidates by what they reach on the traffic as it is."""
        reached = self._answers([self._search(self._options(point)) for point in points])
        return [
            Candidate(p, (h,), (_value(self.asked, h),), self.asked.goal) for p, h in zip(points, reached, strict=True)
        ]

    def _on_every_draw(self, found: Sequence[Candidate]) -> list[Candidate]:
        """The candidates, those near the best with what they reach on the other draws."""
        near = [c for c in found if c.value and found[0].value and abs(log(c.value / found[0].value)) <= log(NEAR)]
        traffics = [self._like(c.point).options[1:] for c in near]
        searches = [
            self._search(_on(traffic, self._options(candidate.point)), candidate.reached[0].most, STEP)
            for candidate, others in zip(near, traffics, strict=True)
            for traffic in others
        ]
        reached = iter(self._answers(searches))
        drawn = {}
        for candidate, others in zip(near, traffics, strict=True):
            own = (*candidate.reached, *islice(reached, len(others)))
            values = tuple(_value(self.asked, one) for one in own)
            drawn[id(candidate)] = replace(candidate, reached=own, values=values)
        return [drawn.get(id(candidate), candidate) for candidate in found]

    def _like(self, point: Mapping[str, Value]) -> Like:
        options = self._options(point)
        traffic = {name: value for name, value in options.items() if name in TRAFFIC}
        if (key := repr(traffic)) not in self._traffics:
            self._traffics[key] = like_traffic(traffic, self.asked.draws, self.folder)
        return self._traffics[key]

    def _options(self, point: Mapping[str, Value]) -> dict[str, Any]:
        """Of a candidate's run on the traffic as it is."""
        return options_at(self.asked.study, point, 0)

    def _search(self, options: dict[str, Any], start: float = 1.0, step: float = 2.0) -> Search[Reached]:
        """How much load a deployment sustains, or its goodput where that is the goal."""
        if self.asked.goal == "goodput":
            return _goodput(options)
        return most_load(options, self.asked.slos, start=start, step=step)

    def _explained(self, found: list[Candidate]) -> Tuned:
        """What binds the best, what more would buy, and how its answer hangs on the GPU's speed."""
        asked, best = self.asked, found[0]
        if best.value is None or best.ran is None:
            return Tuned(asked.study, asked.goal, asked.slos, found, [], None, None, 0.0)
        like, at_first = self._like(best.point), best.reached[0]
        base = _on(like.options[0], self._options(best.point))
        what_if = changes(base)
        error = SPEED_ERRORS[setup_of(base).profile.status]
        searches = [self._search({**base, **change.options}, at_first.most or 1.0, COARSE) for change in what_if]
        speeds = (faster(base, 1.0 - error), faster(base, 1.0 + error))
        searches += [self._search({**base, **speed}, at_first.most, STEP) for speed in speeds]
        *changed, slow, fast = self._answers(searches)
        share = best.value / (best.known[0] or 1.0)
        low, high = (None if end is None else end * share for end in (_value(asked, slow), _value(asked, fast)))
        gains = gains_of(what_if, at_first, changed)
        return Tuned(asked.study, asked.goal, asked.slos, found, gains, low, high, error, like.alone)


def ranked(asked: Asked, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The best first, of equals the one furthest from its SLOs; those that never met them last, in their order."""
    known = [((-c.value, _margin(asked, c)), c) for c in candidates if c.value is not None]
    known.sort(key=itemgetter(0))
    return [c for _, c in known] + [c for c in candidates if c.value is None]


def _goodput(options: dict[str, Any]) -> Search[Reached]:
    ran = yield options
    if ran.result is None:
        return Reached(0.0, None, 1.0, ran)
    return Reached(ran.result["request_goodput"], ran, None, None)


def _on(traffic: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """A run's options on another traffic."""
    return {**{name: value for name, value in options.items() if name not in TRAFFIC}, **traffic}


def _value(asked: Asked, reached: Reached) -> float | None:
    """What the goal counts, load or goodput, in requests/s."""
    ran = reached.ran
    if ran is None or ran.result is None:
        return None
    return offered_per_s(ran.result) if asked.goal == "load" else reached.most


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
