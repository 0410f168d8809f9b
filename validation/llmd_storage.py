"""Does a file tier gain what llm-d measured? 16 H100, Llama 3.3 70B, prompts that neither GPUs nor hosts can keep.

    python validation/llmd_storage.py

llm-d's guide (`guides/tiered-prefix-cache/storage` at commit 105e3bc3, Apache-2.0) has means of 2,700 requests from 20
clients at four vLLM servers on four GPUs each, with 10,768 blocks of KV and LMCache: 20 GB of host memory a GPU, and
1,120 GiB of files a GPU on a Lustre file system of 18,000 GiB. LMCache's chunks are of 256 tokens; here its rules are
vLLM's for its own tiers. Not stated and assumed: the order of requests (shuffled, a seed), and what Lustre reaches; the
guide's storage class asks for 1,000 MB/s a TiB, which is 4.5 GB/s for each server. Nothing was fitted to these rows.
"""

import argparse

from llmd_offload import Means, requests, run, text
from rich.progress import track

from sim.options.scenario import Scenario

GROUPS, PROMPTS, CLIENTS, GPU_BLOCKS = 50, 54, 20, 10_768
HOST = "vllm-v1:kv-offloading-size=74.5,blocks-per-chunk=16"
RATES_GB_PER_S = (4.5, 1.5)
"""To and from the files, of each server."""
MEASURED = {
    (50_000, False): Means(25.38, 37.74, 56.21, 69.69, 18_962),
    (50_000, True): Means(20.12, 34.02, 45.83, 58.73, 23_262),
    (70_000, False): Means(58.02, 74.75, 87.99, 105.46, 16_825),
    (70_000, True): Means(45.0, 64.79, 68.28, 87.47, 21_656),
}


def simulate(system_tokens: int, rate_gb_per_s: float | None) -> Means:
    """A run of these servers, with files behind the host where a rate is given."""
    scenario = Scenario(
        workload="fixed", model="llama-3.1-70b", gpu="h100", tp=4, replicas=4, max_concurrency=CLIENTS,
        max_model_len=131_072, num_gpu_blocks_override=GPU_BLOCKS, router="llm-d",
        router_weights=("queue:2", "kv:2", "prefix:2"), seed=1,
    )  # fmt: skip
    policy = HOST
    if rate_gb_per_s is not None:
        policy += f",storage-space=4480,storage-read-gb-per-s={rate_gb_per_s},storage-write-gb-per-s={rate_gb_per_s}"
    return run(scenario, policy, requests(system_tokens, 1, GROUPS, PROMPTS))


def main() -> None:
    """Print what was measured, and what is simulated at each rate."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    cells = [(*cell, rate) for cell in MEASURED for rate in (RATES_GB_PER_S if cell[1] else (None,))]
    found = {cell: simulate(cell[0], cell[2]) for cell in track(cells, description="runs")}
    print(f"{'':36}{'TTFT':>9}{'P90':>9}{'E2EL':>9}{'P90':>9}{'tokens/s':>12}")
    for tokens, has_files in MEASURED:
        print(
            f"{f'{tokens:,}' + (', files' if has_files else ''):<20}{'measured':<16}{text(MEASURED[tokens, has_files])}"
        )
        for cell, means in found.items():
            if cell[:2] == (tokens, has_files):
                print(f"{'':20}{'simulated' if cell[2] is None else f'{cell[2]} GB/s':<16}{text(means)}")


if __name__ == "__main__":
    main()
