"""Calibration as it is pinned in `golden/calibration/`: what is planned, counted, imported and fitted.

    python tests/sim/pinned_calibration.py      # writes golden/calibration/*.txt anew

Numbers of fits have three digits: a solver's last ones differ between machines.
"""

import contextlib
import io
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "calib"))

import msgspec
import numpy as np
import pinned_imports
import pinned_server
from calib_small import A100, copies, noisy, planted, shapes
from goldens import GOLDEN, digest, rough, rounded
from measure_small import GPU
from test_calib_cli import steps_table, vidur_tables
from test_calib_llmservingsim import write_kernels

import kvtwin
from calib.copies import all_reduce_s
from calib.importers import llmservingsim
from calib.measure.plan import make_plan
from calib.roofline import attention_s, complete, predict_s, products_s
from calib.samples import TOKEN_OPS, Sample, write_samples
from calib.terms import Terms, terms_of
from sim.errors import UserError
from sim.specs.models import load_model

CALIBRATION = GOLDEN / "calibration"
MODELS = ("llama-2-7b", "llama-3.1-70b", "qwen3-0.6b", "mixtral-8x7b-v0.1", "deepseek-v2-lite", "gemma-2-9b")
L20, T4 = (GOLDEN / f"{name}-profile.json" for name in ("l20", "t4"))
CPU = msgspec.structs.replace(
    GPU, device_bytes=8 * 2**30, num_gpus=0, flops_per_s=2e10, bytes_per_s=5e9, graphs=False
)  # fmt: skip


def plans() -> Iterator[str]:
    """What is measured of models on machines, op by op, and why some of it is not."""
    models = {name: load_model(name) for name in MODELS[:3]}
    eight = msgspec.structs.replace(GPU, num_gpus=8, device_bytes=140 * 2**30)
    for label, machine in {"GPUs": GPU, "eight GPUs": eight, "a CPU": CPU}.items():
        for quick in (True, False):
            for element_bytes in (2, 4):
                where = f"{label}{', quick' * quick}, {element_bytes} bytes"
                plan = make_plan(models, machine, quick=quick, element_bytes=element_bytes)
                yield f"{where}: {plan.built_layers} {plan.kv_blocks} {plan.longest} {plan.copy_bytes}"
                for op, count in Counter(point.op for point in plan.points).items():
                    points = [msgspec.structs.asdict(point) for point in plan.points if point.op == op]
                    words = digest([point.label for point in plan.points if point.op == op])
                    yield f"{where}: {count} {op} {digest(points)} {words}"
                for reason, count in Counter(plan.left_out.values()).items():
                    left = [msgspec.structs.asdict(point) for point, why in plan.left_out.items() if why == reason]
                    yield f"{where}: without {count}: {reason} {digest(left)}"


def some_of(name: str) -> Iterator[Sample]:
    """Prompts, chunks, decodes and both, by operation and type."""
    layers = load_model(name).num_layers
    for op in sorted(TOKEN_OPS):
        for tp in (1, 2):
            common = {"op": op, "latency_s": 1.0, "model": name, "tp": tp, "num_layers": layers}
            for batch, new, context in ((1, 300, 0), (3, 64, 500), (16, 1, 900)):
                plain = Sample(**common, batch_size=batch, new_tokens=new, context_tokens=context)
                yield plain
                yield msgspec.structs.replace(plain, quantization="fp8", kv_cache_dtype="fp8")
                yield msgspec.structs.replace(plain, dtype_bytes=4.0)
            yield Sample(**common, new_tokens=128, context_tokens=256, decodes=9, decode_context_tokens=700)


def terms() -> Iterator[str]:
    """What samples compute and move, and their seconds."""
    constants = complete(
        A100 | {"elementwise_bytes_per_s": 9e11, "elementwise_launch_s": 4e-6, "step_overhead_s": 3e-3,
        "allreduce_bytes_per_s": 1e11, "allreduce_latency_s": 2e-5, "attention_tile_tokens": 100.0,
        "attention_slots": 12.0}
    )  # fmt: skip
    for name in MODELS:
        found, refused = {}, Counter()
        for sample in some_of(name):
            try:
                found[sample] = terms_of([sample], {name: load_model(name)})
            except UserError as error:
                refused[f"{error}"] += 1
        for field in fields(Terms):
            values = rounded([float(getattr(term, field.name)[0]) for term in found.values()])
            yield f"{name} {field.name} {digest(values)} {sorted(set(values))[:4]}"
        for price in (predict_s, products_s, attention_s):
            values = rounded([float(price(constants, term)[0]) for term in found.values()])
            yield f"{name} {price.__name__} {digest(values)} {values[:3]}"
        yield from (f"{name} {count} refused: {error}" for error, count in refused.items())


def tables() -> Iterator[str]:
    """Tables of kernels' times, as samples and as they are."""
    with tempfile.TemporaryDirectory() as folder:
        write_kernels(Path(folder))
        samples, provenance = llmservingsim.import_samples(Path(folder), "llama-3.1-8b")
        yield json.dumps(provenance, default=str)
        for op, count in Counter(sample.op for sample in samples).items():
            yield f"{count} {op} {digest([list(msgspec.structs.asdict(s).values()) for s in samples if s.op == op])}"
        for name, table in msgspec.to_builtins(llmservingsim.import_tables(Path(folder), "llama-3.1-8b")).items():
            yield f"{name} {rounded(table) if isinstance(table, int | float | str) else digest(table)}"


def everything() -> list[Sample]:
    """Of every operation: whole steps, the head, what is recomputed, all-reduces, copies of all kinds."""
    models = ("llama-2-7b", "llama-3.1-8b")
    common = {"latency_s": 1.0, "model": "llama-3.1-8b"}
    passes = [*shapes(models), *shapes(("llama-3.1-8b",), "step")]
    passes += [Sample(op="lm_head", batch_size=rows, new_tokens=1, **common) for rows in (1, 8, 64)]
    passes += [Sample(op=op, new_tokens=n, **common) for n in (64, 512, 2048) for op in ("recompute", "elementwise")]
    passes += [
        Sample(op="products", new_tokens=n, context_tokens=c, decodes=d, decode_context_tokens=700, **common)
        for n in (64, 256, 1024) for c in (0, 1024) for d in (1, 16)
    ]  # fmt: skip
    found = planted(passes, A100 | {"step_overhead_s": 2e-3, "elementwise_bytes_per_s": 9e11})
    ring = {"allreduce_bytes_per_s": 1e11, "allreduce_latency_s": 5e-6, "allreduce_chunk_s": 1e-6}
    for gpus in (2, 4, 8):
        for moved in (1e4, 1e5, 1e6, 1e7, 1e8):
            seconds = float(all_reduce_s(ring, np.array([moved]), np.array([gpus]))[0])
            found.append(Sample(op="all_reduce", latency_s=seconds, tp=gpus, num_bytes=moved))
    found += copies("h2d", launch_s=3e-6, bytes_per_s=2.4e10) + copies("d2h", launch_s=3e-6, bytes_per_s=2.2e10)
    beside = copies("d2h", launch_s=3e-6, bytes_per_s=1e10)
    found += [msgspec.structs.replace(sample, beside="layers") for sample in beside]
    return noisy([*found, *copies("host_memcpy", launch_s=1e-6, bytes_per_s=9e9)], seed=1)


def fits() -> Iterator[str]:
    """What commands tell and write that fit profiles to samples and to tables."""
    samples = [*planted(shapes(("llama-2-7b", "llama-3.1-8b"))), *copies("h2d", launch_s=2e-6, bytes_per_s=2.4e10)]
    samples += copies("d2h", launch_s=2e-6, bytes_per_s=2.2e10)
    steps = planted(shapes(("llama-2-7b",), "step"), {**A100, "step_overhead_s": 3e-3})
    with (
        tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder),
        patch("calib.figure.draw_fit", lambda report: None),
        patch("sim.results.figures.style.save_figure", lambda path, figure: path),
    ):  # fmt: skip
        here = Path()
        write_samples(here / "samples.csv", noisy(samples), ["device: a card"])
        copied = copies("h2d", launch_s=2e-6, bytes_per_s=2.4e10, overlap=False)
        write_samples(here / "all.csv", everything())
        write_samples(here / "steps-samples.csv", noisy([*steps, *copied]))
        steps_table(here)
        vidur = " ".join(map(str, vidur_tables(here)))
        for words in (
            "fit samples.csv", "fit all.csv --name all", "fit steps-samples.csv --form linear --name line",
            "import steps steps.csv --hardware a100 --model llama2=llama-2-7b --name steps",
            f"import vidur --model llama-2-7b {vidur} --name vidur",
            f"derive --gpu rtx-4090 --sibling {L20} --compute-share 0.7 --memory-sibling {T4} --base {L20} --reason so",
        ):  # fmt: skip
            more = "" if words.startswith("derive") else f" --gpu a100-80g --base {L20}"
            told = io.StringIO()
            with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
                status = kvtwin.main(f"profile {words}{more} --out out".split())
            yield f"$ kvtwin profile {words}{more}".replace(str(GOLDEN), "GOLDEN")
            yield from (rough(line) for line in told.getvalue().splitlines() if line and line[0] != "|")
            yield f"exit status {status}"
        for path in sorted((here / "out").glob("*.json")):
            profile = json.loads(path.read_text())
            constants = profile.pop("constants")
            yield rough(f"-- {path} {json.dumps(profile)}")
            yield from (rough(f"{name} {json.dumps(constant)}") for name, constant in constants.items())
        for path in sorted((here / "out").glob("*.md")):
            yield f"-- {path}"
            yield from (rough(line) for line in path.read_text().splitlines())


PINNED = {
    "plans": plans, "terms": terms, "tables": tables, "fits": fits,
    **pinned_imports.PINNED, **pinned_server.PINNED,
}  # fmt: skip


def main() -> None:
    CALIBRATION.mkdir(exist_ok=True)
    for name, lines in PINNED.items():
        (CALIBRATION / f"{name}.txt").write_text("\n".join(lines()) + "\n")
        print(name)


if __name__ == "__main__":
    main()
