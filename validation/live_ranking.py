"""Whether `adaptive`, LayerKV and vLLM rank live as they rank simulated: a small model, on this machine's CPU.

    OMP_NUM_THREADS=1 python validation/live_ranking.py OUT [--profile cpu-measured.json] [--runs 3] [--loads 1.5 4]

Calibrates first unless given a profile. ShareGPT clipped to 128 tokens, 60 blocks, loads past the knee: so many times
the rate at which `vllm-v1` drains a full queue. SLOs are multiples of a decode step of 16 sequences by the profile, so
that machines of any speed see the same contention. All time, of calibration and of runs, is the process's own CPU time,
waiting included: other programs on the cores stretch the wall's. Policies take turns, a round each; the probe of
`kvtwin validate` says before and after each run how slow the machine is. The status is 1 if the medians of live goodput
rank in another order.
"""

# ruff: noqa: E402 (the clock comes first)

import argparse
import sys
import time
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from statistics import median

import msgspec
from rich.progress import track

time.perf_counter, time.perf_counter_ns = time.process_time, time.process_time_ns

from gpu_runtime.cli import of_our_engine
from gpu_runtime.live import LiveOptions, load_decoder, perform
from gpu_runtime.model.decoder import Decoder
from gpu_runtime.twin.probe import machine_slowness
from kvtwin import main as kvtwin
from sim.engine.plan import IterationPlan
from sim.files import write_atomically
from sim.options.policies import parse_policy
from sim.options.scenario import Scenario
from sim.results.result import assemble
from sim.run.prepare import prepare
from sim.run.runs import Recording
from sim.run.simulate import build_run, execute
from sim.run.traffic import traffic

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}
BLOCKS, CLIP, SEATS = 60, 128, 64
TPOT_STEPS, TTFT_STEPS = 2.0, 20.0
"""SLOs, in decode steps of `STEP_SEQS` sequences of `STEP_CONTEXT` tokens."""
STEP_SEQS, STEP_CONTEXT = 16, 64


def slos_ms(scenario: Scenario) -> tuple[int, int]:
    """TTFT and TPOT that requests are to meet, ms."""
    plan = IterationPlan()
    plan.num_decodes, plan.decode_context_tokens = STEP_SEQS, STEP_SEQS * STEP_CONTEXT
    step_ms = 1e3 * prepare(scenario, *parse_policy("vllm-v1", {})).cost.iteration_s(plan)
    return round(TTFT_STEPS * step_ms), round(TPOT_STEPS * step_ms)


def simulated(scenario: Scenario, policy: str) -> tuple[float, float]:
    """Goodput and throughput, 1/s."""
    result = assemble(execute(build_run(prepare(scenario, *parse_policy(policy, {})), traffic(scenario))))
    return result.request_goodput or 0.0, result.request_throughput


def lived(scenario: Scenario, policy: str, decoder: Decoder, options: LiveOptions) -> float:
    """Goodput of a live run, 1/s."""
    setup = prepare(scenario, *parse_policy(policy, {}))
    run = perform(setup, traffic(scenario), None, Recording(), decoder, options)
    if run.interrupted:
        raise KeyboardInterrupt
    return assemble(run).request_goodput or 0.0


def order(goodput: dict[str, float]) -> list[str]:
    """The policies, the best first."""
    return sorted(goodput, key=lambda policy: -goodput[policy])


def table(load: float, slos: str, there: dict[str, float], here: dict[str, list[float]], slowness: list[float]) -> str:
    """What a load showed so far."""
    rounds = min(map(len, here.values()))
    alike = sum(order({p: runs[i] for p, runs in here.items()}) == order(there) for i in range(rounds))
    rows = [f"## {load:g} times the drain rate; {slos}", ""]
    rows += ["| policy | simulated (1/s) | live, median (1/s) | least | most |", "|---|--:|--:|--:|--:|"]
    for policy in order(there):
        runs = here[policy]
        if runs:
            rows.append(
                f"| `{policy.split(':')[0]}` | {there[policy]:.2f} | {median(runs):.2f} | {min(runs):.2f} | "
                f"{max(runs):.2f} |"
            )
    rows += ["", f"{alike} of {rounds} rounds rank as simulated. The machine took {median(slowness):.2f} times as "]
    rows[-1] += f"long as its profile says ({min(slowness):.2f} to {max(slowness):.2f})."
    return "\n".join(rows) + "\n"


def prepared(out: Path, profile: Path | None, num_prompts: int) -> Scenario:
    """All requests at once, on the CPU; calibrates it in `out` unless given a profile."""
    out.mkdir(parents=True, exist_ok=True)
    config = out / "config.json"
    write_atomically(config, lambda file: file.write(msgspec.json.encode(CONFIG)))
    if profile is None:
        calibrated = out / "calibration"
        command = ["calibrate", "--device", "cpu", "--quick", "--model", str(config), "--out", str(calibrated)]
        if kvtwin(command):
            raise SystemExit(1)
        profile = calibrated / "cpu-measured.json"
    return of_our_engine(
        Scenario(
            model=str(config), gpu="cpu", dtype="float32", profile=str(profile), workload="sharegpt", clip=CLIP, seed=1,
            num_prompts=num_prompts, num_gpu_blocks_override=BLOCKS, max_num_seqs=SEATS, swap_space=0.5,
            request_rate=inf,
        )
    )  # fmt: skip


@dataclass
class Load:
    """One load: its scenario, goodput by policy as simulated and of each live run, 1/s, and how slow the machine was.

    `factor` is of the drain rate; `slowness` of the machine over its profile, before and after each live run.
    """

    factor: float
    scenario: Scenario
    there: dict[str, float]
    here: dict[str, list[float]]
    slowness: list[float] = field(default_factory=list)

    def live(self, policy: str, decoder: Decoder, options: LiveOptions) -> None:
        """One more live run, between two probes."""
        before = machine_slowness(self.scenario, decoder, options)
        self.here[policy].append(lived(self.scenario, policy, decoder, options))
        self.slowness += [before, machine_slowness(self.scenario, decoder, options)]

    @property
    def agrees(self) -> bool:
        """Whether the medians of live runs rank as simulated."""
        return order({policy: median(runs) for policy, runs in self.here.items()}) == order(self.there)


def run(loads: list[Load], slos: str, runs: int, out: Path, decoder: Decoder, options: LiveOptions) -> str:
    """Run every policy at every load in turns, and keep the report up to date; returns it."""
    turns = [(load, policy) for _ in range(runs) for load in loads for policy in load.here]
    text = ""
    for load, policy in track(turns, description="live runs"):
        load.live(policy, decoder, options)
        text = "\n".join(table(at.factor, slos, at.there, at.here, at.slowness) for at in loads if at.slowness)
        write_atomically(out / "ranking.md", lambda file, text=text: file.write(text.encode()))
    return text


def main() -> int:
    """Run every load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--num-prompts", type=int, default=80)
    parser.add_argument("--loads", type=float, nargs="+", default=[1.5, 4.0])
    arguments = parser.parse_args()
    out: Path = arguments.out
    base = prepared(out, arguments.profile, arguments.num_prompts)
    options = LiveOptions("cpu")
    decoder = load_decoder(base.model, "float32", options)
    _, drained = simulated(base, "vllm-v1")
    ttft_ms, tpot_ms = slos_ms(base)
    policies = (
        f"adaptive:ttft-slo-ms={ttft_ms},tpot-slo-ms={tpot_ms}", f"layerkv:tpot-slo-ms={tpot_ms}", "vllm-v1"
    )  # fmt: skip
    loads = []
    for factor in arguments.loads:
        goodput = (f"ttft:{ttft_ms}", f"tpot:{tpot_ms}")
        scenario = replace(base, request_rate=factor * drained, goodput=goodput)
        there = {policy: simulated(scenario, policy)[0] for policy in policies}
        loads.append(Load(factor, scenario, there, {policy: [] for policy in policies}))
    print(run(loads, f"TTFT {ttft_ms} ms, TPOT {tpot_ms} ms", arguments.runs, out, decoder, options))
    return int(not all(load.agrees for load in loads))


if __name__ == "__main__":
    sys.exit(main())
