"""Whether presets of kvtwin decide in vLLM 0.33 as they do in the simulator, on random workloads.

python validation/vllm_scheduler.py --first-seed 20000 --workloads 200

Needs the environment of `tests/oracle/vllm_v1_oracle.py`, kvtwin in it. vLLM's own `EngineCore` runs on the CPU over a
virtual clock with `--scheduler-cls kvtwin.vllm.Preset` (`tests/oracle/vllm_core.py`). Compared are, of every
iteration, its end, the requests with their tokens and the free blocks; then the ends of all requests and those
preempted. Workloads are small and nasty: pools of a few requests, prompts sent twice, bursts, turns that hit what was
generated.

- `adaptive`, serially and ahead, with SLOs, GPU, model and predictor drawn, against the simulator without a host.
- `vllm-v1`, with vLLM's options drawn, against vLLM's own scheduler, in vLLM's order.
"""

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path
from random import Random

from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "oracle"))

PRESET = "kvtwin.vllm.Preset"
MACHINES = (("llama-3.1-8b", "l20"), ("llama-2-7b", "a100-80g"), ("qwen3-14b", "h100"), ("llama-3.1-8b", "rtx-4090"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first-seed", type=int, default=20_000)
    parser.add_argument("--workloads", type=int, default=200, help="of each kind")
    asked = parser.parse_args()
    try:
        from make_cases_v1 import Workload  # noqa: PLC0415
        from scheduler_replay import PLAIN, facts_of, requests_of, simulated  # noqa: PLC0415
        from vllm_core import Core  # noqa: PLC0415
    except ImportError as error:
        raise SystemExit(f"{error}; tests/oracle/vllm_v1_oracle.py says which environment this needs") from None

    different = {"adaptive": 0, "vllm-v1": 0}
    iterations, preempted = dict.fromkeys(different, 0), dict.fromkeys(different, 0)
    console = Console(stderr=True)
    for seed in track(range(asked.first_seed, asked.first_seed + asked.workloads), "Workloads", console=console):
        workload, dice = Workload(seed), Random(f"vllm scheduler {seed}")
        options, rows = replace(workload.options(), async_scheduling=dice.random() < 0.5), workload.rows()
        model, gpu = dice.choice(MACHINES)

        # vLLM's options that `adaptive` does not have stay at vLLM's defaults.
        facts = facts_of(asdict(options) | PLAIN)
        requests = requests_of(rows, facts)
        ttft_ms, tpot_ms = round(10 ** dice.uniform(1.5, 3.7)), round(10 ** dice.uniform(1.2, 2.3))
        words = f"ttft-slo-ms={ttft_ms},tpot-slo-ms={tpot_ms},predictor={dice.choice(['none', 'bucket', 'oracle'])}"
        told = {"policy": f"adaptive:{words}", "model": model, "gpu": gpu}
        want, found = simulated(requests, facts, told), Core(requests, facts, PRESET, told).run()
        compare(f"{seed} {told['policy']}", want.difference(found, "simulated", "in vLLM"), "adaptive", different)
        iterations["adaptive"] += len(found.steps)
        preempted["adaptive"] += len(found.preempted)

        facts = facts_of(asdict(options))
        requests = requests_of(rows, facts)
        told = {"policy": "vllm-v1", "model": model, "gpu": gpu}
        found = Core(requests, facts, PRESET, told).run()
        own = Core(requests, facts, None, told, found).run()
        where = found.difference(own, "as a preset", "as vLLM's own")
        if not where and (found.steps, found.preempted) != (own.steps, own.preempted):
            where = "the order within an iteration"
        compare(f"{seed} vllm-v1", where, "vllm-v1", different)
        iterations["vllm-v1"] += len(found.steps)
        preempted["vllm-v1"] += len(found.preempted)
    for name, count in different.items():
        print(
            f"{name}: {asked.workloads} workloads, {iterations[name]} iterations, {preempted[name]} preemptions; "
            f"{count} workloads differ"
        )
    raise SystemExit(any(different.values()))


def compare(what: str, difference: str, name: str, different: dict[str, int]) -> None:
    """Count and print a difference, if there is one."""
    if difference:
        different[name] += 1
        print(f"{what}: {difference}")


if __name__ == "__main__":
    main()
