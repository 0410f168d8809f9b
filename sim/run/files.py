"""A run with its files: result.json, the table of requests, and what else was asked for; drawn and printed."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from sim.clock.instance import Observer
from sim.errors import InvariantError
from sim.files import CsvTable, InOrder, ParquetTable, make_folder, write_atomically
from sim.options.scenario import Outputs, Scenario
from sim.parts.options import refuse_idle
from sim.results.metrics import ENGINE_COLUMNS, TABLE_COLUMNS, TableSink
from sim.results.result import assemble, write_result, write_series
from sim.results.schema import Result
from sim.run.interrupts import INTERRUPTED
from sim.run.prepare import Setup, prepare
from sim.run.runs import Recording, Run
from sim.run.simulate import build_run, execute
from sim.run.traffic import requests_of
from sim.systems.base import Policy
from traces.request import Request

TABLE_FILES = ("requests.csv", "requests.parquet")


class Table(TableSink, Protocol):
    """A per-request table that is a file."""

    def close(self) -> None:
        """Write what is buffered."""
        ...


Perform = Callable[[Setup, Iterable[Request], TableSink, Recording], Run]
"""Carries a run out on one of the clocks."""


def carry_out(
    scenario: Scenario,
    label: str,
    policy: Policy,
    folder: Path,
    outputs: Outputs,
    perform: Perform | None = None,
    *,
    series: bool = False,
    watch: Observer | None = None,
) -> tuple[Run, Result]:
    """One run with its files, simulated unless `perform` is given; `watch` hears of every plan."""
    setup = prepare(scenario, label, policy)
    refuse_idle(setup.conditional)
    return record(setup, folder, outputs, perform or simulator(outputs), series=series, watch=watch)


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
    table: Table | None = None,
) -> tuple[Run, Result]:
    """One run with its files: result.json, the per-request table and what else was asked for.

    Args:
        setup: what to run.
        folder: for the files; this process's own, and made where it is missing.
        outputs: which files.
        perform: carries it out.
        series: keep a time series, asked for or not.
        requests: in place of the scenario's traffic; a server has none, since what it serves comes from outside.
        watch: hears of every plan.
        table: in place of the one in order of the trace.
    """
    scenario, label = setup.scenario, setup.label
    if requests is None:
        requests = requests_of(setup)
    make_folder(folder, "--out")
    table = table or table_in(folder, setup)
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
        from sim.results.timeline import write_timeline  # noqa: PLC0415 - few runs have one

        write_timeline(folder, run)
    if result.complete and not result.completed:
        print(f"kvtwin: {label}: no request completed: {result.ignored} were given up", file=sys.stderr)
    for warning in result.warnings:
        print(f"kvtwin: {label}: warning: {warning}", file=sys.stderr)
    return run, result


class RowsAtOnce:
    """The per-request table of what may be killed any time: CSV, each row in the file when its request has ended.

    Attributes:
        is_open: whether the file is there; it replaces an earlier one.
    """

    def __init__(self, folder: Path, columns: Sequence[str]) -> None:
        self.path, self._columns = folder / TABLE_FILES[0], columns
        self._table: CsvTable | None = None

    @property
    def is_open(self) -> bool:
        return self._table is not None

    def open(self) -> None:
        """Make the file."""
        self._table = CsvTable(self.path, self._columns, flush_rows=1)

    def write(self, row: tuple[object, ...]) -> None:
        """Append a row, in order of completion."""
        if self._table is None:
            raise InvariantError("a row before the table is open")
        self._table.write(row)

    def close(self) -> None:
        """Put the rows in order of the requests, as in every other table."""
        if self._table is None:
            return
        self._table.close()
        header, *rows = self.path.read_bytes().splitlines(keepends=True)
        rows.sort(key=lambda row: int(row.partition(b",")[0]))
        write_atomically(self.path, lambda file: file.writelines([header, *rows]))


def table_columns(setup: Setup) -> tuple[str, ...]:
    """Columns of the per-request table: those of engines where there are several."""
    scenario = setup.scenario
    places = 0 if scenario.num_engines * setup.num_schedulers == 1 else 1 if scenario.prefill_replicas is None else 2
    return (*TABLE_COLUMNS, *list(ENGINE_COLUMNS)[:places])


def table_in(folder: Path, setup: Setup) -> Table:
    """The per-request table in order of the trace: Parquet where pyarrow is installed, else CSV."""
    parquet = find_spec("pyarrow") is not None
    return InOrder((ParquetTable if parquet else CsvTable)(folder / TABLE_FILES[parquet], table_columns(setup)))


def draw_result(run: Run, result: Result, folder: Path, outputs: Outputs) -> None:
    """Draw one run if asked for."""
    if outputs.figures:
        from sim.results.figures import FigureRun, write_figures  # noqa: PLC0415 - matplotlib is slow to import

        write_figures(folder / "figures", [FigureRun.of(run, result)])


def print_result(run: Run, result: Result, folder: Path, outputs: Outputs) -> int:
    """Print one run if asked for, and how it ended; returns the exit status."""
    if not outputs.quiet:
        from sim.results.report import run_lines  # noqa: PLC0415 - rich is slow to import

        print("\n".join(run_lines(result, folder)))
    return tell_end(run, folder)


def tell_end(run: Run, folder: Path) -> int:
    """Say where what finished of a run is that ended early; returns the exit status of a command that made it."""
    if run.error:
        print(f"kvtwin: {run.error}; what finished before is in {folder}", file=sys.stderr)
    if run.interrupted:
        print(f"kvtwin: interrupted; what finished is in {folder}", file=sys.stderr)
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
