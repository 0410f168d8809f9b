"""Setups of papers as they ship (`setups/*.toml`): what a figure ran, and what the paper says came of it."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from sim.errors import UserError
from sim.options.scenario_file import scenario_values

SETUPS = Path(__file__).parent / "setups"


class Claim(Struct, frozen=True, forbid_unknown_fields=True):
    """One number of a paper, and where ours is found: `metric` of policy `of`, over or less that of `over`.

    `kind`: `ratio` is held to the paper's size; `most` and `least` bound; `difference` subtracts; `capacity` compares
    the largest x at which the metric is within `limit` and half of the requests queue for 2 s or less. Among points
    and cases the largest is taken unless `pick`, `at` or `case` say otherwise.
    """

    says: str
    paper: float
    metric: str
    of: str
    over: str | None = None
    kind: Literal["ratio", "most", "least", "difference", "capacity"] = "ratio"
    reduce: Literal["ratio", "difference"] = "ratio"
    pick: Literal["max", "min"] = "max"
    at: float | None = None
    case: str | None = None
    limit: float = 0.0


class PaperSetup(Struct, frozen=True, forbid_unknown_fields=True):
    """One figure: policies by label, options, those that differ by case, and the option along x.

    A case may have `values` of its own, and an `slo` that goes into policies' texts.
    """

    paper: str
    figure: str
    title: str
    draw: list[str]
    policies: dict[str, str]
    scenario: dict[str, Any]
    claims: list[Claim]
    x: str | None = None
    values: list[float | int] = []
    cases: dict[str, dict[str, Any]] = {}

    @property
    def name(self) -> str:
        """As `kvtwin reproduce` takes the paper: without what stands behind a hyphen."""
        return self.paper.lower().partition("-")[0]

    @property
    def heading(self) -> str:
        """Paper, figure or table where it has a number, and what was run."""
        number = self.figure.removeprefix("table-")
        kind = "table" if number != self.figure else "figures" if "-" in number else "figure"
        return f"{self.paper}{f', {kind} {number}' if number[0].isdigit() else ''}: {self.title}"

    def along(self, case: str) -> list[Any]:
        """The values of x in a case; one None where there is no x."""
        return self.cases.get(case, {}).get("values", self.values) or [None]

    def points(self) -> list[tuple[str, float | int | None, str, dict[str, Any]]]:
        """(case, x, label of the policy, options by field) of every run."""
        found = []
        for case, more in (self.cases or {"": {}}).items():
            options = _options(more)
            for value in self.along(case):
                along = {} if value is None or self.x is None else {self.x: value}
                for label, text in self.policies.items():
                    policy = text.replace("{slo}", str(more.get("slo", "")))
                    found.append((case, value, label, {**self.scenario, **options, **along, "policy": policy}))
        return found


def read_setups(folder: Path = SETUPS) -> list[PaperSetup]:
    """All of them, by file name. UserError where a file is not what it should be."""
    return [_read(path) for path in sorted(folder.glob("*.toml"))]


def _read(path: Path) -> PaperSetup:
    try:
        setup = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), PaperSetup)
    except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise UserError(f"{path}: {error}; see the setups that ship with kvtwin") from error
    for options in (setup.scenario, *setup.cases.values()):
        scenario_values(_options(options), str(path))
    return setup


def _options(case: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in case.items() if name not in ("slo", "values")}


def chosen(setups: list[PaperSetup], paper: str | None, figure: str | None) -> list[PaperSetup]:
    """Those of a paper and a figure ("6" is in "6-7"). UserError where there is none."""
    names = sorted({setup.name for setup in setups})
    if paper is not None and paper not in names:
        raise UserError(f"reproduce: no setup of {paper!r}; known: {', '.join(names)}")
    found = [setup for setup in setups if paper in (None, setup.name)]
    if figure is not None:
        found = [setup for setup in found if figure == setup.figure or figure in setup.figure.split("-")]
    if not found:
        figures = ", ".join(setup.figure for setup in setups if paper in (None, setup.name))
        raise UserError(f"--figure: no setup of figure {figure}; known: {figures}")
    return found


def value_of(result: Mapping[str, Any], metric: str) -> float:
    """A number of result.json, or one made of several: queueing, violations, attainment, fragmentation, uncached."""
    counters = result["counters"]
    if metric == "queueing":
        return result["mean_queue_ms"] / result["mean_ttft_ms"]
    if metric == "violations":
        return 100.0 * (1.0 - result["goodput_attainment"])
    if metric == "attainment":
        return result["goodput_attainment"]
    if metric == "fragmentation":
        held = counters.get("held_block_layers", 0) * result["scenario"]["block_size"]
        return 1.0 - counters["filled_token_layers"] / held if held else 0.0
    if metric == "uncached":
        return counters.get("rebuilt_tokens", 0) / max(1, counters.get("context_tokens", 0))
    return float(result[metric] or 0.0)
