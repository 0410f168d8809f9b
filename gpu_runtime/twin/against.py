"""`kvtwin validate --against`: a simulation beside what a server's client measured of the same requests."""

import argparse
from array import array
from pathlib import Path

import msgspec
import numpy as np

from sim.files import folder_name, write_atomically
from sim.options.flags import read_options
from sim.results.metrics import summary
from sim.results.report import METRICS
from sim.results.schema import Result
from sim.run.files import draw_result, print_result, record, simulator
from sim.run.folders import renewing
from sim.run.prepare import Setup, prepare
from sim.run.served import Times, as_served, measured_times, read_run, times_in
from sim.systems import DEFAULT_POLICY
from traces.served import ServedRun

WORST = 10
"""Requests that are listed."""
ROWS = {metric.key: metric for metric in METRICS}
STATISTICS = ("mean", "median", "p99")


class Compared(msgspec.Struct, frozen=True):
    """One metric; the ratio is simulated over measured, None where that is no number."""

    metric: str
    """Name in `result.json`; ITL only where the client saw every token."""
    simulated: float | None
    """Value of the simulation. None: it has none."""
    measured: float
    """Value from the client's times; rates are from the first arrival to the last token."""
    ratio: float | None
    """Simulated over measured. None: either is missing or 0."""


class WorstRequest(msgspec.Struct, frozen=True):
    """A request whose times are far apart: its place in order of arrival, what it is, and both runs' times, s."""

    request_id: int
    """Place in the order of arrival, from 0."""
    arrival_s: float
    """After the first arrival, s."""
    prompt_tokens: int
    """Prompt tokens."""
    output_tokens: int
    """Output tokens."""
    metric: str
    """Which of `ttft`, `tpot` and `e2el` is furthest apart."""
    simulated_s: float
    """That, simulated, s."""
    measured_s: float
    """That, measured, s."""
    ratio: float
    """Simulated over measured."""


class Against(msgspec.Struct, frozen=True):
    """What `against.json` says of one policy: the metrics, and the requests that are furthest apart."""

    policy: str
    """Its label."""
    scheduling: str
    """Of the simulation: `async scheduling` or `serial scheduling`."""
    profile: str
    """Name of the constants that priced the simulation."""
    measured: str
    """Name of the file that the client wrote."""
    num_prompts: int
    """Requests compared: those that the server answered."""
    failed_requests: int
    """Those that it did not."""
    metrics: list[Compared]
    """Each metric, below."""
    worst: list[WorstRequest]
    """The ten requests that are furthest apart, below."""


def validate_against(arguments: argparse.Namespace, path: Path) -> int:
    """Simulate each policy, print and write the comparison; the exit status is 0 whatever it says."""
    from gpu_runtime.twin.against_figure import draw_against  # noqa: PLC0415 - matplotlib is slow to import
    from sim.results.figures.style import save_figure  # noqa: PLC0415

    if arguments.trace is None:
        arguments.trace = str(path)
    scenario, policies, folder, outputs = read_options(arguments, DEFAULT_POLICY)
    served = read_run(path, scenario)
    setups = [prepare(as_served(scenario), label, policy) for label, policy in policies]
    parts = []
    ended = None
    with renewing(folder, below=[folder_name(setup.label) for setup in setups]) as new:
        for setup in setups:
            place = new.place / folder_name(setup.label)
            run, result = record(setup, place, outputs, simulator(outputs), requests=served.requests)
            if run.interrupted or run.error:
                draw_result(run, result, place, outputs)
                ended, new.whole = (run, result, folder_name(setup.label)), False
                break
            simulated, measured = times_in(run.log, served), measured_times(served)
            found = compare(result, setup, served, simulated, measured)
            data = msgspec.json.format(msgspec.json.encode(found), indent=2)
            write_atomically(place / "against.json", data + b"\n")
            save_figure(place / "against.png", draw_against(setup.label, served, simulated, measured))
            parts.append(markdown(found))
            text = "# Simulated and measured\n\n" + "\n".join(parts)
            write_atomically(new.place / "validation.md", text.encode())
    if ended is not None:
        return print_result(ended[0], ended[1], new.home / ended[2], outputs)
    if not outputs.quiet:
        print("\n".join(parts))
        print(f"wrote {new.home / 'validation.md'}, and against.json and against.png for each policy")
    return 0


def compare(result: Result, setup: Setup, served: ServedRun, simulated: Times, measured: Times) -> Against:
    """Every metric that the client measured, simulated beside it, and the requests that are furthest apart."""
    rows = []
    for metric, theirs in measured_metrics(served, measured).items():
        ours: float | None = getattr(result, metric)
        ratio = ours / theirs if ours is not None and theirs else None
        rows.append(Compared(metric, ours, theirs, ratio))
    return Against(
        setup.label,
        setup.policy.scheduling,
        result.profile.name,
        served.path.name,
        len(served.requests),
        served.left_out,
        rows,
        worst(served, simulated, measured),
    )


def measured_metrics(served: ServedRun, measured: Times) -> dict[str, float]:
    """The metrics of a run by the names of `vllm bench serve`: ms, and rates from first arrival to last token."""
    found: dict[str, float] = {}
    latencies = dict(measured.by_name())
    if served.has_token_times:
        latencies["itl"] = np.array([gap for own in served.gaps_s for gap in own])
    for name in ("ttft", "tpot", "itl", "e2el"):
        values = latencies.get(name)
        if values is not None and values.size:
            known = summary(array("d", values), name)
            found |= {key: value for s in STATISTICS if (value := known[key := f"{s}_{name}_ms"]) is not None}
    arrivals_s = np.array([request.arrival_s for request in served.requests])
    duration_s = float(np.max(arrivals_s + measured.e2el_s))
    tokens = sum(request.output_tokens for request in served.requests)
    rates = {
        "request_throughput": len(served.requests) / duration_s,
        "output_throughput": tokens / duration_s,
        "duration": duration_s,
    }
    return found | rates


def worst(served: ServedRun, simulated: Times, measured: Times) -> list[WorstRequest]:
    """The requests whose TTFT, TPOT or latency is off by the largest factor, worst first."""
    found = []
    names = ("ttft", "tpot", "e2el")
    pairs = [(getattr(simulated, f"{n}_s"), getattr(measured, f"{n}_s")) for n in names]
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = np.nan_to_num(np.array([np.abs(np.log(ours / theirs)) for ours, theirs in pairs]), nan=0.0)
    for i in np.argsort(-factors.max(axis=0), kind="stable")[:WORST]:
        k = int(factors[:, i].argmax())
        ours, theirs = float(pairs[k][0][i]), float(pairs[k][1][i])
        request = served.requests[i]
        what = request.request_id, request.arrival_s, request.prompt_tokens, request.output_tokens
        found.append(WorstRequest(*what, names[k], ours, theirs, ours / theirs if theirs else float("inf")))
    return found


def markdown(found: Against) -> str:
    """One policy's comparison as tables."""
    failed = f"; {found.failed_requests} that failed are left out" if found.failed_requests else ""
    lines = [
        f"## {found.policy}",
        "",
        f"{found.num_prompts} requests of {found.measured}{failed}. Constants: {found.profile}; {found.scheduling}.",
        "",
        "| metric | simulated | measured | simulated / measured |",
        "|---|--:|--:|--:|",
        *(
            f"| {(named := ROWS[row.metric]).name} | {named.text(row.simulated)} | {named.text(row.measured)} | "
            f"{'-' if row.ratio is None else f'{row.ratio:.3f}'} |"
            for row in found.metrics
        ),
        "",
        "Requests furthest apart:",
        "",
        "| request | arrival, s | prompt | output | metric | simulated, s | measured, s | ratio |",
        "|--:|--:|--:|--:|---|--:|--:|--:|",
        *(
            f"| {w.request_id} | {w.arrival_s:.3f} | {w.prompt_tokens} | {w.output_tokens} | {w.metric.upper()} | "
            f"{w.simulated_s:.4g} | {w.measured_s:.4g} | {w.ratio:.3f} |"
            for w in found.worst
        ),
    ]
    return "\n".join(lines) + "\n"
