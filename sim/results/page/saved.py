"""Runs as they were saved: what the figures need, read back from a run's folder or a comparison's."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from msgspec import UNSET

from sim.errors import UserError
from sim.files import folder_name, read_text
from sim.options.scenario import Scenario
from sim.options.scenario_file import ASKED_FILE
from sim.options.values import flag
from sim.results.comparison_sentences import all_sentences
from sim.results.figures.data import FigureRun
from sim.results.report import metric_values
from sim.results.result import RESULT_FILE, read_result
from sim.results.saved_tables import read_request_table, read_series
from sim.results.schema import Bounds, Comparison
from sim.results.sections import ResolvedScenario
from sim.results.tails import Tail, tail_of
from sim.results.timeline import TIMELINE_FILE
from sim.specs.json_file import convert, read_json_object

COMPARISON_FILE = "comparison.json"
PLAN_FILES = ("plan.md", "answer")
"""What `kvtwin plan` says, and the folder of its answer's own run."""


@dataclass(frozen=True)
class Section:
    """Runs of one question, side by side: those of a comparison, or those given as single runs."""

    runs: list[FigureRun]
    sentences: list[str]
    command: str | None
    """What runs it again; None where the folder does not say."""
    asked: str | None
    """The scenario file of that command."""
    tails: list[tuple[str, Tail]] = field(default_factory=list)
    """Label and slowest requests of the runs that kept a timeline."""


def read_sections(folders: Iterable[Path]) -> list[Section]:
    """A section for each comparison's folder, and one for all folders of single runs together."""
    found: list[Section] = []
    single: list[tuple[Path, FigureRun]] = []
    for folder in folders:
        if (folder / COMPARISON_FILE).is_file():
            found.append(_comparison(folder))
        elif (folder / PLAN_FILES[0]).is_file() and (folder / PLAN_FILES[1] / RESULT_FILE).is_file():
            found.append(_plan(folder))
        elif (folder / RESULT_FILE).is_file():
            single.append((folder, read_run(folder)))
        else:
            what = f"neither {RESULT_FILE} nor {COMPARISON_FILE}" if folder.is_dir() else "no such folder"
            raise UserError(
                f"{folder}: {what}; give folders that kvtwin run, compare, live, plan, sweep, tune or map has written"
            )
    if single:
        runs = _told_apart(single)
        section = _section(runs, None, single[0][0] if len(single) == 1 else None, "run")
        found.append(replace(section, tails=_tails([folder for folder, _ in single], runs)))
    return found


def _comparison(folder: Path) -> Section:
    path = folder / COMPARISON_FILE
    compared = convert(read_json_object(path, finite=True), Comparison, path)
    runs = [read_run(folder / folder_name(label)) for label in compared.policies]
    if not runs:
        raise UserError(f"{path}: no policy was run; compare some")
    for label, run in zip(compared.policies, runs, strict=True):
        found = metric_values(run.result)
        for key, value in compared.metrics.get(label, {}).items():
            if found.get(key, value) != value:
                raise UserError(
                    f"{folder / folder_name(label) / RESULT_FILE}: {key} is {_shown(found[key])}, in {path.name} "
                    f"above it {_shown(value)}: another command wrote there; compare again, or report it by itself"
                )
    section = _section(runs, compared, folder, "compare")
    return replace(section, tails=_tails([folder / folder_name(label) for label in compared.policies], runs))


LEAST_OF_TAIL = 20
"""Completed requests from which on a run's slowest hundredth is told."""


def _tails(folders: Sequence[Path], runs: Sequence[FigureRun]) -> list[tuple[str, Tail]]:
    """Those beyond the 99th percentile of TTFT in each run that kept a timeline, and requests one by one."""
    return [
        (run.label, tail_of(folder))
        for folder, run in zip(folders, runs, strict=True)
        if (folder / TIMELINE_FILE).is_file()
        and run.result.request_ids is not UNSET
        and run.result.completed >= LEAST_OF_TAIL
    ]


def _shown(value: float | None) -> str:
    return "null" if value is None else f"{value:.6g}"


def _plan(folder: Path) -> Section:
    """The run of a plan's answer, under what the plan says."""
    said, answer = (folder / name for name in PLAN_FILES)
    section = _section([read_run(answer)], None, answer, "run")
    told = [line.strip() for line in read_text(said).splitlines() if line.endswith("  ")]
    return replace(section, sentences=[*told, *section.sentences])


def _section(runs: list[FigureRun], bounds: Bounds | None, folder: Path | None, verb: str) -> Section:
    results = [run.result for run in runs]
    told = [*unlike_sentences(runs), *all_sentences(results, bounds)]
    path = folder / ASKED_FILE if folder is not None else None
    if path is None or not path.is_file():
        return Section(runs, told, None, None)
    return Section(runs, told, f"kvtwin {verb} --scenario {ASKED_FILE} --out out/", read_text(path))


MOST_UNLIKE = 5
"""Options that are told where runs differ in them."""


def unlike_sentences(runs: Sequence[FigureRun]) -> list[str]:
    """In what runs side by side differ beside the policy and what it resolves; nothing where that is nothing."""
    unlike: list[str] = []
    for option in fields(Scenario):
        values = [getattr(run.result.scenario, option.name) for run in runs]
        if option.name not in ResolvedScenario.__annotations__ and any(value != values[0] for value in values):
            several = ", ".join(f"{value} in {run.label}" for run, value in zip(runs, values, strict=True))
            unlike.append(f"{flag(option.name)[2:]} is {several}")
    if not unlike:
        return []
    more = f"; and {len(unlike) - MOST_UNLIKE} options more" if len(unlike) > MOST_UNLIKE else ""
    return [f"These runs are not of one scenario: {'; '.join(unlike[:MOST_UNLIKE])}{more}."]


def _told_apart(runs: list[tuple[Path, FigureRun]]) -> list[FigureRun]:
    """Runs whose labels are alike carry their folders' names, or paths where those are alike as well."""
    labels = [run.label for _, run in runs]
    named = [f"{run.label} ({folder.name})" for folder, run in runs]
    return [
        replace(run, label=f"{run.label} ({folder})" if named.count(name) > 1 else name)
        if labels.count(run.label) > 1
        else run
        for (folder, run), name in zip(runs, named, strict=True)
    ]


def read_run(folder: Path) -> FigureRun:
    """A run as the figures need it."""
    result = read_result(folder / RESULT_FILE)
    return FigureRun.of_tables(result, read_request_table(folder), read_series(folder))
