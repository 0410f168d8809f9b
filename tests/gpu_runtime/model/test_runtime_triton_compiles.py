"""Triton's kernels compile for GPUs that are not here, each in a process of its own (`triton_compiles`)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")


@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_kernels_compile_and_fit_a_multiprocessor(capability):
    """The cases that failed or come near a limit; `make kernels` compiles all that `-m gpu` runs."""
    script = Path(__file__).parent / "triton_compiles.py"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, script, str(capability)], env=env, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-2000:]
    assert run.stdout.startswith(f"compiles sm_{capability}")


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_tiles_are_no_smaller_than_a_product_of_matrices_may_be(head_dim):
    """Triton before 3.9 refused the 8 tokens that heads of over 128 elements once had in fp32, on every GPU."""
    from gpu_runtime.model import triton_attention  # noqa: PLC0415 (triton may be absent)

    for dtype in (torch.float32, torch.float16):
        assert min(triton_attention._tiling(torch.empty(1, 1, head_dim, dtype=dtype))) >= triton_attention.MIN_ROWS
