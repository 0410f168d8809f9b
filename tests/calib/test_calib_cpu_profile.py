"""`kvtwin calibrate --device cpu --quick` as a user runs it: its profile predicts iterations timed another time."""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

pytest.importorskip("torch")

from calib.linear import predict_s
from calib.samples import Sample, read_samples
from sim.cost.profile import read_profile

ROOT = Path(__file__).parent.parent.parent
CONFIG = {
    "model_type": "llama", "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1024,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "torch_dtype": "float32", "hidden_act": "silu",
}  # fmt: skip
MOST_ERROR = 0.2
"""Of the typical iteration: the form is a straight line, the iterations are not."""
MOST_APART = 0.1
"""Between two timings of the typical iteration; a busier machine tells nothing about the form."""


def calibrate(folder: Path, model: Path) -> dict[tuple[int, int, int], Sample]:
    """A quick calibration in a process of its own; its whole iterations by shape."""
    command = [sys.executable, "-m", "kvtwin", "calibrate", "--device", "cpu", "--quick"]
    # One thread: threads that wait for each other at barriers time the neighbours, not the machine.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--model", str(model), "--out", str(folder)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    steps = [s for s in read_samples(folder / "samples.csv") if s.op == "step"]
    return {(s.batch_size, s.new_tokens, s.context_tokens): s for s in steps}


def test_the_profile_predicts_iterations_timed_another_time(tmp_path):
    model = tmp_path / "tiny"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    first = calibrate(tmp_path / "first", model)
    profile = read_profile(tmp_path / "first" / "cpu-measured.json")
    assert (profile.gpu, profile.status, profile.form) == ("cpu", "measured", "linear")
    second = calibrate(tmp_path / "second", model)
    values = {name: constant.value for name, constant in profile.constants.items()}
    keys = sorted(first.keys() & second.keys())
    assert len(keys) >= 9
    predicted = dict(zip(keys, predict_s(values, [second[key] for key in keys]), strict=True))
    apart = median(abs(first[key].latency_s / second[key].latency_s - 1) for key in keys)
    if apart > MOST_APART:
        pytest.skip(f"two timings of the same iterations are {100 * apart:.0f} % apart: the machine is busy")
    error = median(abs(predicted[key] / second[key].latency_s - 1) for key in keys)
    assert error <= MOST_ERROR, (error, apart)
