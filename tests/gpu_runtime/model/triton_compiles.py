"""Compiles Triton's kernels for GPUs that are not here: its compiler needs no device, and is stricter than its
interpreter.

`python triton_compiles.py` compiles every case that `-m gpu` runs on a GPU (`triton_cases.py`) for each of four GPUs,
and records which kernels that were (`triton_compiled.txt`). `python triton_compiles.py CAPABILITY` compiles for one
them all; but where exactly their kernels are on record, only attention that has failed or come near a limit. A process
compiles for one GPU: Triton keeps what it has compiled by device.
"""

import hashlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

sys.path[:0] = [str(Path(__file__).parents[3])]
from gpu_runtime.kv.pool import KVPool  # noqa: E402
from gpu_runtime.kv.stored import FLOAT8  # noqa: E402
from gpu_runtime.model import triton_attention, triton_experts, triton_layer  # noqa: E402
from gpu_runtime.model.attention_batch import AttentionBatch  # noqa: E402
from kvtwin.testing.live import SMALL  # noqa: E402

SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""What a block of threads may have, by compute capability (CUDA C++ Programming Guide, technical specifications)."""
SHAPES = {
    "mha": {"num_heads": 2, "num_kv_heads": 2, "head_dim": 32},
    "gqa": {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64},
    "group-of-7": {"num_heads": 7, "num_kv_heads": 1, "head_dim": 20},
    "mqa": {"num_heads": 20, "num_kv_heads": 1, "head_dim": 16},
    "head-of-80": {"num_heads": 3, "num_kv_heads": 3, "head_dim": 80},
    "head-of-96": {"num_heads": 5, "num_kv_heads": 1, "head_dim": 96},
    "head-of-128": {"num_heads": 6, "num_kv_heads": 2, "head_dim": 128},
    "head-of-256": {"num_heads": 8, "num_kv_heads": 1, "head_dim": 256},
}
LAYOUTS = [
    ("mha", 16), ("gqa", 16), ("group-of-7", 3), ("mqa", 8), ("head-of-80", 16), ("head-of-96", 32),
    ("head-of-128", 16), ("head-of-256", 32),
]  # fmt: skip
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HARD = {
    80: [("head-of-128", 16, torch.float16, torch.float8_e5m2)],
    89: [("head-of-256", 32, torch.float32, None), ("head-of-256", 32, torch.bfloat16, None)],
    90: [("head-of-128", 16, torch.bfloat16, torch.float8_e4m3fn)],
    100: [("head-of-128", 16, torch.bfloat16, torch.float8_e4m3fn)],
}
"""Layout, block's tokens, computed type and stored type (None: the same), by compute capability, where attention has
failed or come near a limit."""
FP8_E4M3_FROM = 89
RECORD = Path(__file__).with_name("triton_compiled.txt")
"""A line a GPU: how many cases and kernels, with which Triton, and a digest of which kernels. `record` writes it."""


class Absent:
    """Triton's driver of a device that it only compiles for."""

    def __init__(self, capability):
        self.capability = capability

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


def cases(capability):
    stored = [kind for kind in FLOAT8 if kind is not torch.float8_e4m3fn or capability >= FP8_E4M3_FROM]
    return [
        (shape, tokens, computed, kind)
        for shape, tokens in LAYOUTS
        for computed in DTYPES
        for kind in (None, *(stored if shape == "gqa" else ()))
    ]


def compile_case(shape, block_tokens, computed, stored):
    """Ask for every kernel that such a decoder launches: decodes whole and split, chunks, rotation, norm, SwiGLU,
    experts."""
    config = msgspec.structs.replace(SMALL, num_layers=1, **SHAPES[shape])
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    num_new, context = [1, 20], [150, 17]
    counts = [-(-(n + c) // block_tokens) for n, c in zip(num_new, context, strict=True)]
    pool = KVPool(config, sum(counts), block_tokens, 1, "cpu", stored or computed)
    batch = AttentionBatch.build(
        num_new, context, [[list(range(counts[0])), list(range(counts[0], sum(counts)))]], block_tokens, "cpu"
    )
    query = torch.zeros(21, heads, head_dim, dtype=computed)
    place = pool.key_value(0), batch.block_tables[0], batch
    for slots, window in ((1, None), (3, None), (3, 40)):
        triton_attention.attend_decodes(query, *place, torch.empty_like(query), window, slots)
    for window in (None, 40):
        triton_attention.attend_chunks(query, *place, batch.chunk_seqs, torch.empty_like(query), window)
    norms, table = (torch.ones(head_dim, dtype=computed),) * 2, torch.zeros(200, head_dim)
    for rows, weights in ((heads + 2 * kv_heads, norms), (heads + 2 * kv_heads, None), (2 * kv_heads, None)):
        projected = torch.zeros(21, rows * head_dim, dtype=computed)
        slots = batch.slot_mapping[0]
        triton_layer.rotate_and_write(projected, weights, 1e-5, table, batch.positions, slots, pool.key_value(0))
    hidden = torch.zeros(3, 5000, dtype=computed)
    triton_layer.add_rms_norm(hidden, hidden, hidden[0], 1e-5)
    triton_layer.silu_and_mul(torch.zeros(3, 2 * 688, dtype=computed))
    gate_up, down = torch.zeros(8, 2 * 96, 80, dtype=computed), torch.zeros(8, 80, 96, dtype=computed)
    for tokens in (1, 256):
        hidden, chosen = torch.zeros(tokens, 80, dtype=computed), torch.arange(2).repeat(tokens, 1)
        triton_experts.mix(hidden, gate_up, down, torch.ones(tokens, 2), chosen, lambda both: both[:, :96].contiguous())


def kernels_of(capability):
    """Which kernels the cases launch: a digest of all that has a say in how they compile, but Triton itself."""
    asked = set()

    def note(*, fn, compile, **_):
        facts = ("signature", "constants", "configs", "num_warps", "num_stages", "enable_fp_fusion")
        asked.add(f"{fn.name} {fn.jit_function.cache_key} {[compile[name] for name in facts]}")
        return True  # It need not be compiled.

    knobs.runtime.jit_cache_hook = note
    for case in cases(capability):
        compile_case(*case)
    knobs.runtime.jit_cache_hook = None
    digest = hashlib.sha256("\n".join((str(SHARED_BYTES[capability]), *sorted(asked))).encode()).hexdigest()
    counts = f"{len(cases(capability))} cases, {len(asked)} kernels"
    return f"sm_{capability}: {counts}, Triton {triton.__version__}, {digest[:16]}"


def main(capability: int, everything: bool) -> int:
    """1 if a case failed; each is printed with the shared memory that its largest kernel takes, all kernels last."""
    run, failed = JITFunction.run, 0
    shared: list[int] = []

    def compile_only(self, *arguments, grid, warmup, **named):
        kernel = run(self, *arguments, grid=grid, warmup=True, **named)
        shared.append(kernel.metadata.shared if kernel else 0)

    JITFunction.run = compile_only
    driver.set_active(Absent(capability))
    kernels = kernels_of(capability)
    recorded = not everything and kernels in RECORD.read_text().splitlines()
    if recorded:
        knobs.runtime.jit_cache_hook = lambda *, fn, **_: fn.name != triton_attention._attend.__name__
    for case in HARD[capability] if recorded else cases(capability):
        shared.clear()
        try:
            compile_case(*case)
            word = f"{max(shared)} bytes shared"
            fault = max(shared) > SHARED_BYTES[capability] or len(shared) != 16
        except Exception as error:
            word, fault = f"{type(error).__name__}: {str(error).splitlines()[-1][:200]}", True
        failed |= fault
        print("FAILS" if fault else "compiles", f"sm_{capability}", *case, word, flush=True)
    print(kernels)
    return failed


def record() -> int:
    """Compile all for all GPUs, two at a time, and record it if no case failed."""

    def compile_all(capability):
        command = [sys.executable, __file__, str(capability), "all"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line)
        return process.returncode, lines[-1]

    with ThreadPoolExecutor(2) as pool:
        codes, lines = zip(*pool.map(compile_all, SHARED_BYTES), strict=True)
    if any(codes):
        return 1
    RECORD.write_text("".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), "all" in sys.argv[2:]) if sys.argv[1:] else record())
