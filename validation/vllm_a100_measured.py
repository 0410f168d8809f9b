"""An early vLLM on A100 as measured and as simulated: OPT-13B, ShareGPT, request by request, with shipped constants.

python validation/vllm_a100_measured.py FOLDER    # with runs.csv; says so and ends where it is not there

`runs.csv` has runs that the authors of DistServe measured and published (LLMServe/DistServe, Apache-2.0); these are its
eight of vLLM, 1 to 4 requests/s. Every run's requests are replayed at the times at which they were issued. GPU, engine
and pool are those that any run of this model has here; nothing is fitted to these runs. `distserve_measured.py` prices
the same runs with DistServe's own fits. First the GPU's price is compared with the fit of that engine without a server.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from distserve_measured import FITS_MS, Measured, read, row

from sim.cost.engine_profile import OF_POLICY
from sim.cost.forms import build_cost
from sim.cost.profile import default_profile
from sim.options.policies import parse_policy
from sim.options.scenario import Scenario
from sim.run.prepare import prepare
from sim.run.simulate import build_run, execute
from sim.specs.hardware import load_hardware
from sim.specs.models import load_model

POLICY = "vllm-recompute"
MODEL, GPU = "opt-13b", "a100-80g"
PROMPTS = (256, 512, 770, 1024, 2000)
DECODES = [(batch, context) for batch in (1, 16, 64, 94) for context in (300, 700)]
"""Prompt tokens; sequences of a decode and each one's context, within what was fitted."""
TPOT_TARGET, TTFT_TARGET = 0.10, 0.25
SATURATED = 3.5
"""Requests/s from which TTFT is judged."""
KNEE_MS = 1_000.0
"""A run whose mean TTFT is longer than this does not keep up: below saturation it is under half of that."""


@dataclass(frozen=True)
class Compared:
    """Means of one run, measured and simulated, ms."""

    rate: float
    ttft_ms: tuple[float, float]
    tpot_ms: tuple[float, float]


def price_errors() -> tuple[list[float], list[float]]:
    """The GPU's price over the fit of vLLM without a server, less 1: of `PROMPTS` and of `DECODES`."""
    cost = build_cost(load_model(MODEL), load_hardware(GPU), default_profile(GPU), 1, 0.0)
    (p0, p1, p2), (d0, d1, d2) = FITS_MS["vllm-tp1"]
    prompts = [1e3 * cost.prefill_s(n) / (p0 + p1 * n + p2 * n * n) - 1 for n in PROMPTS]
    decodes = [1e3 * cost.decode_run(n, n * each)[0] / (d0 + d1 * n + d2 * n * each) - 1 for n, each in DECODES]
    return prompts, decodes


def scenario(blocks: int | None, engine: str | None = None) -> Scenario:
    """The deployment: batch limits of the authors' artefact; `blocks` of KV instead of sizing the pool."""
    return Scenario(
        workload="fixed",
        model=MODEL,
        gpu=GPU,
        engine_profile=engine or OF_POLICY,
        max_model_len=2048,
        max_num_batched_tokens=16_384,
        max_num_seqs=1024,
        num_gpu_blocks_override=blocks,
    )


def compare(measured: Measured, deployed: Scenario) -> tuple[str, Compared]:
    """Replay a run: its line of the table, and the means."""
    setup = prepare(deployed, POLICY, parse_policy(POLICY, {})[1])
    log = execute(build_run(setup, measured.requests)).log
    ttft_ms, tpot_ms = [s * 1e3 for s in log.ttft_s], [s * 1e3 for s in log.tpot_s]
    means = Compared(
        float(measured.name.rpartition("-")[2]),
        (fmean(measured.ttft_ms), fmean(ttft_ms)),
        (fmean(measured.tpot_ms), fmean(tpot_ms)),
    )
    return row(measured, ttft_ms, tpot_ms), means


def verdicts(found: list[Compared]) -> list[str]:
    """Each target, and whether it is met."""
    tpot = [here / there - 1 for there, here in (one.tpot_ms for one in found)]
    ttft = [one.ttft_ms[1] / one.ttft_ms[0] - 1 for one in found if one.rate >= SATURATED]
    knees = [min((one.rate for one in found if one.ttft_ms[i] > KNEE_MS), default=None) for i in (0, 1)]
    told = ["none" if knee is None else f"{knee:g}/s" for knee in knees]

    def verdict(errors: list[float], target: float) -> str:
        within = sum(abs(error) <= target for error in errors)
        span = f"{100 * min(errors):+.0f} to {100 * max(errors):+.0f} %"
        return f"{span}, {within} of {len(errors)} runs within {100 * target:.0f} %"

    return [
        f"mean TPOT: {verdict(tpot, TPOT_TARGET)}",
        f"mean TTFT at {SATURATED:g} requests/s and more: {verdict(ttft, TTFT_TARGET)}",
        f"first rate with a mean TTFT above {KNEE_MS / 1e3:g} s: measured {told[0]}, simulated {told[1]}",
    ]


def main() -> None:
    """Print every run's means and medians, measured and simulated, and the verdicts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num-gpu-blocks-override", type=int, metavar="N", help="KV blocks (default: sized)")
    parser.add_argument("--engine-profile", metavar="NAME|FILE", help="engine (default: the policy's)")
    arguments = parser.parse_args()
    for name, errors in zip(("prompts", "decodes"), price_errors(), strict=True):
        told = ", ".join(f"{100 * error:+.0f}" for error in errors)
        print(f"the GPU's price over the fit without a server, {name}: {told} %")
    path = arguments.folder / "runs.csv"
    if not path.exists():
        print(f"{path} is not there: nothing to compare with")
        return
    titles = "".join(f"  {name + ', ms':>19} {'':>8}" for name in ("mean TTFT", "mean TPOT", "median TPOT"))
    print(f"{'run':<30}{'1/s':>6}{titles}")
    found = []
    deployed = scenario(arguments.num_gpu_blocks_override, arguments.engine_profile)
    for measured in read(path):
        if measured.name.startswith("vllm"):
            text, means = compare(measured, deployed)
            found.append(means)
            print(text)
    print("\n".join(verdicts(found)))


if __name__ == "__main__":
    main()
