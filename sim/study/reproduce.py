"""`kvtwin reproduce`: a paper's figures from setups that ship, its numbers beside ours, and the page of verdicts."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

from sim.cost.engine_profile import OF_POLICY
from sim.study.setup_files import Claim, PaperSetup, value_of
from sim.study.sweep import Means, Store, perform_missing, place_of

REPRODUCED, PARTLY, NOT = "reproduced", "partly", "not"
NEAR = 1.5
"""By how much ours may be larger or smaller than the paper's ratio to count as reproduced."""
LEAST_SHARE = 0.05
"""Less of a difference than this is none."""
MOST_QUEUE_MS = 2000.0
"""Median queueing of a rate that an engine can bear (Sarathi-Serve)."""
Point = tuple[str, float | int | None, str]
Results = Mapping[Point, Mapping[str, Any]]


class Found(Struct, frozen=True):
    """What the runs of one setup gave, by case, x and label: `results` and `errors` on engines of the papers' time.

    `todays` are results of the same on one engine, today's: what of a claim is the policy's, and what its engine's.
    """

    setup: PaperSetup
    results: dict[Point, dict[str, Any]]
    errors: dict[Point, str]
    todays: dict[Point, dict[str, Any]] = {}


class Row(NamedTuple):
    """A claim, the paper's number and ours, and what to make of it."""

    claim: Claim
    ours: float | None
    verdict: str


def run_setups(setups: Iterable[PaperSetup], folder: Path, means: Means, begin: Any = None) -> list[Found]:  # noqa: ANN401
    """Perform what is not kept in `folder` yet."""
    store = Store(folder)
    found = [Found(setup, {}, {}, {}) for setup in setups]
    planned = [
        (one, results, (case, x, label), place_of({**options, **engine}, {}))
        for one in found
        for results, engine in ((one.results, {"engine_profile": OF_POLICY}), (one.todays, {}))
        for case, x, label, options in one.setup.points()
    ]
    perform_missing([place for *_, place in planned], store, means, begin)
    for one, results, point, place in planned:
        outcome = store.outcome_of(place)
        if outcome.result is not None:
            results[point] = outcome.result
        else:
            one.errors[point] = outcome.error or "not run"
    return found


# -- claims ------------------------------------------------------------------------------------------------------------


def rows_of(setup: PaperSetup, results: Results) -> list[Row]:
    """Each claim with our number, where the runs have it."""
    rows = []
    for claim in setup.claims:
        ours = _ours(claim, results)
        rows.append(Row(claim, ours, _verdict(claim, ours)))
    return rows


def _ours(claim: Claim, results: Results) -> float | None:
    if claim.kind == "capacity":
        most = [_capacity(claim, label, results) for label in (claim.of, claim.over)]
        return most[0] / most[1] if most[0] and most[1] else None
    values = []
    for (case, x, label), result in results.items():
        if label != claim.of or claim.case not in (None, case) or claim.at not in (None, x):
            continue
        value = value_of(result, claim.metric)
        if claim.over is not None:
            other = results.get((case, x, claim.over))
            if other is None:
                return None
            base = value_of(other, claim.metric)
            if "difference" in (claim.kind, claim.reduce):
                value -= base
            elif not base:
                return None
            else:
                value /= base
        values.append(value)
    if not values:
        return None
    return max(values) if claim.pick == "max" else min(values)


def _capacity(claim: Claim, label: str | None, results: Results) -> float:
    good = [
        x
        for (_, x, other), result in results.items()
        if other == label
        and value_of(result, claim.metric) <= claim.limit
        and result["median_queue_ms"] <= MOST_QUEUE_MS
    ]
    return float(max((x for x in good if x is not None), default=0.0))


def _verdict(claim: Claim, ours: float | None) -> str:
    if ours is None:
        return "no result"
    if claim.kind == "most":
        return REPRODUCED if ours <= claim.paper else NOT
    if claim.kind == "least":
        return REPRODUCED if ours >= claim.paper else NOT
    neutral = 1.0 if claim.over and claim.kind != "difference" else 0.0
    gained, claimed = ours - neutral, claim.paper - neutral
    if gained * claimed <= 0.0 or abs(gained) < LEAST_SHARE * (neutral or abs(claim.paper)):
        return NOT
    return REPRODUCED if claim.paper / NEAR <= ours <= claim.paper * NEAR else PARTLY


def digits(value: float) -> str:
    """Three significant digits, no exponent."""
    return f"{value:.3g}" if 0.001 <= abs(value) < 999.5 or not value else f"{value:,.0f}"


def table(found: Iterable[Found]) -> str:
    """Claims as Markdown: the paper's number; ours and the verdict, on engines of the time and on today's."""
    lines = ["| figure | claim | paper | engine of its time | verdict | today's engine | verdict |",
             "|:--|:--|--:|--:|:--|--:|:--|"]  # fmt: skip
    for one in found:
        both = (rows_of(one.setup, results) for results in (one.results, one.todays))
        for row, todays in zip(*both, strict=True):
            sign = {"most": "≤ ", "least": "≥ "}.get(row.claim.kind, "")
            ours = [cell for this in (row, todays) for cell in (_digits(this.ours), this.verdict)]
            cells = one.setup.figure, row.claim.says, sign + digits(row.claim.paper), *ours
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _digits(value: float | None) -> str:
    return "-" if value is None else digits(value)
