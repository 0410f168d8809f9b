"""`adaptive` on cells that are drawn, not chosen: does goodput fall as load rises, and how near is it to the bound?

    python validation/drawn_cells.py --out docs/drawn-cells.csv --seeds 1000 1200   # goes on where it was stopped
    python validation/drawn_cells.py --out docs/drawn-cells.csv --what ladder told  # these alone
    python validation/drawn_cells.py --out docs/drawn-cells.csv --what again        # of cells there whose ladder falls
    python validation/drawn_cells.py --table docs/drawn-cells.csv

A seed draws a cell: model and GPU, lengths, burstiness, sessions, SLOs from tight to loose. Its knee is the rate whose
requests take, by price, as long as they are apart; `adaptive` runs at `LADDER` times that (`ladder`). At one of these
loads, drawn as well, run

- `others`: all other presets of one engine;
- `thinned`: `vllm-v1` behind a gate that keeps a share of the requests at random, the best of those shares that make it
  a lower load of the ladder;
- `told`: `adaptive` with prices that are wrong behind its back: told that the GPU is slower or faster than it is;
- `bound`: the certified bound, of good requests among all that arrive;
- `long`: ladder and bound where arrivals last `SPANS` times as long as SLOs allow the mean request, at least. The bound
  knows when arrivals end, and leaves decodes until then: in 40 s of arrivals that is much of its share.

A ladder's least share is that of four steps, and other traffic moves a rate by 1 to 7 % (standard deviation, in eight
cells). A cell whose ladder falls below `LEAST_SHARE` is run `again` with the traffic of other seeds: told is then the
least share of the mean rates, with their standard errors.

Rates are good requests over the time in which requests arrive.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
import simpy
from resumed import read, run_missing

from sim.bounds.goodput import goodput_bound
from sim.clock.instance import Instance, Observer
from sim.errors import UserError
from sim.options.policies import parse_policy
from sim.options.scenario import Scenario
from sim.results.goodput import Goodput
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
OTHERS = (
    "vllm-v1", "sarathi", "fastgen", "layerkv:predictor=bucket", "fastserve", "vllm-recompute", "vllm-swap", "radix",
    "sglang", "orca", "pensieve", "cachedattention", "hcache", "infercept", "batchllm", "ellm", "kvpr",
)  # fmt: skip
"""All presets of one engine."""
THINNED = "vllm-v1, thinned"
TRAFFIC = range(1, 7)
"""Other arrivals and lengths of a cell."""
LEAST_SHARE = 0.97
"""Of the most good requests a second at any smaller load: below that a ladder falls."""
TOLD = (0.8333, 1.25)
"""How fast the GPU is taken to be, times what it is."""
KNEE_SAMPLE = 300
ARRIVALS_S, FEWEST, MOST = 40.0, 400, 1500
"""For how long requests arrive, and how many do at the knee at least and at most."""
SPANS = 8
"""Spans of a request, from its arrival to its last token as SLOs allow, that `long` arrivals last at least."""


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
    span_s: float
    """From the mean request's arrival to its last token, as SLOs allow."""

    def scenario(self, load: float, traffic: int = 0, spans: int = 0) -> Scenario:
        """Its traffic or other, and its machine, at `load` times its knee: as many seconds of arrivals at each."""
        at_knee = min(MOST, max(FEWEST, int(ARRIVALS_S * self.knee_per_s)))
        at_knee = max(at_knee, int(spans * self.span_s * self.knee_per_s))
        return Scenario(
            workload=self.workload, num_prompts=int(at_knee * load), request_rate=self.knee_per_s * load,
            burstiness=self.burstiness, seed=self.seed + 10_000 * traffic, model=self.model, gpu=self.gpu, tp=self.tp,
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
    span_s = ttft_s + tpot_s * fmean([request.output_tokens for request in requests])
    return Cell(
        seed, model, gpu, tp, workload, input_len, output_len, turns, think_time, burstiness,
        round(1e3 * ttft_s, 1), round(1e3 * tpot_s, 1), round(knee_per_s, 4), load, round(span_s, 2),
    )  # fmt: skip


def setup_of(cell: Cell, scenario: Scenario, policy: str) -> Setup:
    """One policy on its machine, told of the SLOs if it asks for them."""
    label, built = parse_policy(policy, {})
    told = {f.name: getattr(cell, f.name) for f in fields(built) if f.name in ("ttft_slo_ms", "tpot_slo_ms")}
    return prepare(scenario, label, replace(built, **told))


def run(true: Setup, told: Setup, requests: Sequence[Request], observer: Observer | None = None) -> SimulatedRun:
    """A run on the machine `true` of an engine that takes it to be `told`."""
    env, parts = simpy.Environment(), build_engines(told, None, NOTHING)[0]
    parts.log.front_end_s = true.front_end[0]
    arrivals = arrivals_of(true.scenario, requests, *true.front_end, parts.log.sent_s)
    sizes = {
        "layers": true.model.num_layers, "block_bytes": true.limits.block_bytes,
        "hidden_bytes": true.model.hidden_bytes_per_token_layer,
    }  # fmt: skip
    instance = Instance(env, parts.engine, true.cost, arrivals, parts.lanes, **sizes, observer=observer)
    return execute_all(SimulatedRun(engines=[parts], instances=[instance], env=env, serve=instance.serve))


class Name(NamedTuple):
    """A run of a cell."""

    policy: str
    load: float = 0.0
    """Of `LADDER`; 0: that of the cell."""
    told_speed: float = 1.0
    """As in `TOLD`."""
    traffic: int = 0
    """The cell's own, or one of `TRAFFIC`."""
    spans: int = 0
    """That arrivals last at least: 0 or `SPANS`."""


WHAT: dict[str, tuple[Name, ...]] = {
    "ladder": tuple(Name("adaptive", load) for load in LADDER),
    "again": tuple(Name("adaptive", load, traffic=traffic) for traffic in TRAFFIC for load in LADDER),
    "told": tuple(Name("adaptive", told_speed=speed) for speed in TOLD),
    "others": tuple(map(Name, OTHERS)),
    "thinned": (Name(THINNED),),
    "bound": (Name("bound"),),
    "long": (*(Name("adaptive", load, spans=SPANS) for load in LADDER), Name("bound", spans=SPANS)),
}


def name_of(row: Mapping[str, str]) -> tuple[int, Name]:
    """Seed and run of a row."""
    policy, speed, traffic = row["policy"], float(row["told_speed"]), int(row["traffic"])
    is_ladder = policy == "adaptive" and speed == 1.0
    # Rows of before 0.19 lack it.
    spans = int(row.get("spans", 0))
    return int(row["seed"]), Name(policy, float(row["load"]) if is_ladder else 0.0, speed, traffic, spans)


def good_of(cell: Cell, scenario: Scenario, requests: Sequence[Request], name: Name) -> float:
    """Good requests of a run, or that the bound allows."""
    if name.policy == "bound":
        setup = setup_of(cell, scenario, "adaptive")
        found = goodput_bound(requests, setup.limits, setup.cost, Goodput.parse(scenario.goodput))
        assert found is not None
        return found.good_requests
    if name.policy == THINNED:
        draws = np.random.default_rng(cell.seed).random(len(requests))
        shares = [load / cell.load for load in LADDER if load <= cell.load]
        kept = [[one for one, draw in zip(requests, draws, strict=True) if draw < share] for share in shares]
        return max(good_of(cell, scenario, some, Name("vllm-v1")) for some in kept)
    told = true = setup_of(cell, scenario, name.policy)
    if name.told_speed != 1.0:
        profile = f"{true.profile.name}:gpu_speed={name.told_speed}"
        told = setup_of(cell, replace(scenario, profile=profile), name.policy)
    result = assemble(run(true, told, requests))
    return round((result.goodput_attainment or 0.0) * result.num_prompts)


def rows(seed: int, names: Sequence[Name]) -> list[dict[str, object]]:
    """A row a run; without what a preset refuses. None where no engine can be built."""
    try:
        cell = drawn(seed)
    except UserError as error:
        print(f"seed {seed}: {error}")
        return []
    of_cell = {name: "" if value is None else value for name, value in cell._asdict().items()}
    found: list[dict[str, object]] = []
    for name in names:
        scenario = cell.scenario(name.load or cell.load, name.traffic, name.spans)
        requests = list(traffic(scenario))
        try:
            good: float | str = round(good_of(cell, scenario, requests, name), 1)
        except UserError:
            good = ""
        span_s, num = requests[-1].arrival_s - requests[0].arrival_s, len(requests)
        measured = {"good": good, "num_prompts": num, "good_per_s": "" if good == "" else round(good / span_s, 4)}
        found.append(of_cell | name._asdict() | {"load": name.load or cell.load} | measured)
    return found


def main() -> None:
    """Run the cells, or sum up those that ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, help="CSV to write")
    where.add_argument("--table", type=Path, nargs="+", help="CSVs to sum up")
    parser.add_argument("--seeds", type=int, nargs=2, default=(1000, 1200), metavar=("FIRST", "BEYOND"))
    parser.add_argument("--what", nargs="+", choices=list(WHAT), default=list(WHAT))
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.table:
        print(summary([row for path in arguments.table for row in read(path)]))
        return
    names = [name for what in arguments.what if what != "again" for name in WHAT[what]]
    asked: dict[int, Sequence[Name]] = dict.fromkeys(range(*arguments.seeds), names) if names else {}
    if "again" in arguments.what:
        shares = least_shares(rates(read(arguments.out)))
        falling = [seed for seed in range(*arguments.seeds) if shares.get(seed, 1.0) < LEAST_SHARE]
        asked |= {seed: [*names, *WHAT["again"]] for seed in falling}
    run_missing(arguments.out, asked, name_of, rows, arguments.workers)


def rates(found: Sequence[Mapping[str, str]]) -> dict[int, dict[Name, float]]:
    """Good requests a second of each run of each cell."""
    cells: dict[int, dict[Name, float]] = {}
    for row in found:
        seed, name = name_of(row)
        if row["good"]:
            cells.setdefault(seed, {})[name] = float(row["good_per_s"])
    return cells


def least_share(ladder: Sequence[float]) -> float:
    """Of the most at any smaller load, where that is least."""
    return min(rate / most if most else 1.0 for rate, most in zip(ladder, accumulate(ladder, max), strict=True))


def least_shares(cells: Mapping[int, Mapping[Name, float]], spans: int = 0) -> dict[int, float]:
    """The same of each cell whose ladder is whole, with its own traffic."""
    names = [Name("adaptive", load, spans=spans) for load in LADDER]
    ladders = {seed: [good[name] for name in names if name in good] for seed, good in cells.items()}
    return {seed: least_share(ladder) for seed, ladder in ladders.items() if len(ladder) == len(LADDER)}


def again(good: Mapping[Name, float]) -> str:
    """What other traffic makes of a ladder: the least share of the mean rates, and the rates' mean standard error."""
    runs = [[good[Name("adaptive", load, traffic=one)] for load in LADDER] for one in TRAFFIC]
    means, error = np.mean(runs, axis=0), np.std(runs, axis=0, ddof=1) / len(runs) ** 0.5
    return f"{least_share(means.tolist()):.1%} (standard errors {fmean(error / means):.1%})"


def summary(found: Sequence[Mapping[str, str]]) -> str:
    """Distributions over cells: what remains of the most at smaller loads, shares of others, what wrong prices cost."""
    cells, loads = rates(found), dict[int, float]()
    for row in found:
        seed, name = name_of(row)
        if name.load == 0.0:
            loads[seed] = float(row["load"])
    shares = least_shares(cells)
    named = {"of the most at any smaller load, where that is least": list(shares.values())}
    if long := list(least_shares(cells, SPANS).values()):
        named["the same, long arrivals"] = long
    behind: list[str] = []

    def add(name: str, ours: float, theirs: float) -> None:
        named.setdefault(name, []).append(ours / theirs if theirs > 0.0 else 1.0)

    for seed, good in cells.items():
        if shares.get(seed, 1.0) < LEAST_SHARE:
            others = again(good) if WHAT["again"][-1] in good else "not run"
            behind.append(
                f"- seed {seed}: {shares[seed]:.1%} of the most at a smaller load; with other traffic {others}"
            )
        ours = good.get(Name("adaptive", loads[seed])) if seed in loads else None
        if ours is None:
            continue
        if (bound := Name("bound", spans=SPANS)) in good:
            add("of the bound, long arrivals", good[Name("adaptive", loads[seed], spans=SPANS)], good[bound])
        for title, name in (("of the bound", Name("bound")), (f"of `{THINNED}`", Name(THINNED))):
            if name in good:
                add(title, ours, good[name])
        known = {good[name]: name.policy for name in WHAT["others"] if name in good}
        if known:
            best = max(known)
            add("of the best other", ours, best)
            if ours < 0.98 * best:
                behind.append(f"- seed {seed}, {loads[seed]:g} times the knee: {ours / best:.1%} of {known[best]}")
        for name in WHAT["told"]:
            if name in good:
                add(f"with a GPU taken to be {name.told_speed:.3g} times as fast", good[name], ours)
    lines = [f"{len(cells)} cells", "", "| share | cells | least | 5th percentile | median | 97 % or more |"]
    lines.append("|---|--:|--:|--:|--:|--:|")
    for name, values in named.items():
        few, half = np.quantile(values, (0.05, 0.5))
        enough = fmean(value >= 0.97 for value in values)
        lines.append(f"| {name} | {len(values)} | {min(values):.1%} | {few:.1%} | {half:.1%} | {enough:.0%} |")
    return "\n".join([*lines, "", *behind]).replace("%", " %").replace("  %", " %")


if __name__ == "__main__":
    main()
