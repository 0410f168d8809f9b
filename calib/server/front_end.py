"""What a server's front end takes, found from when its engine could first have scheduled each request.

Tokens of an iteration come at its end, but clients hear of it the front end's time later. Where that time is taken too
short or too long, requests are replayed into the iteration before or after their own, and tokens no longer agree about
any iteration's end. So the time is where most agree: sharply, since one request in the wrong place disturbs all others.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from calib.server.constants import FRONT_END, PER_TOKEN, TOKENISER_S, constants_of, with_constants
from calib.server.iterations import replay
from sim.run.prepare import Setup
from traces.served import ServedRun

FIRST_REQUESTS = 40
"""Requests that the search looks at; the whole run is replayed close to what it finds."""
STEPS, LONGEST_STEP_S = 60, 2e-3
"""Values of the front end's time that are tried at first, and how far apart at most: a fraction of an iteration."""
PER_TOKEN_S = tuple(TOKENISER_S * n for n in (0, 2, 5))
FINER = (2.0, 1.0, 0.5, 0.25, 0.125)
"""Of such a step, how far from the best so far others are tried, one after the other."""
CLOSE = 0.9
"""Where more agree from the start, the rest is found step by step."""
NEARLY = 0.02
"""Shares of agreeing iterations closer than this are the same."""


@dataclass(frozen=True)
class FrontEnd:
    """Constants of the front end with which most tokens agree.

    Attributes:
        values: of each constant.
        limits: of each, between which nearly as many agree.
        matched: share of the iterations about whose end tokens agree.
    """

    values: dict[str, float]
    limits: dict[str, tuple[float, float]]
    matched: float


def find_front_end(setup: Setup, served: ServedRun, known: int, names: Sequence[str]) -> FrontEnd:
    """The constants `names` (`FRONT_END`, `PER_TOKEN`) with which tokens of the first `known` requests agree most."""
    tried: dict[tuple[float, ...], float] = {}

    def matched(values: Mapping[str, float], count: int) -> float:
        key = (count, *values.values())
        if key not in tried:
            tried[key] = replay(with_constants(setup, values), served, count).matched
        return tried[key]

    first = min(FIRST_REQUESTS, known)
    steps = {FRONT_END: min(min(served.ttft_s[:known]) / STEPS, LONGEST_STEP_S), PER_TOKEN: TOKENISER_S}
    ranges = {FRONT_END: steps[FRONT_END] * np.arange(STEPS), PER_TOKEN: PER_TOKEN_S}
    best = {name: constants_of(setup)[name].value for name in names}
    if matched(best, first) < CLOSE:
        for values in product(*(ranges[name] for name in names)):
            best = max(best, dict(zip(names, map(float, values), strict=True)), key=lambda found: matched(found, first))
    for finer, count in zip(FINER, (first, first, first, known, known), strict=True):
        around = [best, *_around(best, {name: finer * steps[name] for name in names})]
        best = max(around, key=lambda found: matched(found, count))
    level = matched(best, known) - NEARLY
    mean_tokens = float(np.mean([request.prompt_tokens for request in served.requests[:known]]))

    def agree(name: str, value: float) -> bool:
        """Whether nearly as many do with another value, the other constant as before or making up for it."""
        more_s = (value - best[name]) * (mean_tokens if name == PER_TOKEN else 1.0)
        others = {other: best[other] - more_s / (mean_tokens if other == PER_TOKEN else 1.0) for other in names}
        made_up = {other: max(0.0, found) for other, found in others.items()} | {name: value}
        return matched(best | {name: value}, known) >= level or matched(made_up, known) >= level

    def limit(name: str, sign: float) -> float:
        """The nearest value tried with which fewer agree, or the end of the range."""
        away = FINER[-1] * steps[name]
        while (value := max(0.0, best[name] + sign * away)) and away < STEPS * steps[name] and agree(name, value):
            away *= 2
        return value

    return FrontEnd(best, {name: (limit(name, -1.0), limit(name, 1.0)) for name in names}, matched(best, known))


def _around(best: Mapping[str, float], steps: Mapping[str, float]) -> Iterator[dict[str, float]]:
    for name, step in steps.items():
        for sign in (-1.0, 1.0):
            yield {**best, name: max(0.0, best[name] + sign * step)}
