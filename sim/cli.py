"""The commands `run`, `compare`, `report`, `explain`."""

import argparse
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from sim.errors import UserError
from sim.files import folder_name
from sim.options.flags import add_bound_flags, add_flags, asked_values, read_options, taken
from sim.options.scenario import Outputs
from sim.options.scenario_file import write_asked
from sim.run.folders import renewing, settle
from sim.run.interrupts import INTERRUPTED
from sim.systems import DEFAULT_POLICY

if TYPE_CHECKING:
    from sim.options.scenario import Scenario
    from sim.results.schema import Bounds, Result

EXPLAIN_HELP = (
    "What became of one request of a saved run and why it waited, in sentences; or what the slowest waited for beside "
    "all others, by cause, and which requests ran meanwhile."
)
REPORT_HELP = (
    "Runs that run, compare or live have saved as one HTML page: what was asked, tables, interactive figures, where "
    "the time went, which limit bound when. It opens offline. A folder of compare is a section; single runs share one. "
    "Folders of sweep, map, tune, plan and validate: their answer, pictures and table."
)
RUN_HELP = "Simulate one policy on a trace or a generated workload and write the results to a folder."
COMPARE_HELP = (
    "Simulate several policies on the same traffic: a table side by side, ratios to the first, figures. "
    "Name options in place to compare variants: --policy layerkv layerkv:slo-aware=false"
)


def add_run(parser: Any) -> None:  # noqa: ANN401 - `kvtwin.command_line`'s
    """Fill the parser of `run`, as the next ones those of their commands."""
    parser.description = RUN_HELP
    parser.set_defaults(run=run_command)
    add_flags(parser)


def add_compare(parser: Any) -> None:  # noqa: ANN401
    """`compare`."""
    parser.description = COMPARE_HELP
    parser.set_defaults(run=compare_command)
    add_flags(parser)
    add_bound_flags(parser)


def add_report(parser: Any) -> None:  # noqa: ANN401
    """`report`."""
    parser.description = REPORT_HELP
    parser.set_defaults(run=report_command)
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="what a command wrote")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page (default: report.html in the first DIR)")


def report_command(arguments: argparse.Namespace) -> int:
    """`kvtwin report`."""
    from sim.results.page.page import write_page  # noqa: PLC0415 - matplotlib is slow to import
    from sim.results.page.saved import COMPARISON_FILE, read_sections  # noqa: PLC0415
    from sim.results.page.studies import kind_of, read_study  # noqa: PLC0415

    path = arguments.out or arguments.folders[0] / "report.html"
    for folder in arguments.folders:
        settle(folder)
    kinds = {folder: None if (folder / COMPARISON_FILE).is_file() else kind_of(folder) for folder in arguments.folders}
    sections = read_sections(folder for folder, kind in kinds.items() if kind is None)
    write_page(path, sections, [read_study(folder, kind) for folder, kind in kinds.items() if kind is not None])
    print(f"The report is {path}: open it in a browser")
    return 0


def add_explain(parser: Any) -> None:  # noqa: ANN401
    """`explain`."""
    parser.description = EXPLAIN_HELP
    parser.set_defaults(run=explain_command)
    parser.add_argument("folder", type=Path, metavar="DIR", help="of one run, made with --timeline")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--request", type=int, metavar="N", help="request id: its place in the trace")
    which.add_argument("--slowest", type=int, metavar="N", help="the N slowest requests, beside all others")
    which.add_argument("--beyond", metavar="P", help="those beyond a percentile (p99), beside all others")
    parser.add_argument(
        "--by", choices=("ttft", "e2el"), help="what --slowest and --beyond go by (default: ttft, the first token)"
    )


def explain_command(arguments: argparse.Namespace) -> int:
    """`kvtwin explain`."""
    settle(arguments.folder)
    if arguments.request is not None:
        from sim.results.explain import explain  # noqa: PLC0415 - matplotlib is slow to import

        if arguments.by is not None:
            raise UserError("--by: goes with --slowest or --beyond; leave it out")
        lines = explain(arguments.folder, arguments.request)
    else:
        from sim.results.tails import sentences, tail_of  # noqa: PLC0415 - likewise

        beyond = None if arguments.beyond is None else _percentile(arguments.beyond)
        lines = sentences(
            tail_of(arguments.folder, slowest=arguments.slowest, beyond=beyond, metric=arguments.by or "ttft")
        )
    print("\n".join(lines))
    return 0


def _percentile(text: str) -> float:
    """`p99`, `P99.9` or `99`; UserError for what is none."""
    try:
        found = float(text.removeprefix("p").removeprefix("P"))
    except ValueError:
        found = 0.0
    if not 0.0 < found < 100.0:
        raise UserError(f"--beyond: {text!r} is no percentile; give one above 0 and below 100, as p99")
    return found


def run_command(arguments: argparse.Namespace) -> int:
    """`kvtwin run`."""
    from sim.run.files import carry_out, draw_result, print_result  # noqa: PLC0415 - numpy is slow to import

    scenario, policies, folder, outputs = read_options(arguments, DEFAULT_POLICY)
    if len(policies) != 1:
        raise UserError(f"run takes one --policy, {len(policies)} given; use `kvtwin compare`")
    label, policy = policies[0]
    with renewing(folder) as new:
        run, result = carry_out(scenario, label, policy, new.place, outputs)
        write_asked(new.place, asked_values(arguments, DEFAULT_POLICY))
        draw_result(run, result, new.place, outputs)
        new.whole = result.complete
    status = print_result(run, result, new.home, outputs)
    _tell_taken(arguments, outputs, status)
    return status


def _tell_taken(arguments: argparse.Namespace, outputs: Outputs, status: int) -> None:
    """Of a run that ended well: a refusal is one line."""
    told = taken(asked_values(arguments))
    if told and not status and not outputs.quiet:
        sys.stdout.flush()
        print(f"kvtwin: {told}", file=sys.stderr)


def compare_command(arguments: argparse.Namespace) -> int:
    """`kvtwin compare`."""
    from sim.parts.options import refuse_idle  # noqa: PLC0415 - as for `run`
    from sim.results.comparison import comparison_lines, write_comparison  # noqa: PLC0415
    from sim.run.files import exit_status, record, simulator, tell_end  # noqa: PLC0415
    from sim.run.prepare import prepare, with_one_swap_space  # noqa: PLC0415 - as for `run`
    from sim.run.traffic import requests_of  # noqa: PLC0415

    scenario, policies, folder, outputs = read_options(arguments)
    drawing = None
    if outputs.figures is not False:
        from sim.results import figures as drawing  # noqa: PLC0415 - matplotlib is slow to import
    labels = [label for label, _ in policies]
    if len(set(labels)) != len(labels):
        raise UserError(f"--policy: {', '.join(labels)} names one twice")
    scenario = with_one_swap_space(scenario, (policy for _, policy in policies))
    # All are checked before the first runs.
    planned = [(setup, requests_of(setup)) for setup in (prepare(scenario, *policy) for policy in policies)]
    refuse_idle(one for setup, _ in planned for one in setup.conditional)
    setups = [setup for setup, _ in planned]
    best = None
    if arguments.bound:
        from sim.bounds.compared import best_bound  # noqa: PLC0415 - scipy is slow to import

        best = best_bound(setups)
    below = [folder_name(label) for label in labels]
    with _other_draws(arguments, scenario) as others, renewing(folder, below=below) as new:
        results: list[Result] = []
        drawn = []
        status, ended = 0, None
        for setup, requests in planned:
            place = new.place / folder_name(setup.label)
            try:
                run, result = record(setup, place, outputs, simulator(outputs), series=True, requests=requests)
            except KeyboardInterrupt:
                # Before a run or behind it: what is there is compared.
                if not results:
                    raise
                status = INTERRUPTED
                break
            results.append(result)
            if drawing is not None:
                drawn.append(drawing.FigureRun.of(run, result))
            status = exit_status(run)
            if status:
                ended = run, folder_name(setup.label)
                break
        bounds = None
        counted = any(result.request_goodput is not None for result in results)
        if not status and (counted or best or arguments.lift_limits):
            from sim.bounds.compared import best_bound, bounds_of  # noqa: PLC0415 - as above

            try:
                if counted and arguments.bound is None:
                    best = best_bound(setups, asked=False)
                bounds = bounds_of(setups, results, best, lifted=bool(arguments.lift_limits))
            except KeyboardInterrupt:
                print("kvtwin: interrupted; the policies are compared without bounds", file=sys.stderr)
                status = INTERRUPTED
        if not status and others:
            try:
                bounds = _over_draws(arguments, results, others, bounds)
            except KeyboardInterrupt:
                print("kvtwin: interrupted; the policies are compared on one draw", file=sys.stderr)
                status = INTERRUPTED
            except UserError as error:
                print(f"kvtwin: {error}; the policies are compared on one draw", file=sys.stderr)
        write_comparison(new.place, results, bounds, figures=drawing is not None)
        write_asked(new.place, asked_values(arguments))
        if drawing is not None:
            drawing.write_figures(new.place / "figures", drawn)
        # Bounds and other draws alone may be missing.
        new.whole = len(results) == len(planned) and ended is None
    if ended is not None:
        tell_end(ended[0], new.home / ended[1])
    if not outputs.quiet:
        print("\n".join(comparison_lines(results, new.home, bounds, figures=drawing is not None)))
    _tell_taken(arguments, outputs, status)
    return status


def _other_draws(arguments: argparse.Namespace, scenario: "Scenario") -> AbstractContextManager[list[dict[str, Any]]]:
    """Of the traffic that policies are compared on; none where `--seeds` does not ask for them."""
    if arguments.seeds is None:
        return nullcontext([])
    from sim.study.over_draws import other_draws  # noqa: PLC0415 - numpy is slow to import

    return other_draws(asked_values(arguments), scenario, arguments.seeds)


def _over_draws(
    arguments: argparse.Namespace, results: list["Result"], others: list[dict[str, Any]], bounds: "Bounds | None"
) -> "Bounds":
    from sim.results.schema import Bounds  # noqa: PLC0415
    from sim.study.cli import progress  # noqa: PLC0415
    from sim.study.over_draws import over_draws  # noqa: PLC0415 - as above

    with progress("draws", bool(arguments.quiet)) as bar:
        found = over_draws(results, asked_values(arguments)["policy"], others, bar)
    return replace(bounds or Bounds(), draws=1 + len(others), over_draws=found)
