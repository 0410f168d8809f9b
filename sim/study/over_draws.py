"""Which differences between policies are more than chance: each runs again on traffics like the one compared."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sim.errors import UserError
from sim.options.scenario import Scenario
from sim.options.scenario_file import scenario_keys
from sim.results.schema import OVER_DRAWS, Result, Spread
from sim.study.backends import outcomes
from sim.study.draws import TRAFFIC, like_traffic
from sim.study.intervals import of_ratio
from sim.study.points import Outcome, Task

Bar = Callable[[int], Callable[[Outcome], None]]
"""Is told how many runs there are; what it gives hears of each."""


@contextmanager
def other_draws(asked: Mapping[str, Any], scenario: Scenario, count: int) -> Iterator[list[dict[str, Any]]]:
    """Options of a comparison on each of the traffics like its own, which makes them `count`; resamples are files.

    Args:
        asked: the comparison's options.
        scenario: what they say, with the host memory that all policies have.

    Raises:
        UserError: there is no like traffic.
    """
    if count < 2:
        raise UserError(f"--seeds: {count} tells nothing of chance; give 2 or more, or leave it out")
    if len(asked["policy"]) < 2:
        raise UserError("--seeds: one policy differs from none; name several, or leave it out")
    known = {f.name: value for f in fields(Scenario) if (value := getattr(scenario, f.name)) != f.default}
    of_policies = {name: asked[name] for name in asked.keys() & scenario_keys().keys() if not hasattr(scenario, name)}
    own = {name: value for name, value in (of_policies | known).items() if name not in (*TRAFFIC, "policy")}
    with TemporaryDirectory(prefix="kvtwin-") as folder:
        like = like_traffic(known, count, Path(folder))
        if like.alone:
            raise UserError(f"--seeds: {like.alone}; leave it out")
        yield [{**own, **traffic} for traffic in like.options[1:]]


def over_draws(
    results: Sequence[Result], policies: Sequence[str], others: Sequence[Mapping[str, Any]], bar: Bar | None = None
) -> dict[str, dict[str, Spread]]:
    """Label: metric: ratio to the first policy, over the draw that `results` are of and all others.

    A metric that is 0 or missing in a draw has no ratio.

    Raises:
        UserError: a run failed.
    """
    tasks = [
        Task(f"{draw} {place}", {**options, "policy": text}, None)
        for draw, options in enumerate(others)
        for place, text in enumerate(policies)
    ]
    found: dict[str, dict[str, Any]] = {}
    told = bar(len(tasks)) if bar else None
    for outcome in outcomes(tasks, {}):
        if told:
            told(outcome)
        if outcome.result is None:
            draw, place = map(int, outcome.key.split())
            raise UserError(f"--seeds: {results[place].policy} on draw {draw + 2}: {outcome.error}")
        found[outcome.key] = outcome.result
    columns = [
        [{name: getattr(result, name) for name in OVER_DRAWS}, *(found[f"{d} {place}"] for d in range(len(others)))]
        for place, result in enumerate(results)
    ]
    return {r.policy: dict(_spreads(columns[0], column)) for r, column in zip(results[1:], columns[1:], strict=True)}


def _spreads(first: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Spread]]:
    for name in OVER_DRAWS:
        values, base = [row[name] for row in other], [row[name] for row in first]
        if all(values) and all(base):
            yield name, Spread(*of_ratio(values, base))
