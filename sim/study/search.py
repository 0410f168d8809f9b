"""Searches that ask for runs: how much load a deployment sustains.

A search is a generator: it yields the options of a run, hears how it ended, and returns its answer. `answers` drives
many of them at once, so that workers have something to do and equal runs are made once.
"""

import hashlib
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from sim.errors import UserError
from sim.options.values import convert
from sim.results.schema import Result
from sim.study.intervals import geometric_mean
from sim.study.points import Most, Outcome
from sim.study.sweep import Means, Store, Told, perform_missing, place_of

Answer = TypeVar("Answer")
Search = Generator[dict[str, Any], "Ran", Answer]
PRECISION = 0.02
"""Loads are found to within this share."""
MOST_DOUBLINGS = 12
STAYS = 5.0
"""Arrivals must go on for so many mean latencies before a load counts as sustained: seats and blocks have filled and
emptied some times by then."""
DEFAULT_SLO = "goodput_attainment:0.99"
NO_LOAD = 2.0**-MOST_DOUBLINGS


class Ran(Struct, frozen=True):
    """How a run that a search asked for ended."""

    options: dict[str, Any]
    num_gpus: int
    outcome: Outcome

    @property
    def result(self) -> dict[str, Any] | None:
        """What result.json says; None where the run failed."""
        return self.outcome.result


class Slo(Struct, frozen=True):
    """A bound on one statistic of a run: times at most, shares at least."""

    metric: str
    bound: float

    @staticmethod
    def parse(word: str, where: str) -> "Slo":
        """Read `p99_ttft_ms:3000` or `goodput_attainment:0.99`."""
        metric, colon, text = word.partition(":")
        metric = metric.replace("-", "_")
        if not colon or not (metric in Result.__struct_fields__ and metric.endswith(("_ms", "_attainment"))):
            raise UserError(
                f"{where}: {word!r} is not METRIC:BOUND, such as p99_ttft_ms:3000 or goodput_attainment:0.99"
            )
        bound = convert(f"{where}: {word}", text, float)
        if not bound > 0:
            raise UserError(f"{where}: {word!r} has a bound that nothing meets; give more than 0")
        if metric.endswith("_attainment") and bound > 1:
            raise UserError(f"{where}: {word!r} is a share, at most 1; 99 % is {metric}:0.99")
        return Slo(metric, bound)

    def met(self, result: Mapping[str, Any]) -> bool:
        """Whether a run meets it."""
        value = result[self.metric]
        if value is None:
            return False
        return value >= self.bound if self.at_least else value <= self.bound

    @property
    def most(self) -> Most | None:
        """The bound as it can be told during a run; None of a mean, a share or a gap between tokens."""
        found = re.fullmatch(r"p([0-9]+)_(ttft|tpot|e2el)_ms|(median)_(ttft|tpot|e2el)_ms", self.metric)
        if found is None:
            return None
        percent, times = (float(found[1]), found[2]) if found[1] else (50.0, found[4])
        return Most(f"{times}_s", percent, self.bound / 1e3)  # type: ignore[arg-type]

    @property
    def at_least(self) -> bool:
        """Whether more is better."""
        return not self.metric.endswith("_ms")

    def __str__(self) -> str:
        return f"{self.metric} {'>=' if self.at_least else '<='} {self.bound:g}"


def check_slos(slos: Sequence[Slo], where: str, *, counts_goodput: bool) -> None:
    """UserError for two bounds on one metric, and for shares of requests that meet SLOs where none are given."""
    for metric in {slo.metric for slo in slos}:
        if len(same := [str(slo) for slo in slos if slo.metric == metric]) > 1:
            raise UserError(f"{where}: {' and '.join(same)} bound one metric; give one of them")
        if metric.endswith("_attainment") and not counts_goodput:
            raise UserError(f"{where}: {metric} counts requests within goodput = ['ttft:3000', ...]; give it")


SERVED = 0.99
"""Share of the requests that must not be given up, whatever the SLOs."""


def meets(ran: Ran, slos: Sequence[Slo]) -> bool:
    """Whether a run met all SLOs and gave up hardly any request."""
    result = ran.result
    if result is None:
        return False
    return result["completed"] >= SERVED * result["num_prompts"] and all(slo.met(result) for slo in slos)


def too_short(result: Mapping[str, Any]) -> str:
    """Why a run cannot tell whether its load is sustained: its arrivals end before a queue could show. Else empty."""
    span_s, stay_ms = result.get("arrival_span_s"), result.get("mean_e2el_ms")
    if span_s is None or stay_ms is None or span_s >= STAYS * stay_ms / 1e3:
        return ""
    count = result["num_prompts"]
    if span_s == 0.0:
        return "all requests arrive at once, at any load: give arrivals over time (a finite request-rate)"
    return (
        f"at more load {count:,} requests arrive within {span_s:.3g} s, where each stays {stay_ms / 1e3:.3g} s: too "
        "few to see a queue grow; a longer trace tells"
    )


class Reached(Struct, frozen=True):
    """The most that met the SLOs and the least that did not, with their runs; None where there was none.

    Attributes:
        unknown: why more may meet them than the search could tell; empty where `least_failing` did not.
    """

    most: float
    ran: Ran | None
    least_failing: float | None
    failing: Ran | None
    unknown: str = ""


def mean_of(reached: Sequence[Reached]) -> Reached:
    """What like traffics sustain on the geometric mean; 0 where one of them sustains nothing, and then that one."""
    worst = min(reached, key=lambda one: one.most)
    if not worst.most > 0:
        return worst
    unknown = next((one.unknown for one in reached if one.unknown), "")
    return replace(worst, most=geometric_mean([one.most for one in reached]), unknown=unknown)


def most_load(
    options: Mapping[str, Any],
    slos: Sequence[Slo],
    precision: float = PRECISION,
    *,
    start: float = 1.0,
    step: float = 2.0,
    is_near: bool = False,
) -> Search[Reached]:
    """The greatest factor on the arrivals' rate at which the SLOs are met, by steps and geometric bisection.

    Where the start `is_near` steps may be small: each is the square of the one before, at most 2.

    It assumes that SLOs met at some load are met at any lower one. 0 where none down to `NO_LOAD` meets them.
    A run that is too short to tell (`too_short`) is no proof that its load is sustained: `unknown` says so, as it does
    where no load fails.
    """
    usual = options.get("rate_scale", 1.0)
    good: tuple[float, Ran | None] = (0.0, None)
    failing: tuple[float | None, Ran | None] = (None, None)
    # The least factor that is not known to be sustained.
    limit: float | None = None
    unknown = f"no load up to {1 / NO_LOAD:,.0f} times the traffic fails"
    factor = start
    while NO_LOAD <= factor <= 1 / NO_LOAD:
        ran = yield {**options, "rate_scale": usual * factor}
        if ran.outcome.error is not None and good[1] is None and failing[1] is None:
            # Refused as it is: no load changes that.
            return Reached(0.0, None, factor, ran)
        if not meets(ran, slos):
            limit, failing, unknown = factor, (factor, ran), ""
        elif short := too_short(ran.result or {}):
            if ran.result and not ran.result["arrival_span_s"]:
                # No load changes that.
                return Reached(0.0, None, None, None, short)
            limit, failing, unknown = factor, (None, None), short
        else:
            good = (factor, ran)
        if limit is not None and good[1] is not None:
            if limit / good[0] <= 1.0 + precision:
                break
            factor = (good[0] * limit) ** 0.5
            continue
        factor = factor * step if limit is None else factor / step
        if is_near:
            step = min(step * step, 2.0)
    return Reached(*good, *failing, unknown)


def answers(
    searches: Sequence[Search[Answer]],
    store: Store,
    means: Means,
    begin: Callable[[int], Told] | None = None,
    until: Sequence[Slo] = (),
) -> list[Answer]:
    """Drive the searches to their ends, a round of runs at a time; their answers in order. `until` as of `runs`."""
    found: dict[int, Answer] = {}
    asked: dict[int, dict[str, Any]] = {}
    for place, search in enumerate(searches):
        _step(found, asked, place, search, None)
    while asked:
        ended = dict(zip(asked, runs(list(asked.values()), store, means, begin, until), strict=True))
        asked.clear()
        for place, ran in ended.items():
            _step(found, asked, place, searches[place], ran)
    return [found[place] for place in range(len(searches))]


def runs(
    asked: Sequence[dict[str, Any]],
    store: Store,
    means: Means,
    begin: Callable[[int], Told] | None = None,
    until: Sequence[Slo] = (),
) -> list[Ran]:
    """Perform runs by their options, those that are not kept yet; how each ended, in order.

    `until`: SLOs with one of which missed for sure a run is ended, without a result.
    """
    planned = [place_of(options, {}) for options in asked]
    bounds = tuple(most for slo in until if (most := slo.most) is not None)
    if bounds:
        # Kept apart from whole runs.
        mark = hashlib.sha256(msgspec.json.encode(bounds)).hexdigest()[:8]
        planned = [
            p if p.outcome.error else replace(p, outcome=Outcome(f"{p.outcome.key}-until-{mark}")) for p in planned
        ]
    perform_missing(planned, store, means, begin, bounds)
    return [Ran(place.options, place.num_gpus, store.outcome_of(place)) for place in planned]


def _step(
    found: dict[int, Answer], asked: dict[int, dict[str, Any]], place: int, search: Search[Answer], ran: Ran | None
) -> None:
    try:
        asked[place] = next(search) if ran is None else search.send(ran)
    except StopIteration as end:
        found[place] = end.value
