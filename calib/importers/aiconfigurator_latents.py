"""aiconfigurator-core's tables of latent attention (MLA) of vLLM and SGLang, as samples.

A row is vLLM's whole attention module of DeepSeek V3 on one GPU, in a CUDA graph (aiconfigurator,
`collector/vllm/collect_mla_module.py`): `num_heads` are those of one GPU, `isl` a prompt's tokens; of decodes `step`
is the context with the token computed. Latencies are in ms. Norms and rotary embedding ran operation by operation there
until a change of July 2026 (#1423), which no table has yet: 31 to 51 us of a layer by its words, which no server takes.

So decodes of SGLang are taken as well, whose module has kernels for these (`collect_mla_module.py`, with the same
attention kernel). `isl` is the context. What its columns say of FP8 KV is not so: its latents have 16 bits. The
products that make latents are not in it; SGLang's time of 7168 x 2048 beside it stands for these 7168 x 2112.

Not taken:

- fewer than 8 heads, which 16 GPUs would leave, and KV in FP8;
- prompts so short that vLLM computes them with the kernels of decodes, and those of one token;
- Blackwell and GPUs before Hopper: other kernels, which these terms miss by 12 to 45 % (B200).
"""

from pathlib import Path
from typing import Any

from calib.importers.aiconfigurator import GEMMS, MS, newest_of_engine, read_rows
from calib.latents import LatentSample

PREFILL_TABLE, DECODE_TABLE = "mla_context_module_perf.parquet", "mla_generation_module_perf.parquet"
SGLANG_TABLE, SGLANG_KERNEL = "wideep_generation_mla_perf.parquet", "fa3"
DOWN_PRODUCT = {"gemm_dtype": "fp8_block", "n": 2048, "k": 7168}
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
    kernels = f"attention of DeepSeek V3, vLLM {decode.parent.name}"
    if (root / "mla" / "sglang").is_dir():
        path = newest_of_engine(root / "mla", SGLANG_TABLE, "sglang")
        samples += _of_sglang(path, newest_of_engine(root / "gemm", GEMMS, "sglang"))
        kernels += f" and decodes of SGLang {path.parent.name}"
    return samples, kernels


def _of_sglang(modules: Path, gemms: Path) -> list[LatentSample]:
    rows = [row for row in read_rows(gemms, (*DOWN_PRODUCT, "m", "latency")) if row.items() >= DOWN_PRODUCT.items()]
    down_ms = {row["m"]: row["latency"] for row in rows}
    return [
        LatentSample(
            phase="decode",
            fp8=1,
            num_heads=row["num_heads"],
            batch=row["batch_size"],
            context_tokens=row["isl"],
            latency_s=float(f"{(row['latency'] + down_ms[row['batch_size']]) * MS:.5g}"),
        )
        for row in read_rows(modules, ("kernel_source", "num_heads", "batch_size", "isl", "latency"))
        if row["kernel_source"] == SGLANG_KERNEL and row["num_heads"] >= LEAST_HEADS and row["batch_size"] in down_ms
    ]


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
        eager=1,
    )
