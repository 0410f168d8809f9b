"""SGLang 0.3.0 as its authors measured it and as `radix` simulates it, by engine profile.

python validation/sglang03_served.py [--policy radix]

The rows are those of benchmark/benchmark_vllm_060 in sgl-project/sglang: ShareGPT, Poisson arrivals, no radix cache,
medians. Requests are drawn anew with ShareGPT's lengths. Nothing is fitted to them.
"""

import argparse
from statistics import median
from typing import NamedTuple

from sim.options.policies import parse_policy
from sim.options.scenario import Scenario
from sim.run.prepare import prepare
from sim.run.simulate import build_run, execute_all
from sim.run.traffic import requests_of


class Row(NamedTuple):
    """Medians, ms, of so many requests a second for five minutes."""

    model: str
    gpu: str
    tp: int
    rate: int
    ttft_ms: float
    tpot_ms: float


ROWS = (
    Row("llama-3.1-8b", "a100-80g", 1, 4, 31.98, 13.17),
    Row("llama-3.1-8b", "a100-80g", 1, 8, 35.68, 17.85),
    Row("llama-3.1-70b", "h100", 4, 4, 53.94, 25.03),
    Row("llama-3.1-70b", "h100", 4, 8, 58.11, 33.07),
)
PROFILES = ("sglang-0.3", "vllm-v1", "vllm-0.5")
DURATION_S = 300


def simulated(row: Row, policy: str, engine_profile: str) -> tuple[float, float]:
    """Median TTFT and TPOT, ms."""
    scenario = Scenario(
        workload="sharegpt", num_prompts=DURATION_S * row.rate, request_rate=row.rate, model=row.model, gpu=row.gpu,
        tp=row.tp, engine_profile=engine_profile,
    )  # fmt: skip
    setup = prepare(scenario, policy, parse_policy(policy, {})[1])
    log = execute_all(build_run(setup, requests_of(setup))).log
    return 1e3 * median(log.ttft_s), 1e3 * median(log.tpot_s)


def main() -> None:
    """Print every row with every profile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="radix")
    policy = parser.parse_args().policy
    for profile in PROFILES:
        for row in ROWS:
            found = simulated(row, policy, profile)
            cells = (
                f"{name} {there:.1f} / {here:.1f} ({100 * (here / there - 1):+.0f} %)"
                for name, there, here in zip(("TTFT", "TPOT"), (row.ttft_ms, row.tpot_ms), found, strict=True)
            )
            print(f"{profile:<11}{row.model:<14}{row.rate}/s  {'  '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
