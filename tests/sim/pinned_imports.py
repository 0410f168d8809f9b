"""Imports as they are pinned: what of every kind of public table becomes samples, and what is said of the rest."""

import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from calib_small import noise
from goldens import digest, rough, rounded
from test_calib_experts import SHAPES, sample
from test_calib_importers import (
    ATTENTION_HEADER,
    GEMMS,
    attention_row,
    gemm_row,
    mlp_row,
    mlp_table,
    nccl_row,
    put,
    written,
)
from test_calib_llmservingsim import write_kernels

from calib.experts import WEIGHT_BYTES, ExpertTerms, fit_experts, predict_expert_s
from calib.experts_report import experts_table
from calib.importers import aiconfigurator, llmservingsim, steps, vidur
from calib.importers.aiconfigurator_experts import QUANTIZATIONS, import_experts
from calib.importers.aiconfigurator_gdn import CONVOLUTIONS, UPDATES, import_gdn
from calib.importers.aiconfigurator_latents import import_latents
from sim.cost.profile import EXPERT_UNITS, load_profile
from sim.errors import UserError


def shown(samples: Iterable[msgspec.Struct], *by: str) -> Iterator[str]:
    """How many of each kind, and a digest of all that they say."""
    rows = [msgspec.structs.asdict(found) for found in samples]
    for kind, count in sorted(Counter(tuple(row[name] for name in by) for row in rows).items()):
        chosen = [row for row in rows if tuple(row[name] for name in by) == kind]
        yield f"{' '.join(map(str, kind))}: {count} {rounded(sum(row['latency_s'] for row in chosen))} {digest(chosen)}"


def timed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with times that tell each from the others."""
    return [row | {"latency": round(0.01 + 0.001 * (i * 7919 % 1013), 6)} for i, row in enumerate(rows)]


def write_system(root: Path) -> None:
    """Tables of all kinds for a system: of more shapes, types and kernels than are taken."""
    shapes = {shape for (n, k), tp in product(GEMMS, (1, 2, 4, 8)) for shape in ((n // tp, k), (n, k // tp))}
    shapes = sorted(shapes | {(1024, 512), (512, 4096)})
    gemms = [
        gemm_row(m, n, k, 0.0) | {"gemm_dtype": kind}
        for kind, m, (n, k) in product(("bfloat16", "fp8", "nvfp4", "int8"), (1, 4, 16, 64, 127, 128, 256), shapes)
    ]
    for place in ("sglang/0.5.0", "vllm/0.9.0", "vllm/0.10.0", "trtllm/1.0.0"):
        put(root, f"gemm/{place}/gemm_perf.parquet", timed(gemms[len(place) % 5 :]))
    heads = [{"num_heads": 32 // tp, "num_key_value_heads": max(1, 8 // tp)} for tp in (1, 2, 4, 8)]
    prompts = "context", (1, 2, 4), (16, 64, 128, 256), (0, 512)
    decodes = "generation", (1, 4, 16, 64), (1,), (63, 127, 255, 1023)
    for engine, (kind, batches, news, steps_) in product(("vllm", "sglang"), (prompts, decodes)):
        rows = [
            attention_row(b, n, c, 0.0, kv_cache_dtype=kv, window_size=window, **shape)
            for shape, kv, window, b, n, c in product(heads, ("bfloat16", "fp8"), (0, 4096), batches, news, steps_)
        ]
        put(root, f"attention/{engine}/1.2.0/{kind}_attention_perf.parquet", timed(rows))
    sizes = [2**power for power in range(11, 30, 2)] + [8 << 10, 256 << 20, 512 << 20, (8 << 10) - 2]
    reduced = [
        nccl_row(gpus, size, 0.0, nccl_dtype=dtype, op_name=op)
        for gpus, size, dtype, op in product((2, 4, 8, 16), sizes, ("half", "int8"), ("all_reduce", "all_gather"))
    ]
    put(root, "comm/nccl/2.20.5/nccl_perf.parquet", timed(reduced))
    own = [
        {"num_gpus": gpus, "message_size": size // 2, "backend": backend, "implementation": ""}
        for gpus, size, backend in product((2, 4, 8), sizes, ("vllm_graph", "vllm_eager"))
    ]
    for place in ("vllm/0.24.0", "trtllm/1.3.0"):
        put(root, f"comm/{place}/custom_allreduce_perf.parquet", timed(own))
    write_kernel_tables(root)


def write_kernel_tables(root: Path) -> None:
    """Of experts, latent attention and Gated DeltaNet."""
    models = ((4096, 1536, 8, 128), (7168, 2048, 8, 256), (2688, 1856, 6, 128), (4096, 14336, 2, 8))
    experts = [
        {
            "moe_dtype": kind, "kernel_source": kernel, "num_tokens": tokens, "hidden_size": hidden,
            "inter_size": width, "topk": topk, "num_experts": count, "moe_tp_size": tp, "moe_ep_size": ep,
            "distribution": routing,
        }
        for kind, kernel, (hidden, width, topk, count), tokens, tp, ep, routing in product(
            (*QUANTIZATIONS, "fp8"), ("vllm_triton", "gptoss", "flashinfer_trtllm"), models, (1, 2, 64, 16_384, 20_480),
            (1, 8, 16), (1, 2), ("balanced", "power_law_1.01", "power_law_1.2"),
        )
    ]  # fmt: skip
    put(root, "moe/vllm/0.20.0/moe_perf.parquet", timed(experts))
    for name, lengths in (("context", (1, 64, 2048)), ("generation", (1,))):
        latents = [
            {
                "kernel_source": kernel, "kv_cache_dtype": kv, "gemm_type": gemm, "num_heads": heads,
                "batch_size": batch, "isl": tokens, "step": 17 * batch,
            }
            for kernel, kv, gemm, heads, batch, tokens in product(
                ("FLASH_ATTN", "FLASH_ATTN_MLA", "FLASHMLA"), ("bfloat16", "fp8"), ("bfloat16", "fp8_block", "nvfp4"),
                (4, 7, 8, 128), (1, 32), lengths,
            )
        ]  # fmt: skip
        put(root, f"mla/vllm/0.20.0/mla_{name}_module_perf.parquet", timed(latents))
    deltas = [
        {
            "kernel_source": kernel, "phase": phase, "batch_size": batch, "seq_len": tokens, "num_k_heads": keys,
            "head_k_dim": dim, "num_v_heads": 2 * keys, "head_v_dim": 128, "d_conv": 4,
        }
        for (phase, tokens, kernels), batch, keys, dim in product(
            (("context", 512, (CONVOLUTIONS[0], UPDATES[0])), ("generation", 1, (CONVOLUTIONS[1], UPDATES[1], "x"))),
            (1, 64), (8, 8, 16), (128, 64),
        )
        for kernel in kernels
        if (kernel, batch, keys) != (CONVOLUTIONS[0], 64, 16)
    ]  # fmt: skip
    put(root, "linear_attention/vllm/0.20.0/gdn_perf.parquet", timed(deltas))


def aiconfigurators() -> Iterator[str]:
    """Of systems that fuse all-reduces with norms, reduce over two GPUs only, and neither; of engines with and without
    tables of their own."""
    pytest.importorskip("pyarrow")
    with tempfile.TemporaryDirectory() as folder:
        write_system(Path(folder) / "h100_sxm")
        for system in ("h100_sxm", "l40s", "b300_sxm"):
            root = Path(folder) / system
            with suppress(FileExistsError):
                root.symlink_to(Path(folder) / "h100_sxm")
            for engine in ("vllm", "sglang"):
                found, provenance = aiconfigurator.import_samples(system, ["llama-3.1-8b"], engine, Path(folder))
                yield f"{system} by {engine}: {json.dumps(provenance)}"
                yield from shown(found, "op", "tp", "quantization", "kv_cache_dtype")
            for read, by in (
                (import_experts, ("quantization", "routing", "tp", "gated")), (import_latents, ("phase", "fp8")),
                (import_gdn, ("phase",)),
            ):  # fmt: skip
                found, kernels = read(root)
                yield f"{system}: {len(found)} of {kernels}"
                yield from shown(found, *by)


def tables_of_steps() -> Iterator[str]:
    """Vidur's operators with and without attention, whole steps, and LLMServingSim's of two sizes of group."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = (1, 8, 32, 63, 64, 100, 128, 256, 512, 1024, 2048, 4096, 8192)
        grid = [(n, tp) for n in tokens for tp in (1, 2)]
        mlp = mlp_table(folder, *(mlp_row(n, 0.3 + n**1.1 / 200 / tp, tp) for n, tp in [*grid, (128, 1), (128, 1)]))
        rows = [
            f"{is_prompt},{batch},{chunk},{cached},{tp},32,{kv},4096,{0.1 + 0.01 * i},{0.05 + 0.01 * i},0.01,0.02,0.003"
            for i, (is_prompt, batch, chunk, cached, tp, kv) in enumerate(
                product(("True", "False"), (1, 3, 65), (0, 1, 100), (0, 999), (1, 2, 4), (32, 8))
            )
        ]
        attention = written(folder, "\n".join([ATTENTION_HEADER, *rows, ""]), "attention.csv")
        sizes = [f"{0.01 * i + 0.01},{gpus},{size}" for i, (gpus, size) in enumerate(product((1, 2, 4), (8, 8, 1024)))]
        header = "time_stats.all_reduce.median,num_workers,size"
        reduced = written(folder, "\n".join([header, *sizes, ""]), "reduce.csv")
        for given in ((mlp,), (mlp, attention), (mlp, attention, reduced), (mlp, None, reduced)):
            found, provenance = vidur.import_samples("llama-2-7b", *given)
            yield f"Vidur: {json.dumps(provenance)}"
            yield from shown(found, "op", "tp")
        header = "model,hardware,tensor_parallel,prompt_size,batch_size,token_size,prompt_time,token_time"
        rows = [
            f"{model},{gpu},{tp},{prompt},{batch},{tokens_},{10 + i},{3 + 0.1 * i}"
            for i, (model, gpu, tp, prompt, batch, tokens_) in enumerate(
                product(("a", "b", "c"), ("x", "y"), (1, 2), (128, 512), (1, 4), (33, 128, 128, 128))
            )
        ]
        table = written(folder, "\n".join([header, *rows, ""]), "steps.csv")
        for gpu in ("x", "z"):
            try:
                found, provenance = steps.import_samples(table, gpu, {"a": "llama-2-7b", "b": "llama-3.1-8b"})
            except UserError as error:
                yield str(error).replace(name, "FOLDER")
                continue
            yield f"steps: {json.dumps(provenance)}"
            yield from shown(found, "model", "tp", "batch_size")
        write_kernels(folder)
        for tp in (1, 2):
            yield from shown(llmservingsim.import_samples(folder, "llama-3.1-8b", tp)[0], "op", "decodes")


def experts_told() -> Iterator[str]:
    """What is said of experts' kernels of every type, fitted to samples that scatter."""
    draw, samples = np.random.default_rng(5), []
    for i, kind in enumerate(WEIGHT_BYTES):
        shapes = [(h, w // (1 + i % 2), k, e) for h, w, k, e in SHAPES[: 3 - i % 3]]
        found = [
            sample(tokens, shape, tp, kind, routing, gated=int(shape != SHAPES[1]))
            for shape in shapes
            for tp, routing in ((1, "balanced"), (2, "power_law_1.2"), (8, "balanced"))
            for tokens in (1, 16, 32, 256, 320, 4096)
        ]
        values = dict(zip(EXPERT_UNITS, (3e14 + 1e14 * i, 2e12, 1.0 + 0.3 * i, 1.2e12, 2e-5), strict=True))
        seconds = predict_expert_s(values, ExpertTerms.of(found)) * noise(draw, len(found), outliers=0.02)
        samples += [msgspec.structs.replace(s, latency_s=float(t)) for s, t in zip(found, seconds, strict=True)]
    fits = fit_experts(samples)
    for fit in fits:
        yield f"{fit.quantization or '16 bits'}: {rough(str(fit.residuals))} {max(fit.fit.scatter, 1e-3):.3g}"
        yield from (f"{name} {value:.3g}" for name, value in fit.fit.values.items())
    one = [fit for fit in fits if fit.quantization in ("", "fp8")]
    told = {"h100": (load_profile("h100-imported"), one), "b200": (load_profile("b200-imported"), fits)}
    yield from experts_table(told).splitlines()


PINNED = {"aiconfigurator": aiconfigurators, "imports": tables_of_steps, "experts": experts_told}
