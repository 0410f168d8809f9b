"""aiconfigurator-core's tables of latent attention (MLA) of vLLM, as samples.

A row is vLLM's whole attention module of DeepSeek V3 on one GPU, in a CUDA graph (aiconfigurator,
`collector/vllm/collect_mla_module.py`): `num_heads` are those of one GPU, `isl` a prompt's tokens; of decodes `step`
is the context with the token computed. Latencies are in ms.

Not taken:

- fewer than 8 heads, which 16 GPUs would leave, and KV in FP8;
- prompts so short that vLLM computes them with the kernels of decodes, and those of one token;
- Blackwell and GPUs before Hopper: other kernels, which these terms miss by 12 to 45 % (B200).
"""

from pathlib import Path
from typing import Any

from calib.importers.aiconfigurator import MS, newest_of_engine, read_rows
from calib.latents import LatentSample

PREFILL_TABLE, DECODE_TABLE = "mla_context_module_perf.parquet", "mla_generation_module_perf.parquet"
COLUMNS = (
    "kernel_source", "kv_cache_dtype", "gemm_type", "num_heads", "batch_size", "isl", "step", "latency",
)  # fmt: skip
SYSTEMS = ("h100_sxm", "h200_sxm")
GEMM_TYPES = {"bfloat16": 0, "fp8_block": 1}
PREFILL_KERNEL, DECODE_KERNEL = "FLASH_ATTN", "FLASH_ATTN_MLA"
LEAST_HEADS = 8


def import_latents(root: Path) -> tuple[list[LatentSample], str]:
    """Samples of a system's folder, and whose kernels they are; none where the terms do not fit its kernels."""
    if root.name not in SYSTEMS or not (root / "mla" / "vllm").is_dir():
        return [], "none in the tables that the terms fit"
    prefill, decode = (newest_of_engine(root / "mla", table, "vllm") for table in (PREFILL_TABLE, DECODE_TABLE))
    samples = [_sample(row, "prefill") for row in read_rows(prefill, COLUMNS) if _is_taken(row, PREFILL_KERNEL)]
    samples += [_sample(row, "decode") for row in read_rows(decode, COLUMNS) if _is_taken(row, DECODE_KERNEL)]
    return samples, f"attention of DeepSeek V3, vLLM {decode.parent.name}"


def _is_taken(row: dict[str, Any], kernel: str) -> bool:
    return (
        row["kernel_source"] == kernel
        and row["kv_cache_dtype"] == "bfloat16"
        and row["gemm_type"] in GEMM_TYPES
        and row["num_heads"] >= LEAST_HEADS
    )


def _sample(row: dict[str, Any], phase: str) -> LatentSample:
    return LatentSample(
        phase="prefill" if phase == "prefill" else "decode",
        fp8=GEMM_TYPES[row["gemm_type"]],
        num_heads=row["num_heads"],
        batch=row["batch_size"],
        context_tokens=row["isl"] if phase == "prefill" else row["step"],
        latency_s=float(f"{row['latency'] * MS:.5g}"),
    )
