"""aiconfigurator-core's tables of mixture-of-experts kernels of vLLM, as samples of experts.

A row is vLLM's whole `FusedMoE` module on one GPU, in a CUDA graph: routing from given logits to the weighted sum of
the experts (aiconfigurator, `collector/vllm/collect_moe.py`). Its widths are the model's, before the split over GPUs.
Latencies are in ms.

Not taken:

- expert parallelism, which is not simulated;
- power laws of 1.01, which are much like those of 1.2;
- weights that fit in the L2 cache twice: a replay finds there what the one before has read, and no server would;
- DeepSeek-V3's shape: its router chooses among groups of experts, which the logits of the tables were not made for.
  Taken for what they say, 64 tokens would read all experts at 8.1 TB/s on an H200, which has 4.8;
- static FP8 scales per tensor: up to six times as slow as blocks of FP8 in the same table, at 0.65 TB/s on an H200;
- MXFP4 but gpt-oss's: that of other models has other kernels;
- NVFP4 but by TensorRT-LLM's kernels, which vLLM prefers where it can.

NVFP4 has inputs of four bits as well; int4 has inputs of 16 bits: Marlin's kernels, 32 weights a group, Kimi K2 alone.
"""

from pathlib import Path
from typing import Any

import numpy as np

from calib.experts import WEIGHT_BYTES, ExpertSample
from calib.importers.aiconfigurator import MS, SYSTEMS, newest_of_engine, read_rows

TABLE = "moe_perf.parquet"
COLUMNS = (
    "moe_dtype", "kernel_source", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size",
    "moe_ep_size", "distribution", "latency",
)  # fmt: skip
QUANTIZATIONS = {"bfloat16": "", "fp8_block": "fp8", "nvfp4": "nvfp4", "w4a16_mxfp4": "mxfp4", "int4_wo": "int4"}
"""Types of the tables that are taken, and what they are called here."""
ROUTINGS = ("balanced", "power_law_1.2")
MOST_TOKENS, MOST_GPUS = 16_384, 8
GROUPED = {(7168, 2048, 8, 256)}
"""Hidden size, width, experts per token and experts of models that choose among groups of experts."""
UNGATED = {(2688, 1856), (2048, 5120), (1024, 2688)}
"""Hidden size and width of Nemotron 3's experts, which have two matrices."""
LATER = ("nvfp4", "int4_wo")
KERNELS = {"w4a16_mxfp4": ("gptoss", "vllm_mxfp4_moe"), "nvfp4": ("flashinfer_trtllm",)}
"""Words of the names of the kernels that are taken, where not all are."""
DRAWS = 10


def import_experts(root: Path) -> tuple[list[ExpertSample], str]:
    """Samples of a system's folder, and whose kernels they are; none where it has no such table of vLLM."""
    if not (root / "moe" / "vllm").is_dir():
        return [], "none in the tables"
    path = newest_of_engine(root / "moe", TABLE, "vllm")
    # Those last that were taken last, so that the others' draws stay what they were.
    rows = sorted(
        (row for row in read_rows(path, COLUMNS) if _is_taken(row)), key=lambda row: row["moe_dtype"] in LATER
    )
    met = _ExpertsMet()
    samples = [_sample(row, met) for row in rows]
    version = path.parent.name
    found = [s for s in samples if _read_bytes(s) > 2 * SYSTEMS[root.name].l2_bytes]
    return found, f"FusedMoE of vLLM {version}"


def _is_taken(row: dict[str, Any]) -> bool:
    kind = row["moe_dtype"]
    shape = (row["hidden_size"], row["inter_size"], row["topk"], row["num_experts"])
    return (
        kind in QUANTIZATIONS
        and row["distribution"] in ROUTINGS
        and row["moe_ep_size"] == 1
        and row["moe_tp_size"] <= MOST_GPUS
        and row["num_tokens"] <= MOST_TOKENS
        and shape not in GROUPED
        and any(word in row["kernel_source"] for word in KERNELS.get(kind, ("",)))
    )


def _sample(row: dict[str, Any], met: "_ExpertsMet") -> ExpertSample:
    tokens, experts, topk = row["num_tokens"], row["num_experts"], row["topk"]
    return ExpertSample(
        quantization=QUANTIZATIONS[row["moe_dtype"]],
        tokens=tokens,
        hidden_size=row["hidden_size"],
        intermediate_size=row["inter_size"],
        experts_per_token=topk,
        num_experts=experts,
        tp=row["moe_tp_size"],
        gated=int((row["hidden_size"], row["inter_size"]) not in UNGATED),
        routing=row["distribution"],
        experts_met=met.of(tokens, experts, topk, row["distribution"]),
        latency_s=float(f"{row['latency'] * MS:.5g}"),
    )


def _read_bytes(sample: ExpertSample) -> float:
    weights = (2 + sample.gated) * sample.hidden_size * sample.intermediate_size / sample.tp
    return sample.experts_met * weights * WEIGHT_BYTES[sample.quantization]


class _ExpertsMet:
    """Experts that any of the tokens meets, as the collector spreads them."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)
        self._known: dict[tuple[int, int, int, str], float] = {}

    def of(self, tokens: int, experts: int, topk: int, routing: str) -> float:
        """Mean over draws; evenly spread tokens meet as many as they can."""
        if routing == "balanced":
            return float(min(experts, tokens * topk))
        key = (tokens, experts, topk, routing)
        if key not in self._known:
            alpha = float(routing.rpartition("_")[2])
            draws = [self._count(tokens, experts, topk, alpha) for _ in range(DRAWS)]
            self._known[key] = sum(draws) / DRAWS
        return self._known[key]

    def _count(self, tokens: int, experts: int, topk: int, alpha: float) -> int:
        """Experts that get a token where their shares are drawn from a power law, and none gets a token twice."""
        chosen = tokens * topk
        least, most = (1.0, 0.8 * tokens) if chosen > experts else (0.01, 2.0)
        low, high = least ** (1 - alpha), most ** (1 - alpha)
        shares = (low + (high - low) * self._random.random(experts)) ** (1 / (1 - alpha))
        counts = np.rint(shares / shares.sum() * chosen)
        counts = np.minimum(counts, tokens)
        # What rounding and the limit leave over goes to those that have least, or comes from those with most.
        left_over = max(int(chosen - counts.sum()), 0)
        return min(int((counts > 0).sum()) + left_over, experts, chosen)
