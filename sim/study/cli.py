"""The commands that run many scenarios: `sweep`, `tune`, `map`, `reproduce`."""

import argparse
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.errors import UserError
from sim.files import out_folder
from sim.options.flags import add_flags, taken
from sim.options.policies import owned_option
from sim.options.scenario import ALIASES, OF_LAYOUTS, Outputs
from sim.options.scenario_file import option_named, read_toml, scenario_keys
from sim.options.values import convert, flag
from sim.run.folders import owning
from sim.run.interrupts import INTERRUPTED

if TYPE_CHECKING:
    from sim.study.sweep import Means, Place

REPRODUCE_HELP = (
    "Run the setups of papers that ship with kvtwin: the paper's numbers beside ours with their ratio, a verdict, and "
    "the figures. What is finished is kept in --out."
)
NOT_OF_A_STUDY = ("scenario", "out", *(f.name for f in fields(Outputs)))
"""Flags of `run` that a study has under another name, or has no use for."""
SWEEP_HELP = (
    "Run every point of a study file: a scenario file with a table [sweep] of axes (docs/sweep.md). What has ended is "
    "kept; the same command goes on where it was interrupted."
)
TUNE_HELP = (
    "Search a study file with a table [tune] (docs/tune.md) for the policy and the knobs that carry the most load or "
    "goodput under SLOs, and say which limit binds and what more of it would buy. Keys of [tune]: goal (load or "
    "goodput), slo (METRIC:BOUND, ...), repeats (seeds), trials (of Optuna), storage (its database); and [tune.grid], "
    "[tune.zip] or [tune.random] of policies and knobs. How many GPUs it takes is for `plan`."
)
PLAN_HELP = (
    "Which deployment on how many GPUs for this traffic under SLOs (docs/plan.md): tensor parallelism, replicas or "
    "prefill and decode pools, token budget, seats, KV type, prefix caching and offload, searched together. What an "
    "option says is not searched. Ends with the commands that serve it."
)
MAP_HELP = (
    "Run the policies of a study file over two parameters, by default prompt length and PCIe bandwidth, and draw "
    "which wins where, by goodput or any other metric (docs/sweep.md)."
)


def add_reproduce(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of `reproduce`, as the next ones those of their commands."""
    parser.description = REPRODUCE_HELP
    parser.set_defaults(run=partial(_goes_on, reproduce_command))
    parser.add_argument("paper", nargs="?", help="layerkv, ellm, hcache, kvpr or sarathi (default: all)")
    parser.add_argument("--figure", metavar="N", help="of the paper (default: all that are known)")
    add_means(parser)


def add_sweep(parser: argparse.ArgumentParser) -> None:
    """`sweep`."""
    parser.description = SWEEP_HELP
    parser.set_defaults(run=partial(_goes_on, sweep_command))
    _add_study(parser, "scenario and axes")
    parser.add_argument("--table", choices=("csv", "parquet"), default="csv", help="format of the tables (default csv)")
    parser.add_argument("--no-figures", action="store_true", help="draw nothing")


def add_tune(parser: argparse.ArgumentParser) -> None:
    """`tune`."""
    parser.description = TUNE_HELP
    parser.set_defaults(run=partial(_goes_on, tune_command))
    _add_study(parser, "scenario, goal, SLOs and knobs")


def add_plan(parser: argparse.ArgumentParser) -> None:
    """`plan`."""
    parser.description = PLAN_HELP
    parser.set_defaults(run=partial(_goes_on, plan_command))
    parser.add_argument("--gpu", nargs="+", metavar="G", help="kinds, one of which is taken (default: a100-80g)")
    parser.add_argument("--max-gpus", metavar="N", help="most GPUs there may be (default: 8)")
    parser.add_argument("--slo", nargs="+", metavar="METRIC:BOUND", help="such as p99_ttft_ms:1000 p99_tpot_ms:50")
    parser.add_argument(
        "--objective",
        metavar="WHAT",
        help="gpus: fewest (default); goodput: most load on --max-gpus; cost; energy",
    )
    parser.add_argument(
        "--gpu-hour-usd", nargs="+", metavar="USD", help="for cost: what your seller asks, as 2.5 or h100=2.5 l20=1"
    )
    parser.add_argument(
        "--layouts", metavar="WHICH", help="engines (that do both), pools (prefill and decode), or both (default)"
    )
    parser.add_argument("--seeds", metavar="N", help="draws of the traffic, for intervals (default: 5)")
    add_means(parser)
    add_flags(parser, without=(*NOT_OF_A_STUDY, "gpu", *OF_LAYOUTS[1:]))


def add_map(parser: argparse.ArgumentParser) -> None:
    """`map`."""
    parser.description = MAP_HELP
    parser.set_defaults(run=partial(_goes_on, map_command))
    _add_study(parser, "scenario, policies and axes")


def _add_study(parser: argparse.ArgumentParser, holds: str) -> None:
    parser.add_argument("study", type=Path, metavar="FILE.toml", help=f"{holds}; flags of a scenario override it")
    add_means(parser)
    add_flags(parser, without=NOT_OF_A_STUDY)


def add_means(parser: argparse.ArgumentParser) -> None:
    """The flags of every command that runs many scenarios."""
    parser.add_argument("--out", type=out_folder, metavar="DIR", required=True, help="folder for the results")
    parser.add_argument(
        "--backend", default="loky", metavar="NAME", help="loky: this machine's cores (default); dask or ray: a cluster"
    )
    parser.add_argument("--address", help="scheduler of the cluster (default: one is started on this machine)")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes (default: one a core)")
    parser.add_argument("--max-seconds", type=float, metavar="S", help="give a run up after so long (default: never)")
    parser.add_argument("--retry-failed", action="store_true", help="run again what failed before")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")


def means_of(arguments: argparse.Namespace) -> "Means":
    """How runs are to be performed, by the flags of `add_means`."""
    from sim.study.sweep import Means  # noqa: PLC0415 - only when asked for

    seconds = arguments.max_seconds
    if seconds is not None and not seconds > 0:
        raise UserError(f"--max-seconds: {seconds} is not greater than 0; give more, or leave it out")
    return Means(arguments.backend, arguments.address, arguments.jobs, seconds, arguments.retry_failed)


def study_table(arguments: argparse.Namespace, command: str) -> dict[str, Any]:
    """The table in the study's file, with what flags say in place of what the file says."""
    given = _flags_given(arguments)
    table = read_toml(arguments.study, command)
    spelt = {key: ALIASES.get(name := key.replace("-", "_"), name) for key in table}
    return {key: value for key, value in table.items() if spelt[key] not in given} | given


def _flags_given(arguments: argparse.Namespace, without: Collection[str] = ()) -> dict[str, Any]:
    """Options of runs that flags say, by field."""
    known = {name for name in scenario_keys() if name not in NOT_OF_A_STUDY}
    return {
        name: convert(flag(name), value, option_named(name, "flags")[1])
        for name, value in vars(arguments).items()
        if value is not None and name not in without and (name in known or owned_option(name))
    }


def _tell_taken(given: Mapping[str, Any], quiet: bool) -> None:
    """Which model and GPU were taken where none are given. Of what ended well: a refusal is one line."""
    if (told := taken(dict(given))) and not quiet:
        sys.stdout.flush()
        print(f"kvtwin: {told}", file=sys.stderr)


@contextmanager
def progress(label: str, quiet: bool, *, of_work: bool = False) -> Iterator[Any]:
    """A bar on standard error, `runs_bar` or `work_bar` of `sim.run.progress`; None without a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from sim.run.progress import runs_bar, work_bar  # noqa: PLC0415 - rich is slow to import

    with (work_bar if of_work else runs_bar)(label) as bar:
        yield bar


def _goes_on(command: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """Run a command that keeps what is finished when it is interrupted."""
    try:
        return command(arguments)
    except KeyboardInterrupt:
        print(f"kvtwin: interrupted; what is finished is in {arguments.out}: the same command goes on", file=sys.stderr)
        return INTERRUPTED


def sweep_command(arguments: argparse.Namespace) -> int:
    """`kvtwin sweep`."""
    from sim.study.axes import read_study  # noqa: PLC0415
    from sim.study.sweep import run_study  # noqa: PLC0415

    study = read_study(study_table(arguments, "sweep"), "sweep", str(arguments.study))
    if arguments.table == "parquet" and find_spec("pyarrow") is None:
        # Said before the runs are made.
        raise UserError("--table parquet: pyarrow is not installed: pip install 'kvtwin[parquet]', or take csv")
    means, folder = means_of(arguments), arguments.out
    with owning(folder):
        with progress("sweep", arguments.quiet) as begin:
            places = run_study(study, folder, means, begin)
        from sim.study.tables import means as means_table  # noqa: PLC0415 - pandas is slow to import
        from sim.study.tables import write_tables  # noqa: PLC0415

        found = means_table(study, write_tables(folder, study, places, arguments.table))
        if not arguments.no_figures:
            from sim.study.figures import write_figures  # noqa: PLC0415

            write_figures(folder / "figures", study, found)
    if not arguments.quiet:
        from sim.study.overview import print_points  # noqa: PLC0415

        print_points(study, found)
        print("\n".join(_told(study.where, folder, places)))
    _tell_taken(study.fixed | dict.fromkeys(study.axes, True), arguments.quiet)
    return 0


def reproduce_command(arguments: argparse.Namespace) -> int:
    """`kvtwin reproduce`."""
    from sim.study.reproduce import run_setups, table  # noqa: PLC0415
    from sim.study.setup_files import chosen, read_setups  # noqa: PLC0415

    folder: Path = arguments.out
    setups, means = chosen(read_setups(), arguments.paper, arguments.figure), means_of(arguments)
    with owning(folder):
        with progress("reproduce", arguments.quiet) as begin:
            found = run_setups(setups, folder, means, begin)
        from sim.study.reproduce_figure import draw  # noqa: PLC0415 - matplotlib is slow to import

        for one in found:
            draw(one, folder / "figures" / f"{one.setup.name}-{one.setup.figure}.png")
    if not arguments.quiet:
        for one in found:
            print(f"\n{one.setup.heading}\n{table([one])}")
    for one in found:
        for point, error in one.errors.items():
            where = " ".join(str(word) for word in point if word not in ("", None))
            print(f"kvtwin: {one.setup.paper} {one.setup.figure}, {where}: {error}", file=sys.stderr)
    return 0


def tune_command(arguments: argparse.Namespace) -> int:
    """`kvtwin tune`."""
    from sim.study.tune import read_tune, tune  # noqa: PLC0415

    asked = read_tune(study_table(arguments, "tune"), str(arguments.study))
    means, folder = means_of(arguments), arguments.out
    with owning(folder):
        with progress("tune", arguments.quiet) as begin:
            found = tune(asked, folder, means, begin)
        from sim.study.tune_report import lines, write  # noqa: PLC0415 - pandas and matplotlib are slow to import

        write(folder, found)
    if not arguments.quiet:
        print("\n".join(lines(found)))
        print(f"Candidates, picture and runs are in {folder}")
    _tell_taken(asked.study.fixed | dict.fromkeys(asked.study.axes, True), arguments.quiet)
    return 0


def plan_command(arguments: argparse.Namespace) -> int:
    """`kvtwin plan`."""
    from sim.study.plan import OWN, plan, read_plan  # noqa: PLC0415

    own = {name: value for name in OWN if (value := getattr(arguments, name)) is not None}
    asked = read_plan({**_flags_given(arguments, OWN), **own})
    means, folder = means_of(arguments), arguments.out
    with owning(folder):
        with progress("plan", arguments.quiet, of_work=True) as bar:
            found = plan(asked, folder, means, bar)
        from sim.study.plan_report import (  # noqa: PLC0415 - pandas is slow to import
            commands,
            front_lines,
            lines,
            simulate_answer,
            write,
        )

        simulate_answer(folder, found)
        write(folder, found)
    if not arguments.quiet:
        print("\n".join([*lines(found), "", *front_lines(found), "", *commands(found, folder)]))
        print(f"The answer, its runs and a manifest for Kubernetes are in {folder}; kvtwin report {folder} shows it")
    _tell_taken(vars(arguments), arguments.quiet)
    return 0


def map_command(arguments: argparse.Namespace) -> int:
    """`kvtwin map`."""
    from sim.study.regimes import lines, read_map, write  # noqa: PLC0415
    from sim.study.sweep import run_study  # noqa: PLC0415
    from sim.study.tables import means as means_table  # noqa: PLC0415
    from sim.study.tables import write_tables  # noqa: PLC0415

    regimes = read_map(study_table(arguments, "map"), str(arguments.study))
    means, folder = means_of(arguments), arguments.out
    with owning(folder):
        with progress("map", arguments.quiet) as begin:
            places = run_study(regimes.study, folder, means, begin)
        found = write(folder, regimes, means_table(regimes.study, write_tables(folder, regimes.study, places, "csv")))
    if not arguments.quiet:
        print("\n".join(lines(regimes, found)))
        print("\n".join(_told(regimes.study.where, folder, places)))
    _tell_taken(regimes.study.fixed | dict.fromkeys(regimes.study.axes, True), arguments.quiet)
    return 0


def _told(where: str, folder: Path, places: "list[Place]") -> Iterator[str]:
    """What a sweep says when it ends."""
    failed = [place.outcome.error for place in places if place.outcome.error is not None]
    from sim.study.sweep import engines_of_runs_differ  # noqa: PLC0415

    if told := engines_of_runs_differ(place.outcome.result for place in places):
        yield f"{where}: {told}"
    yield f"{where}: {len(places)} runs, {len(failed)} of them failed; tables and figures are in {folder}"
    kinds = list(dict.fromkeys(failed))
    for error in kinds[:5]:
        yield f"  {failed.count(error)} failed: {error}"
    if len(kinds) > 5:
        yield f"  and {len(kinds) - 5} more reasons: column error of the table"
