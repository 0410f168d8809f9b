"""`adaptive` against other presets and the certified bound, cell by cell: writes a CSV, a row a run.

    python benchmarks/adaptive_cells.py --out docs/adaptive-cells.csv [--num-prompts 6000] [--quick]

A cell is a model, a GPU, a trace, a load and a PCIe link. Goodput under TTFT 3 s and TPOT 200 ms.
"""

import argparse
import csv
import io
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET
from rich.progress import track

from sim.bounds.goodput import goodput_bound
from sim.cost.forms import build_cost
from sim.files import write_atomically
from sim.policy_options import parse_policy
from sim.results.metrics import Goodput
from sim.results.result import assemble
from sim.scenario import Scenario
from sim.simulate import Setup, build_run, execute, prepare
from sim.traffic import traffic

GOODPUT = ("ttft:3000", "tpot:200")
PREDICTORS = ("adaptive", "adaptive:predictor=oracle", "adaptive:predictor=none")
OTHERS = ("vllm-v1", "layerkv:predictor=bucket", "sarathi")
TRAFFIC = (
    ("llama-2-7b", "l20", "sharegpt", (4.2, 5.0, 8.0)),
    ("llama-2-7b", "l20", "azure-conv-2023", (2.1, 2.5)),
    ("llama-3.1-8b", "a100-80g", "azure-conv-2023", (8.0, 9.5, 13.0)),
)
LINKS_GBPS = (1.6, 50.0)
"""GB/s in each direction, instead of the profile's."""
LONGEST = 0.05


class Cell(NamedTuple):
    """One run."""

    model: str
    gpu: str
    trace: str
    request_rate: float
    link_gb_per_s: float | None
    policy: str


def cells(*, quick: bool) -> list[Cell]:
    """All of them; `quick`: other links at the highest load alone."""
    found = []
    for model, gpu, trace, rates in TRAFFIC:
        for rate in rates:
            found += [Cell(model, gpu, trace, rate, None, policy) for policy in (*PREDICTORS, *OTHERS)]
            if not quick or rate == rates[-1]:
                found += [
                    Cell(model, gpu, trace, rate, link, policy)
                    for link in LINKS_GBPS
                    for policy in ("adaptive", *OTHERS[: 2 if quick else None])
                ]
    return found


def with_link(setup: Setup, bytes_per_s: float) -> Setup:
    """The same machine with another PCIe link."""
    known = setup.profile.constants
    link = {
        name: msgspec.structs.replace(known[name], value=bytes_per_s) for name in ("d2h_bytes_per_s", "h2d_bytes_per_s")
    }
    profile = msgspec.structs.replace(setup.profile, constants=known | link)
    cost = build_cost(
        setup.model, setup.hardware, profile, setup.tp, setup.limits.block_bytes, None, setup.engine_profile
    )
    return replace(setup, profile=profile, cost=cost)


def row(cell: Cell, num_prompts: int) -> dict[str, object]:
    """Simulate one cell."""
    scenario = Scenario(
        workload=cell.trace, num_prompts=num_prompts, request_rate=cell.request_rate, seed=1, model=cell.model,
        gpu=cell.gpu, goodput=GOODPUT,
    )  # fmt: skip
    requests = list(traffic(scenario))
    setup = prepare(scenario, *parse_policy(cell.policy, {}))
    if cell.link_gb_per_s is not None:
        setup = with_link(setup, cell.link_gb_per_s * 1e9)
    slo = Goodput.parse(list(GOODPUT))
    bound = goodput_bound(requests, setup.limits, setup.cost, slo)
    result = assemble(execute(build_run(setup, requests)))
    assert bound is not None and result.ttfts is not UNSET and result.latencies is not UNSET
    assert result.output_lens is not UNSET
    goodput, ttfts, outputs = result.request_goodput or 0.0, np.array(result.ttfts), np.array(result.output_lens)
    tpots = (np.array(result.latencies) - ttfts) / np.maximum(1, outputs - 1)
    good = (ttfts <= (slo.ttft_s or 0.0)) & (tpots <= (slo.tpot_s or 0.0)) & (outputs > 0)
    longest = np.argsort(outputs, kind="stable")[-max(1, int(LONGEST * len(outputs))) :]
    return cell._asdict() | {
        "num_prompts": num_prompts,
        "goodput": round(goodput, 4),
        "bound": round(bound.goodput, 4),
        "share_of_bound": round(goodput / bound.goodput, 4),
        "attainment": round(result.goodput_attainment or 0.0, 4),
        "attainment_of_longest_5_percent": round(float(good[longest].mean()), 4),
        "p99_ttft_s": round((result.p99_ttft_ms or 0.0) / 1e3, 3),
        "p99_tpot_ms": round(result.p99_tpot_ms or 0.0, 1),
        "preemptions": result.num_preemptions,
    }


def main() -> None:
    """Run all cells on the machine's processors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=6000)
    parser.add_argument("--quick", action="store_true", help="other links at the highest load alone")
    arguments = parser.parse_args()
    asked = cells(quick=arguments.quick)
    rows: dict[int, dict[str, object]] = {}
    with ProcessPoolExecutor() as pool:
        futures = {pool.submit(row, cell, arguments.num_prompts): i for i, cell in enumerate(asked)}
        for future in track(as_completed(futures), description="cells", total=len(asked)):
            rows[futures[future]] = future.result()
            write(arguments.out, [rows[i] for i in sorted(rows)])


def write(path: Path, rows: list[dict[str, object]]) -> None:
    """The table so far."""
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    write_atomically(path, lambda file: file.write(text.getvalue().encode()))


if __name__ == "__main__":
    main()
