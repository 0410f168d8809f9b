"""`kvtwin run` and `compare` over several engines: what their files say, and what is refused."""

import csv
import gzip
import json

import pytest

import kvtwin
from sim.files import CsvTable
from sim.results import result as result_module
from sim.results.metrics import ENGINE_COLUMNS, TABLE_COLUMNS

WORKLOAD = ["--workload", "sharegpt", "--num-prompts", "60", "--request-rate", "20", "--seed", "3", "--gpu", "l20"]


@pytest.fixture(autouse=True)
def plain_tables(monkeypatch):
    """CSV, whether pyarrow is installed or not."""
    monkeypatch.setattr("sim.cli.ParquetTable", CsvTable)
    monkeypatch.setattr("sim.cli.TABLE_FILES", ("requests.csv", "requests.csv"))


def run(out, *words, policy="vllm-recompute", command="run"):
    return kvtwin.main([command, "--policy", policy, "--out", str(out), "--quiet", *WORKLOAD, *words])


def rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_tables_series_timelines_and_results_say_which_engine(tmp_path):
    assert run(tmp_path, "--replicas", "3", "--timeline", "--figures") == 0
    table = rows(tmp_path / "requests.csv")
    assert list(table[0]) == [*TABLE_COLUMNS, *ENGINE_COLUMNS]
    assert {row["request_id"]: row["engine"] for row in table} == {str(i): str(i % 3) for i in range(60)}
    found = result_module.read_result(tmp_path / "result.json")
    assert found.engines is not result_module.UNSET
    assert [(use.engine, use.num_prompts) for use in found.engines] == [(0, 20), (1, 20), (2, 20)]
    assert found.num_iterations == sum(use.num_iterations for use in found.engines)
    mean_s = sum(use.lanes.compute.busy_s for use in found.engines) / 3
    assert found.lanes.compute.busy_s == pytest.approx(mean_s)
    series = rows(tmp_path / "series.csv")
    assert {row["engine"] for row in series} == {"0", "1", "2"}
    times = [float(row["time_s"]) for row in series]
    assert times == sorted(times)
    events = json.loads(gzip.decompress((tmp_path / "timeline.json.gz").read_bytes()))["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == {1, 2, 3}
    assert (tmp_path / "figures" / "engines.png").exists()


def test_one_replica_leaves_the_files_of_one_engine(tmp_path):
    assert run(tmp_path / "one", "--timeline", "--figures") == 0
    assert run(tmp_path / "same", "--replicas", "1", "--timeline", "--figures") == 0
    for name in ("requests.csv", "series.csv", "timeline.json.gz", "figures/memory.png", "figures/lanes.png"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "same" / name).read_bytes()
    assert not (tmp_path / "same" / "figures" / "engines.png").exists()
    assert "replicas" not in json.loads((tmp_path / "one" / "result.json").read_text())["scenario"]


def test_stepped_and_jumped_runs_leave_the_same_requests(tmp_path):
    words = ["--replicas", "4", "--router", "least-loaded", "--max-concurrency", "30"]
    assert run(tmp_path / "jumped", *words) == run(tmp_path / "stepped", *words, "--step") == 0
    jumped, stepped = (
        {row["request_id"]: row for row in rows(tmp_path / name / "requests.csv")} for name in ("jumped", "stepped")
    )
    for key, row in jumped.items():
        assert row["engine"] == stepped[key]["engine"]
        assert float(row["e2el_s"]) == pytest.approx(float(stepped[key]["e2el_s"]), abs=1e-6)


def test_policies_are_compared_over_replicas(tmp_path):
    words = ["--policy", "layerkv", "--replicas", "2", "--router", "power-of-two"]
    assert run(tmp_path, *words, command="compare") == 0
    assert set(json.loads((tmp_path / "comparison.json").read_text())["policies"]) == {"vllm-recompute", "layerkv"}
    assert (tmp_path / "figures" / "engines.png").exists()


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--router", "least-loaded"], ["--router", "least-loaded", "--replicas"]),
        (["--router", "least-loaded", "--replicas", "1"], ["--router", "--replicas of 2 or more"]),
        (["--replicas", "0"], ["--replicas", "0", "give more"]),
        (["--replicas", "1.5"], ["--replicas", "'1.5'", "whole number"]),
    ],
)
def test_bad_values_are_refused(tmp_path, capsys, words, parts):
    assert run(tmp_path, *words) == 2
    error = capsys.readouterr().err
    assert [part for part in parts if part not in error] == []
