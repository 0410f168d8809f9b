"""DistServe as measured and as simulated: OPT-13B on A100-80G, ShareGPT, request by request.

python validation/distserve_measured.py FOLDER    # with runs.csv; says so and ends where it is not there

`runs.csv` (run, issue_s, prompt_len, output_len, ttft_ms, tpot_ms, latency_ms) has runs that the authors of DistServe
measured and published with their code (LLMServe/DistServe, Apache-2.0). Every run's requests are replayed at the times
at which they were issued. Times of iterations are DistServe's own fits for that machine, from the same repository, and
the factors that its authors put on them for serving; we fitted nothing to these runs. What the runs do not say is
assumed in `PLACEMENTS` and `scenario`.
"""

import argparse
import csv
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory

from sim.cost.forms import LinearCost
from sim.options.policies import parse_policy
from sim.options.scenario import Scenario
from sim.run.prepare import Setup, prepare
from sim.run.simulate import build_run, execute
from traces.request import Request

FITS_MS = {
    "distserve-tp1": ((16.45686043, 0.09264750661, 6.474785740e-6), (19.93470262, 0.03850697741, 6.269356524e-4)),
    "distserve-tp2": ((13.40270336, 0.06234291582, 2.226884309e-6), (13.29479635, 0.06296393225, 3.410921970e-4)),
    "vllm-tp1": ((15.75157485, 0.1003637419, 5.768989159e-6), (19.56253417, 0.05060571772, 4.941120551e-4)),
}
"""Prefill a + b tokens + c sum(len^2); decode of batches under 95: a + b sequences + c context tokens; ms.

Fitted to engines without a server, equal requests, as first published (commit 3261c76, April 2024).
"""
FACTORS = {"distserve-tp1": (1.1, 1.0), "distserve-tp2": (1.1, 1.0), "vllm-tp1": (1.4, 1.2)}
"""By how much serving is slower, prefill and decode, in the authors' simulator: Ray and what else a step takes.

Set by hand to align it with served runs; since commit 4c68ed9 (May 2024) the published constants contain them.
"""
OVERHEAD_MS = (2.0, 1e-4)
"""What DistServe's simulator adds to every iteration for Ray: so much, and so much for a token of context."""
KV_BLOCKS = {1: 66_144 // 16, 2: 163_008 // 16}
"""Blocks of an engine by its GPUs, one pipeline stage or two, from DistServe's table of the tokens that fit."""
SWAP_S_PER_BLOCK = 16 * 819_200 / 25e9
"""A block of 16 tokens over PCIe at 25 GB/s; nothing swaps below saturation."""
NVLINK_GBPS = 2400.0
"""A100 SXM: 600 GB/s over all links, half of it in each direction."""
PLACEMENTS = {"distserve-400-4": 2, "distserve-800-8": 2, "distserve-c21d12": 2}
"""Pipeline stages of the decode engine, 1 of all others, one GPU each; the prefill engine has two GPUs.

What a run's name does not say (`distserve-300-3`) is inferred: with one request/s a TTFT of 93 ms is that of
two GPUs (one takes 120 ms for the prompts alone), and all of these runs go with c21d11 at their rate, but for two that
go with c21d12.
"""
SLO_MS = (250.0, 100.0)
"""DistServe's TTFT and TPOT for this model. A run whose measured means keep both is below saturation."""
CLOSE = 0.15
LEAST_TOKENS = 2
"""Output tokens of a request that has a TPOT."""


@dataclass(frozen=True)
class Measured:
    """A run: its requests and what each took."""

    name: str
    requests: list[Request]
    ttft_ms: list[float]
    tpot_ms: list[float]

    @property
    def rate(self) -> float:
        """Requests/s."""
        return (len(self.requests) - 1) / self.requests[-1].arrival_s


def read(path: Path) -> Iterator[Measured]:
    """The runs of a file."""
    found: defaultdict[str, list[dict[str, str]]] = defaultdict(list)
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found[row["run"]].append(row)
    for name, rows in found.items():
        rows.sort(key=lambda row: float(row["issue_s"]))
        requests = [
            Request(i, float(row["issue_s"]), int(row["prompt_len"]), int(row["output_len"]))
            for i, row in enumerate(rows)
        ]
        tpot_ms = [float(row["tpot_ms"]) for row in rows if int(row["output_len"]) >= LEAST_TOKENS]
        yield Measured(name, requests, [float(row["ttft_ms"]) for row in rows], tpot_ms)


def write_profiles(folder: Path, factors: dict[str, tuple[float, float]]) -> dict[str, str]:
    """The fits, times the factors, as profiles of form `linear`; path by name."""
    paths = {}
    fixed, per_token = OVERHEAD_MS
    for name, fits in FITS_MS.items():
        (p0, p1, p2), (d0, d1, d2) = ([f * ms for ms in fit] for f, fit in zip(factors[name], fits, strict=True))
        path = folder / f"{name}.json"
        found = {"prefill": (p0 + fixed, p1 + per_token, p2), "decode": (d0 + fixed, d1, d2 + per_token)}
        values = {part: [ms / 1e3 for ms in constants] for part, constants in found.items()}
        path.write_text(json.dumps({"form": "linear", "swap_s_per_block": SWAP_S_PER_BLOCK, **values}))
        paths[name] = str(path)
    return paths


def scenario(name: str, profiles: dict[str, str]) -> tuple[str, Scenario]:
    """Policy and deployment of a run."""
    base = Scenario(
        workload="fixed", model="opt-13b", gpu="a100-80g", max_model_len=2048, max_num_batched_tokens=16_384
    )
    if name.startswith("vllm"):
        return "vllm-recompute", replace(base, profile=profiles["vllm-tp1"])
    stages = next((found for key, found in PLACEMENTS.items() if name.startswith(key)), 1)
    pools = replace(
        base,
        prefill_replicas=1,
        decode_replicas=1,
        decode_pipeline_parallel_size=stages,
        link_gbps=NVLINK_GBPS,
        prefill_tp=2,
        decode_tp=1,
        prefill_profile=profiles["distserve-tp2"],
        decode_profile=profiles["distserve-tp1"],
    )
    return "distserve", pools


def main() -> None:
    """Print every run's means and medians, measured and simulated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fits-alone", action="store_true", help="without the authors' factors for serving")
    arguments = parser.parse_args()
    factors = dict.fromkeys(FITS_MS, (1.0, 1.0)) if arguments.fits_alone else FACTORS
    path = arguments.folder / "runs.csv"
    if not path.exists():
        print(f"{path} is not there: nothing to compare with")
        return
    errors: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    titles = "".join(f"  {name + ', ms':>19} {'':>8}" for name in ("mean TTFT", "mean TPOT", "median TPOT"))
    print(f"{'run':<30}{'1/s':>6}{titles}")
    with TemporaryDirectory() as folder:
        profiles = write_profiles(Path(folder), factors)
        for measured in read(path):
            policy, deployed = scenario(measured.name, profiles)
            setup = with_blocks(prepare(deployed, policy, parse_policy(policy, {})[1]))
            log = execute(build_run(setup, measured.requests)).log
            ttft_ms, tpot_ms = [s * 1e3 for s in log.ttft_s], [s * 1e3 for s in log.tpot_s]
            print(row(measured, ttft_ms, tpot_ms))
            if fmean(measured.ttft_ms) <= SLO_MS[0] and fmean(measured.tpot_ms) <= SLO_MS[1]:
                stages = deployed.decode_pipeline_parallel_size
                engines = f"{policy}, {stages} pipeline stages for decodes" if stages else policy
                errors[engines].append(
                    (fmean(ttft_ms) / fmean(measured.ttft_ms) - 1, fmean(tpot_ms) / fmean(measured.tpot_ms) - 1)
                )
    for engines, found in errors.items():
        for name, of in (("TTFT", [ttft for ttft, _ in found]), ("TPOT", [tpot for _, tpot in found])):
            close = sum(abs(error) <= CLOSE for error in of)
            print(
                f"{engines}, below saturation: mean {name} {100 * min(of):+.0f} to {100 * max(of):+.0f} %, "
                f"{close} of {len(of)} runs within {100 * CLOSE:.0f} %"
            )


def with_blocks(setup: Setup) -> Setup:
    """The engines with the blocks and the host's part of an iteration that DistServe's have."""
    decode = None if setup.decode is None else with_blocks(setup.decode)
    blocks = KV_BLOCKS[setup.tp * setup.pp] // setup.pp
    assert isinstance(setup.cost, LinearCost)
    if setup.scenario.prefill_replicas:
        setup.cost.prelude_base_s, setup.cost.prelude_s_per_token = (ms / 1e3 for ms in OVERHEAD_MS)
    return replace(setup, limits=replace(setup.limits, num_gpu_blocks=blocks), decode=decode)


def row(measured: Measured, ttft_ms: list[float], tpot_ms: list[float]) -> str:
    """A line of the table: measured, simulated, and how far apart."""
    text = f"{measured.name:<30}{measured.rate:>6.2f}"
    for there, here in (
        (fmean(measured.ttft_ms), fmean(ttft_ms)),
        (fmean(measured.tpot_ms), fmean(tpot_ms)),
        (median(measured.tpot_ms), median(tpot_ms)),
    ):
        text += f"  {there:>9,.1f} {here:>9,.1f} {100 * (here / there - 1):>+6.0f} %"
    return text


if __name__ == "__main__":
    main()
