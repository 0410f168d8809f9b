"""Sizes of KV pools beside those that public logs of vLLM print: `python validation/kv_pools.py`.

`kv_pools.csv` has a log a row: the GiB of KV on one GPU, and what they hang on. Where a log does not say them, batched
tokens and sequences are the defaults of `vllm serve` on that GPU. Int8 weights are rows of fp8, CodeLlama is Llama-2.
What `vllm-v1-async` has was read off rows that are not `set_aside`, older constants off rows of 0.5 and 0.6. Sources:

    sweep           github.com/jgchn/llm-d-planner, commit 30ec05f7, accuracy/results/v0.19.0/results_raw.csv
    sweep-runs      the same, commit cb666596, accuracy/results/v0.19.0/runs/*.json
    sweep-releases  the same, commit a95e9f62, accuracy/results/version-sweep/run_matrix.md
    empirical       github.com/llm-d-incubation/llm-d-planner, commit e50305af, docs/empirical-vllm-memory-results.md;
                    gpt-oss-120b's parts add up at a utilization of 0.95, not at the 0.9 that its line says
    myoceane        myoceane.fr/index.php/ai-vllm-a100-gemma-4
    older           startup logs of vLLM 0.5.4, 0.6.1 and 0.6.3 (max_model_len 512, chunks of 512, max_model_len 4096)
"""

import csv
from collections import defaultdict
from pathlib import Path

from errors import summary

from sim.cost.engine_profile import load_engine_profile
from sim.specs.hardware import load_hardware
from sim.specs.kv_format import kv_dtype
from sim.specs.memory import OLDER, EngineMemory, kv_cache_blocks
from sim.specs.models import load_model
from sim.specs.stages import partitioned

Row = dict[str, str]
COUNTS = ("tensor_parallel_size", "pipeline_parallel_size", "max_num_batched_tokens", "max_num_seqs")


def rows() -> list[Row]:
    """All logs."""
    return list(csv.DictReader(Path(__file__).with_suffix(".csv").read_text().splitlines()))


def error(row: Row, engine: EngineMemory | None = None) -> float:
    """Of the simulated pool, as a share of the log's; with what its release takes, or `engine`."""
    if engine is None:
        engine = OLDER if row["vllm"] in ("0.5", "0.6") else load_engine_profile(f"vllm=={row['vllm']}").memory()
    model, gpu = load_model(row["model"]), load_hardware(row["gpu"])
    if row["quantization"]:
        model = model.with_quantization(row["quantization"])
    if row["kv_cache_dtype"] != "auto":
        model = model.with_kv_dtype(kv_dtype(row["kv_cache_dtype"], gpu))
    tp, pp, tokens, seqs = (int(row[name]) for name in COUNTS)
    pool = kv_cache_blocks(
        model, gpu, tensor_parallel_size=tp, stage_layers=partitioned(model.num_layers, pp),
        max_num_batched_tokens=tokens, max_num_seqs=seqs,
        gpu_memory_utilization=float(row["gpu_memory_utilization"]), block_size=16, swap_space_bytes_per_gpu=0.0,
        engine=engine,
    )  # fmt: skip
    return pool.num_gpu_blocks * pool.block_bytes / (float(row["kv_gib"]) * 2**30) - 1


def group(row: Row) -> str:
    """What of the answer a row is evidence for."""
    experts = "experts" if load_model(row["model"]).moe else "dense"
    is_new = row["vllm"] in ("0.17", "0.18", "0.19")
    return f"{experts}, vLLM {'0.17 to 0.19' if is_new else 'before 0.17'}{', set aside' if row['set_aside'] else ''}"


def main() -> None:
    """Prints each row's error, and the errors of groups."""
    found, before = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for row in rows():
        gpus = f"{row['tensor_parallel_size']}x{row['pipeline_parallel_size']} {row['gpu']}"
        found[group(row)].append(error(row))
        before[group(row)].append(error(row, OLDER))
        print(f"{row['vllm']:5} {row['model']:17} {gpus:12} {row['kv_gib']:>6} GiB {100 * error(row):+6.1f} %")
    for name in sorted(found):
        print(summary(name, found[name], "pools"))
        print(summary(f"{name}, with what 0.5 takes", before[name], "pools"))


if __name__ == "__main__":
    main()
