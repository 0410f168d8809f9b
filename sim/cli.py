"""The commands `run`, `compare`, `report`, `explain`."""

import argparse
import sys
from pathlib import Path
from typing import Any

from sim.errors import UserError
from sim.files import folder_name
from sim.flags import add_bound_flags, add_flags, asked_values, read_options
from sim.folders import clear, owning
from sim.interrupts import INTERRUPTED
from sim.prepare import prepare, with_one_swap_space
from sim.results.schema import Result
from sim.run_files import draw_result, exit_status, print_result, record, simulate, simulator
from sim.scenario_file import write_asked
from sim.systems import DEFAULT_POLICY
from sim.traffic import requests_of

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
            status = exit_status(run)
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
