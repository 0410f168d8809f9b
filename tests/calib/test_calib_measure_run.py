"""A small model calibrated on this machine's CPU."""

import json
from pathlib import Path

import pytest
import torch
from measure_small import write_config

from calib.measure import bench, layer_ops, machine, provenance, run
from calib.measure.log import Note, PointLog
from calib.samples import OPS, read_comments, read_samples
from calib.terms import load_models
from sim.errors import UserError

ROOT = Path(__file__).parents[2]
torch.set_num_threads(1)


def calibrate(model, out, **options):
    return run.calibrate("cpu", [str(model)], out, quick=True, **options)


def points_of(log):
    return [line for line in log.read_bytes().splitlines(keepends=True) if line.startswith(b'{"line":"point"')]


def test_a_killed_calibration_resumes_and_is_complete(tmp_path, monkeypatch):
    """Killed in the middle of a line."""
    model, out = write_config(tmp_path / "small"), tmp_path / "out"
    log, add = out / "points.jsonl", PointLog.add

    def add_eight(self, line):
        add(self, line)
        if len(self.measured) == 8:
            raise SystemExit

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(PointLog, "add", add_eight)
        calibrate(model, out)
    log.write_bytes(log.read_bytes()[:-9])
    before = points_of(log)
    assert len(before) == 8 and not (out / "samples.csv").exists()

    samples = calibrate(model, out)

    after = points_of(log)
    whole = [line for line in before if line.endswith(b"\n")]
    assert after[: len(whole)] == whole
    assert len(after) == len({line.split(b'"repeats_s"')[0] for line in after}) > len(whole) == 7

    assert read_samples(out / "samples.csv") == samples
    assert {sample.op for sample in samples} == set(OPS) - {"all_reduce", "products", "linear", "elementwise"}
    assert {sample.model for sample in samples} == {"", "configs/small.json"}
    assert load_models(samples, out)["configs/small.json"].hidden_size == 64
    told = json.loads((out / "provenance.json").read_text())
    assert told["points"] == len(samples) == len(after)
    assert told["cpu_threads"] == "1" and told["torch"] == torch.__version__ and told["grid"] == "quick"
    assert [state["when"] for state in told["states"]] == sorted(state["when"] for state in told["states"])
    assert read_comments(out / "samples.csv")["dtype"] == "float32"

    # All is measured: asking again changes no byte.
    contents = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    assert calibrate(model, out) == samples
    assert contents == {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}


def test_what_does_not_fit_in_memory_is_skipped_and_listed(tmp_path, monkeypatch, capsys):
    logits = layer_ops.Decoder.logits

    def short_of_memory(decoder, hidden):
        if len(hidden) == 64:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB.\nmore")
        return logits(decoder, hidden)

    monkeypatch.setattr(layer_ops.Decoder, "logits", short_of_memory)
    out = tmp_path / "out"
    (sample,) = calibrate(write_config(tmp_path / "small"), out, ops=["lm_head"])
    assert sample.batch_size == 1
    expected = {
        "point": "lm_head configs/small.json, 64 x 1 tokens",
        "reason": "out of memory: CUDA out of memory. Tried to allocate 3 GiB.",
    }
    assert expected in json.loads((out / "provenance.json").read_text())["skipped"]
    assert "64 x 1 tokens" in capsys.readouterr().err
    assert len(read_samples(out / "samples.csv")) == 1


def test_what_speaks_against_a_calibration_is_printed_and_kept(tmp_path, monkeypatch, capsys):
    busy = {"load_average": 1e4, "throttled": "power cap"}
    monkeypatch.setattr(machine, "state_under_load", lambda *_: dict(busy))
    out = tmp_path / "out"
    calibrate(write_config(tmp_path / "small"), out, ops=["launch"])
    told = json.loads((out / "provenance.json").read_text())
    assert [state["load_average"] for state in told["states"]] == [1e4, 1e4]
    assert len(told["warnings"]) == 2
    assert capsys.readouterr().err == "".join(f"warning: {warning}\n" for warning in told["warnings"])
    lines = (out / "samples.csv").read_text().splitlines()
    assert [line for line in lines if "warning" in line] == [f"# warning: {warning}" for warning in told["warnings"]]


def test_layers_that_cannot_be_built_are_skipped_together(tmp_path, monkeypatch):
    built = []

    def no_room(*_, **__):
        built.append(1)
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")

    monkeypatch.setattr(bench, "ModelWork", no_room)
    out = tmp_path / "out"
    samples = calibrate(write_config(tmp_path / "small"), out, ops=["lm_head", "launch"])
    assert {sample.op for sample in samples} == {"launch"}
    assert len(built) == 1
    assert "do not fit" in (out / "provenance.json").read_text()


def test_an_error_of_ours_is_not_taken_for_a_lack_of_memory(tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(layer_ops.Decoder, "logits", broken)
    with pytest.raises(RuntimeError, match="mat1"):
        calibrate(write_config(tmp_path / "small"), tmp_path / "out", ops=["lm_head"])


def test_another_model_of_the_same_name_is_refused(tmp_path):
    """What else differs, the log's own tests name."""
    model, out = write_config(tmp_path / "small"), tmp_path / "out"
    calibrate(model, out, ops=["launch"])
    write_config(model, hidden_size=128)
    with pytest.raises(UserError, match=r"models was configs/small\.json \(\w+\), is configs/small\.json \(\w+\)"):
        calibrate(model, out, ops=["launch"])


def test_bad_arguments_are_refused_in_one_line(tmp_path, monkeypatch):
    for device, models, options, words in (
        ("cpu", ["llama-2-7b"], {"seed": -1}, "--seed: -1 is not between 0 and"),
        ("cpu", ["llama-2-7b"], {"seed": 10**20}, f"--seed: {10**20} is not between 0 and"),
        ("cpu", ["deepseek-v2-lite"], {}, "multi-head latent attention"),
        ("cpu", ["llama-2-7"], {}, "did you mean 'llama-2-7b'"),
    ):
        with pytest.raises(UserError, match=words):
            run.calibrate(device, models, tmp_path, quick=True, **options)
    quantised = write_config(tmp_path.parent / "quantised", quantization_config={"quant_method": "fp8"})
    with pytest.raises(UserError, match="is quantised, and the runtime computes unquantised models"):
        run.calibrate("cpu", [str(quantised)], tmp_path, quick=True)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UserError, match="is a build without CUDA"):
        run.device_name("cuda")
    monkeypatch.setattr("gpu_runtime.cli.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"pip install 'kvtwin\[gpu\]'"):
        run.calibrate("cpu", ["llama-2-7b"], tmp_path, quick=True)
    assert not list(tmp_path.iterdir())


def test_two_models_of_one_name_are_refused(tmp_path):
    (tmp_path / "a").mkdir()
    first, second = write_config(tmp_path / "small"), write_config(tmp_path / "a" / "small", vocab_size=501)
    with pytest.raises(UserError, match="the same name 'small'"):
        run.calibrate("cpu", [str(first), str(second)], tmp_path / "out", quick=True)


def test_clocks_that_fell_are_warned_of():
    notes = [Note("a", {"sm_mhz": 1980.0, "throttled": "no"}), Note("b", {"sm_mhz": 1600.0, "throttled": "power cap"})]
    first, second = provenance.warnings(notes, 2)
    assert "fell from 1980 to 1600 MHz" in first and "power cap" in second
    assert provenance.warnings([notes[0], Note("b", {"sm_mhz": 1900.0, "throttled": "unknown"})], 2) == []
    (slower,) = provenance.warnings([Note("a", {"matmul_s": 0.9}), Note("b", {"matmul_s": 1.0})], 2)
    assert "took 0.9 s before and 1 s after" in slower
    assert provenance.warnings([Note("a", {"matmul_s": 0.02}), Note("b", {"matmul_s": 0.021})], 2) == []
    (busy,) = provenance.warnings([Note("a", {"load_average": 1.5}), Note("b", {"load_average": 9.0})], 2)
    assert "load average was 1.50 before" in busy
    assert provenance.warnings([Note("a", {"load_average": 2 * provenance.BUSY})], 2) == []
    assert provenance.warnings([], 1) == []


def test_what_nvidia_smi_says_of_the_clocks_is_read(monkeypatch):
    answers = {
        "clocks.sm,clocks.mem,power.draw,temperature.gpu": "1980, 3201, 612.5, [N/A]",
        "clocks_throttle_reasons.active": "0x0000000000000024",
    }
    monkeypatch.setattr(machine, "_smi", lambda _, fields: answers.get(fields, ""))
    assert machine._clocks(torch.device("cuda", 0)) == {
        "sm_mhz": 1980.0, "memory_mhz": 3201.0, "power_w": 612.5, "temperature_c": "[N/A]",
        "throttled": "power cap, software thermal",
    }  # fmt: skip
    monkeypatch.setattr(machine, "_smi", lambda *_: "")
    assert machine._clocks(torch.device("cuda", 0)) == {"throttled": "unknown"}


def test_points_are_hurried_where_time_runs_short_and_not_because_they_are_last():
    """40 s of a quick run: what begins at a quarter of the points after 10 s has its full rule, after 11 s the least;
    the last ones have theirs where the run has caught up."""
    full, least = run.RULES[True], run.RULES[True].hurried()
    found = [run.rule_of(spent_s, done, quick=True) for spent_s, done in ((0, 0), (10, 0.25), (11, 0.25), (39, 0.99))]
    assert found == [full, full, least, full]
