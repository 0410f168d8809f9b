"""AISimulate and kvtwin on the same measured rows: errors by group, and the CPU time of each.

python validation/aisimulate.py silicon_sample.csv --aisimulate BINARY [--every 7]    # says so where one is not there

Rows are those of `vllm_closed_loop.py`, in its groups, and so are requests and settings: lengths, clients, seats,
budget of tokens, formats, layout. AISimulate (NVIDIA, Apache-2.0; its own environment) gets them as a trace in closed
loop and predicts with its own tables, `database_mode: SILICON`. It has no setting for sampling, CUDA graphs or
asynchronous scheduling. CPU time is of one process a row for it, its start included; ours is the run alone.
"""

import argparse
import json
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

from vllm_closed_loop import SERVED, Row, Served, error, read, simulate, with_graphs

DENSE = ("meta-llama/", "Qwen/Qwen3-32B")
KNOWN_AS = {"meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B"}
"""Models that it knows by another name."""
QUANTIZATIONS = {"fp8": {"gemm_quant_mode": "fp8"}, "modelopt_fp4": {"gemm_quant_mode": "nvfp4"}}
"""Of matrices that are not in the format of the model's own checkpoint, which it knows."""


@dataclass(frozen=True)
class Answer:
    """Means, ms, and what they took."""

    ttft_ms: float
    tpot_ms: float
    cpu_s: float


def config(row: Row, served: Served, trace: Path) -> dict[str, Any]:
    """What `aisimulate predict` is asked (JSON is YAML)."""
    options = served.options | served.options_of(row)
    path = served.columns["model_path"]
    group = "attention_data" if served.layout == "ranks" else "tensor"
    parallelism = {group: row.tp}
    if not path.startswith(DENSE):
        parallelism["moe_tensor" if served.layout == "group" else "moe_expert"] = row.tp
    timing = {"kvcache_quant_mode": "fp8" if options.get("kv_cache_dtype") == "fp8" else "bfloat16"}
    if not path.endswith("FP8"):
        timing |= QUANTIZATIONS.get(options.get("quantization", ""), {})
    if options["model"].endswith("nvfp4"):
        timing["moe_quant_mode"] = "nvfp4"
    worker = {
        "parallelism": parallelism,
        "scheduler": {
            "max_batched_tokens": options.get("max_num_batched_tokens", 8192),
            "max_sequences": options.get("max_num_seqs") or 1024,
        },
        "kv_cache": {
            "prefix_caching": False,
            "capacity": {"memory_fraction": options.get("gpu_memory_utilization", 0.9)},
        },
        "timing": timing,
    }
    engine = {
        "mode": "aggregated",
        "model": KNOWN_AS.get(path, path),
        "hardware": served.columns["system"],
        "backend": "vllm",
        "workers": {"aggregated": worker},
    }
    load = {"type": "concurrency", "concurrency": row.concurrency}
    source = {"type": "trace", "paths": [str(trace)], "format": "mooncake", "block_size": 512}
    return {"engine": engine, "traffic": {"source": source, "load": load}}


def theirs(binary: Path, row: Row, served: Served, folder: Path) -> Answer | None:
    """AISimulate's answer; None where it has none."""
    trace, asked = folder / "trace.jsonl", folder / "asked.yaml"
    block_ids = count()
    lines = [
        {
            "timestamp": 0,
            "input_length": request.prompt_tokens,
            "output_length": request.output_tokens,
            "hash_ids": list(islice(block_ids, -(-request.prompt_tokens // 512))),
        }
        for request in served.client.requests(row)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    wanted = config(row, served, trace)
    command = [str(binary), "predict", "-c", str(asked), "--format", "json", "--output-dir", str(folder), "--overwrite"]
    # It refuses shares of blocks of FP8 that no kernel takes: then FP8 with one scale, as the measured file says.
    for more in ({}, {"gemm_quant_mode": "fp8", "moe_quant_mode": "fp8"}):
        wanted["engine"]["workers"]["aggregated"]["timing"] |= more
        asked.write_text(json.dumps(wanted), encoding="utf-8")
        before = os.times()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        after = os.times()
        if not done.returncode:
            said = json.loads(done.stdout.strip().splitlines()[-1])
            cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
            return Answer(said["mean_ttft_ms"], said["mean_tpot_ms"], cpu_s)
        if served.columns.get("precision", "fp8") != "fp8":
            break
    return None


def ours(row: Row, served: Served) -> Answer:
    """Our answer."""
    began = time.process_time()
    found = simulate(row, served)
    return Answer(found.ttft_ms[1], found.tpot_ms[1], time.process_time() - began)


def summary(pairs: Sequence[tuple[Row, Answer]]) -> str:
    """Median absolute errors, median errors, and CPU seconds a row."""
    text = ""
    for name in ("ttft_ms", "tpot_ms"):
        errors = [100 * error(getattr(found, name), getattr(row, name)) for row, found in pairs]
        text += f"{median(map(abs, errors)):>8.1f} %{median(errors):>+7.1f} %"
    return f"{text}{fmean(found.cpu_s for _, found in pairs):>8.2f} s"


def main() -> None:
    """Print errors by group, AISimulate's and ours."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--aisimulate", type=Path, required=True, metavar="BINARY")
    parser.add_argument("--served", choices=SERVED, nargs="+", help="these groups alone")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="every N-th row of a group alone")
    arguments = parser.parse_args()
    for path in (arguments.file, arguments.aisimulate):
        if not path.exists():
            print(f"{path} is not there: nothing to compare with")
            return
    print(f"{'':44}{'TTFT: median, |median|':>18}{'TPOT':>18}{'CPU':>9}")
    with TemporaryDirectory() as name:
        folder = Path(name)
        for group in arguments.served or [name for name, served in SERVED.items() if not served.sglang]:
            served = SERVED[group]
            rows = list(dict.fromkeys(read(arguments.file, served)))[arguments.every // 2 :: arguments.every]
            found = [(row, theirs(arguments.aisimulate, row, served, folder)) for row in rows]
            answered = [(row, answer) for row, answer in found if answer is not None]
            if not answered:
                print(f"{group:<32}AISimulate answers none of {len(rows)} rows")
                continue
            ran = with_graphs(served, folder)
            print(f"{group:<32}AISimulate, {len(answered)} of {len(rows)} rows {summary(answered)}")
            print(f"{'':<32}kvtwin {summary([(row, ours(row, ran)) for row, _ in answered])}", flush=True)


if __name__ == "__main__":
    main()
