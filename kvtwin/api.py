"""kvtwin in Python: what `import kvtwin` offers. Results are typed structs; tables are pandas data frames.

    >>> import kvtwin
    >>> scenario = kvtwin.Scenario(workload="sharegpt", num_prompts=50, request_rate=4.0, gpu="l20")
    >>> run = kvtwin.simulate(scenario, "layerkv")
    >>> run.result.completed, len(run.requests)
    (50, 50)

Scenarios have the fields of the command line's flags, policies the texts of `--policy`. Bad input raises `UserError`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from kvtwin.arguments import names_of, path_of, policies_of, policy_of, scenario_of
from kvtwin.studies import MapResult, PlanResult, SweepResult, TuneResult, plan, regime_map, sweep, tune
from sim.cost.changed_profile import profile_named
from sim.errors import UserError
from sim.options.policies import options_of, parse_policy
from sim.options.scenario import Scenario, build_scenario
from sim.options.values import option_fields
from sim.parts.options import refuse_idle
from sim.results.comparison_sentences import engine_sentences, sentences
from sim.results.metrics import ENGINE_COLUMNS, TABLE_COLUMNS
from sim.results.report import METRICS, metric_values
from sim.results.result import RESULT_FILE, assemble, read_result
from sim.results.saved_tables import read_request_table, read_series
from sim.results.schema import Result
from sim.run.folders import settle
from sim.run.prepare import prepare, with_one_swap_space
from sim.run.runs import EngineParts, Recording
from sim.run.simulate import build_run, execute
from sim.run.traffic import requests_of
from sim.systems import DEFAULT_POLICY
from sim.systems.base import Policy
from traces.errors import TraceError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "ComparisonResult",
    "MapResult",
    "PlanResult",
    "Policy",
    "Result",
    "RunResult",
    "Scenario",
    "SweepResult",
    "TuneResult",
    "UserError",
    "compare",
    "load_result",
    "plan",
    "profile_errors",
    "profile_table",
    "regime_map",
    "simulate",
    "sweep",
    "tune",
]


@dataclass(frozen=True, repr=False)
class RunResult:
    """One run.

    Attributes:
        result: everything that result.json holds (`docs/results.md`); times are in ms or, where the name says so, s.
        requests: a row for each request in order of the trace, with the columns of the per-request table; times in s.
        series: queues, pools and lanes over time (`time_s`), of several engines with a column `engine`; empty where
            the run kept none.
    """

    result: Result
    requests: pd.DataFrame
    series: pd.DataFrame

    @property
    def label(self) -> str:
        """The policy as it was named."""
        return self.result.policy

    @property
    def metrics(self) -> pd.Series:
        """The metrics of `kvtwin compare` by key; NaN where the run has none."""
        return pd.Series(metric_values(self.result), name=self.label, dtype=float)

    def __repr__(self) -> str:
        return repr(self.result).replace("Result", "RunResult", 1)

    def _repr_html_(self) -> str:
        """A notebook shows the metrics."""
        return ComparisonResult((self,))._repr_html_()

    def figure(self, name: str) -> "Figure":
        """One figure of this run: `ttft_tpot`, `queueing`, `memory`, `lanes` or, of several engines, `engines`."""
        return _drawn(name, [self])


@dataclass(frozen=True, repr=False)
class ComparisonResult:
    """Several policies on the same traffic, in order; the first is what the others are compared with."""

    runs: tuple[RunResult, ...]

    @property
    def table(self) -> pd.DataFrame:
        """A row for each metric of `kvtwin compare`, a column for each policy; NaN where a run has no value."""
        found = pd.DataFrame({run.label: run.metrics for run in self.runs})
        return found.rename({metric.key: metric.name for metric in METRICS}).dropna(how="all")

    @property
    def sentences(self) -> list[str]:
        """Which engines they ran on, then what differs from the first policy, a paragraph for each further one."""
        results = [run.result for run in self.runs]
        return [*engine_sentences(results), *sentences(results)]

    def __repr__(self) -> str:
        return f"<ComparisonResult: {', '.join(map(repr, self.runs))}>"

    def _repr_html_(self) -> str:
        """A notebook shows the table."""
        table = self.table
        table.index.name = None
        return table.to_html(float_format="{:,.4g}".format, na_rep="-")

    def figure(self, name: str) -> "Figure":
        """One figure of all runs, as `RunResult.figure` has it."""
        return _drawn(name, self.runs)

    def __getitem__(self, label: str) -> RunResult:
        """The run of a policy, by its label."""
        found = next((run for run in self.runs if run.label == label), None)
        if found is None:
            raise UserError(f"{label!r} was not run; there are: {', '.join(run.label for run in self.runs)}")
        return found


def simulate(scenario: Scenario, policy: str | Policy = DEFAULT_POLICY) -> RunResult:
    """Simulate one policy on a scenario; the same scenario and policy give the same result.

    Args:
        scenario: traffic, model, GPU and limits.
        policy: as `--policy` takes it ("layerkv:slo-aware=false"), or a preset with its options.

    Raises:
        UserError: a value, a file or a trace is not what it should be, in one line that says what to do.

    >>> fixed = Scenario(workload="fixed", num_prompts=10, request_rate=1.0, input_len=100, output_len=5)
    >>> simulate(fixed, "vllm-recompute").requests["output_tokens"].sum()
    np.int64(50)
    """
    label, preset = _named(policy_of(policy))
    setup = prepare(_checked(scenario_of(scenario)), label, preset)
    refuse_idle(setup.conditional)
    rows = _Rows()
    try:
        run = execute(build_run(setup, requests_of(setup), table=rows, keep=Recording(series=True)))
    except TraceError as error:
        raise UserError(str(error)) from error
    if run.interrupted:
        raise KeyboardInterrupt
    if run.error:
        raise UserError(run.error)
    return RunResult(assemble(run), _requests(rows), _series(run.engines))


def compare(scenario: Scenario, policies: Sequence[str | Policy]) -> ComparisonResult:
    """Simulate several policies on the same traffic.

    All have the same host memory, the largest of their defaults, unless the scenario says how much.

    >>> crowd = Scenario(workload="sharegpt", num_prompts=60, request_rate=8.0, gpu="l20", goodput=("ttft:3000",))
    >>> both = compare(crowd, ["vllm-recompute", "layerkv"])
    >>> list(both.table.columns)
    ['vllm-recompute', 'layerkv']
    """
    policies, scenario = policies_of(policies), scenario_of(scenario)
    named = [_named(policy) for policy in policies]
    labels = [label for label, _ in named]
    if not labels or len(set(labels)) != len(labels):
        raise UserError(f"policies: {', '.join(labels) or 'none'}; name one or more, each once")
    scenario = with_one_swap_space(scenario, [policy for _, policy in named])
    return ComparisonResult(tuple(simulate(scenario, policy) for policy in policies))


def profile_table(*names: str) -> pd.DataFrame:
    """The constants of profiles side by side: a row a constant with its unit, and a profile's value and standard error.

    >>> table = profile_table("a100-80g-imported", "h100-imported")
    >>> float(table.loc["h2d_bytes_per_s", "h100-imported"]) > 1e10
    True
    """
    if not names_of(names):
        raise UserError("profiles: none is named; `kvtwin profile list` has those that are shipped")
    columns: dict[str, dict[str, object]] = {"unit": {}}
    for name in names:
        for constant, found in profile_named(name).constants.items():
            columns["unit"][constant] = found.unit
            columns.setdefault(name, {})[constant] = found.value
            columns.setdefault(f"{name} stderr", {})[constant] = found.stderr
    return pd.DataFrame(columns)


def profile_errors(*names: str) -> pd.DataFrame:
    """Errors of the fits of profiles as they were recorded, a column a profile; shares such as 0.05 for 5 %."""
    return pd.DataFrame({name: profile_named(name).residuals or {} for name in names_of(names)})


def load_result(folder: str | Path) -> RunResult:
    """A run that the command line left in a folder (`kvtwin run --out DIR`, or a policy's folder of `compare`).

    Raises:
        UserError: the folder holds no result, or files that are none.
    """
    folder = path_of("folder", folder)
    settle(folder)
    path = folder if folder.name == RESULT_FILE else folder / RESULT_FILE
    result, folder = read_result(path), path.parent
    return RunResult(result, read_request_table(folder), read_series(folder))


class _Rows(list[tuple[object, ...]]):
    """The per-request table in memory."""

    def write(self, row: tuple[object, ...]) -> None:
        self.append(row)


def _named(policy: str | Policy) -> tuple[str, Policy]:
    """A policy and its label: the text itself, or the name and the options that are not the defaults."""
    if isinstance(policy, str):
        return parse_policy(policy, {})
    usual = type(policy)()
    own = {option.name: getattr(policy, option.name) for option in options_of(type(policy))}
    words = [f"{name.replace('_', '-')}={own[name]}" for name in own if own[name] != getattr(usual, name)]
    words += [f"{kind}={name}" for kind, name in policy.mixed]
    return ":".join(filter(None, (policy.name, ",".join(words)))), policy


def _checked(scenario: Scenario) -> Scenario:
    return build_scenario({field.name: getattr(scenario, field.name) for field, _ in option_fields(Scenario)})


def _requests(rows: _Rows) -> pd.DataFrame:
    columns = (*TABLE_COLUMNS, *ENGINE_COLUMNS)
    return pd.DataFrame(
        sorted(rows, key=itemgetter(0)), columns=pd.Index(columns[: len(rows[0]) if rows else len(TABLE_COLUMNS)])
    )


def _series(engines: list[EngineParts]) -> pd.DataFrame:
    found = [pd.DataFrame(parts.series.columns) for parts in engines if parts.series is not None]
    if len(found) < 2:
        return found[0] if found else pd.DataFrame()
    placed = [frame.assign(engine=place) for place, frame in enumerate(found)]
    return pd.concat(placed).sort_values("time_s", kind="stable", ignore_index=True)


def _drawn(name: str, runs: Sequence[RunResult]) -> "Figure":
    from sim.results.figures import FIGURES, FigureRun  # noqa: PLC0415 - matplotlib is slow to import

    draw = FIGURES.get(f"{name}.png")
    if draw is None:
        raise UserError(f"figure {name!r} is not one of {', '.join(file.removesuffix('.png') for file in FIGURES)}")
    return draw([FigureRun.of_tables(run.result, run.requests, run.series) for run in runs])
