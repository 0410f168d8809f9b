"""Many deployments raced against one another: on short traffic each climbs in load until it misses the SLOs.

Successive halving (Jamieson and Talwalkar 2016): all run on short traffic, those near the best on longer, the last few
on every draw in full. Each family (pools or not, 16-bit KV or not) is raced by itself: what pays in one alone is found.
"""

from collections.abc import Callable, Mapping, Sequence
from math import ceil, log
from typing import Any

from msgspec import Struct

from sim.study.deployments import Deployment
from sim.study.search import NO_LOAD, Ran, Slo, answers, meets, most_load, runs, too_short
from sim.study.sweep import Means, Store

STEP = 1.12
"""Between loads of the first race."""
STRIDE = 4
"""Steps at once, while the best may be anywhere."""
SHORT_S, LONGER_S = 40.0, 160.0
"""Arrivals of the first race and of the second, s at the load that is tried."""
NEAR = 1
"""Steps behind the best of a family within which a deployment comes on."""
SECOND, THIRD = 6, 2
"""Most deployments of a family in the second race, and behind it."""
SECOND_PRECISION = 0.03
CLIMB_RUNS, BASE_RUNS, SECOND_RUNS = 2.0, 25.0, 24.0
"""For the bar: runs of a race, about: of the first each deployment and each family, of the second each family."""


Bar = Callable[[str, float, float], None]
"""Hears how far a search is: what it does, and requests simulated of those it will take."""


class Ground(Struct, frozen=True):
    """Where runs are made: the traffic by number and load, SLOs, workers.

    Attributes:
        head: options of the first seconds of the traffic raced on, at a load; its arguments are seconds and load.
    """

    head: Callable[[float, float], Mapping[str, Any]]
    slos: Sequence[Slo]
    store: Store
    means: Means
    work: "Work"


class Work:
    """What is done and what is left of a search, in requests simulated, for a bar with a true time left."""

    def __init__(self, bar: Bar | None) -> None:
        self._bar, self._stage, self._done = bar, "", 0.0
        self._ahead: dict[str, float] = {}

    def expect(self, stage: str, requests: float) -> None:
        """So many are ahead in a stage, in all."""
        self._ahead[stage] = requests

    def begin(self, stage: str) -> None:
        """The stage that comes now; what was expected of it and not needed goes when another begins."""
        if self._stage != stage:
            self._ahead.pop(self._stage, None)
        self._stage = stage
        self._tell()

    def of(self, asked: Sequence[Mapping[str, Any]]) -> Callable[[int], Callable[[Any], None]]:
        """What `runs` is told, for a round of these runs."""
        each = sum(options.get("num_prompts") or 0 for options in asked) / max(1, len(asked))

        def begin(_: int) -> Callable[[Any], None]:
            return lambda _: self._ended(each)

        return begin

    def _ended(self, requests: float) -> None:
        self._done += requests
        self._ahead[self._stage] = max(self._ahead.get(self._stage, 0.0) - requests, 0.0)
        self._tell()

    def _tell(self) -> None:
        if self._bar is not None:
            self._bar(self._stage, self._done, self._done + sum(self._ahead.values()))


class Raced(Struct, frozen=True):
    """A deployment and how much load it was seen to sustain, as a factor on the traffic."""

    deployment: Deployment
    load: float
    unknown: str = ""


def requests_of(deployments: Sequence[Deployment], ground: Ground, start: float) -> float:
    """Requests that a race simulates, about."""
    short, longer = (ground.head(span_s, start)["num_prompts"] for span_s in (SHORT_S, LONGER_S))
    families = len({one.family for one in deployments})
    return (CLIMB_RUNS * len(deployments) + BASE_RUNS * families) * short + SECOND_RUNS * families * longer


def race(deployments: Sequence[Deployment], ground: Ground, start: float) -> tuple[list[Raced], dict[str, list[str]]]:
    """The best few of each family, the best first; and what could not be run, by reason.

    Args:
        deployments: the simplest first: of those that cannot be told apart, the first comes on.
        ground: where they are raced.
        start: the load, as a factor on the traffic, at which they begin.
    """
    found: list[Raced] = []
    refused: dict[str, list[str]] = {}
    families: dict[tuple[bool, bool], list[Deployment]] = {}
    for one in deployments:
        families.setdefault(one.family, []).append(one)
    for family in families.values():
        climb = _Climb(family, ground, start, refused)
        found += _second(climb.near(), ground)
    return sorted(found, key=lambda one: -one.load), refused


class _Climb:
    """The first race of one family: loads are `start` x STEP^k, a deployment's level the greatest k it sustained."""

    def __init__(
        self, family: Sequence[Deployment], ground: Ground, start: float, refused: dict[str, list[str]]
    ) -> None:
        self.family, self.ground, self.start, self.refused = family, ground, start, refused
        self.levels: dict[int, int] = {}
        self._seen: dict[int, dict[int, tuple[Any, ...]]] = {}
        self._gone: set[int] = set()
        floor = ceil(log(NO_LOAD) / log(STEP))
        plain = [place for place, one in enumerate(family) if not set(one.changed) - {"kv_cache_dtype"}]
        base = self._base(plain, floor)
        if base is None:
            base = self._base(range(len(family)), floor)
        if base is None:
            return
        level = max(base - NEAR, floor)
        alive = [place for place in range(len(family)) if place not in self._gone]
        while alive and level <= -floor:
            alive = self._passing(alive, level)
            level += 1

    def load(self, place: int) -> float:
        return self.start * STEP ** self.levels[place]

    def near(self) -> list[Raced]:
        """Those near the best that can be told apart, the best first; of each layout one before a second of any."""
        if not self.levels:
            return []
        best = max(self.levels.values())
        places = [place for place, level in self.levels.items() if level >= best - NEAR]
        places.sort(key=lambda place: (-self.levels[place], place))
        turns: dict[str, int] = {}
        ranked, alike = [], set()
        for place in places:
            layout = self.family[place].layout
            did = (layout, *(self._seen[place].get(level) for level in range(best - NEAR, best + 2)))
            if did in alike:
                continue
            alike.add(did)
            turns[layout] = turns.get(layout, 0) + 1
            ranked.append((turns[layout], -self.levels[place], place))
        return [Raced(self.family[place], self.load(place)) for *_, place in sorted(ranked)[:SECOND]]

    def _base(self, places: Sequence[int], floor: int) -> int | None:
        """The greatest level, by strides, that any of these sustains."""
        level = 0
        if alive := self._passing(places, level):
            while level <= -floor:
                higher = self._passing(alive, level + STRIDE)
                if not higher:
                    return level
                alive, level = higher, level + STRIDE
            return level
        while level > floor and (places := [place for place in places if place not in self._gone]):
            level -= STRIDE
            if self._passing(places, level):
                return level
        return None

    def _passing(self, places: Sequence[int], level: int) -> list[int]:
        """Those that sustain a level, which is noted."""
        load = self.start * STEP**level
        asked = [{**self.family[place].options, **_at(self.ground.head(SHORT_S, load), load)} for place in places]
        found = []
        ended = runs(asked, self.ground.store, self.ground.means, self.ground.work.of(asked), self.ground.slos)
        for place, ran in zip(places, ended, strict=True):
            if ran.outcome.error is not None:
                self._gone.add(place)
                names = self.refused.setdefault(ran.outcome.error, [])
                names.append(self.family[place].name)
                continue
            self._seen.setdefault(place, {})[level] = _what(ran)
            if meets(ran, self.ground.slos) and not too_short(ran.result or {}):
                found.append(place)
                self.levels[place] = max(level, self.levels.get(place, level))
        return found


def _what(ran: Ran) -> tuple[Any, ...]:
    """What tells runs apart."""
    result = ran.result
    if result is None:
        return (ran.outcome.missed_s,)
    return tuple(result[name] for name in ("mean_ttft_ms", "mean_tpot_ms", "p99_ttft_ms", "p99_tpot_ms", "duration"))


def _at(traffic: Mapping[str, Any], load: float) -> dict[str, Any]:
    return {**traffic, "rate_scale": traffic.get("rate_scale", 1.0) * load}


def _second(raced: Sequence[Raced], ground: Ground) -> list[Raced]:
    """The same deployments on longer traffic, searched to a few percent; the best of them."""
    traffics = [ground.head(LONGER_S, one.load) for one in raced]
    reached = answers(
        [
            most_load({**one.deployment.options, **head}, ground.slos, SECOND_PRECISION, start=one.load, step=STEP)
            for one, head in zip(raced, traffics, strict=True)
        ],
        ground.store, ground.means, ground.work.of(traffics), ground.slos,
    )  # fmt: skip
    found = [
        Raced(one.deployment, r.most, r.unknown) for one, r in zip(raced, reached, strict=True) if r.ran is not None
    ]
    return sorted(found, key=lambda one: (-one.load, one.deployment.simplicity))[:THIRD]
