"""How long a cluster takes to simulate: 64 replicas and 100,000 requests under each router.

ShareGPT's lengths; `prefix-affinity` needs prompts with hash ids and gets conversations of such turns, with caches.

python benchmarks/replicas_speed.py [--replicas N] [--num-prompts N] [--rate REQUESTS_PER_S_AND_REPLICA]
    [--router NAME]...
"""

import argparse
import sys
from time import perf_counter, process_time

from sim.options.policies import parse_policy
from sim.options.scenario import Scenario
from sim.run.prepare import prepare
from sim.run.simulate import build_run, execute
from sim.run.traffic import traffic
from sim.topology import ROUTERS


def main() -> None:
    """Print seconds, those of a core, iterations and mean TTFT for each router."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--num-prompts", type=int, default=100_000)
    parser.add_argument("--rate", type=float, default=5.0, help="requests/s for each replica")
    parser.add_argument("--policy", default="vllm-recompute")
    parser.add_argument("--router", action="append", choices=tuple(ROUTERS), default=None)
    given = parser.parse_args()
    for router in given.router or ROUTERS:
        named = router == "prefix-affinity"
        scenario = Scenario(
            workload="sessions" if named else "sharegpt",
            input_len=161 if named else None,
            output_len=338 if named else None,
            enable_prefix_caching=True if named else None,
            clip=4096 if named else None,
            num_prompts=given.num_prompts,
            request_rate=given.rate * given.replicas,
            model="llama-3.1-8b",
            gpu="a100-80g",
            max_model_len=4096,
            replicas=given.replicas,
            router=router,  # pyright: ignore[reportArgumentType] - a name of the catalogue
        )
        run = build_run(prepare(scenario, given.policy, parse_policy(given.policy, {})[1]), traffic(scenario))
        begun_s, cpu_begun_s = perf_counter(), process_time()
        execute(run)
        took_s, cpu_s = perf_counter() - begun_s, process_time() - cpu_begun_s
        if run.error is not None:
            sys.exit(f"{router}: {run.error}")
        iterations = sum(instance.iterations for instance in run.instances)
        ttft_ms = run.log.latencies()["mean_ttft_ms"]
        print(
            f"{router:<18}{took_s:7.1f} s, {cpu_s:6.1f} s of a core, {run.log.completed:>9,} requests, "
            f"{iterations:>12,} iterations, mean TTFT {ttft_ms:,.1f} ms"
        )


if __name__ == "__main__":
    main()
