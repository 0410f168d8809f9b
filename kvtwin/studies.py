"""Studies in Python: sweeps, searches and maps, as the command line has them."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvtwin.arguments import check_means, path_of, study_of
from sim.errors import UserError
from sim.options.scenario_file import read_toml
from sim.run.folders import owning
from sim.study.axes import Study, read_study
from sim.study.backends import Backend
from sim.study.sweep import Means, run_study
from sim.study.tables import means, tidy
from sim.study.tune import Tuned, read_tune
from sim.study.tune import tune as search

# What draws is imported when something is drawn: matplotlib is slow to import.
if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sim.study.plan import Planned
    from sim.study.regimes import Regimes


@dataclass(frozen=True, repr=False)
class SweepResult:
    """The runs of a study.

    Attributes:
        table: a row for each run: its axes by their fields' names, `seed`, `num_gpus`, the numbers of result.json,
            `error` where it failed, and its `key`.
        study: what was varied.
    """

    table: pd.DataFrame
    study: Study

    def __repr__(self) -> str:
        failed = len(self.table.dropna(subset=["error"]))
        return f"<SweepResult over {', '.join(self.study.axes)}: {len(self.table):,} runs, {failed} failed>"

    def _repr_html_(self) -> str:
        """A notebook shows the means."""
        return self.means.to_html(index=False, na_rep="-", max_rows=60)

    @property
    def means(self) -> pd.DataFrame:
        """A row for each point: means over its repeats, and in `METRIC_ci95` half of their 95 % interval."""
        return means(self.study, self.table)

    def figure(self, metric: str) -> "Figure":
        """A metric over the axes: `p99_ttft_ms`, or any other numeric column of the table."""
        from sim.study.figures import draw  # noqa: PLC0415

        if not isinstance(metric, str) or metric not in self.table.select_dtypes("number"):
            raise UserError(f"metric {metric!r} is no numeric column of the table")
        return draw(self.study, self.means, metric)


def sweep(
    study: str | Path | Mapping[str, Any],
    out: str | Path,
    *,
    backend: Backend = "loky",
    address: str | None = None,
    jobs: int | None = None,
    max_seconds: float | None = None,
    retry_failed: bool = False,
) -> SweepResult:
    """Run every point of a study, as `kvtwin sweep` does; what `out` holds already is not run again.

    Args:
        study: a study file (`docs/sweep.md`), or what would stand in one.
        out: folder in which every run is kept as it ends.
        backend: this machine's cores (loky), or a cluster of Dask or Ray.
        address: where that cluster is.
        jobs: processes, by default one a core.
        max_seconds: of a run, after which it is given up, s.
        retry_failed: run again what failed before.

    Raises:
        UserError: a bad study, every point refused, or a folder that cannot be written or is another's meanwhile.
    """
    check_means(jobs, max_seconds, address)
    folder, (table, where) = path_of("out", out), _read(study)
    found = read_study(table, "sweep", where)
    return _swept(found, folder, Means(backend, address, jobs, max_seconds, retry_failed))


def _swept(study: Study, folder: Path, how: Means) -> SweepResult:
    with owning(folder, "out"):
        places = run_study(study, folder, how)
    return SweepResult(tidy(study, places), study)


class _Answer(ABC):
    """What a search or a map found, in sentences."""

    @abstractmethod
    def _lines(self) -> Iterable[str]: ...

    @property
    def text(self) -> str:
        """The answer in sentences, as the command prints it."""
        return "\n".join(self._lines())

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.text.splitlines()[0]}>"

    def _repr_html_(self) -> str:
        """A notebook shows the sentences."""
        return f"<pre>{escape(self.text)}</pre>"


@dataclass(frozen=True, repr=False)
class TuneResult(_Answer):
    """The answer of a search.

    Attributes:
        tuned: the answer typed: `best`, `binds`, `gains`, the range `low` to `high`.
    """

    tuned: Tuned

    def _lines(self) -> Iterable[str]:
        from sim.study.tune_report import lines  # noqa: PLC0415

        return lines(self.tuned)

    @property
    def table(self) -> pd.DataFrame:
        """A row for each candidate, the best first, with what it reached and whether it is on the Pareto front."""
        from sim.study.tune_report import candidates_table  # noqa: PLC0415

        return candidates_table(self.tuned)

    def figure(self) -> "Figure":
        """Candidates, Pareto front, and what raising each limit brings."""
        from sim.study.tune_report import draw  # noqa: PLC0415

        return draw(self.tuned)


def tune(
    study: str | Path | Mapping[str, Any],
    out: str | Path,
    *,
    backend: Backend = "loky",
    address: str | None = None,
    jobs: int | None = None,
    max_seconds: float | None = None,
) -> TuneResult:
    """Search for the policy and the knobs that reach most under SLOs, as `kvtwin tune` does; arguments as of `sweep`.

    Raises:
        UserError: a bad study, every candidate refused, or a folder that cannot be written or is another's meanwhile.
    """
    check_means(jobs, max_seconds, address)
    folder, asked = path_of("out", out), read_tune(*_read(study))
    with owning(folder, "out"):
        return TuneResult(search(asked, folder, Means(backend, address, jobs, max_seconds)))


@dataclass(frozen=True, repr=False)
class PlanResult(_Answer):
    """The answer of a plan.

    Attributes:
        planned: the answer typed: `best`, `answer`, the interval `fewest` to `most`, `gains`.
    """

    planned: "Planned"

    @property
    def table(self) -> pd.DataFrame:
        """A row for each number of GPUs that was looked at: load, its interval, deployment, whether on the front."""
        from sim.study.plan_report import front  # noqa: PLC0415

        return pd.DataFrame(front(self.planned))

    def _lines(self) -> Iterable[str]:
        from sim.study.plan_report import lines  # noqa: PLC0415

        return lines(self.planned)


def plan(question: Mapping[str, Any], out: str | Path, *, jobs: int | None = None) -> PlanResult:
    """Search for a deployment, as `kvtwin plan` does.

    Args:
        question: the command's flags by name: `{"model": "qwen3-32b", "gpu": ["h100"], "max_gpus": 4,
            "trace": "mine.csv", "slo": ["p99_ttft_ms:1000"]}`.
        out: folder in which every run is kept as it ends.
        jobs: processes, by default one a core.

    Raises:
        UserError: a bad question, nothing that can be deployed, or a folder that cannot be written.
    """
    from sim.study.plan import plan as search_plan  # noqa: PLC0415
    from sim.study.plan import read_plan  # noqa: PLC0415

    asked = read_plan({key.replace("-", "_"): value for key, value in question.items()})
    with owning(Path(out), "out"):
        return PlanResult(search_plan(asked, Path(out), Means(jobs=jobs)))


@dataclass(frozen=True, repr=False)
class MapResult(_Answer):
    """Which policy wins where.

    Attributes:
        sweep: the runs.
        regimes: the axes and the metric.
    """

    sweep: SweepResult
    regimes: "Regimes"

    def _lines(self) -> Iterable[str]:
        from sim.study.regimes import cells, lines  # noqa: PLC0415

        return lines(self.regimes, cells(self.regimes, self.sweep.means))

    def figure(self) -> "Figure":
        """The map."""
        from sim.study.regimes import cells, draw  # noqa: PLC0415

        return draw(self.regimes, cells(self.regimes, self.sweep.means))


def regime_map(
    study: str | Path | Mapping[str, Any],
    out: str | Path,
    *,
    backend: Backend = "loky",
    address: str | None = None,
    jobs: int | None = None,
) -> MapResult:
    """Run policies over two parameters and see which policy wins where, as `kvtwin map` does; arguments as of `sweep`.

    Raises:
        UserError: a bad study, every point refused, or a folder that cannot be written or is another's meanwhile.
    """
    from sim.study.regimes import read_map  # noqa: PLC0415

    check_means(jobs, None, address)
    folder, regimes = path_of("out", out), read_map(*_read(study))
    return MapResult(_swept(regimes.study, folder, Means(backend, address, jobs)), regimes)


def _read(study: str | Path | Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The table of a study and where it stands, for messages."""
    found = study_of(study)
    return (found, "study") if isinstance(found, Mapping) else (read_toml(found, "study"), str(found))
