"""`kvtwin plan` on planted cases: optima that simulated runs have, and whether other seeds lie within its intervals.

    python validation/plan_planted.py optima OUT
    python validation/plan_planted.py intervals OUT [FIRST LAST]

`optima`: small questions whose best knob or layout was made best, and is known by trying every deployment in full.
`intervals`: cases drawn at random (seed 2026); the load that the answer sustains, and the fewest GPUs, on three seeds
that the plan has not seen. Minutes of CPU; the same command goes on where it was.
"""

import random
import sys
from pathlib import Path
from typing import Any

from sim.study.deployments import Space
from sim.study.plan import plan, read_plan
from sim.study.search import Slo, answers, most_load
from sim.study.sweep import Means, Store

CASES, FRESH, FIRST_FRESH = 20, 3, 5000
SLOS = ["p99_ttft_ms:2000", "p99_tpot_ms:150"]
BASE: dict[str, Any] = {"model": "llama-2-7b", "gpu": ["l20"], "workload": "uniform", "slo": SLOS, "num_prompts": 400}
KNOBS = {"max_num_batched_tokens": 2048, "max_num_seqs": 256, "kv_cache_dtype": "auto"}
ONE = {"layouts": "engines", "tp": 1}
GOODPUT = {"objective": "goodput", "seeds": 3}
OPTIMA: dict[str, dict[str, Any]] = {
    # What is left open is what the name says; SLOs and traffic make it matter.
    "token budget": BASE | KNOBS | ONE | GOODPUT | {"max_gpus": 1, "input_len": 2000, "output_len": 4,
                     "request_rate": 1.0, "max_num_batched_tokens": None, "slo": ["p99_ttft_ms:4000"]},
    "small token budget": BASE | KNOBS | ONE | GOODPUT | {"max_gpus": 1, "input_len": 1500, "output_len": 150,
                           "request_rate": 1.0, "max_num_batched_tokens": None,
                           "slo": ["p99_ttft_ms:20000", "p99_itl_ms:120"]},
    "group": BASE | KNOBS | GOODPUT | {"max_gpus": 4, "layouts": "engines", "input_len": 500, "output_len": 200,
              "request_rate": 1.0, "slo": ["p99_ttft_ms:2000", "p99_tpot_ms:14"]},
    "KV type": BASE | KNOBS | ONE | GOODPUT | {"max_gpus": 1, "input_len": 800, "output_len": 400, "request_rate": 1.0,
                "kv_cache_dtype": None},
    "seats": BASE | KNOBS | ONE | GOODPUT | {"max_gpus": 1, "input_len": 100, "output_len": 200, "request_rate": 4.0,
              "max_num_seqs": None, "slo": ["p99_tpot_ms:45", "p99_ttft_ms:20000"]},
    "layout": BASE | KNOBS | GOODPUT | {"max_gpus": 4, "input_len": 1500, "output_len": 100, "request_rate": 2.0,
               "slo": ["p99_ttft_ms:1500", "p99_tpot_ms:40"]},
    "layout and KV type": BASE | KNOBS | GOODPUT | {"max_gpus": 2, "input_len": 1000, "output_len": 300,
                           "request_rate": 1.0, "kv_cache_dtype": None},
    "layout and token budget": BASE | KNOBS | GOODPUT | {"max_gpus": 3, "input_len": 2000, "output_len": 150,
                                "request_rate": 1.0, "max_num_batched_tokens": None,
                                "slo": ["p99_ttft_ms:3000", "p99_tpot_ms:50"]},
}  # fmt: skip


def optima(out: Path) -> None:
    """What the plan takes sustains as much as the best of all deployments, tried in full on the same draws."""
    for name, question in OPTIMA.items():
        asked = read_plan(question)
        folder = out / name.replace(" ", "-")
        found = plan(asked, folder, Means())
        best = found.best
        if best is None:
            print(f"{name}: nothing meets the SLOs")
            continue
        engine = {k: v for k, v in asked.fixed.items() if k in (*KNOBS, "model", "tp")}
        every = Space(engine, "l20", asked.policies, asked.layouts, shares_prefixes=False, link_gbps=asked.link_gbps)
        deployments = every.of(asked.max_gpus)
        traffics = [found.draws.options[number] for number in range(asked.seeds)]
        searches = [
            most_load({**one.options, **traffic}, asked.slos, start=best.mean, step=1.25)
            for one in deployments
            for traffic in traffics
        ]
        loads = [reached.most for reached in answers(searches, Store(folder), Means())]
        means = []
        for at in range(0, len(loads), asked.seeds):
            product = 1.0
            for load in loads[at : at + asked.seeds]:
                product *= load
            means.append(product ** (1 / asked.seeds))
        top = max(range(len(means)), key=means.__getitem__)
        print(
            f"{name}: plan {best.mean:.3f} ({best.deployment.name}); best of all {len(deployments)} "
            f"{means[top]:.3f} ({deployments[top].name}); share {best.mean / means[top]:.3f}",
            flush=True,
        )


def drawn(case: int) -> dict[str, Any]:
    """A question at random: traffic for some 1 to 6 GPUs, for two minutes."""
    draw = random.Random(2026 + case)
    rate = 2.0 * 10.0 ** draw.uniform(0.0, 1.0)
    return BASE | KNOBS | ONE | {
        "max_gpus": 10, "input_len": draw.randint(100, 1500), "output_len": draw.randint(20, 250),
        "range_ratio": draw.uniform(0.1, 0.9), "request_rate": rate, "num_prompts": round(120.0 * rate),
        "burstiness": draw.choice([0.5, 1.0, 2.0]), "seed": 100 * case,
    }  # fmt: skip


def intervals(out: Path, first: int, last: int) -> None:
    """Fresh seeds within the intervals that plans print."""
    loads_in = gpus_in = count = 0
    for case in range(first, last):
        asked = read_plan(drawn(case))
        folder = out / f"case-{case}"
        found = plan(asked, folder, Means())
        best = found.best
        if best is None or found.answer is None:
            print(f"{case}: nothing meets the SLOs on {asked.max_gpus} GPUs", flush=True)
            continue
        low, high = best.interval
        fresh = _fresh(asked.fixed, best.deployment.options, best.mean, asked.slos, folder)
        by_size = {found.answer.num_gpus: fresh}
        for size in found.sizes:
            if size.best is not None and size.num_gpus not in by_size:
                options = size.best.deployment.options
                by_size[size.num_gpus] = _fresh(asked.fixed, options, size.best.mean, asked.slos, folder)
        needed = [
            min((gpus for gpus, loads in by_size.items() if loads[seed] >= 1.0), default=None) for seed in range(FRESH)
        ]
        inside = sum(low <= load <= high for load in fresh)
        most = found.most if found.most is not None else asked.max_gpus + 1
        held = sum((found.fewest or 0) <= (gpus or asked.max_gpus + 1) <= most for gpus in needed)
        loads_in, gpus_in, count = loads_in + inside, gpus_in + held, count + FRESH
        print(
            f"{case}: {found.answer.num_gpus} GPUs ({found.fewest} to {found.most}), fresh {needed}; load "
            f"{best.mean:.2f} ({low:.2f} to {high:.2f}), fresh {', '.join(f'{load:.2f}' for load in fresh)}",
            flush=True,
        )
    print(f"{loads_in} of {count} fresh loads and {gpus_in} of {count} fresh numbers of GPUs are within the intervals")


def _fresh(
    fixed: dict[str, Any], options: dict[str, Any], load: float, slos: tuple[Slo, ...], folder: Path
) -> list[float]:
    """The load that a deployment sustains on seeds no plan has seen."""
    seeds = range(FIRST_FRESH + fixed["seed"], FIRST_FRESH + fixed["seed"] + FRESH)
    searches = [most_load({**fixed, **options, "seed": seed}, slos, start=load, step=1.1) for seed in seeds]
    return [reached.most for reached in answers(searches, Store(folder), Means())]


if __name__ == "__main__":
    what, target, *ends = sys.argv[1:]
    if what == "optima":
        optima(Path(target))
    else:
        intervals(Path(target), *(map(int, ends) if ends else (0, CASES)))
