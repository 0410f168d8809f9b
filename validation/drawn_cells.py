"""`adaptive` on cells that are drawn, not chosen: does goodput fall as load rises, and how near is it to the bound?

    python validation/drawn_cells.py --out docs/drawn-cells.csv --seeds 1000 1200   # goes on where it was stopped
    python validation/drawn_cells.py --table docs/drawn-cells.csv

A seed draws a cell: model and GPU, lengths, burstiness, sessions, SLOs from tight to loose. Its knee is the rate whose
requests take, by price, as long as they are apart; `adaptive` runs at `LADDER` times that. At one of these loads, drawn
as well, run others, the certified bound is found (good requests of all that arrive), and `adaptive` runs with prices
that are wrong behind its back: told that the GPU is slower or faster than it is. Rates are good requests over the time
in which requests arrive.
"""

import argparse
import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
import simpy
from rich.progress import track

from sim.bounds.goodput import goodput_bound
from sim.clock.instance import Instance
from sim.errors import UserError
from sim.files import write_atomically
from sim.options.policies import parse_policy
from sim.options.scenario import Scenario
from sim.results.metrics import Goodput
from sim.results.result import assemble
from sim.run.prepare import Setup, prepare
from sim.run.runs import build_engines
from sim.run.simulate import NOTHING, SimulatedRun, execute_all
from sim.run.traffic import arrivals_of, traffic
from sim.systems.adaptive.request_price import RequestPrice
from traces.request import Request

MACHINES = (
    ("llama-2-7b", "l20", 1), ("llama-3.1-8b", "l20", 1), ("qwen2.5-7b", "l20", 1), ("llama-3.1-8b", "l40s", 1),
    ("qwen3-8b", "rtx-4090", 1), ("mistral-7b-v0.1", "a100-40g", 1), ("llama-3.1-8b", "a100-80g", 1),
    ("llama-2-13b", "a100-80g", 1), ("qwen3-14b", "a100-80g", 1), ("llama-3.1-8b", "h100", 1), ("qwen3-14b", "h100", 1),
    ("qwen3-32b", "h200", 1), ("llama-3.1-70b", "h100", 4),
)  # fmt: skip
"""Model, GPU and how many of them."""
WORKLOADS = {"sharegpt": 0.3, "azure-conv-2023": 0.25, "uniform": 0.25, "sessions": 0.1, "fixed": 0.1}
"""And the probability of each."""
LADDER = (0.6, 1.0, 1.5, 2.2, 3.0)
"""Loads, times the knee."""
OTHERS = ("vllm-v1", "sarathi", "layerkv:predictor=bucket", "fastserve")
TOLD = (1 / 1.2, 1.25)
"""How fast the GPU is taken to be, times what it is."""
KNEE_SAMPLE = 300
ARRIVALS_S, FEWEST, MOST = 40.0, 400, 1500
"""For how long requests arrive, and how many do at the knee at least and at most."""


class Cell(NamedTuple):
    """What its seed drew."""

    seed: int
    model: str
    gpu: str
    tp: int
    workload: str
    input_len: int | None
    output_len: int | None
    turns: float | None
    think_time: float | None
    burstiness: float
    ttft_slo_ms: float
    tpot_slo_ms: float
    knee_per_s: float
    load: float
    """Of `LADDER`, at which others run as well."""

    def scenario(self, load: float) -> Scenario:
        """Its traffic and machine at `load` times its knee: as many seconds of arrivals at every load."""
        at_knee = min(MOST, max(FEWEST, int(ARRIVALS_S * self.knee_per_s)))
        return Scenario(
            workload=self.workload, num_prompts=int(at_knee * load), request_rate=self.knee_per_s * load,
            burstiness=self.burstiness, seed=self.seed, model=self.model, gpu=self.gpu, tp=self.tp,
            input_len=self.input_len, output_len=self.output_len, turns=self.turns, think_time=self.think_time,
            goodput=(f"ttft:{self.ttft_slo_ms:g}", f"tpot:{self.tpot_slo_ms:g}"),
        )  # fmt: skip


def drawn(seed: int) -> Cell:
    """The cell of a seed."""
    rng = np.random.default_rng(seed)
    model, gpu, tp = MACHINES[rng.integers(len(MACHINES))]
    workload = str(rng.choice(list(WORKLOADS), p=list(WORKLOADS.values())))
    input_len = output_len = turns = think_time = None
    if workload in ("uniform", "fixed"):
        input_len, output_len = int(2 ** rng.uniform(6, 11.5)), int(2 ** rng.uniform(4, 9.5))
    elif workload == "sessions":
        input_len, output_len = (int(2 ** rng.uniform(5, 9)) for _ in range(2))
        turns, think_time = float(rng.uniform(2, 6)), float(rng.uniform(5, 30))
    burstiness = float(rng.choice((1.0, 1.0, 0.5, 0.25)))
    ttft_s, tpot_steps = 2 ** rng.uniform(-1, 3.3), 2 ** rng.uniform(0.6, 3)
    load = float(rng.choice(LADDER))
    lengths = Scenario(
        workload=workload, num_prompts=KNEE_SAMPLE, request_rate=1.0, seed=seed, model=model, gpu=gpu, tp=tp,
        input_len=input_len, output_len=output_len, turns=turns, think_time=think_time,
    )  # fmt: skip
    setup, requests = prepare(lengths, *parse_policy("adaptive", {})), list(traffic(lengths))
    price = RequestPrice(setup.cost, setup.limits, setup.limits.max_model_len)
    tpot_s = max(0.01, price.step_s * tpot_steps)
    price.keep_pace(0.9 * tpot_s)
    prompts_s = [price.prefill_s(request.prompt_tokens) for request in requests]
    decodes_s = [price.decodes_s(float(one.output_tokens), float(one.prompt_tokens)) for one in requests]
    # No request is too long to meet its SLO alone.
    ttft_s = max(ttft_s, 1.3 * max(prompts_s) + 2 * price.step_s)
    knee_per_s = 1.0 / (fmean(prompts_s) + fmean(decodes_s))
    return Cell(
        seed, model, gpu, tp, workload, input_len, output_len, turns, think_time, burstiness,
        round(1e3 * ttft_s, 1), round(1e3 * tpot_s, 1), round(knee_per_s, 4), load,
    )  # fmt: skip


def setup_of(cell: Cell, scenario: Scenario, policy: str) -> Setup:
    """One policy on its machine, told of the SLOs if it asks for them."""
    label, built = parse_policy(policy, {})
    told = {f.name: getattr(cell, f.name) for f in fields(built) if f.name in ("ttft_slo_ms", "tpot_slo_ms")}
    return prepare(scenario, label, replace(built, **told))


def run(true: Setup, told: Setup, requests: Sequence[Request]) -> SimulatedRun:
    """A run on the machine `true` of an engine that takes it to be `told`."""
    env, parts = simpy.Environment(), build_engines(told, None, NOTHING)[0]
    parts.log.front_end_s = front_end_s = true.engine_profile.value("front_end_s") if true.engine_profile else 0.0
    arrivals = arrivals_of(true.scenario, requests, front_end_s)
    sizes = {
        "layers": true.model.num_layers, "block_bytes": true.limits.block_bytes,
        "hidden_bytes": true.model.hidden_bytes_per_token_layer,
    }  # fmt: skip
    instance = Instance(env, parts.engine, true.cost, arrivals, parts.lanes, **sizes, observer=parts.observer)
    return execute_all(SimulatedRun(engines=[parts], instances=[instance], env=env, serve=instance.serve))


def good_of(cell: Cell, load: float, policy: str, speed: float = 1.0) -> tuple[int, int, float]:
    """Good requests, all of them, and the seconds in which they arrive; `speed` as in `TOLD`."""
    scenario = cell.scenario(load)
    true, requests = setup_of(cell, scenario, policy), list(traffic(scenario))
    told = true
    if speed != 1.0:
        told = setup_of(cell, replace(scenario, profile=f"{true.profile.name}:gpu_speed={speed}"), policy)
    result = assemble(run(true, told, requests))
    good = round((result.goodput_attainment or 0.0) * result.num_prompts)
    return good, len(requests), requests[-1].arrival_s - requests[0].arrival_s


def rows(cell: Cell, others: Sequence[str], told: Sequence[float], *, bound: bool) -> Iterator[dict[str, object]]:
    """A row a run, and one of the bound."""
    asked = [("adaptive", load, 1.0) for load in LADDER] + [("adaptive", cell.load, speed) for speed in told]
    for policy, load, speed in [*asked, *((policy, cell.load, 1.0) for policy in others)]:
        good, num, span_s = good_of(cell, load, policy, speed)
        yield row(cell, load, policy, speed, good, num, span_s)
    if bound:
        scenario = cell.scenario(cell.load)
        requests, setup = list(traffic(scenario)), setup_of(cell, scenario, "adaptive")
        found = goodput_bound(requests, setup.limits, setup.cost, Goodput.parse(scenario.goodput))
        assert found is not None
        span_s = requests[-1].arrival_s - requests[0].arrival_s
        yield row(cell, cell.load, "bound", 1.0, found.good_requests, len(requests), span_s)


def row(cell: Cell, load: float, what: str, speed: float, good: float, num: int, span_s: float) -> dict[str, object]:
    """What the table has of one run."""
    of_cell = {name: "" if value is None else value for name, value in cell._asdict().items()}
    measured = {"good": round(good, 1), "num_prompts": num, "good_per_s": round(good / span_s, 4)}
    return of_cell | {"load": load, "policy": what, "told_speed": round(speed, 4)} | measured


def main() -> None:
    """Run the cells, or sum up those that ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="CSV to write")
    what.add_argument("--table", type=Path, help="CSV to sum up")
    parser.add_argument("--seeds", type=int, nargs=2, default=(1000, 1200), metavar=("FIRST", "BEYOND"))
    parser.add_argument("--ladder-only", action="store_true", help="adaptive alone, with right prices")
    parser.add_argument("--no-others", action="store_true", help="no other presets")
    arguments = parser.parse_args()
    if arguments.table:
        print(summary(read(arguments.table)))
        return
    found = read(arguments.out) if arguments.out.exists() else []
    done = {int(one["seed"]) for one in found}
    ladder_only = arguments.ladder_only
    others, told = () if ladder_only or arguments.no_others else OTHERS, () if ladder_only else TOLD
    for seed in track([one for one in range(*arguments.seeds) if one not in done], description="cells"):
        try:
            cell = drawn(seed)
        except UserError as error:
            print(f"seed {seed}: {error}")
            continue
        found += [
            {name: str(value) for name, value in one.items()} for one in rows(cell, others, told, bound=not ladder_only)
        ]
        write(arguments.out, found)


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV."""
    return list(csv.DictReader(path.read_text().splitlines()))


def write(path: Path, found: Sequence[dict[str, str]]) -> None:
    """The table so far."""
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, list(found[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(found)
    write_atomically(path, lambda file: file.write(text.getvalue().encode()))


def summary(found: Sequence[dict[str, str]]) -> str:
    """Distributions over cells: what remains of the most at smaller loads, shares of others, what wrong prices cost."""
    cells: dict[str, dict[tuple[str, float, float], float]] = {}
    for one in found:
        key = one["policy"], float(one["load"]), float(one["told_speed"])
        cells.setdefault(one["seed"], {})[key] = float(one["good_per_s"])
    named: dict[str, list[float]] = {}

    def add(name: str, ours: float, theirs: float) -> None:
        named.setdefault(name, []).append(ours / theirs if theirs > 0.0 else 1.0)

    for good in cells.values():
        ladder = [good["adaptive", load, 1.0] for load in LADDER]
        worst = min(range(1, len(LADDER)), key=lambda place: ladder[place] / max(ladder[: place + 1]))
        add("of the most at any smaller load, where that is least", ladder[worst], max(ladder[: worst + 1]))
        for (policy, load, speed), theirs in good.items():
            ours = good["adaptive", load, 1.0]
            if speed != 1.0:
                add(f"with a GPU taken to be {speed:.3g} times as fast", theirs, ours)
            elif policy == "bound":
                add("of the bound", ours, theirs)
        known = [
            value for (policy, _, speed), value in good.items() if policy not in ("adaptive", "bound") and speed == 1.0
        ]
        if known:
            load = next(load for policy, load, _ in good if policy == "bound")
            add("of the best other", good["adaptive", load, 1.0], max(known))
    lines = [f"{len(cells)} cells", "", "| share | cells | least | 5th percentile | median | 97 % or more |"]
    lines.append("|---|--:|--:|--:|--:|--:|")
    for name, values in named.items():
        few, half = np.quantile(values, (0.05, 0.5))
        enough = fmean(value >= 0.97 for value in values)
        lines.append(f"| {name} | {len(values)} | {min(values):.1%} | {few:.1%} | {half:.1%} | {enough:.0%} |")
    return "\n".join(lines).replace("%", " %").replace("  %", " %")


if __name__ == "__main__":
    main()
