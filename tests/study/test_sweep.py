"""Sweeps: the same runs as one by one, kept through kill -9, on any backend; what goes wrong is told in a line."""

import importlib
import json
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvtwin
from sim import files
from sim.options.scenario import Scenario
from sim.study import sweep
from sim.study.axes import Study, read_study
from sim.study.overview import print_points
from sim.study.points import Task, code_hash, key_of, perform, setup_of
from sim.study.shared_trace import SharedTrace
from sim.study.tables import half_width
from sim.systems.layerkv.preset import LayerKV
from traces.readers import open_trace
from traces.request import Image, Request, ToolCall
from traces.slos import SLOs

ROOT = Path(kvtwin.__file__).parents[1]
FIXED = {"workload": "fixed", "num-prompts": 4, "input-len": 40, "output-len": 4, "gpu": "l20", "goodput": ["ttft:9"]}
SMALL = FIXED | {"policy": ["vllm-v1", "layerkv"], "sweep": {"grid": {"request-rate": [1, 2, 4], "seed": [0, 1]}}}


def written(path, study):
    """A study as TOML, which JSON's values happen to be."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in study.items() if key != "sweep"]
    own = study["sweep"]
    lines += ["[sweep]", *(f"{key} = {value}" for key, value in own.items() if key != "grid"), "[sweep.grid]"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in own["grid"].items()]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def command(study, out, *words):
    return ["sweep", str(study), "--out", str(out), "--no-figures", *words]


def test_a_sweeps_runs_are_those_of_single_commands(tmp_path):
    found = kvtwin.sweep(SMALL, tmp_path, jobs=1)
    assert len(found.table) == 12 and found.table["error"].isna().all()
    for _, row in found.table.iterrows():
        scenario = kvtwin.Scenario(
            workload="fixed", num_prompts=4, input_len=40, output_len=4, gpu="l20", goodput=("ttft:9",),
            request_rate=row["request_rate"], seed=row["seed"],
        )  # fmt: skip
        run = kvtwin.simulate(scenario, row["policy"])
        for name in ("p99_ttft_ms", "mean_tpot_ms", "request_goodput", "num_iterations"):
            assert row[name] == getattr(run.result, name)


def test_the_command_writes_tables_figures_and_the_summary(tmp_path, capsys):
    study = FIXED | {"sweep": {"grid": {"request-rate": [1, 2]}}}
    path = written(tmp_path / "s.toml", study)
    assert kvtwin.main(["sweep", str(path), "--out", str(tmp_path / "o"), "--jobs", "1", "--table", "parquet"]) == 0
    assert "2 runs, 0 of them failed" in capsys.readouterr().out
    assert sorted(p.name for p in (tmp_path / "o").iterdir()) == [
        "figures", "means.parquet", "points", "study.json", "summary.json", "table.parquet",
    ]  # fmt: skip
    table = pd.read_parquet(tmp_path / "o" / "table.parquet")
    pd.testing.assert_frame_equal(table, kvtwin.sweep(study, tmp_path / "o").table, check_dtype=False)
    assert (tmp_path / "o" / "figures" / "p99_ttft_ms.png").stat().st_size > 5000


def test_the_summary_is_what_vllms_plots_read(tmp_path):
    """`vllm bench sweep plot` wants flat objects with its metrics, `plot_pareto` users and GPUs as numbers."""
    study = FIXED | {"request-rate": 1000, "tp": 2}
    study |= {"sweep": {"repeats": 2, "grid": {"max-concurrency": [1, 2]}}}
    kvtwin.main(command(written(tmp_path / "s.toml", study), tmp_path, "--jobs", "1", "--quiet"))
    rows = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    assert [(row["max_concurrency"], row["run_number"]) for row in rows] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    for row in rows:
        assert not any(isinstance(value, dict | list) or value is None for value in row.values())
        assert row["tensor_parallel_size"] * row["pipeline_parallel_size"] * row["data_parallel_size"] == 2
        assert row["max_concurrent_requests"] == row["max_concurrency"]
        assert row["output_throughput"] > 0 and row["request_throughput"] > 0 and row["p99_e2el_ms"] > 0


KILLED = """
import os, signal, sys
import kvtwin
from sim.study import sweep
write, points = sweep.write_atomically, []
def written(path, content):
    write(path, content)
    points.extend([path] if path.parent.name == "points" else [])
    if len(points) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
sweep.write_atomically = written
kvtwin.main(sys.argv[1:])
"""


def test_points_through_kill_9_are_those_of_an_uninterrupted_sweep(tmp_path):
    path = written(tmp_path / "s.toml", SMALL)
    words = command(path, tmp_path / "killed", "--jobs", "2")
    # Workers that outlived it would hold its pipes, and this would wait for them.
    whole = [sys.executable, "-c", KILLED, *words]
    process = subprocess.run(whole, cwd=ROOT, capture_output=True, check=False)
    assert process.returncode == -signal.SIGKILL
    kept = {file: file.stat().st_mtime_ns for file in (tmp_path / "killed" / "points").glob("*.json")}
    assert len(kept) == 5
    ran = []
    found = read_study(SMALL, "sweep", "s")
    sweep.run_study(found, tmp_path / "killed", sweep.Means(jobs=1), lambda total: ran.append)
    assert len(ran) == 12 - 5
    assert {outcome.key for outcome in ran}.isdisjoint(file.stem for file in kept)
    assert all(file.stat().st_mtime_ns == before for file, before in kept.items())
    assert kvtwin.main(command(path, tmp_path / "killed", "--quiet")) == 0
    assert kvtwin.main(command(path, tmp_path / "whole", "--jobs", "1", "--quiet")) == 0
    for name in ("table.csv", "means.csv", "summary.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_parquet_table_without_pyarrow_is_refused_before_any_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sim.study.cli.find_spec", lambda name: None)
    words = command(written(tmp_path / "s.toml", SMALL), tmp_path / "out", "--table", "parquet")
    assert kvtwin.main(words) == 2
    assert "--table parquet: pyarrow is not installed" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_broken_point_does_not_stop_the_others(tmp_path, capsys):
    study = FIXED | {"sweep": {"grid": {"gpu": ["l20", "nothing", "rtx-4090"], "max-num-seqs": [8, 99999]}}}
    del study["gpu"]
    assert kvtwin.main(command(written(tmp_path / "s.toml", study), tmp_path, "--jobs", "1")) == 0
    said = capsys.readouterr().out
    assert "6 runs, 4 of them failed" in said and "2 failed: gpu: 'nothing' is neither" in said
    table = pd.read_csv(tmp_path / "table.csv")
    assert table["error"].notna().tolist() == [False, True, True, True, False, True]
    assert table["p99_ttft_ms"].notna().tolist() == [True, False, False, False, True, False]


def test_a_bug_in_one_point_is_its_own(tmp_path, monkeypatch):
    def bad(self, limits, deployment):
        raise KeyError("lost")

    monkeypatch.setattr(LayerKV, "parts", bad)
    found = kvtwin.sweep(SMALL, tmp_path, jobs=1)
    failed = found.table[found.table["error"].notna()]
    assert set(failed["policy"]) == {"layerkv"} and len(failed) == 6
    assert failed["error"].str.contains("KeyError: 'lost'; run it alone").all()
    monkeypatch.undo()
    assert kvtwin.sweep(SMALL, tmp_path, jobs=1).table["error"].notna().sum() == 6
    assert kvtwin.sweep(SMALL, tmp_path, jobs=1, retry_failed=True).table["error"].isna().all()


def test_a_point_that_takes_too_long_is_given_up_and_tried_again_with_more_time(tmp_path, monkeypatch):
    """By a clock that goes a millisecond at each look; one look a plan."""
    monkeypatch.setattr("sim.study.points.monotonic", count(0.0, 0.001).__next__)
    study = FIXED | {"output-len": 4000, "sweep": {"grid": {"num-prompts": [2, 60000]}}}
    del study["num-prompts"]
    found = kvtwin.sweep(study, tmp_path, jobs=1, max_seconds=0.3)
    assert found.table["error"].isna().tolist() == [True, False]
    assert "took more than --max-seconds 0.3" in found.table["error"].iloc[1]
    planned = read_study(study, "sweep", "s")
    for means, again in ((sweep.Means(jobs=1, max_seconds=0.2), 0), (sweep.Means(jobs=1, max_seconds=0.4), 1)):
        ran = []
        sweep.run_study(planned, tmp_path, means, lambda total, ran=ran: ran.append)
        assert len(ran) == again


def test_a_full_disk_keeps_what_is_finished_and_says_so(tmp_path, monkeypatch, capsys):
    real, written_so_far = files.write_atomically, []

    def full(path, write):
        if path.parent.name == "points":
            written_so_far.append(path)
            if len(written_so_far) == 6:
                raise OSError(28, "No space left on device")
        real(path, write)

    monkeypatch.setattr(sweep, "write_atomically", full)
    path = written(tmp_path / "s.toml", SMALL)
    assert kvtwin.main(command(path, tmp_path / "o", "--jobs", "1")) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "(No space left on device); what is finished is kept" in said
    assert len(list((tmp_path / "o" / "points").glob("*.json"))) == 5
    assert not list((tmp_path / "o" / "points").glob("*.part"))
    assert kvtwin.main(command(path, tmp_path / "o", "--jobs", "1")) == 0
    assert len(written_so_far) == 6 + 7


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--out", "FILE"], "--out: cannot create folder"),
        (["--backend", "spark"], "--backend: 'spark' is not one of loky, dask, ray"),
        (["--jobs", "0"], "--jobs: 0 is less than 1"),
        (["--address", "tcp://there:1"], "--address tcp://there:1: of a cluster of --backend dask or ray"),
        (["--max-seconds", "0"], "--max-seconds: 0.0 is not greater than 0"),
    ],
)
def test_bad_flags_are_one_line(words, said, tmp_path, capsys):
    (tmp_path / "f").write_text("")
    words = [str(tmp_path / "f") if word == "FILE" else word for word in words]
    try:
        status = kvtwin.main(command(written(tmp_path / "s.toml", SMALL), tmp_path / "o", *words))
    except SystemExit as end:
        status = end.code
    error = capsys.readouterr().err
    assert status == 2 and error.count("\n") == 1 and said in error


def test_every_point_refused_for_one_reason_is_that_reason(tmp_path):
    with pytest.raises(kvtwin.UserError, match="every point is refused: --trace FILE and --workload NAME"):
        kvtwin.sweep({"sweep": {"grid": {"tp": [1, 2]}}}, tmp_path)


def test_a_bad_trace_fails_its_own_points(tmp_path):
    header = "arrival_s,prompt_tokens,output_tokens\n0,90,5\n"
    (tmp_path / "good.csv").write_text(header + "1.0,70,3\n")
    (tmp_path / "bad.csv").write_text(header + "1.0,x,9\n")
    traces = [str(tmp_path / name) for name in ("good.csv", "bad.csv", "none.csv")]
    found = kvtwin.sweep({"sweep": {"grid": {"trace": traces}}}, tmp_path, jobs=1)
    assert found.table["error"].isna().tolist() == [True, False, False]
    assert "line 3" in found.table["error"].iloc[1] and "cannot read" in found.table["error"].iloc[2]


def test_a_folder_says_what_was_asked_of_it(tmp_path):
    study = read_study(SMALL | {"sweep": {"repeats": 2, "grid": {"request-rate": [1, 2, 4]}}}, "sweep", "s.toml")
    begun, ended = [], []
    sweep.run_study(study, tmp_path, sweep.Means(jobs=1), lambda total: begun.append(total) or ended.append)
    assert begun == [12] and len({outcome.key for outcome in ended}) == 12
    asked = json.loads((tmp_path / "study.json").read_text())
    fixed = {name.replace("-", "_"): value for name, value in FIXED.items()}
    assert asked == {
        "where": "s.toml", "fixed": fixed, "axes": ["policy", "request_rate"], "repeats": 2, "points": 6,
        "versions": {"kvtwin": kvtwin.__version__, "code_sha256": code_hash()},
    }  # fmt: skip
    assert (tmp_path / "study.json").read_text() == json.dumps(asked, indent=1) + "\n"


def test_traces_that_are_read_alike_are_read_once(tmp_path, monkeypatch):
    """Alike by content and options of reading; each run gets the one that is its own."""
    for name, rows in (("a", 2), ("b", 2), ("c", 3)):
        text = "arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{i},90,5\n" for i in range(rows))
        (tmp_path / f"{name}.csv").write_text(text)
    grid = {"trace": [str(tmp_path / f"{name}.csv") for name in "abc"], "time-unit": ["s", "ms"], "seed": [0, 1]}
    handed = []

    def performed(tasks, traces, backend, **where):
        handed.extend([[request.arrival_s for request in traces[task.trace]] for task in tasks])
        handed.append((len(traces), backend, where, {task.max_seconds for task in tasks}))
        return iter(())

    monkeypatch.setattr(sweep, "outcomes", performed)
    study = read_study({"sweep": {"grid": grid}}, "sweep", "s")
    sweep.run_study(study, tmp_path / "o", sweep.Means("dask", "tcp://there:1", 3, 9.0))
    two, three = ([[0.0, 1.0]] * 2, [[0.0, 0.001]] * 2), ([[0.0, 1.0, 2.0]] * 2, [[0.0, 0.001, 0.002]] * 2)
    *runs, how = handed
    # The same rows under another name are the same run.
    assert runs == [*two[0], *two[1], *three[0], *three[1]]
    assert how == (4, "dask", {"address": "tcp://there:1", "jobs": 3}, {9.0})


# -- keys ------------------------------------------------------------------------------------------------------------


def key(**options):
    return key_of(setup_of({"workload": "fixed", **options}))


def test_a_key_hangs_on_everything_that_decides_a_run(tmp_path, monkeypatch):
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,90,5\n")
    profile = tmp_path / "p.json"
    linear = {"form": "linear", "prefill": [0.01, 1e-4, 0], "decode": [0.02, 1e-3, 1e-4], "swap_s_per_block": 1e-3}
    profile.write_text(json.dumps(linear))
    base = {"trace": str(trace), "workload": None, "profile": str(profile), "policy": "layerkv"}
    first = key(**base)
    assert key(**base) == first
    found = {first, key(**base, seed=1), key(**base, layerkv_threshold=0.3), key(**(base | {"policy": "vllm-v1"}))}
    profile.write_text(json.dumps(linear | {"swap_s_per_block": 2e-3}))
    found.add(key(**base))
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,91,5\n")
    # Files are read once a process.
    importlib.import_module("sim.study.points").file_hash.cache_clear()
    found.add(key(**base))
    monkeypatch.setattr(importlib.import_module("sim.study.points"), "code_hash", lambda: "new")
    found.add(key(**base))
    assert len(found) == 7
    assert len(code_hash()) == 64


def test_the_code_is_each_file_that_decides_a_run_by_its_name_and_content(tmp_path, monkeypatch):
    points = importlib.import_module("sim.study.points")
    monkeypatch.setattr(points, "PACKAGES", tmp_path)
    found = [points.code_hash.__wrapped__()]

    def write(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        found.append(points.code_hash.__wrapped__())
        return found[-1] != found[-2]

    decide = (
        "sim/a.py", "sim/cost/a.json", "sim/study/points.py", "sim/results/report.py", "traces/b.py", "traces/c.json",
    )  # fmt: skip
    assert all(write(name, "x") for name in decide)
    assert all(write(name, "y") for name in decide)
    assert not any(map(write, ("sim/study/sweep.py", "sim/results/figures/x.py", "sim/a.txt", "calib/a.py"), "xxxx"))
    # Not by how many bytes lie one behind another.
    (tmp_path / "sim/a.py").rename(tmp_path / "sim/b.py")
    assert write("sim/a.txt", "z")
    assert len(set(found)) == 2 * len(decide) + 2


def test_equal_points_are_run_once_and_each_has_its_row(tmp_path):
    study = FIXED | {"policy": ["vllm-v1", "layerkv"], "sweep": {"grid": {"layerkv-threshold": [0.01, 0.5, 0.9]}}}
    found = kvtwin.sweep(study, tmp_path, jobs=1)
    assert len(found.table) == 6
    assert len(list((tmp_path / "points").iterdir())) == found.table["key"].nunique() == 4


# -- repeats ---------------------------------------------------------------------------------------------------------


def test_means_and_intervals_are_those_of_the_repeats(tmp_path):
    study = {"workload": "sharegpt", "num-prompts": 20, "request-rate": 5, "sweep": {"repeats": 3}}
    found = kvtwin.sweep(study, tmp_path, jobs=1)
    values = found.table["mean_ttft_ms"].to_numpy()
    row = found.means.iloc[0]
    assert found.table["seed"].tolist() == [0, 1, 2] and len(set(values)) == 3
    assert row["runs"] == 3 and row["mean_ttft_ms"] == pytest.approx(values.mean())
    # Student's t of 2 degrees of freedom at 97.5 %: 4.303.
    assert row["mean_ttft_ms_ci95"] == pytest.approx(4.302653 * values.std(ddof=1) / np.sqrt(3))
    assert np.isnan(half_width(values[:1]))
    assert found.figure("mean_ttft_ms").axes
    with pytest.raises(kvtwin.UserError, match="'ttft' is no numeric column"):
        found.figure("ttft")


def test_a_figure_shows_every_value_of_its_table(tmp_path):
    found = kvtwin.sweep(SMALL, tmp_path, jobs=1)
    for metric in ("p99_ttft_ms", "num_preemptions"):
        figure = found.figure(metric)
        figure.canvas.draw()
        drawn = [line for ax in figure.axes for line in ax.lines if len(line.get_xdata())]
        assert sorted(np.concatenate([line.get_ydata() for line in drawn])) == sorted(found.means[metric])
        for ax in figure.axes:
            low, high = ax.get_ylim()
            assert all(low <= value <= high for line in ax.lines for value in line.get_ydata())
        assert figure.legends[0].get_texts()[1].get_text() == "layerkv"


def test_an_interrupted_run_interrupts_its_worker(monkeypatch):
    def interrupted(run):
        run.interrupted = True

    monkeypatch.setattr("sim.study.points.execute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        perform(Task("k", {"workload": "fixed", "num_prompts": 1}, None), None)


@pytest.mark.parametrize("command", ["sweep", "tune", "map", "reproduce"])
def test_an_interrupted_study_says_what_goes_on(tmp_path, monkeypatch, capsys, command):
    def interrupt(*_):
        raise KeyboardInterrupt

    for module in ("sweep", "reproduce"):
        monkeypatch.setattr(f"sim.study.{module}.perform_missing", interrupt)
    monkeypatch.setattr("sim.study.tune.answers", interrupt)
    (tmp_path / "s.toml").write_text(
        f'workload = "fixed"\ngoodput = ["ttft:9"]\npolicy = ["vllm-v1", "layerkv"]\n[{command}]\n'
    )
    words = ["kvpr"] if command == "reproduce" else [str(tmp_path / "s.toml")]
    assert kvtwin.main([command, *words, "--out", str(tmp_path / "o"), "--jobs", "1"]) == 130
    told = f"kvtwin: interrupted; what is finished is in {tmp_path / 'o'}: the same command goes on\n"
    assert capsys.readouterr().err == told


def test_flags_override_the_file_under_any_of_its_names(tmp_path):
    path = tmp_path / "s.toml"
    fixed = 'workload = "fixed"\nnum_prompts = 9\ntensor-parallel-size = 2\npolicy = ["vllm-v1", "sarathi"]\n'
    path.write_text(f"{fixed}[sweep.grid]\nseed = [0, 1]\n")
    flags = ["--num-prompts", "3", "--tp", "1", "--gpu", "l20", "--policy", "layerkv", "--layerkv-threshold", "0.1"]
    assert kvtwin.main(command(path, tmp_path / "o", "--jobs", "1", "--quiet", *flags)) == 0
    asked = json.loads((tmp_path / "o" / "study.json").read_text())
    assert asked["fixed"] == {
        "workload": "fixed", "num_prompts": 3, "tp": 1, "policy": ["layerkv"], "gpu": "l20", "layerkv_threshold": 0.1,
    }  # fmt: skip
    assert asked["axes"] == ["seed"]


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        (["--seed", "3"], "'seed' is an axis and stands as a fixed value too; keep one"),
        (["--layerkv-threshold", "0.1"], "'layerkv-threshold' is an option of layerkv, which no point runs"),
    ],
)
def test_flags_that_do_not_fit_the_study_are_refused(tmp_path, capsys, flags, refusal):
    path = tmp_path / "s.toml"
    path.write_text('workload = "fixed"\n[sweep.grid]\nseed = [0, 1]\n')
    assert kvtwin.main(command(path, tmp_path / "o", "--jobs", "1", *flags)) == 2
    error = capsys.readouterr().err
    assert refusal in error and error.count("\n") == 1


def test_a_model_that_is_not_given_is_told_and_what_is_an_axis_is_given(tmp_path, capsys):
    """The GPU is an axis."""
    (tmp_path / "s.toml").write_text('workload = "fixed"\nnum-prompts = 2\n[sweep.grid]\ngpu = ["l20", "h100"]\n')
    words = ["sweep", str(tmp_path / "s.toml"), "--out", str(tmp_path / "o"), "--jobs", "1", "--no-figures"]
    assert kvtwin.main(words) == 0
    assert capsys.readouterr().err == "kvtwin: taken, as not given: --model llama-2-7b\n"


@pytest.mark.parametrize(("count", "said"), [(24, ""), (25, "and 1 more points in the tables")])
def test_a_terminal_shows_two_dozen_points_and_says_what_is_left(count, said, capsys):
    study = Study("s", {}, ("seed",), [], 1, {})
    print_points(study, pd.DataFrame({"seed": range(100, 100 + count), "mean_ttft_ms": 1.0}))
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert [line.split()[0] for line in lines if line.startswith("1")] == [str(100 + i) for i in range(24)]
    assert [line for line in lines if "more points" in line] == ([said] if said else [])


FILE = SimpleNamespace(left_out=())
IDS = st.lists(st.integers(0, 2**65), max_size=3).map(tuple)
ROWS = st.lists(
    st.tuples(
        st.floats(0, 1e6), st.integers(1, 10**6), st.integers(1, 10**6), st.text(max_size=3), IDS,
        st.integers(0, 512), IDS, st.integers(-5, 5), st.sampled_from([(), (ToolCall(1, 0.5, 3),)]),
        st.sampled_from([None, SLOs(ttft_s=0.5)]), st.none() | st.floats(0, 1),
        st.sampled_from([(), (Image(0, 1, 2**65),)]), st.sampled_from(["", "sql"]),
    ),
    max_size=20,
)  # fmt: skip


@settings(max_examples=40)
@given(ROWS, st.booleans())
def test_requests_come_back_as_they_went_in(rows, plain):
    requests = [Request(i, *(row[:3] if plain else row)) for i, row in enumerate(rows)]
    # numpy's fixed-width text drops trailing zeros.
    requests = [request._replace(session_id=request.session_id.rstrip("\0")) for request in requests]
    found = list(SharedTrace.of(requests, FILE))
    assert found == requests
    assert all(type(value) in (int, float, str, tuple, SLOs, type(None)) for request in found for value in request)


@pytest.mark.parametrize("name", ["azure2023_conv.csv", "mooncake_synthetic_trace.jsonl"])
def test_public_traces_come_back(name):
    path = Path(__file__).parents[3] / "shared" / "traces" / name
    if not path.exists():
        pytest.skip("../shared is not there")
    shared = SharedTrace.read(Scenario(trace=str(path)))
    assert list(shared) == list(open_trace(path))
    assert shared.columns["arrival_s"].dtype == np.float64
