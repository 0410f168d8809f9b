"""aiconfigurator-core's tables of Gated DeltaNet of vLLM, as samples.

A row is one kernel of one layer of a Qwen 3.5 model on one GPU: the convolution or the state's update, `num_k_heads`
and `num_v_heads` those of one GPU. A sample is both together; where models share a shape, the median of their times.
Latencies are in ms.

Not taken: GPUs whose prompts were timed with Triton's kernel (L40S, RTX PRO 6000), where vLLM has FlashInfer's or will
have; the terms miss those by 17 to 28 %.
"""

from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from calib.gdn import GdnSample
from calib.importers.aiconfigurator import MS, newest_of_engine, read_rows
from sim.cost.gated_delta_net import HEAD_DIM

TABLE = "gdn_perf.parquet"
COLUMNS = (
    "kernel_source", "phase", "batch_size", "seq_len", "num_k_heads", "head_k_dim", "num_v_heads", "head_v_dim",
    "d_conv", "latency",
)  # fmt: skip
PHASES = {"context": "prefill", "generation": "decode"}
CONVOLUTIONS = ("causal_conv1d_fn", "causal_conv1d_update")
UPDATES = ("chunk_gated_delta_rule_flashinfer", "fused_recurrent_gated_delta_rule_packed_decode")


def import_gdn(root: Path) -> tuple[list[GdnSample], str]:
    """Samples of a system's folder, and whose kernels they are; none where other kernels were timed."""
    nothing: list[GdnSample] = []
    if not (root / "linear_attention" / "vllm").is_dir():
        return nothing, "none in the tables"
    path = newest_of_engine(root / "linear_attention", TABLE, "vllm")
    rows = read_rows(path, COLUMNS)
    if not all(any(row["kernel_source"] == kernel for row in rows) for kernel in UPDATES):
        return nothing, "none in the tables that the terms fit"
    convolutions, updates = _times(rows, CONVOLUTIONS), _times(rows, UPDATES)
    samples = [
        GdnSample(
            phase=phase, num_key_heads=keys, num_value_heads=values, batch=batch, new_tokens=tokens,
            latency_s=float(f"{(median(convolutions[shape]) + median(times)) * MS:.5g}"),
        )
        for shape, times in updates.items()
        for phase, keys, values, batch, tokens in (shape,)
        if shape in convolutions
    ]  # fmt: skip
    return samples, f"Gated DeltaNet of Qwen 3.5, vLLM {path.parent.name}"


def _times(rows: list[dict[str, Any]], kernels: tuple[str, ...]) -> dict[tuple[Any, ...], list[float]]:
    """Latencies by phase, heads, sequences and tokens."""
    found: defaultdict[tuple[Any, ...], list[float]] = defaultdict(list)
    for row in rows:
        if row["kernel_source"] in kernels and row["head_k_dim"] == row["head_v_dim"] == HEAD_DIM:
            shape = row["num_k_heads"], row["num_v_heads"], row["batch_size"], row["seq_len"]
            found[PHASES[row["phase"]], *shape].append(row["latency"])
    return found
