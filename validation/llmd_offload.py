"""Does KV offload gain what llm-d measured? 16 H100, Qwen3-32B, many prompts behind few long system prompts.

    python validation/llmd_offload.py [--seeds 3]

llm-d's guide to tiered prefix caches (`guides/tiered-prefix-cache/cpu`, Apache-2.0) has means over 450 requests of 45
clients at eight vLLM servers, each on two GPUs, with 9,271 blocks of KV and, offloading, 41,000 more on the host. The
system prompts of "high" do not fit into the GPUs' memory, those of "low" do. What it does not say is assumed here: the
order of requests (shuffled, a seed), empty caches, vLLM's scheduling ahead, PCIe as our H100 has it, and the router's
weights in the run without offload (its file for runs with has 2 for queue, 2 for KV and 1 for each of two tiers).
Nothing was fitted to these rows.
"""

import argparse
from random import Random
from statistics import fmean, quantiles
from typing import Any, NamedTuple

from rich.progress import track

from sim.options.policies import parse_policy
from sim.options.scenario import Scenario
from sim.run.prepare import prepare
from sim.run.simulate import build_run, execute_all
from traces.request import Request

GROUPS, PROMPTS, QUESTION_TOKENS, OUTPUT_TOKENS, CLIENTS = 45, 10, 256, 1024, 45
SYSTEM_TOKENS = {"high": 30_000, "low": 8_000}
BLOCK_TOKENS, GPU_BLOCKS, HOST_BLOCKS = 16, 9_271, 41_000
OFFLOAD = f"vllm-v1:kv-offloading-size=172,cpu-chunks={HOST_BLOCKS}"
ROUTERS = {
    "llm-d": (("queue:2", "kv:2", "prefix:1"), ("queue:2", "kv:2", "prefix:2")),
    "least-loaded": ((), ()),
    "prefix-affinity": ((), ()),
}
"""Weights without offload and with it."""


class Means(NamedTuple):
    """Of a run: s, and tokens/s in and out."""

    ttft_s: float
    p90_ttft_s: float
    e2el_s: float
    p90_e2el_s: float
    tokens_per_s: float


MEASURED = {
    ("high", False): Means(9.0, 20.9, 37.8, 49.7, 38_534.8),
    ("high", True): Means(6.7, 20.2, 30.9, 44.2, 46_751.0),
    ("low", False): Means(0.12, 0.09, 18.4, 19.6, 23_389.6),
    ("low", True): Means(0.13, 0.11, 18.6, 20.6, 23_032.6),
}


def requests(system_tokens: int, seed: int, num_groups: int = GROUPS, prompts: int = PROMPTS) -> list[Request]:
    """All at once; the clients send them one after another."""
    groups = [group for group in range(num_groups) for _ in range(prompts)]
    Random(seed).shuffle(groups)
    shared, own = system_tokens // BLOCK_TOKENS, QUESTION_TOKENS // BLOCK_TOKENS
    return [
        Request(
            number, 0.0, system_tokens + QUESTION_TOKENS, OUTPUT_TOKENS, "",
            (*range(group * shared, (group + 1) * shared), *range(-own * (number + 1), -own * number)), BLOCK_TOKENS,
        )
        for number, group in enumerate(groups)
    ]  # fmt: skip


def simulate(system_tokens: int, router: str, seed: int, *, offload: bool) -> Means:
    """A run of these servers."""
    layout: dict[str, Any] = {"router": router, "router_weights": ROUTERS[router][offload], "replicas": 8, "tp": 2}
    scenario = Scenario(
        workload="fixed", model="qwen3-32b", gpu="h100", max_concurrency=CLIENTS, max_model_len=40_960,
        num_gpu_blocks_override=GPU_BLOCKS, seed=seed, **layout,
    )  # fmt: skip
    return run(scenario, OFFLOAD if offload else "vllm-v1", requests(system_tokens, seed))


def run(scenario: Scenario, policy: str, asked: list[Request]) -> Means:
    """What the requests saw."""
    setup = prepare(scenario, policy, parse_policy(policy, {})[1])
    ended = execute_all(build_run(setup, asked)).log.requests
    assert ended is not None
    ttft_s, e2el_s = [row.ttft_s for row in ended], [row.e2el_s for row in ended]
    tokens = sum(row.prompt_tokens + row.output_tokens for row in ended)
    p90 = [quantiles(values, n=10, method="inclusive")[-1] for values in (ttft_s, e2el_s)]
    end_s = max(row.arrival_s + row.e2el_s for row in ended)
    return Means(fmean(ttft_s), p90[0], fmean(e2el_s), p90[1], tokens / end_s)


def text(means: Means) -> str:
    """A line's numbers."""
    return "".join(f"{value:>9.2f}" for value in means[:4]) + f"{means.tokens_per_s:>12,.0f}"


def main() -> None:
    """Print what was measured, and what each router leads to, as means over seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="orders of the requests (default: 3)")
    seeds = range(1, parser.parse_args().seeds + 1)
    cells = [(cache, offload, router, seed) for cache, offload in MEASURED for router in ROUTERS for seed in seeds]
    found: dict[tuple[str, bool, str], list[Means]] = {}
    for cache, offload, router, seed in track(cells, description="runs"):
        means = simulate(SYSTEM_TOKENS[cache], router, seed, offload=offload)
        found.setdefault((cache, offload, router), []).append(means)
    print(f"{'':36}{'TTFT':>9}{'P90':>9}{'E2EL':>9}{'P90':>9}{'tokens/s':>12}")
    for (cache, offload), there in MEASURED.items():
        print(f"{cache + (', offload' if offload else ''):<20}{'measured':<16}{text(there)}")
        for router in ROUTERS:
            runs = found[cache, offload, router]
            here = Means(*(fmean(values) for values in zip(*runs, strict=True)))
            rates = [run.tokens_per_s for run in runs]
            print(f"{'':20}{router:<16}{text(here)}   {min(rates):,.0f} to {max(rates):,.0f}")
    for cache in SYSTEM_TOKENS:
        for name in ("measured", *ROUTERS):
            off, on = (
                MEASURED[cache, offload].tokens_per_s
                if name == "measured"
                else fmean(run.tokens_per_s for run in found[cache, offload, name])
                for offload in (False, True)
            )
            print(f"{cache:<20}{name:<16}offload gains {100 * (on / off - 1):+.1f} % tokens/s")


if __name__ == "__main__":
    main()
