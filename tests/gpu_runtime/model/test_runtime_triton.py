"""Triton's kernels compute what plain torch computes: interpreted on any machine, compiled where there is CUDA."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("mode", ["interpreted", pytest.param("cuda", marks=[pytest.mark.gpu, CUDA])])
def test_kernels_agree_with_plain_torch(mode):
    # In a process of its own: Triton looks for the variable when a kernel is defined.
    here = Path(__file__).parent
    env = {**os.environ, "TRITON_INTERPRET": "1" if mode == "interpreted" else "0"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(here / "triton_cases.py")]
    run = subprocess.run(command, cwd=here.parents[2], env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
