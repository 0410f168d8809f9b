"""The commands `run`, `compare`, `report`, `explain`. Flags are fields of `Scenario` and of the policies' options."""

import argparse
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from sim.clock.instance import Observer
from sim.errors import UserError
from sim.files import CsvTable, InOrder, ParquetTable, folder_name, out_folder
from sim.folders import clear, owning
from sim.interrupts import INTERRUPTED
from sim.option_values import base_type, flag, option_fields
from sim.policy_options import (
    PREEMPTION_MODES,
    has_option,
    options_of,
    owned_option,
    parse_policy,
    with_preemption_mode,
)
from sim.prepare import Setup, prepare, with_one_swap_space
from sim.results.metrics import ENGINE_COLUMNS, TABLE_COLUMNS, TableSink
from sim.results.result import assemble, write_result, write_series
from sim.results.schema import Result
from sim.results.timeline import write_timeline
from sim.runs import Recording, Run
from sim.scenario import (
    PREEMPTION_MODE,
    Outputs,
    Scenario,
    build_options,
    build_scenario,
    read_scenario,
    write_asked,
)
from sim.simulate import build_run, execute
from sim.systems import DEFAULT_POLICY, POLICIES
from sim.systems.base import Policy
from sim.traffic import requests_of
from traces.request import Request

TABLE_FILES = ("requests.csv", "requests.parquet")


def add_commands(subparsers: Any) -> None:  # noqa: ANN401 - argparse does not name the type publicly
    """Mount `run`, `compare`, `report` and `explain`."""
    run = subparsers.add_parser("run", help="simulate one policy", description=RUN_HELP)
    compare = subparsers.add_parser("compare", help="simulate several policies side by side", description=COMPARE_HELP)
    report = subparsers.add_parser("report", help="one HTML page of saved runs", description=REPORT_HELP)
    report.later(_add_report_flags)
    report.set_defaults(run=report_command)
    explain = subparsers.add_parser("explain", help="why one request waited, in sentences", description=EXPLAIN_HELP)
    explain.later(_add_explain_flags)
    explain.set_defaults(run=explain_command)
    for parser, command in ((run, run_command), (compare, compare_command)):
        parser.later(add_flags)
        parser.set_defaults(run=command)
    compare.later(add_bound_flags)


def _add_report_flags(parser: Any) -> None:  # noqa: ANN401
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="what run, compare or live wrote")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page (default: report.html in the first DIR)")


def report_command(arguments: argparse.Namespace) -> int:
    """`kvtwin report`."""
    from sim.results.page.page import write_page  # noqa: PLC0415 - matplotlib is slow to import
    from sim.results.page.saved import read_sections  # noqa: PLC0415

    path = arguments.out or arguments.folders[0] / "report.html"
    write_page(path, read_sections(arguments.folders))
    print(f"The report is {path}: open it in a browser")
    return 0


def _add_explain_flags(parser: Any) -> None:  # noqa: ANN401
    parser.add_argument("folder", type=Path, metavar="DIR", help="of one run, made with --timeline")
    parser.add_argument("--request", type=int, required=True, metavar="N", help="request id: its place in the trace")


def explain_command(arguments: argparse.Namespace) -> int:
    """`kvtwin explain`."""
    from sim.results.explain import explain  # noqa: PLC0415 - matplotlib is slow to import

    print("\n".join(explain(arguments.folder, arguments.request)))
    return 0


EXPLAIN_HELP = "What became of one request of a saved run and why it waited, in sentences."
REPORT_HELP = (
    "Runs that run, compare or live have saved as one HTML page: what was asked, tables, interactive figures, where "
    "the time went, which limit bound when. It opens offline. A folder of compare is a section; single runs share one."
)
RUN_HELP = "Simulate one policy on a trace or a generated workload and write the results to a folder."
COMPARE_HELP = (
    "Simulate several policies on the same traffic: a table side by side, ratios to the first, figures. "
    "Name options in place to compare variants: --policy layerkv --policy layerkv:slo-aware=false"
)


def add_flags(parser: Any, without: Collection[str] = ()) -> None:  # noqa: ANN401 - the command line's own parser
    """Add a flag for every field of a scenario, and `--out`, but those `without`, and every option of the policies."""
    if "scenario" not in without:
        text = "TOML file with these options; flags override it"
        parser.add_argument("--scenario", type=Path, metavar="FILE", help=text)
    parser.add_argument(
        "--policy",
        action="append",
        metavar="P",
        help=f"one of {', '.join(POLICIES)} (run: default {DEFAULT_POLICY}); options and parts as "
        "NAME:option=value,... or options by their flags",
    )
    if "out" not in without:
        parser.add_argument("--out", type=out_folder, metavar="DIR", help="folder for the results (required)")
    for f, hint in (*option_fields(Outputs), *option_fields(Scenario)):
        if f.name not in without:
            text = f.metadata["help"]
            if base_type(hint) is not bool and f.default not in (None, ()):
                text += f" (default: {f.default})"
            action = _add_flag(parser, f.name, hint, text, f.metadata["metavar"], f.metadata["alias"])
            if f.name in BUILT_IN:
                parser.later(partial(_name_built_in, action=action), ("-h", "--help"))
    modes = " or ".join(PREEMPTION_MODES)
    parser.add_argument(
        flag(PREEMPTION_MODE), metavar="MODE", help=f"{modes}: what vLLM 0.5.5 does with victims, as its preset has it"
    )
    # A policy's flags are added, and the policy imported, when one of them is given or help asked for.
    _add_policy_flags(parser, DEFAULT_POLICY)
    for name in POLICIES:
        if name == DEFAULT_POLICY:
            continue
        parser.later(partial(_add_policy_flags, name=name), (f"--{name}-", f"--no-{name}-"))


def add_bound_flags(parser: Any) -> None:  # noqa: ANN401 - the command line's own parser
    """Flags of `compare` alone: what stands beside the policies."""
    yes_or_no = argparse.BooleanOptionalAction
    text = "the most goodput that any scheduler could reach (default: where there is one, below 20,000 requests)"
    parser.add_argument("--bound", action=yes_or_no, default=None, help=text)
    text = "run each policy with infinite PCIe, infinite memory and known lengths, too"
    parser.add_argument("--bounds", action="store_true", default=None, help=text)


BUILT_IN = {"model": "models", "gpu": "gpus"}
"""Options that take names, and the folders that hold what ships."""


def _name_built_in(_: object, action: argparse.Action) -> None:
    """Names that ship, for the help alone: reading folders takes time."""
    found = sorted(path.stem for path in (Path(__file__).parent / "specs" / BUILT_IN[action.dest]).glob("*.json"))
    action.help = f"{action.help}; built in: {', '.join(found)}"


def _add_policy_flags(parser: argparse.ArgumentParser, name: str) -> None:
    kind = POLICIES[name]
    parts = ", ".join(f"{part} {value}" for part, value in kind.composition.items())
    group = parser.add_argument_group(f"options of {name}", f"{kind.summary} ({parts})")
    for option in options_of(kind):
        if option.is_plain and name != DEFAULT_POLICY:
            continue
        text, default = option.field.metadata["help"], option.field.default
        text += "" if default is None else f" (default {default})"
        _add_flag(group, option.full_name, option.hint, text, None)


def _add_flag(
    target: Any,  # noqa: ANN401
    name: str,
    hint: Any,  # noqa: ANN401
    help_text: str,
    metavar: str | None,
    alias: str | None = None,
) -> argparse.Action:
    """One option; None when not given, so that a scenario file's value or the default holds."""
    flags = [flag(name)] if alias is None else [flag(name), flag(alias)]
    kind = base_type(hint)
    text = help_text.replace("%", "%%")
    if kind is bool:
        return target.add_argument(*flags, action=argparse.BooleanOptionalAction, default=None, help=text)
    if get_origin(kind) is Literal:
        return target.add_argument(*flags, choices=get_args(kind), default=None, help=text)
    if get_origin(kind) is tuple:
        return target.add_argument(*flags, nargs="+", action="extend", default=None, help=text, metavar="WORD")
    return target.add_argument(*flags, dest=name, default=None, help=text, metavar=metavar or name.upper())


def asked_values(arguments: argparse.Namespace, default: str | None = None) -> dict[str, Any]:
    """Options by name, those of flags over those of the scenario file; the policy `default` where none is named."""
    values = read_scenario(arguments.scenario) if arguments.scenario else {}
    values |= {name: value for name, value in vars(arguments).items() if value is not None}
    if default is not None:
        values.setdefault("policy", (default,))
    return values


def read_options(
    arguments: argparse.Namespace, default: str | None = None
) -> tuple[Scenario, list[tuple[str, Policy]], Path, Outputs]:
    """Scenario, labelled policies, output folder and outputs from flags over an optional scenario file.

    `default` is the policy where none is named; None: then it is missing.
    """
    values = asked_values(arguments, default)
    named = {name for name, value in vars(arguments).items() if value is not None}
    sources = {name: str(arguments.scenario) for name in values if name not in named}
    texts: tuple[str, ...] = tuple(values.get("policy") or ())
    if not texts:
        raise UserError(f"--policy is missing; known: {', '.join(POLICIES)}")
    if (mode := values.pop(PREEMPTION_MODE, None)) is not None:
        texts = tuple(with_preemption_mode(text, mode) for text in texts)
    policies = [parse_policy(text, values) for text in texts]
    plain = {f.name for owner in (Scenario, Outputs) for f, _ in option_fields(owner)}
    for name in values.keys() - plain:
        option = owned_option(name)
        if option is not None and not any(has_option(policy.name, option) for _, policy in policies):
            raise UserError(f"{flag(name)}: an option of {option.policy}, which --policy does not name")
    if "out" not in values:
        raise UserError("--out DIR is missing: where are the results to go?")
    return build_scenario(values, sources), policies, Path(values["out"]), build_options(Outputs, values)


def run_command(arguments: argparse.Namespace) -> int:
    """`kvtwin run`."""
    scenario, policies, folder, outputs = read_options(arguments, DEFAULT_POLICY)
    if len(policies) != 1:
        raise UserError(f"run takes one --policy, {len(policies)} given; use `kvtwin compare`")
    label, policy = policies[0]
    with owning(folder):
        run, result = simulate(scenario, label, policy, folder, outputs)
        write_asked(folder, asked_values(arguments, DEFAULT_POLICY))
        draw_result(run, result, folder, outputs)
    return print_result(run, result, folder, outputs)


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
    return _status(run)


def compare_command(arguments: argparse.Namespace) -> int:
    """`kvtwin compare`."""
    from sim.results.comparison import print_comparison, write_comparison  # noqa: PLC0415
    from sim.results.figures import FigureRun, write_figures  # noqa: PLC0415

    scenario, policies, folder, outputs = read_options(arguments)
    labels = [label for label, _ in policies]
    if len(set(labels)) != len(labels):
        raise UserError(f"--policy: {', '.join(labels)} names one twice")
    scenario = with_one_swap_space(scenario, (policy for _, policy in policies))
    # All are checked before the first runs, and before anything of an earlier command goes.
    planned = [(setup, requests_of(setup)) for setup in (prepare(scenario, *policy) for policy in policies)]
    with owning(folder):
        clear(folder, below=[folder_name(label) for label in labels])
        results: list[Result] = []
        figures: list[FigureRun] = []
        status = 0
        for setup, requests in planned:
            place = folder / folder_name(setup.label)
            try:
                run, result = record(setup, place, outputs, simulator(outputs), series=True, requests=requests)
            except KeyboardInterrupt:
                # Before a run or behind it: what is there is compared.
                if not results:
                    raise
                status = INTERRUPTED
                break
            results.append(result)
            figures.append(FigureRun.of(run, result))
            status = _status(run)
            if status:
                break
        bounds = None
        if not status and (scenario.goodput or arguments.bound or arguments.bounds):
            from sim.bounds.compared import bounds_of  # noqa: PLC0415 - scipy is slow to import

            setups = [setup for setup, _ in planned]
            try:
                bounds = bounds_of(setups, results, bound=arguments.bound, lifted=bool(arguments.bounds))
            except KeyboardInterrupt:
                print("kvtwin: interrupted; the policies are compared without bounds", file=sys.stderr)
                status = INTERRUPTED
        write_comparison(folder, results, bounds)
        write_asked(folder, asked_values(arguments))
        write_figures(folder / "figures", figures)
    if not outputs.quiet:
        print_comparison(results, folder, bounds)
    return status


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
        columns = (*TABLE_COLUMNS, *ENGINE_COLUMNS[:places])
        table = InOrder((ParquetTable if parquet else CsvTable)(folder / TABLE_FILES[parquet], columns))
        if not outputs.quiet and sys.stderr.isatty():
            requests = _with_progress(requests, label, scenario)
        try:
            keep = Recording(outputs.timeline, series or outputs.figures, outputs.save_detailed, watch)
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


def _status(run: Run) -> int:
    if run.error:
        return 2
    return INTERRUPTED if run.interrupted else 0


def _with_progress(requests: Iterable[Request], label: str, scenario: Scenario) -> Iterator[Request]:
    """A progress bar that counts requests as they are read; it shows once a run has taken a while."""
    from sim.progress import track  # noqa: PLC0415 - rich is slow to import

    return track(requests, label, scenario.num_prompts)
