"""vLLM on H100, H200 and B200 as measured and as simulated: Llama-3.3-70B FP8 in closed loop, with shipped constants.

python benchmarks/vllm_closed_loop.py FILE [--gpu h200]    # says so and ends where FILE is not there

FILE is ai-dynamo/aiconfigurator's silicon_sample.csv (Apache-2.0) or rows of it. Of vLLM's rows of this model,
measured by InferenceMAX, it takes tensor parallelism, input and output length, concurrency, TTFT and TPOT. The settings
are those of its scripts (SemiAnalysisAI/InferenceX, Apache-2.0): vLLM about 0.10.2, FP8 weights and KV, async
scheduling, no prefix cache, 8,192 batched tokens, as many sequences as clients, 10 prompts a client, lengths uniform in
[0.8 L, L]. Nothing is fitted to these rows. What is not stated is assumed in `scenario`.
"""

import argparse
import csv
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean, median

from errors import summary

from sim.policy_options import parse_policy
from sim.prepare import prepare
from sim.scenario import Scenario
from sim.simulate import build_run, execute
from traces.request import Request

MODEL = "Llama-3.1-70B"
"""How the rows of Llama-3.3-70B are labelled; the shapes are the same."""
SYSTEMS = {"h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm"}
PROMPTS_PER_CLIENT = 10
LEAST_SHARE = 0.8
TTFT_TARGET, TPOT_TARGET = 0.20, 0.08
"""Median absolute errors aimed at."""
POLICY = "vllm-v1:async-scheduling=true"
MEMORY_BOUND = 1.0
"""Where the KV of all clients at their longest is more than so many pools, requests wait for memory."""


@dataclass(frozen=True)
class Row:
    """A measured row, and what the simulator says."""

    tp: int
    input_tokens: int
    output_tokens: int
    concurrency: int
    ttft_ms: float
    tpot_ms: float

    @property
    def name(self) -> str:
        """As people write it."""
        return f"TP{self.tp} {self.input_tokens}/{self.output_tokens} c{self.concurrency}"


@dataclass(frozen=True)
class Simulated:
    """What a run gave: medians and means, and what explains them."""

    ttft_ms: tuple[float, float]
    tpot_ms: tuple[float, float]
    preemptions: int
    blocks_needed: float
    """KV blocks of all clients at their longest, over those that there are."""


def read(path: Path, gpu: str) -> list[Row]:
    """The 70B model's FP8 rows of vLLM on a GPU, in order of their settings; rows that name no system are H100's."""
    wanted = {"backend": "vllm", "system": SYSTEMS[gpu], "precision": "fp8"}
    with path.open(encoding="utf-8") as file:
        found = [
            Row(
                int(float(row["tp_size"])),
                int(row["isl"]),
                int(row["osl"]),
                int(float(row.get("concurrency") or row["batch_size"])),
                float(row["silicon_ttft_ms"]),
                float(row["silicon_tpot_ms"]),
            )
            for row in csv.DictReader(file)
            if MODEL in row["model_path"] and all(row.get(name, value) == value for name, value in wanted.items())
        ]
    return sorted(found, key=lambda row: (row.tp, row.input_tokens, row.output_tokens, row.concurrency))


def requests(row: Row) -> list[Request]:
    """The prompts of a row: all there from the start, sent as the clients become free."""
    random = Random(row.concurrency)

    def length(longest: int) -> int:
        return random.randint(round(LEAST_SHARE * longest), longest)

    return [
        Request(i, 0.0, length(row.input_tokens), length(row.output_tokens))
        for i in range(PROMPTS_PER_CLIENT * row.concurrency)
    ]


def scenario(row: Row, gpu: str, kv_cache_dtype: str) -> Scenario:
    """The deployment of a row; that 90 % of the memory may be used is vLLM's default, and assumed."""
    return Scenario(
        workload="fixed",
        model="llama-3.1-70b",
        quantization="fp8",
        kv_cache_dtype="fp8" if kv_cache_dtype == "fp8" else "auto",
        gpu=gpu,
        tp=row.tp,
        max_concurrency=row.concurrency,
        max_num_seqs=row.concurrency,
        max_num_batched_tokens=8192,
        max_model_len=row.input_tokens + row.output_tokens + 256,
        enable_prefix_caching=False,
    )


def simulate(row: Row, gpu: str, kv_cache_dtype: str) -> Simulated:
    """Replay a row."""
    setup = prepare(scenario(row, gpu, kv_cache_dtype), POLICY, parse_policy(POLICY, {})[1])
    run = execute(build_run(setup, requests(row)))
    ttft_ms, tpot_ms = ([s * 1e3 for s in values] for values in (run.log.ttft_s, run.log.tpot_s))
    tokens = row.concurrency * (row.input_tokens + row.output_tokens)
    blocks = tokens / setup.limits.block_size / setup.limits.num_gpu_blocks
    preemptions = run.engines[0].scheduler.counters.preemptions
    return Simulated((median(ttft_ms), fmean(ttft_ms)), (median(tpot_ms), fmean(tpot_ms)), preemptions, blocks)


def error(found: float, measured: float) -> float:
    """Found over measured, less one."""
    return found / measured - 1


def line(row: Row, found: Simulated) -> str:
    """A line of the table: measured, simulated, errors."""
    text = f"{row.name:<22}"
    for there, here in ((row.ttft_ms, found.ttft_ms[1]), (row.tpot_ms, found.tpot_ms[1])):
        text += f"{there:>11,.1f}{here:>11,.1f}{100 * error(here, there):>+7.0f} %"
    notes = [f"KV of all clients {found.blocks_needed:.1f}x the pool"] if found.blocks_needed > MEMORY_BOUND else []
    notes += [f"{found.preemptions} preemptions"] if found.preemptions else []
    return f"{text}   {', '.join(notes)}".rstrip()


def main() -> None:
    """Print every row, and how far off they are together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--gpu", choices=SYSTEMS, default="h100")
    parser.add_argument(
        "--kv-cache-dtype", choices=("fp8", "auto"), default="fp8", help="fp8, as stated; auto: 16 bits"
    )
    arguments = parser.parse_args()
    if not arguments.file.exists():
        print(f"{arguments.file} is not there: nothing to compare with")
        return
    print("Simulated: means over all requests of a row, the burst at its start included.")
    print(f"{'row':<22}{'TTFT, ms':>11}{'simulated':>11}{'':>9}{'TPOT, ms':>11}{'simulated':>11}")
    pairs = []
    for row in read(arguments.file, arguments.gpu):
        pairs.append((row, simulate(row, arguments.gpu, arguments.kv_cache_dtype)))
        print(line(*pairs[-1]), flush=True)
    for which, kind in enumerate(("medians", "means")):
        print(f"\nsimulated {kind}:")
        ttft_errors = (error(found.ttft_ms[which], row.ttft_ms) for row, found in pairs)
        tpot_errors = (error(found.tpot_ms[which], row.tpot_ms) for row, found in pairs)
        print(summary("TTFT", ttft_errors, "rows", TTFT_TARGET))
        print(summary("TPOT", tpot_errors, "rows", TPOT_TARGET))
        for tp in sorted({row.tp for row, _ in pairs}):
            group = [(row, found) for row, found in pairs if row.tp == tp]
            ttft = median(error(found.ttft_ms[which], row.ttft_ms) for row, found in group)
            tpot = median(error(found.tpot_ms[which], row.tpot_ms) for row, found in group)
            print(f"  TP{tp}: median error TTFT {100 * ttft:+.0f} %, TPOT {100 * tpot:+.0f} %")


if __name__ == "__main__":
    main()
