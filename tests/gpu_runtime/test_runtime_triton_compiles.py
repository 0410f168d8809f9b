"""Triton's kernels compile for GPUs that are not here: its compiler needs no device, and is stricter than its
interpreter.
"""
# ruff: noqa: E402 (torch and triton may be absent)

import os

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="triton is not installed")

from runtime_small import SMALL
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from gpu_runtime.kv.pool import KVPool
from gpu_runtime.model import triton_attention, triton_layer
from gpu_runtime.model.attention import AttentionBatch

SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""What a block of threads may have, by compute capability (CUDA C++ Programming Guide, technical specifications)."""
CASES = [
    (80, torch.float16, torch.float8_e5m2, 128),
    (89, torch.bfloat16, torch.bfloat16, 256),
    (90, torch.bfloat16, torch.float8_e4m3fn, 128),
    (90, torch.float16, torch.bfloat16, 128),
]


class Absent:
    """Triton's driver of a device that it only compiles for."""

    def __init__(self, capability):
        self.capability = capability

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        # Triton keeps what it has compiled by device.
        return self.capability

    def get_current_stream(self, device=None):
        return 0


@pytest.fixture
def compiled(monkeypatch):
    """Kernels that were asked for, compiled and not launched, by name."""
    kernels = {}
    run = JITFunction.run

    def compile_only(self, *arguments, grid, warmup, **named):
        kernels.setdefault(self.fn.__name__, []).append(run(self, *arguments, grid=grid, warmup=True, **named))

    monkeypatch.setattr(JITFunction, "run", compile_only)
    yield kernels
    # Whatever is there is found when it is asked for.
    driver.set_active(None)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted")
@pytest.mark.parametrize(("capability", "computed", "stored", "head_dim"), CASES)
def test_kernels_compile_and_fit_a_multiprocessor(compiled, capability, computed, stored, head_dim):
    driver.set_active(Absent(capability))
    config = msgspec.structs.replace(SMALL, num_layers=1, num_heads=7, num_kv_heads=1, head_dim=head_dim)
    pool = KVPool(config, 20, 16, 1, "cpu", stored)
    batch = AttentionBatch.build([1, 20], [150, 17], [[list(range(10)), list(range(10, 13))]], 16, "cpu")
    query = torch.zeros(21, 7, head_dim, dtype=computed)
    place = pool.key_value(0), batch.block_tables[0], batch
    for splits in (1, 3):
        triton_attention.attend_decodes(query, *place, torch.empty_like(query), splits)
    triton_attention.attend_chunks(query, *place, batch.chunk_seqs, torch.empty_like(query))
    norms, table = (torch.ones(head_dim, dtype=computed),) * 2, torch.zeros(200, head_dim)
    for heads, weights in ((9, norms), (9, None), (2, None)):
        projected = torch.zeros(21, heads * head_dim, dtype=computed)
        slots = batch.slot_mapping[0]
        triton_layer.rotate_and_write(projected, weights, 1e-5, table, batch.positions, slots, pool.key_value(0))
    triton_layer.silu_and_mul(torch.zeros(3, 2 * 688, dtype=computed))
    assert {name: len(found) for name, found in compiled.items()} == {
        "_attend": 3, "_combine": 1, "_rotate_and_write": 3, "_silu_and_mul": 1
    }  # fmt: skip
    for found in compiled.values():
        assert all(kernel.metadata.shared <= SHARED_BYTES[capability] for kernel in found)
