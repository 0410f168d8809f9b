"""Constants from measured servers, and what they predict: `kvtwin profile fit --bench` on two public sets of runs.

python validation/server_measured.py FOLDER [--only vllm019|distserve]    # says what is not there, and goes on

FOLDER has `vllm019-rtx4090` (vLLM 0.19 with Llama-3.1-8B: trace.csv, measured.csv; CASYS Lab, MIT licence) and
`distserve-opt13b-a100` (an early vLLM with OPT-13B: runs.csv; LLMServe/DistServe, Apache-2.0). The first is fitted to
the first half of its requests and predicts the second. The second is fitted to its run of 2 requests/s and predicts
the others. Nothing is chosen by hand: engine settings are those that come with the files, the rest is the default.
"""

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

from calib.server.constants import constants_of, with_constants
from calib.server.fit import ServerFit, errors_text, fit_server
from sim.options.policies import parse_policy
from sim.options.scenario import Scenario
from sim.run.prepare import Setup, prepare
from sim.run.served import mean_errors, measured_times, simulated_times
from traces.readers import open_trace
from traces.request import Request
from traces.served import ServedRun, read_served

FITTED_RUN = "vllm-200-2"


def vllm019(folder: Path) -> tuple[Setup, ServedRun]:
    """The run on an RTX 4090, with the engine arguments of its meta.json."""
    trace = folder / "trace.csv"
    scenario = Scenario(
        trace=str(trace), model="llama-3.1-8b", gpu="rtx-4090", num_gpu_blocks_override=2588, max_model_len=32_768,
        max_num_batched_tokens=2048, max_num_seqs=256,
    )  # fmt: skip
    served = read_served(folder / "measured.csv", list(open_trace(trace)))
    return prepare(scenario, *parse_policy("vllm-v1", {})), served


def distserve(folder: Path) -> Iterator[tuple[str, ServedRun]]:
    """The runs of vLLM on one A100 by name, in order of their rate."""
    rows: defaultdict[str, list[dict[str, str]]] = defaultdict(list)
    path = folder / "runs.csv"
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["run"].startswith("vllm-"):
                rows[row["run"]].append(row)
    for name in sorted(rows, key=lambda name: float(name.rpartition("-")[2])):
        found = sorted(rows[name], key=lambda row: float(row["issue_s"]))
        requests = [
            Request(i, float(row["issue_s"]), int(row["prompt_len"]), int(row["output_len"]))
            for i, row in enumerate(found)
        ]
        ttft_s, e2el_s = ([float(row[key]) / 1e3 for row in found] for key in ("ttft_ms", "latency_ms"))
        yield name, ServedRun(path, requests, ttft_s, e2el_s, [()] * len(requests), 0)


def opt13b() -> Setup:
    """OPT-13B on an A100, with the limits of DistServe's artefact and the 66,144 tokens of KV that its table gives."""
    scenario = Scenario(
        workload="fixed", model="opt-13b", gpu="a100-80g", max_model_len=2048, max_num_batched_tokens=16_384,
        max_num_seqs=1024, num_gpu_blocks_override=66_144 // 16,
    )  # fmt: skip
    return prepare(scenario, *parse_policy("vllm-recompute", {}))


def fitted(setup: Setup, served: ServedRun) -> ServerFit:
    """Fit, and print the constants."""
    start_s = perf_counter()
    found = fit_server(setup, served, name="fitted")
    print(f"{served.path.name}: {setup.label}, {found.method} ({perf_counter() - start_s:.0f} s)")
    for name, estimate in found.estimates.items():
        interval = f"{estimate.low:.4g} to {estimate.high:.4g}"
        if found.profile.constants[name].stderr is None:
            interval = "at a limit" if estimate.at_limit else "not told alone"
        print(f"  {name:<28}{estimate.value:>12.4g}   {interval}   was {constants_of(setup)[name].value:.4g}")
    for note in found.notes:
        print(f"  {note}")
    if found.untold:
        print(f"  not told: {', '.join(found.untold)}")
    print(f"  second half from the first: {errors_text(found.held_out)}; whole run: {errors_text(found.whole)}")
    return found


def main() -> None:
    """Fit both, and print what they predict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=("vllm019", "distserve"))
    parser.add_argument("--fit", default=FITTED_RUN, metavar="RUN", help="run of DistServe's to fit (%(default)s)")
    arguments = parser.parse_args()
    parts = {"vllm019": "vllm019-rtx4090", "distserve": "distserve-opt13b-a100"}
    for part, name in parts.items():
        folder = arguments.folder / name
        if arguments.only not in (None, part):
            continue
        if not folder.exists():
            print(f"{folder} is not there: nothing to compare with")
        elif part == "vllm019":
            fitted(*vllm019(folder))
        else:
            others(folder, arguments.fit)


def others(folder: Path, fit: str) -> None:
    """Fit one run, predict all."""
    runs, setup = dict(distserve(folder)), opt13b()
    found = fitted(setup, runs[fit])
    there = with_constants(setup, {name: estimate.value for name, estimate in found.estimates.items()})
    print(f"  {'run':<16}{'mean TTFT, ms':>30}{'mean TPOT, ms':>30}{'mean E2EL':>12}")
    for name, run in runs.items():
        ours, theirs = simulated_times(there, run), measured_times(run)
        errors = mean_errors(ours, theirs)
        text = f"  {name:<16}"
        pairs = zip(ours.by_name(), theirs.by_name(), strict=True)
        for (metric, here), (_, measured) in list(pairs)[:2]:
            text += f"{1e3 * measured.mean():>12,.1f} {1e3 * here.mean():>8,.1f} {100 * errors[metric]:>+6.1f} %"
        print(f"{text}{100 * errors['e2el']:>+10.1f} %")


if __name__ == "__main__":
    main()
