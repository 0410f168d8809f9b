"""Triton's kernels compile for GPUs that are not here, each in a process of its own (`triton_compiles`)."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("capability", "cases"), [(80, 27), (89, 30), (90, 30), (100, 30)])
def test_kernels_compile_and_fit_a_multiprocessor(capability, cases):
    """All cases of `-m gpu` are compiled, unless it is on record (`make kernels`) that just these kernels were."""
    script = Path(__file__).parent / "triton_compiles.py"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, script, str(capability)], env=env, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-2000:]
    *compiled, kernels = run.stdout.splitlines()
    assert compiled and all(line.startswith(f"compiles sm_{capability}") for line in compiled)
    assert kernels.startswith(f"sm_{capability}: {cases} cases")
    if len(compiled) == cases:
        warnings.warn(f"All was compiled anew, in minutes. `make kernels` records {kernels}", stacklevel=1)


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_tiles_are_no_smaller_than_a_product_of_matrices_may_be(head_dim):
    """Triton before 3.9 refused the 8 tokens that heads of over 128 elements once had in fp32, on every GPU."""
    from gpu_runtime.model import triton_attention  # noqa: PLC0415 (triton may be absent)

    for dtype in (torch.float32, torch.float16):
        assert min(triton_attention._tiling(torch.empty(1, 1, head_dim, dtype=dtype))) >= triton_attention.MIN_ROWS
