"""`kvtwin validate --against`: what it says of a server that is our own simulation, and of one worked out by hand."""

import json
from pathlib import Path

import pytest
from server_small import serve, setup
from test_calib_cli import attempt, is_drawn, refused

from gpu_runtime.twin.against import measured_metrics
from sim.run.served import measured_times
from traces.request import Request
from traces.served import ServedRun

ENGINE = ("--gpu", "a100-80g", "--model", "llama-2-7b", "--max-model-len", "4096")


def against(capsys, folder, run, *words):
    status, out, error = attempt(capsys, "validate", "--against", run, *ENGINE, "--out", folder, *words)
    assert status == 0, error
    return out


def rows(path):
    return {row["metric"]: row for row in json.loads(path.read_text())["metrics"]}


def test_a_server_that_is_the_simulation_agrees_in_every_metric(tmp_path, capsys):
    serve(setup("vllm-v1"), tmp_path / "run.json", {}, unsteady=0.0, late_s=0.0)
    out = against(capsys, tmp_path / "out", tmp_path / "run.json", "--policy", "vllm-v1", "--policy", "vllm-recompute")
    found = rows(tmp_path / "out" / "vllm-v1" / "against.json")
    assert len(found) == 15 and "p99_itl_ms" in found
    assert [row for row in found.values() if row["ratio"] != pytest.approx(1.0, rel=1e-6)] == []
    # The other engine does not chunk its prompts, and that shows.
    other = rows(tmp_path / "out" / "vllm-recompute" / "against.json")
    assert other["p99_itl_ms"]["ratio"] > 1.2
    assert other["mean_ttft_ms"]["measured"] == pytest.approx(found["mean_ttft_ms"]["simulated"])
    assert is_drawn(tmp_path / "out" / "vllm-v1" / "against.png")
    text = (tmp_path / "out" / "validation.md").read_text()
    assert "## vllm-v1" in text and "## vllm-recompute" in text and "| Mean TTFT (ms) |" in text
    assert "a100-80g-imported; async scheduling." in text and "a100-80g-imported; serial scheduling." in text
    assert "Requests furthest apart" in out


def test_metrics_and_worst_requests_of_a_run_worked_out_by_hand(tmp_path, capsys):
    result = {
        "completed": 2, "request_throughput": 0.5, "input_lens": [100, 200, 9], "output_lens": [3, 1, 0],
        "start_times": [50.0, 51.0, 52.0], "ttfts": [0.5, 1.0, 0.0], "itls": [[0.25, 0.75], [], []],
        "errors": ["", "", "timed out"],
    }  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps(result))
    out = against(capsys, tmp_path / "out", tmp_path / "run.json", "--policy", "vllm-recompute")
    data = json.loads((tmp_path / "out" / "vllm-recompute" / "against.json").read_text())
    measured = {row["metric"]: row["measured"] for row in data["metrics"]}
    assert (data["num_prompts"], data["failed_requests"]) == (2, 1)
    assert "1 that failed" in out
    expected = {
        "mean_ttft_ms": 750, "median_ttft_ms": 750, "p99_ttft_ms": 995, "mean_tpot_ms": 500, "median_itl_ms": 500,
        "mean_e2el_ms": 1250, "duration": 2.0, "request_throughput": 1.0, "output_throughput": 2.0,
    }  # fmt: skip
    assert {name: measured[name] for name in expected} == pytest.approx(expected)
    (first, second) = data["worst"]
    assert (first["request_id"], first["metric"], first["measured_s"]) in (
        (0, "tpot", 0.5),
        (1, "ttft", 1.0),
        (1, "e2el", 1.0),
    )
    assert abs(1 - first["ratio"]) > abs(1 - second["ratio"])


def test_gaps_of_a_few_answers_are_not_those_of_the_server():
    requests = [Request(i, 0.0, 10, 3) for i in range(3)]
    served = ServedRun(Path("run.json"), requests, [0.1] * 3, [0.5] * 3, [(0.2, 0.2), (), ()], 0)
    found = measured_metrics(served, measured_times(served))
    assert found["mean_ttft_ms"] == pytest.approx(100.0) and not any("itl" in name for name in found)


def test_what_cannot_be_compared_is_refused_by_name(tmp_path, capsys):
    serve(setup("vllm-v1", num_prompts=5), tmp_path / "run.json")
    (tmp_path / "bare.json").write_text('{"completed": 3, "request_throughput": 1.0}')
    words = ("validate", *ENGINE, "--out", tmp_path / "out")
    refused(capsys, *words, parts=["--device", "--against", "neither"])
    refused(capsys, *words, "--against", tmp_path / "run.json", "--device", "cpu", parts=["--against", "both"])
    refused(capsys, *words, "--against", tmp_path / "bare.json", parts=["bare.json", "--save-detailed"])
    refused(capsys, *words, "--against", tmp_path / "none.json", parts=["none.json", "no such file"])
    run = ("--against", tmp_path / "run.json")
    refused(capsys, *words, *run, "--max-concurrency", "2", parts=["--max-concurrency", "changes the traffic"])
    refused(capsys, *words, *run, "--trace", tmp_path / "bare.json", parts=["bare.json"])
