"""A run with its files: result.json, the table of requests, and what else was asked for; drawn and printed."""

import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

from sim.clock.instance import Observer
from sim.files import CsvTable, InOrder, ParquetTable
from sim.options.scenario import Outputs, Scenario
from sim.results.metrics import ENGINE_COLUMNS, TABLE_COLUMNS, TableSink
from sim.results.result import assemble, write_result, write_series
from sim.results.schema import Result
from sim.results.timeline import write_timeline
from sim.run.folders import clear, owning
from sim.run.interrupts import INTERRUPTED
from sim.run.prepare import Setup, prepare
from sim.run.runs import Recording, Run
from sim.run.simulate import build_run, execute
from sim.run.traffic import requests_of
from sim.systems.base import Policy
from traces.request import Request

TABLE_FILES = ("requests.csv", "requests.parquet")


def simulate(
    scenario: Scenario,
    label: str,
    policy: Policy,
    folder: Path,
    outputs: Outputs,
    *,
    series: bool = False,
    watch: Observer | None = None,
) -> tuple[Run, Result]:
    """One simulated run with its files; `watch` hears of every plan."""
    return record(prepare(scenario, label, policy), folder, outputs, simulator(outputs), series=series, watch=watch)


Perform = Callable[[Setup, Iterable[Request], TableSink, Recording], Run]
"""Carries a run out on one of the clocks."""


def simulator(outputs: Outputs) -> Perform:
    """Carries a run out on the simulated clock."""

    def perform(setup: Setup, requests: Iterable[Request], table: TableSink, keep: Recording) -> Run:
        return execute(build_run(setup, requests, table=table, keep=keep, jump=not outputs.step))

    return perform


def record(
    setup: Setup,
    folder: Path,
    outputs: Outputs,
    perform: Perform,
    *,
    series: bool = False,
    requests: Iterable[Request] | None = None,
    watch: Observer | None = None,
) -> tuple[Run, Result]:
    """One run with its files: result.json, the per-request table and what else was asked for.

    `requests` replace the scenario's traffic; a server has none, since what it serves comes from outside.
    """
    scenario, label = setup.scenario, setup.label
    if requests is None:
        requests = requests_of(setup)
    with owning(folder):
        clear(folder)
        parquet = find_spec("pyarrow") is not None
        places = 0 if scenario.num_engines * setup.pp == 1 else 1 if scenario.prefill_replicas is None else 2
        columns = (*TABLE_COLUMNS, *list(ENGINE_COLUMNS)[:places])
        table = InOrder((ParquetTable if parquet else CsvTable)(folder / TABLE_FILES[parquet], columns))
        if not outputs.quiet and sys.stderr.isatty():
            requests = _with_progress(requests, label, scenario)
        try:
            keep = Recording(outputs.timeline, series or bool(outputs.figures), outputs.save_detailed, watch)
            run = perform(setup, requests, table, keep)
        finally:
            table.close()
        result = assemble(run)
        write_result(folder, result)
        kept = [parts.series for parts in run.engines if parts.series is not None]
        if kept:
            write_series(folder, kept)
        if outputs.timeline:
            write_timeline(folder, run)
        if result.complete and not result.completed:
            print(f"kvtwin: {label}: no request completed: {result.ignored} were given up", file=sys.stderr)
        for warning in result.warnings:
            print(f"kvtwin: {label}: warning: {warning}", file=sys.stderr)
        if run.error:
            print(f"kvtwin: {run.error}; what finished before is in {folder}", file=sys.stderr)
        if run.interrupted:
            print(f"kvtwin: interrupted; what finished is in {folder}", file=sys.stderr)
        return run, result


def draw_result(run: Run, result: Result, folder: Path, outputs: Outputs) -> None:
    """Draw one run if asked for."""
    if outputs.figures:
        from sim.results.figures import FigureRun, write_figures  # noqa: PLC0415 - matplotlib is slow to import

        write_figures(folder / "figures", [FigureRun.of(run, result)])


def print_result(run: Run, result: Result, folder: Path, outputs: Outputs) -> int:
    """Print one run if asked for; returns the exit status."""
    if not outputs.quiet:
        from sim.results.report import print_run  # noqa: PLC0415 - rich is slow to import

        print_run(result, folder)
    return exit_status(run)


def exit_status(run: Run) -> int:
    """Of a command that carried out one run."""
    if run.error:
        return 2
    return INTERRUPTED if run.interrupted else 0


def _with_progress(requests: Iterable[Request], label: str, scenario: Scenario) -> Iterator[Request]:
    """A progress bar that counts requests as they are read; it shows once a run has taken a while."""
    from sim.run.progress import track  # noqa: PLC0415 - rich is slow to import

    return track(requests, label, scenario.num_prompts)
