"""`adaptive` against the other presets and the certified bound, cell by cell: a CSV, a row a run, and a table of it.

    python validation/adaptive_cells.py --out adaptive-cells.csv [--num-prompts 6000] [--workers 1]
    python validation/adaptive_cells.py --bounds-only adaptive-cells.csv
    python validation/adaptive_cells.py --table adaptive-cells.csv

A cell is a model, a GPU, a trace, a load, a PCIe link, a seed and two SLOs, TTFT and TPOT. On other links only policies
that copy run; the others have the goodput of the profile's own link. Uniform lengths are on slow links alone; with the
second seed `adaptive` and vLLM run. Engines are as they are by default. What --out has already is not run again.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET
from resumed import read, run_missing, write
from rich.progress import track

from sim.bounds.goodput import goodput_bound
from sim.options.policies import parse_policy
from sim.options.scenario import Scenario
from sim.results.goodput import Goodput
from sim.results.result import Result, assemble
from sim.run.prepare import Setup, prepare
from sim.run.simulate import build_run, execute
from sim.run.traffic import traffic

SLOS_MS = ((3000, 200), (1000, 50))
"""TTFT and TPOT. Under the second, chat runs on the profiles' own links."""
OURS = ("adaptive", "adaptive:predictor=oracle", "adaptive:predictor=none")
COPYING = ("layerkv:predictor=bucket", "fastserve", "vllm-swap", "cachedattention", "pensieve", "hcache")
OTHERS = ("vllm-v1", "sarathi", "vllm-recompute", "fastgen", "radix", "orca", *COPYING)
"""All presets of one engine but `ellm` and `kvpr`, which are slow to run and far behind, and those that need shared
prefixes to differ."""
TRAFFIC = (
    ("llama-2-7b", "l20", "sharegpt", (4.2, 5.0, 8.0)),
    ("llama-2-7b", "l20", "azure-conv-2023", (1.8, 2.1, 2.5)),
    ("llama-3.1-8b", "a100-80g", "azure-conv-2023", (8.0, 9.5, 13.0)),
    ("llama-3.1-8b", "a100-80g", "sharegpt", (14.0, 18.0, 25.0)),
)
"""Below, at and past the knee."""
LINKS_GB_PER_S = (None, 1.6, 50.0, 1000.0)
"""In each direction; None: the profile's. The last is as good as none: what no choice between copying and computing
again can beat."""
UNIFORM = (
    ("llama-2-7b", "l20", "uniform 3000 600", (0.7, 1.0, 1.5)),
    ("llama-3.1-8b", "l20", "uniform 8000 400", (0.35, 0.8)),
    ("llama-2-13b", "a100-80g", "uniform 1500 1500", (0.8, 1.5)),
    ("qwen3-14b", "a100-80g", "uniform 4000 1000", (1.0, 2.0)),
)
"""With the means of prompt and answer; both are within 50 % of them."""
UNIFORM_LINKS_GB_PER_S = (1.6, 8.0)
SEEDS = (1, 2)
LONGEST = 0.05


class Cell(NamedTuple):
    """What all runs of a cell share."""

    model: str
    gpu: str
    trace: str
    request_rate: float
    link_gb_per_s: float | None
    seed: int
    ttft_slo_ms: int = SLOS_MS[0][0]
    tpot_slo_ms: int = SLOS_MS[0][1]

    @property
    def goodput(self) -> tuple[str, str]:
        """Its SLOs, as `--goodput` takes them."""
        return f"ttft:{self.ttft_slo_ms}", f"tpot:{self.tpot_slo_ms}"


def cells() -> list[Cell]:
    """All of them, the profiles' own links first."""
    chat, uniform = (
        [(model, gpu, trace, rate) for model, gpu, trace, rates in loads for rate in rates]
        for loads in (TRAFFIC, UNIFORM)
    )
    found = [Cell(*load, link, SEEDS[0]) for link in LINKS_GB_PER_S for load in chat]
    found += [Cell(*load, link, SEEDS[0]) for link in UNIFORM_LINKS_GB_PER_S for load in uniform]
    found += [Cell(*load, None, SEEDS[0], *SLOS_MS[1]) for load in chat]
    return found + [Cell(*load, None, SEEDS[1]) for load in chat]


def policies(cell: Cell) -> tuple[str, ...]:
    """Those that run in a cell."""
    if cell.seed != SEEDS[0]:
        return OURS[0], "vllm-v1"
    if (cell.ttft_slo_ms, cell.tpot_slo_ms) != SLOS_MS[0]:
        return OURS[0], "vllm-v1", "sarathi", "layerkv:predictor=bucket", "fastserve"
    if cell.trace.startswith("uniform"):
        return *OURS[:2], "vllm-v1", "layerkv:predictor=bucket", "vllm-swap"
    if cell.link_gb_per_s is None:
        return OURS + OTHERS
    return OURS[:1] if cell.link_gb_per_s == LINKS_GB_PER_S[-1] else (OURS[0], *COPYING[:3])


def with_link(setup: Setup, bytes_per_s: float) -> Setup:
    """The same machine with another PCIe link."""
    known = setup.profile.constants
    link = {
        name: msgspec.structs.replace(known[name], value=bytes_per_s) for name in ("d2h_bytes_per_s", "h2d_bytes_per_s")
    }
    profile = msgspec.structs.replace(setup.profile, constants=known | link)
    return setup.priced(profile, setup.engine_profile)


def scenario_of(cell: Cell, num_prompts: int) -> Scenario:
    """Its traffic and machine, but for the link."""
    workload, *lengths = cell.trace.split()
    input_len, output_len = map(int, lengths) if lengths else (None, None)
    return Scenario(
        workload=workload, num_prompts=num_prompts, request_rate=cell.request_rate, seed=cell.seed, model=cell.model,
        gpu=cell.gpu, goodput=cell.goodput, input_len=input_len, output_len=output_len,
    )  # fmt: skip


def setup_of(cell: Cell, scenario: Scenario, policy: str) -> Setup:
    """One policy on its machine, told of the SLOs if it asks for them."""
    label, built = parse_policy(policy, {})
    told = {f.name: float(getattr(cell, f.name)) for f in fields(built) if f.name in ("ttft_slo_ms", "tpot_slo_ms")}
    setup = prepare(scenario, label, replace(built, **told))
    return setup if cell.link_gb_per_s is None else with_link(setup, cell.link_gb_per_s * 1e9)


def rows(num_prompts: int, cell: Cell, wanted: Sequence[str]) -> list[dict[str, object]]:
    """Simulate those policies of a cell; the bound is that of `adaptive`'s engine."""
    scenario = scenario_of(cell, num_prompts)
    requests = list(traffic(scenario))
    slo = Goodput.parse(cell.goodput)
    found = []
    for policy in wanted:
        run = build_run(setup_of(cell, scenario, policy), requests)
        measured = figures(assemble(execute(run)), slo, bound_of(cell, num_prompts))
        found.append(cell._asdict() | {"policy": policy, "num_prompts": scenario.num_prompts} | measured)
    return found


def cell_of(row: Mapping[str, str]) -> Cell:
    """Whose row it is."""
    link = float(row["link_gb_per_s"]) if row["link_gb_per_s"] else None
    slos = int(row["ttft_slo_ms"]), int(row["tpot_slo_ms"])
    return Cell(row["model"], row["gpu"], row["trace"], float(row["request_rate"]), link, int(row["seed"]), *slos)


def with_bound(row: dict[str, str]) -> dict[str, str]:
    """A row of an earlier run with today's bound."""
    cell = cell_of(row)
    bound = bound_of(cell, int(row["num_prompts"]))
    return row | {"bound": str(round(bound, 4)), "share_of_bound": str(round(float(row["goodput"]) / bound, 4))}


@cache
def bound_of(cell: Cell, num_prompts: int) -> float:
    """Of `adaptive`'s engine, good requests a second."""
    scenario = scenario_of(cell, num_prompts)
    setup = setup_of(cell, scenario, OURS[0])
    bound = goodput_bound(list(traffic(scenario)), setup.limits, setup.cost, Goodput.parse(cell.goodput))
    assert bound is not None
    return bound.goodput


def figures(result: Result, slo: Goodput, bound: float) -> dict[str, object]:
    """What is told of a run."""
    assert result.ttfts is not UNSET and result.latencies is not UNSET and result.output_lens is not UNSET
    goodput, ttfts, outputs = result.request_goodput or 0.0, np.array(result.ttfts), np.array(result.output_lens)
    tpots = (np.array(result.latencies) - ttfts) / np.maximum(1, outputs - 1)
    good = (ttfts <= (slo.ttft_s or 0.0)) & (tpots <= (slo.tpot_s or 0.0)) & (outputs > 0)
    longest = np.argsort(outputs, kind="stable")[-max(1, int(LONGEST * len(outputs))) :]
    return {
        "goodput": round(goodput, 4),
        "bound": round(bound, 4),
        "share_of_bound": round(goodput / bound, 4),
        "attainment": round(result.goodput_attainment or 0.0, 4),
        "attainment_of_longest_5_percent": round(float(good[longest].mean()), 4),
        "p99_ttft_s": round((result.p99_ttft_ms or 0.0) / 1e3, 3),
        "p99_tpot_ms": round(result.p99_tpot_ms or 0.0, 1),
        "preemptions": result.num_preemptions,
    }


def main() -> None:
    """Run all cells, or make a table of those that ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="CSV to write")
    what.add_argument("--bounds-only", type=Path, help="CSV whose bounds are to be found anew")
    what.add_argument("--table", type=Path, help="CSV to print as Markdown")
    parser.add_argument("--num-prompts", type=int, default=6000)
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.table:
        print(markdown(read(arguments.table)))
        return
    if arguments.bounds_only:
        old = read(arguments.bounds_only)
        write(arguments.bounds_only, [with_bound(row) for row in track(old, description="bounds")])
        return
    run_missing(
        arguments.out,
        {cell: policies(cell) for cell in cells()},
        lambda row: (cell_of(row), row["policy"]),
        partial(rows, arguments.num_prompts),
        arguments.workers,
    )


def markdown(rows: list[dict[str, str]]) -> str:
    """A line a load: over the profiles' own links, of uniform lengths over slow ones, and under tighter SLOs."""
    tables: dict[tuple[str, str], dict[tuple[str, ...], dict[str, dict[str, str]]]] = {}
    for row in rows:
        link, slos = row["link_gb_per_s"], f"TTFT {row['ttft_slo_ms']} ms, TPOT {row['tpot_slo_ms']} ms"
        uniform = row["trace"].startswith("uniform")
        if row["seed"] == str(SEEDS[0]) and bool(link) == uniform:
            load = row["model"], row["gpu"], row["trace"], f"{float(row['request_rate']):g}/s"
            table = tables.setdefault((slos, f"{link} GB/s" if link else "the profiles' links"), {})
            table.setdefault(load, {})[row["policy"]] = row
    return "\n\n".join(f"{', '.join(title)}\n\n{_table(loads)}" for title, loads in tables.items())


def _table(loads: Mapping[tuple[str, ...], Mapping[str, Mapping[str, str]]]) -> str:
    lines = [
        "| cell | bound (1/s) | bucket | known | none | best other | SLOs met | of the longest 5% | P99 TTFT (s) |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for load, found in loads.items():
        ours = found[OURS[0]]
        best = max((found[name] for name in OTHERS if name in found), key=lambda run: float(run["goodput"]))
        values = [", ".join(load), f"{float(ours['bound']):.2f}"]
        values += [f"{float(found[name]['share_of_bound']):.0%}" if name in found else "" for name in OURS]
        values += [f"{float(best['share_of_bound']):.0%} (`{best['policy'].partition(':')[0]}`)"]
        values += [f"{float(ours[name]):.0%}" for name in ("attainment", "attainment_of_longest_5_percent")]
        lines.append(f"| {' | '.join(values)} | {float(ours['p99_ttft_s']):.1f} |")
    return "\n".join(lines).replace("%", " %")


if __name__ == "__main__":
    main()
