"""Copies appear on their lanes, and with --timeline torch's own events beside them on the same time axis."""

import gzip
import json
import time
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch
from runtime_small import SMALL
from test_runtime_validate import CONFIG

import kvtwin
from gpu_runtime.kv.copy_engine import CopyEngine, CopyFailed
from gpu_runtime.kv.copy_spans import MOST_KEPT, CopySpans
from gpu_runtime.kv.pool import KVPool
from gpu_runtime.measured.live_timeline import FIRST_PID, PROFILED_ITERATIONS, ZERO, on_our_clock
from sim.engine.changes import Direction
from sim.results.timeline import LIVE_PIDS

CPU = torch.device("cpu")
LIVE = 1 + LIVE_PIDS


@pytest.mark.parametrize("inline", [False, True])
def test_spans_are_those_of_the_copies(inline):
    pools = [KVPool(SMALL, 50, 4, 1, "cpu", torch.float32) for _ in range(2)]
    with closing(CopyEngine("cpu", inline=inline)) as engine:
        begun = time.perf_counter()
        engine.spans.start_clock()
        for i in range(20):
            direction = Direction.D2H if i % 3 else Direction.H2D
            engine.copy_blocks(pools[0], [i], pools[1], [i + 1], direction).wait()
        with pytest.raises(CopyFailed):
            engine.copy_rows(torch.zeros(2), [0], torch.zeros(3), [3], Direction.H2D).wait()
    lasted = time.perf_counter() - begun
    spans = engine.spans.take()
    assert [sum(span.direction is d for span in spans) for d in (Direction.H2D, Direction.D2H)] == [7, 13]
    assert engine.spans.take() == []
    for direction in Direction:
        moments = [moment for span in spans if span.direction is direction for moment in span[1:]]
        assert moments == sorted(moments)
        assert moments[0] >= 0 and moments[-1] <= lasted


class Event:
    """CUDA's, of a stream that says what time it is: ms."""

    def __init__(self, *, enable_timing):
        assert enable_timing
        self.is_over = True

    def record(self, stream):
        self.at_ms = stream.now_ms

    def synchronize(self):
        pass

    def query(self):
        return self.is_over

    def elapsed_time(self, later):
        return later.at_ms - self.at_ms


def test_events_tell_spans_once_they_are_over(monkeypatch):
    stream = SimpleNamespace(now_ms=1000.0)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    spans = CopySpans(torch.device("cuda"))
    marks = []
    for stream.now_ms in (1250.0, 1375.0, 1500.0, 2500.0):
        marks.append(spans.mark(stream))
    spans.note(Direction.D2H, marks[0], marks[1])
    spans.note(Direction.H2D, marks[2], marks[3])
    marks[1].is_over = False
    assert spans.take() == [(Direction.H2D, 0.5, 1.5)]
    marks[1].is_over = True
    assert spans.take() == [(Direction.D2H, 0.25, 0.375)]
    assert spans.take() == []


def test_spans_that_are_not_taken_do_not_fill_the_memory():
    spans = CopySpans(CPU)
    for _ in range(MOST_KEPT + 10):
        spans.note(Direction.D2H, spans.mark(None), spans.mark(None))
    assert len(spans.take()) == MOST_KEPT


def event(name, ts, **fields):
    return {"ph": "X", "cat": "cpu_op", "name": name, "ts": ts, "dur": 2.0, "pid": 4321, "tid": 4321} | fields


def test_foreign_events_move_to_our_clock_and_out_of_our_process():
    named = {"ph": "M", "name": "process_name", "pid": 4321, "tid": 0, "args": {"name": "python"}}
    on_gpu = {**named, "pid": 0}
    labels = [
        {**e, "name": "process_labels", "args": {"labels": label}} for e, label in ((named, "CPU"), (on_gpu, "GPU 0"))
    ]
    found = [
        named, {**named, "pid": 99}, on_gpu, *labels, event(ZERO, 1000.0, cat="user_annotation"), event("lazy", 1010.0),
        event(ZERO, 1500.0, cat="user_annotation"), event("aten::mm", 1600.0),
        event("gemm", 1610.0, pid=0, cat="kernel"), event("other", 1620.0, cat="python_function"),
        {"ph": "i", "name": "end", "ts": 1.0, "pid": "", "tid": ""},
    ]  # fmt: skip
    events = on_our_clock(found)
    assert [(e["name"], e.get("ts"), e["pid"]) for e in events] == [
        ("process_name", None, FIRST_PID), ("process_name", None, FIRST_PID + 1),
        ("aten::mm", 100.0, FIRST_PID), ("gemm", 110.0, FIRST_PID + 1),
    ]  # fmt: skip
    assert [e["args"]["name"].rpartition(": ")[2] for e in events[:2]] == ["CPU", "GPU 0"]
    assert on_our_clock([e for e in found if e not in labels])[0]["args"]["name"].endswith(": python")
    assert on_our_clock([named]) == []


def live(tmp_path, *flags, status=0):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    out = tmp_path / "out"
    assert kvtwin.main(
        ["live", "--device", "cpu", "--model", str(config), "--gpu", "cpu", "--workload", "fixed", "--input-len", "12",
         "--output-len", "25", "--request-rate", "200", "--num-prompts", "30", "--num-gpu-blocks-override", "9",
         "--max-model-len", "64", "--swap-space", "0.01", "--max-num-seqs", "8", "--out", str(out),
         "--policy", "vllm-swap", *flags]
    ) == status  # fmt: skip
    return out, json.loads((out / "result.json").read_text())


def test_one_file_shows_our_lanes_and_what_torch_did_in_them(tmp_path, capsys):
    out, result = live(tmp_path, "--timeline")
    assert any("torch.profiler" in warning for warning in result["warnings"])
    assert result["num_iterations"] > PROFILED_ITERATIONS
    events = json.loads(gzip.decompress((out / "timeline.json.gz").read_bytes()))["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == LIVE}
    ours = [e for e in events if e["ph"] == "X" and e["pid"] == LIVE]
    assert {lanes[e["tid"]] for e in ours} == set(lanes.values()) == {"Iterations", *result["lanes"]}
    assert all(lane["busy_s"] > 0 for lane in result["lanes"].values())
    begun = {e["id"] for e in events if e.get("cat") == "request" and e["ph"] == "b"}
    assert len(begun) == result["completed"] == 30
    steps = sorted((e["ts"], e["ts"] + e["dur"]) for e in ours if lanes[e["tid"]] == "GPU compute")
    products = [e for e in events if e.get("cat") == "cpu_op" and e["name"] == "aten::linear"]
    assert products and all(e["pid"] >= FIRST_PID for e in products)
    # Each layer has four products and the head one; those of an iteration lie within it, to a millisecond.
    slack_us = 1000.0
    for start_us, end_us in steps[:PROFILED_ITERATIONS]:
        inside = [e for e in products if start_us - slack_us <= e["ts"] and e["ts"] + e["dur"] <= end_us + slack_us]
        assert len(inside) >= 4 * CONFIG["num_hidden_layers"] + 1
    assert all(e["ts"] <= steps[PROFILED_ITERATIONS][0] + slack_us for e in products)


def test_an_interrupt_before_the_clock_starts_leaves_a_timeline_of_nothing(tmp_path, capsys, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("gpu_runtime.device.TorchDevice.warm_up", interrupted)
    out, result = live(tmp_path, "--timeline", status=130)
    assert not result["complete"]
    events = json.loads(gzip.decompress((out / "timeline.json.gz").read_bytes()))["traceEvents"]
    assert events and all(e["pid"] == LIVE for e in events)
