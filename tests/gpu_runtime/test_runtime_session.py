"""The session on a lent GPU, rehearsed: no part takes another down, and each leaves its result."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvtwin.testing.live import small_decoder

ROOT = Path(__file__).parents[2]
WRAPPER = """#!/bin/sh
case "$*" in *"--only decode"*) exit 3 ;; esac
exec {python} "$@"
"""


def session(folder, *options, wrapper=WRAPPER):
    python = folder / "python"
    python.write_text(wrapper.format(python=sys.executable))
    python.chmod(0o755)
    command = [ROOT / "benchmarks/gpu_session.sh", folder / "out", "--device", "cpu", *options]
    done = subprocess.run(command, env={"PATH": "/usr/bin:/bin", "PYTHON": str(python)}, capture_output=True, text=True)
    return done, (folder / "out/summary.md").read_text()


def test_a_part_that_fails_leaves_the_others(tmp_path):
    done, summary = session(tmp_path, "--only", "copies decode overlap", "--stretch", "8")
    assert done.returncode == 1
    assert [row.split(" |")[0] for row in summary.splitlines()[4:7]] == ["| copies", "| decode", "| overlap"]
    assert "| copies | done |" in summary and "| overlap | done |" in summary
    assert "| decode | **failed** (status 3) |" in summary
    assert "copies (at most 480 s)" in (tmp_path / "out/session.log").read_text()
    copies = json.loads((tmp_path / "out/copies.json").read_text())
    assert copies["d2h blocks in a row"]["value"] > 0
    assert json.loads((tmp_path / "out/overlap.json").read_text())["recompute beside decode"]["against"] > 0


@pytest.mark.parametrize(
    ("does", "word", "status"),
    [
        ("echo wrote x/validation.md and a figure; exit 1", "done, **inaccurate**", 0),
        ("exit 1", "**failed** (status 1)", 1),
        ("exec sleep 60", "**failed**: ended after", 1),
    ],
)
def test_a_validation_that_is_inaccurate_is_no_crash_and_one_without_an_end_no_success(tmp_path, does, word, status):
    wrapper = f'#!/bin/sh\ncase "$*" in *"kvtwin validate"*) {does} ;; esac\nexec {{python}} "$@"\n'
    done, summary = session(tmp_path, "--only", "validate", "--minutes", "0.12", wrapper=wrapper)
    assert f"| validate | {word}" in summary and done.returncode == status


def test_without_time_nothing_runs_and_the_summary_says_so(tmp_path):
    done, summary = session(tmp_path, "--minutes", "0")
    assert done.returncode == 0
    assert summary.count("not run: no time is left") == 9


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("runtime_cuda", ROOT / "benchmarks/runtime_cuda.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_the_device_has_no_room_for_is_left_out_by_name(benchmark, tmp_path, monkeypatch):
    decoder = small_decoder()
    block = benchmark.layer_block_bytes(decoder.config, decoder.dtype)
    # A quarter of it is for the pool: 4 layers of 9 blocks for one sequence, not for four.
    monkeypatch.setattr(benchmark, "free_bytes", lambda device: 4 * 36 * block)
    figures = benchmark.Figures(tmp_path / "found")
    with torch.inference_mode():
        benchmark.measure(decoder, (), ((1, 128), (4, 128)), figures, ["decode"], quick=True)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["decode 1 x 128"]["value"] > 0
    repeats_s = found["decode 1 x 128"]["repeats_s"]
    assert len(repeats_s) == 7 and sorted(repeats_s)[3] * 1e3 == found["decode 1 x 128"]["value"]
    assert found["decode 4 x 128"] == {"left_out": f"needs {4 * 36 * block} bytes of KV blocks, there are {36 * block}"}
