"""What studies read, ask for and tell where no run is made, as it is pinned in `golden/studies.txt`.

    python tests/sim/pinned_studies.py      # writes golden/studies.txt anew

Results are made of the options that a search asks for, so that every goal meets refusals, ties and loads that nothing
holds. Tables have places that were not run, equal values and several panels.
"""

import random
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))

import pandas as pd
from goldens import GOLDEN, attempt, digest, rounded, write
from pinned_commands import picture

from sim.errors import UserError
from sim.study import search, tune_report
from sim.study.axes import Study, options_at, read_study
from sim.study.limits import binding, changes
from sim.study.points import Outcome
from sim.study.regimes import Regimes, cells, lines, read_map
from sim.study.regimes import draw as draw_map
from sim.study.search import Held, Ran, Search, Slo, fewest_engines, fewest_pools, most_load, worst_of
from sim.study.sweep import Means, Place
from sim.study.tables import means, summary, tidy
from sim.study.tune import read_tune, tune

STUDIES = GOLDEN / "studies.txt"
SEARCHES, MAPS, TABLES, GAINS = 120, 40, 12, 200
PICTURES = 3
"""Of maps; of tunes all are drawn."""
FIXED = {"workload": "fixed", "num-prompts": 20, "request-rate": 4, "gpu": "l20", "input-len": 200, "output-len": 60}
GOODPUT = {"goodput": ["ttft:300"]}
POLICIES = ["vllm-v1", "vllm-recompute"]


# -- files of studies --------------------------------------------------------------------------------------------------

SWEEPS: dict[str, Mapping[str, Any]] = {
    "nothing": {},
    "no table": {"sweep": 3},
    "a list of policies": {"policy": POLICIES, "sweep": {"grid": {"tp": [1, 2]}}},
    "a list elsewhere": {"max-num-seqs": [1, 2]},
    "an unknown key": {"sweep": {"grids": {}}},
    "repeats": {"seed": 5, "sweep": {"repeats": 2, "grid": {"request-rate": {"log": [1, 8], "num": 4}}}},
    "repeats of none": {"sweep": {"repeats": 0}},
    "repeats beside seeds": {"sweep": {"repeats": 2, "grid": {"seed": [1]}}},
    "one repeat beside seeds": {"sweep": {"repeats": 1, "grid": {"seed": [1, 2]}}},
    "whole numbers": {"sweep": {"grid": {"max-num-seqs": {"linear": [1, 4], "num": 9}}}},
    "one value": {"sweep": {"grid": {"max-num-seqs": {"log": [1, 4], "num": 1}}}},
    "no number": {"sweep": {"grid": {"max-num-seqs": {"log": [1, 4]}}}},
    "a range of words": {"sweep": {"grid": {"gpu": {"log": [1, 4], "num": 2}}}},
    "a range from 0": {"sweep": {"grid": {"swap-space": {"log": [0, 4], "num": 2}}}},
    "a linear one from 0": {"sweep": {"grid": {"swap-space": {"linear": [0, 4], "num": 3}}}},
    "an empty range": {"sweep": {"grid": {"swap-space": {"linear": [4, 4], "num": 3}}}},
    "an endless range": {"sweep": {"grid": {"swap-space": {"linear": [4, float("inf")], "num": 3}}}},
    "two kinds": {"sweep": {"grid": {"swap-space": {"linear": [4, 5], "log": [4, 5], "num": 3}}}},
    "a key too many": {"sweep": {"grid": {"swap-space": {"linear": [4, 5], "number": 3}}}},
    "three ends": {"sweep": {"grid": {"swap-space": {"linear": [4, 5, 6], "num": 3}}}},
    "no list": {"sweep": {"grid": {"swap-space": 4}}},
    "an empty list": {"sweep": {"grid": {"swap-space": []}}},
    "a value twice": {"sweep": {"grid": {"swap-space": [4, 4.0]}}},
    "an axis and fixed": {"swap-space": 4, "sweep": {"grid": {"swap-space": [4, 5]}}},
    "an axis twice": {"sweep": {"grid": {"tp": [1]}, "zip": [{"tp": [2], "gpu": ["l20"]}]}},
    "together": {"sweep": {"zip": [{"tp": [2, 1], "gpu": ["l20", "a100-80g"]}], "grid": {"seed": [1, 2]}}},
    "together, unlike": {"sweep": {"zip": {"tp": [2, 1], "max-num-seqs": [3]}}},
    "drawn": {"seed": 3, "sweep": {"random": {"samples": 3, "swap-space": {"log": [1, 64]}, "tp": [1, 2, 4],
                                              "max-num-seqs": {"linear": [1, 99]}}}},
    "drawn too few": {"sweep": {"random": {"samples": 0, "tp": [1, 2]}}},
    "drawn with a number": {"sweep": {"random": {"samples": 1, "swap-space": {"log": [1, 64], "num": 2}}}},
    "a grid of nothing": {"sweep": {"grid": 3}},
    "constants": {"profile": "l20:gpu_speed=1.1", "sweep": {"grid": {"profile-step-overhead-s": [0.001, 0.002]}}},
    "constants of none": {"sweep": {"grid": {"profile-gpu-speed": [0.5]}}},
    "an option that nobody has": {"policy": "vllm-v1", "sweep": {"grid": {"layerkv-threshold": [0.1]}}},
    "an option of one": {"policy": ["layerkv", "vllm-v1"], "sweep": {"grid": {"layerkv-threshold": [0.1]}}},
    "an output": {"sweep": {"grid": {"out": ["a"]}}},
    "an output that is fixed": {"out": "a"},
    "goodput": {"sweep": {"grid": {"goodput": [["ttft:1"], ["ttft:1", "tpot:2"]]}}},
}  # fmt: skip
MAPPED: dict[str, Mapping[str, Any]] = {
    "no axes": {"policy": POLICIES, **GOODPUT},
    "no SLO": {"policy": POLICIES},
    "one policy": {"policy": "vllm-v1", **GOODPUT},
    "one axis": {"policy": POLICIES, "map": {"metric": "mean_ttft_ms", "grid": {"tp": [1, 2]}}},
    "three axes": {"policy": POLICIES, "map": {"metric": "mean_ttft_ms", "grid": {
        "tp": [1], "seed": [1], "gpu": ["l20"]}}},
    "four axes": {"policy": POLICIES, "map": {"metric": "mean_ttft_ms", "grid": {
        "tp": [1], "seed": [1], "gpu": ["l20"], "max-num-seqs": [1]}}},
    "drawn": {"policy": POLICIES, "map": {"metric": "mean_ttft_ms", "random": {"samples": 2, "tp": [1], "seed": [1]}}},
    "no way": {"policy": POLICIES, "map": {"metric": "mean_decoding", "grid": {"tp": [1], "seed": [1]}}},
    "a sweep": {"policy": POLICIES, "sweep": {"grid": {"tp": [1]}}},
    "no table": {"policy": POLICIES, "map": 3},
}  # fmt: skip
SLO = {"slo": ["p99_ttft_ms:300"]}
TUNED: dict[str, Mapping[str, Any]] = {
    "an SLO": {"tune": SLO},
    "a goodput": GOODPUT,
    "neither": {},
    "no goal": {"tune": SLO | {"goal": "speed"}},
    "goodput without": {"tune": SLO | {"goal": "goodput"}},
    "cost without": {"tune": SLO | {"goal": "cost"}},
    "a price without": {"tune": SLO | {"price": 1}},
    "a price": {"tune": SLO | {"goal": "cost", "price": 1, "grid": {"gpu": ["l20", "t4"]}}},
    "a price of one": {"tune": SLO | {"goal": "cost", "price": {"l20": 1}, "grid": {"gpu": ["l20", "t4"]}}},
    "a price of nothing": {"tune": SLO | {"goal": "cost", "price": 0.0}},
    "a small price": {"tune": SLO | {"goal": "cost", "price": 0.5}},
    "engines": {"replicas": 2, "tune": SLO | {"goal": "gpus"}},
    "engines as an axis": {"tune": SLO | {"goal": "gpus", "grid": {"decode-replicas": [2]}}},
    "engines of a load": {"replicas": 2, "tune": SLO},
    "two kinds for a price": {"decode-gpu": "t4", "tune": SLO | {"goal": "cost", "price": 1}},
    "two kinds by number": {"decode-gpu": "t4", "tune": SLO | {"goal": "gpus"}},
    "no trials": {"tune": SLO | {"trials": 0}},
    "a trial": {"tune": SLO | {"trials": 1, "storage": "sqlite:///a"}},
    "a storage alone": {"tune": SLO | {"storage": "sqlite:///a"}},
    "an SLO of what is none": {"tune": {"slo": ["ttft:3"]}},
    "an SLO of nothing": {"tune": {"slo": ["p99-ttft-ms:0"]}},
    "an SLO without": {"tune": {"slo": ["p99_ttft_ms"]}},
    "an SLO of a share": {"tune": {"slo": ["goodput-attainment:0.9", "mean_tpot_ms:1e3"]}},
    "an SLO of a rate": {"tune": {"slo": ["request_throughput:3"]}},
}  # fmt: skip


def read() -> Iterator[str]:
    """Files, as they are read or refused."""
    for name, table in SWEEPS.items():
        found = attempt(read_study, table, "sweep", "study.toml")
        yield f"sweep of {name}: {found!r}"
        if isinstance(found, Study):
            yield repr([dict(options_at(found, point, repeat)) for point in found.points[:3] for repeat in (0, 1)])
    for name, table in MAPPED.items():
        yield f"map of {name}: {attempt(read_map, table, 'study.toml')!r}"
    for name, table in TUNED.items():
        yield f"tune of {name}: {attempt(read_tune, beside(table), 'study.toml')!r}"
    for result in ({"a_ms": 2.0}, {"a_ms": 2.1}, {"a_ms": None}):
        yield repr([Slo("a_ms", 2.0).met(result), Slo("a_ms", 2.0).at_least])


def beside(table: Mapping[str, Any]) -> dict[str, Any]:
    """A study over the usual traffic but for its axes."""
    axes = table.get("tune", {}).get("grid", {})
    return {name: value for name, value in FIXED.items() if name not in axes} | dict(table)


# -- searches ----------------------------------------------------------------------------------------------------------


def result_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """A result that a load spread over engines could have: the more seats and the faster, the less the latency."""
    engines = options.get("replicas") or (options.get("prefill_replicas", 1) * options.get("decode_replicas", 1)) ** 0.5
    load = options.get("request_rate", 4.0) * options.get("rate_scale", 1.0) / engines
    speed = float(found[1]) if (found := re.search(r"gpu_speed=([\d.]+)", str(options.get("profile")))) else 1.0
    speed *= options.get("num_gpu_blocks_override", 900) ** 0.1 * options.get("tp", 1) ** 0.5
    seats, seed = options.get("max_num_seqs", 64), options.get("seed", 0)
    ttft_ms = 20.0 * load**1.5 / speed * (1.0 + 8.0 / seats) * (1.0 + 0.1 * seed)
    tpot_ms = 5.0 * (load * seats) ** 0.3 / speed
    given_up = int(load > 60.0) + (load > 200.0)
    return {
        "p99_ttft_ms": ttft_ms, "mean_ttft_ms": ttft_ms / 3, "p99_tpot_ms": tpot_ms, "mean_tpot_ms": tpot_ms / 2,
        "request_goodput": load / (1.0 + ttft_ms / 900.0) if load < 300.0 else None, "num_prompts": 100,
        "completed": 100 - given_up, "output_throughput": 60.0 * load * engines, "duration": 50.0,
        "goodput_attainment": 1.0 / (1.0 + ttft_ms / 9000.0), "profile": {"name": "l20", "status": "derived"},
        "arrival_span_s": None if seats == 16 else 99.0 / (load * engines),
    }  # fmt: skip


def gpus_of(options: Mapping[str, Any]) -> int:
    """GPUs of all engines."""
    if "decode_replicas" not in options:
        return options.get("replicas", 1) * options["tp"]
    stages, tp = options.get("pipeline_parallel_size", 1), options["tp"]
    prefill = tp * options.get("prefill_pipeline_parallel_size", stages)
    return options["prefill_replicas"] * prefill + options["decode_replicas"] * options.get("decode_tp", tp) * stages


def steps(asked: Search[Held], rng: random.Random, bound: float) -> Iterator[str]:
    """What a search asks for, run by run, and its answer; some runs are refused."""
    refused = rng.choice((-1, -1, -1, 0, 1, 3))
    ran, place = None, 0
    while True:
        try:
            options = next(asked) if ran is None else asked.send(ran)
        except StopIteration as end:
            held = end.value
            ends = [None if one is None else one.options for one in (held.ran, held.failing)]
            yield f"{place} runs: {rounded([held.most, held.least_failing])} {ends}"
            return
        result = result_of(options) | {"p99_ttft_ms": bound * result_of(options)["p99_ttft_ms"]}
        outcome = Outcome("k", None, "refused") if place == refused else Outcome("k", result)
        ran, place = Ran(options, gpus_of(options), outcome), place + 1
        yield repr(
            rounded([options.get(name) for name in ("rate_scale", "replicas", "prefill_replicas", "decode_replicas")])
        )


def searches() -> Iterator[str]:
    """Of loads that anything or nothing holds, of weights of engines, of seeds."""
    slos = (Slo("p99_ttft_ms", 100.0), Slo("goodput_attainment", 0.5))
    for place in range(SEARCHES):
        rng = random.Random(f"search {place}")
        options: dict[str, Any] = {"request_rate": rng.choice((0.1, 4.0, 30.0)), "tp": rng.choice((1, 1, 2))}
        options |= rng.choice(({}, {"rate_scale": 3.0}, {"decode_tp": 4}, {"prefill_pipeline_parallel_size": 3}))
        options |= rng.choice(({}, {"pipeline_parallel_size": 2}, {"router": "round-robin"}))
        kind = (most_load, fewest_engines, fewest_pools)[place % 3]
        given = [options | {"seed": seed} for seed in range(rng.choice((1, 1, 2, 3)))]
        asked = worst_of(
            [kind(one, slos) for one in given], (lambda a, b: a > b) if kind is most_load else lambda a, b: a < b
        )
        found = list(steps(asked, rng, rng.choice((1.0, 1e-9, 1e9, 0.3))))
        yield f"search {place}: {kind.__name__} {digest(found)} {found[-1]}"
    for place in range(GAINS):
        rng = random.Random(f"gains {place}")
        limits = {name: rng.choice((-0.1, 0.0, 0.05, 0.1, 0.2, 0.4)) for name in rng.sample(("a", "b", "compute"), 2)}
        yield f"{limits}: {binding(limits)}"


class Kept:
    """Stands for a folder of outcomes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.known = folder, dict[str, Outcome]()

    def get(self, key: str) -> Outcome | None:
        return self.known.get(key)


def made(planned: Sequence[Place], store: Kept, *_: object) -> None:
    """Results of all that are not refused."""
    for place in planned:
        store.known[place.outcome.key] = Outcome(place.outcome.key, result_of(place.options))


TUNES: dict[str, Mapping[str, Any]] = {
    "load": {"tune": SLO | {"grid": {"max-num-seqs": [4, 16, 64]}}},
    "load of seeds": {"policy": POLICIES, "tune": SLO | {"repeats": 2, "grid": {"tp": [1, 2]}}},
    "load that nothing holds": {"tune": {"slo": ["p99_tpot_ms:0.001"], "grid": {"max-num-seqs": [4, 16]}}},
    "load at any rate": {"tune": {"slo": ["p99_ttft_ms:1e11"]}},
    "load of many": {"tune": SLO | {"grid": {"max-num-seqs": [*range(1, 18)]}}},
    "gpus": {"policy": ["vllm-v1", "distserve"], "request-rate": 70, "link-gbps": 50,
             "tune": SLO | {"goal": "gpus", "grid": {"tp": [1, 2]}}},
    "one GPU": {"tune": SLO | {"goal": "gpus"}},
    "cost": {"request-rate": 70, "policy": POLICIES,
             "tune": SLO | {"goal": "cost", "price": {"l20": 0.75, "t4": 0.5}, "grid": {"gpu": ["l20", "t4"]}}},
    "goodput": {**GOODPUT, "tune": {"goal": "goodput", "grid": {"max-num-seqs": [1, 4, 64]}}},
    "pools": {"policy": "distserve", "prefill-replicas": 2, "decode-replicas": 1, "link-gbps": 50, "tune": SLO},
    "a refused one": {"tune": SLO | {"grid": {"max-num-seqs": [4, 9], "max-num-batched-tokens": [8, 2048]}}},
    "refused ones": {"max-model-len": 100, "tune": SLO | {"grid": {"max-num-batched-tokens": [8, 9]}}},
}  # fmt: skip


def tunes() -> Iterator[str]:
    """Whole searches, what they tell, write and draw."""
    with patch.object(search, "perform_missing", made), patch("sim.study.tune.Store", Kept):
        for name, table in TUNES.items():
            asked = read_tune(beside(table), "study.toml")
            with tempfile.TemporaryDirectory() as folder, patch.object(tune_report, "save_figure"):
                try:
                    found = tune(asked, Path(folder), Means())
                except UserError as error:
                    yield f"tune of {name}: {error}"
                    continue
                tune_report.write(Path(folder), found)
                yield f"tune of {name}:"
                for file in ("tune.txt", "tune.json", "candidates.csv"):
                    text = re.sub(
                        r"-?\d+\.\d+(e-?\d+)?", lambda m: f"{float(m[0]):.7g}", (Path(folder) / file).read_text()
                    )
                    yield from text.splitlines()[:40]
                yield repr(tune_report.short_names(found))
                drawn = picture(tune_report.draw(found))
                yield f"drawn {len(drawn)} {digest(drawn)}"
        yield from front()


def front() -> Iterator[str]:
    """Names and words of parts of the report that no tune above has."""
    one, two = ({"replicas": count} for count in (1, 2))
    for options in (one, two, {"prefill_replicas": 1, "decode_replicas": 3}):
        yield tune_report._engines(Ran(options, 1, Outcome("k")))
    for value in (0.0, 999.94, 999.96, 1000.0, 14859.6, -1000.0, 0.12345):
        yield tune_report._figure(value)


def changed() -> Iterator[str]:
    """What more could be had, of several deployments."""
    pools = {"policy": "distserve", "prefill_replicas": 2, "decode_replicas": 1, "link_gbps": 50.0}
    for options in (
        {}, {"tp": 2, "policy": "vllm-recompute"}, {"pipeline_parallel_size": 2, "policy": "vllm-recompute"}, pools,
        {"kv_cache_dtype": "fp8"}, {"gpu": "t4", "dtype": "float16", "num_gpu_blocks_override": 99},
        {"replicas": 3, "router": "round-robin", "profile": "l20:gpu_speed=1.25"}, {"kv_offloading_size": 8.0},
        {"max_num_seqs": 200, "max_num_batched_tokens": 210},
    ):  # fmt: skip
        given = {"workload": "sharegpt", "gpu": "l20", **options}
        yield f"{options}: {attempt(changes, given)!r}"


# -- maps and tables ---------------------------------------------------------------------------------------------------


VALUES = nan, 0.0, 1.0, 1.01, 1.02, 1.5, 2.0, 5e3


def regimes_of(rng: random.Random) -> tuple[Regimes, pd.DataFrame]:
    """Values of policies over two axes or three: some missing, equal, near or nothing."""
    metric, panel = rng.choice(("mean_ttft_ms", "request_goodput")), rng.choice((None, "tp"))
    axes = {"input_len": [100, 2_000_000, 999_999], "gpu": ["l20", "t4"], **({"tp": [1, 2]} if panel else {})}
    study = Study("study.toml", {}, ("policy", *axes), [], 1, {})
    rows = [
        {"policy": policy, "input_len": x, "gpu": y, "tp": z, metric: rng.choice(VALUES)}
        for policy in POLICIES + ["layerkv"][: rng.randint(0, 1)]
        for x in axes["input_len"] for y in axes["gpu"] for z in axes.get("tp", [1])
        if rng.random() < 0.95
    ]  # fmt: skip
    return Regimes(study, "input_len", "gpu", panel, metric), pd.DataFrame(rows)


def maps() -> Iterator[str]:
    """Who wins where, in words; of a few the picture."""
    for place in range(MAPS):
        regimes, table = regimes_of(random.Random(f"map {place}"))
        found = cells(regimes, table)
        told = [
            *lines(regimes, found),
            *(f"{where} {cell.winner} {rounded(cell.ratio)}" for where, cell in found.items()),
        ]
        yield f"map {place}: {digest(told)}"
        yield from told[: len(told) if place < PICTURES else 0]
        if place < PICTURES:
            drawn = picture(draw_map(regimes, found))
            yield f"drawn {len(drawn)} {digest(drawn)}"


def place_of(rng: random.Random, point: dict[str, Any], repeat: int) -> Place:
    """A run that ended or failed."""
    makespan_s = rng.choice((0.0, 10.0))
    result = {
        "policy": "vllm-v1", "mean_ttft_ms": rng.choice((1.0, 2.5, None)),
        "request_rate": rng.choice((3.0, float("inf"))),
        "complete": True, "duration": 1.5, "completed": rng.randint(0, 9), "makespan_s": makespan_s,
        "lanes": {name: {"busy_s": rng.choice((0.0, 5.0, 20.0))} for name in
                  ("GPU compute", "PCIe host to device", "PCIe device to host")},
        "scenario": {"tp": 2, **rng.choice(({}, {"pipeline_parallel_size": 2})),
                     **rng.choice(({}, {"max_concurrency": 5}))},
    }  # fmt: skip
    failed = rng.random() < 0.25
    outcome = Outcome(f"key {repeat}", None if failed else result, "it failed" if failed else None)
    return Place(point, repeat, {"seed": 4 + repeat} if rng.random() < 0.8 else {}, outcome, rng.choice((4, 8)))


def tables() -> Iterator[str]:
    """Rows, means with their intervals, and the summary of studies with failures."""
    for number in range(TABLES):
        rng = random.Random(f"table {number}")
        repeats = rng.choice((1, 2, 3))
        points: list[dict[str, Any]] = [{"policy": policy, "goodput": ("ttft:1", "tpot:2")} for policy in POLICIES]
        study = Study("study.toml", {}, ("policy", "goodput"), points, repeats, {})
        places = [place_of(rng, point, repeat) for point in points for repeat in range(repeats)]
        if all(place.outcome.result is None for place in places):
            continue
        table = tidy(study, places)
        yield f"table {number}:"
        yield from table.to_csv(index=False).splitlines()
        yield from means(study, table).to_csv(index=False, float_format="%.8g").splitlines()
        yield repr(summary(study, places))


PINNED = {"read": read, "searches": searches, "tunes": tunes, "changed": changed, "maps": maps, "tables": tables}


def main() -> None:
    write(STUDIES, PINNED)


if __name__ == "__main__":
    main()
