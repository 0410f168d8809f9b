"""`kvtwin run` and `kvtwin compare`: what they write and print, how they start, and what an interrupt leaves."""

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.progress import Progress

import kvtwin
from kvtwin.testing import requests
from sim.files import folder_name
from sim.options.scenario import Scenario
from sim.run import files as run_files
from sim.run import progress
from sim.run.prepare import prepare
from sim.run.simulate import build_run, execute
from sim.systems.vllm055 import VllmRecompute
from sim.systems.vllm_v1 import VllmV1
from traces.request import Request

ROOT = Path(kvtwin.__file__).parents[1]
FIGURES = {"ttft_tpot.png", "queueing.png", "memory.png", "lanes.png"}
SMALL = ["--workload", "fixed", "--num-prompts", "5", "--input-len", "20", "--output-len", "3", "--gpu", "l20"]


def table_rows(folder):
    """Rows of the per-request table, whichever there is."""
    if (folder / "requests.parquet").exists():
        return pytest.importorskip("pyarrow.parquet").read_table(folder / "requests.parquet").to_pylist()
    with (folder / "requests.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def names(folder):
    return {path.name for path in folder.iterdir()}


# -- what is written and printed -------------------------------------------------------------------------------------


def test_a_quiet_run_writes_its_result_and_table_and_says_nothing(tmp_path, capsys):
    assert kvtwin.main(["run", *SMALL, "--policy", "layerkv", "--out", str(tmp_path / "a" / "b"), "--quiet"]) == 0
    assert {name.partition(".")[0] for name in names(tmp_path / "a" / "b")} == {"result", "requests", "scenario"}
    assert capsys.readouterr() == ("", "")
    assert len(table_rows(tmp_path / "a" / "b")) == 5


def test_a_run_reports_what_it_found_and_where(tmp_path, capsys):
    assert kvtwin.main(["run", *SMALL, "--policy", "vllm-swap", "--out", str(tmp_path / "out"), "--figures"]) == 0
    printed = capsys.readouterr()
    assert "vllm-swap" in printed.out and "TTFT" in printed.out and "result.json" in printed.out
    assert printed.err == "kvtwin: taken, as not given: --model llama-2-7b\n"
    assert names(tmp_path / "out" / "figures") == FIGURES
    for name in FIGURES:
        assert (tmp_path / "out" / "figures" / name).read_bytes().startswith(b"\x89PNG")


def test_without_pyarrow_the_table_is_csv(tmp_path, monkeypatch):
    monkeypatch.setattr(run_files, "find_spec", lambda name: None)
    assert kvtwin.main(["run", *SMALL, "--policy", "vllm-swap", "--out", str(tmp_path), "--quiet"]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    rows = table_rows(tmp_path)
    assert [float(row["e2el_s"]) for row in sorted(rows, key=lambda row: int(row["request_id"]))] == result["latencies"]
    assert {row["status"] for row in rows} == {"completed"}


def test_compare_runs_every_policy_on_the_same_traffic_and_draws_them(tmp_path, capsys):
    policies = ["vllm-recompute", "layerkv", "layerkv:slo-aware=false,decode=stream"]
    words = [word for policy in policies for word in ("--policy", policy)]
    assert kvtwin.main(["compare", *SMALL, *words, "--out", str(tmp_path), "--seed", "4"]) == 0
    folders = [folder_name(policy) for policy in policies]
    assert names(tmp_path) >= {*folders, "comparison.json", "comparison.md", "figures"}
    assert names(tmp_path / "figures") == FIGURES
    results = [json.loads((tmp_path / folder / "result.json").read_text()) for folder in folders]
    assert [result["policy"] for result in results] == policies
    assert results[2]["scenario"]["policy_options"]["slo_aware"] is False
    for name in ("start_times", "input_lens", "output_lens"):
        assert results[0][name] == results[1][name] == results[2][name]
    printed = capsys.readouterr().out
    assert all(policy in printed for policy in policies[:2])


def test_compare_gives_the_numbers_of_single_runs(tmp_path):
    # One host memory for all, told: by default compare gives all what the greediest takes.
    words = [*SMALL, "--quiet", "--swap-space", "4", "--policy", "vllm-swap"]
    assert kvtwin.main(["compare", "--no-figures", *words, "--policy", "layerkv", "--out", str(tmp_path / "both")]) == 0
    # With a time series, which compare keeps.
    assert kvtwin.main(["run", *words, "--timeline", "--out", str(tmp_path / "one")]) == 0
    single = (tmp_path / "one" / "result.json").read_bytes()
    assert (tmp_path / "both" / "vllm-swap" / "result.json").read_bytes() == single


def test_compare_draws_nothing_where_that_is_said(tmp_path, capsys):
    words = ["--no-figures", "--policy", "vllm-v1", "--policy", "layerkv", "--out", str(tmp_path)]
    assert kvtwin.main(["compare", *SMALL, *words]) == 0
    assert capsys.readouterr().out.endswith(f"Results and comparison.md are in {tmp_path}\n")
    assert names(tmp_path) >= {"vllm-v1", "layerkv", "comparison.json", "comparison.md"}
    assert "figures" not in names(tmp_path) and "figures" not in (tmp_path / "comparison.md").read_text()


# -- starting up -----------------------------------------------------------------------------------------------------

HEAVY = {"matplotlib", "numpy", "pandas", "torch", "rich", "pyarrow", "scipy", "simpy", "IPython"}
SHOW = "\nimport sys; print(*sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)"


def test_nothing_is_imported_that_a_run_does_not_need(tmp_path):
    (tmp_path / "trace.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,20,3\n1,20,3\n")
    words = ["--trace", str(tmp_path / "trace.csv"), "--gpu", "l20", "--policy", "layerkv"]
    words += ["--out", str(tmp_path / "out"), "--quiet"]
    # Without pyarrow, which imports numpy.
    hide = "import sys; sys.modules['pyarrow'] = None"
    code = f"{hide}\nimport kvtwin\nassert kvtwin.main(['run', *{words}]) == 0{SHOW}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(done.stderr.split()) & HEAVY == {"pyarrow", "simpy"}


def test_simpy_is_whole_for_those_who_ask_for_more_of_it():
    """A run imports two of its modules; the package itself runs when it is needed, once."""
    code = """
import sys
from sim.clock.instance import Environment
assert not {"simpy.rt", "importlib.metadata"} & set(sys.modules)
import simpy
from simpy import Store
assert simpy.Environment is Environment and simpy.__version__ and "simpy.rt" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


RUN = ("run", *SMALL, "--policy", "vllm-swap", "--out", "out")
PRINTING = (RUN, ("trace", "list"))


def prints_to(place, command, folder):
    """A process of a command whose standard output is `place`."""
    words = [sys.executable, "-m", "kvtwin", *command]
    path = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(words, stdout=place, stderr=subprocess.PIPE, text=True, check=False, cwd=folder, env=path)


@pytest.mark.parametrize("command", PRINTING, ids=" ".join)
def test_output_that_is_not_read_is_no_traceback(tmp_path, command):
    reader, writer = os.pipe()
    os.close(reader)
    done = prints_to(writer, command, tmp_path)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
    assert (tmp_path / "out" / "result.json").exists() == (command == RUN)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the device that is always full is Linux's")
@pytest.mark.parametrize("command", PRINTING, ids=" ".join)
def test_output_that_has_no_room_is_told_by_its_name(tmp_path, command):
    with Path("/dev/full").open("wb") as full:
        done = prints_to(full, command, tmp_path)
    assert done.returncode == 2
    assert "standard output: " in done.stderr and "--out" not in done.stderr and done.stderr.count("\n") == 1
    assert (tmp_path / "out" / "result.json").exists() == (command == RUN)


INTERRUPTING = """
import signal, sys
class Interrupts:
    def find_spec(self, name, *_):
        if name == {name!r}:
            signal.raise_signal(signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupts())
from kvtwin import main
sys.exit(main(["run", "--workload", "fixed", "--num-prompts", "1", "--out", {out!r}, "--quiet"]))
"""


@pytest.mark.parametrize("name", ["argparse", "sim.cli", "sim.options.scenario", "simpy"])
def test_an_interrupt_while_modules_load_is_told_in_one_line(tmp_path, name):
    code = INTERRUPTING.format(name=name, out=str(tmp_path))
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "kvtwin: interrupted\n")


# -- interrupts ------------------------------------------------------------------------------------------------------


SIGNALLED = """
import signal, sys
import kvtwin, sim.run.traffic
from traces.request import Request
number, ignored, *words = sys.argv[1:]
def requests_of(setup):
    for i in range(20):
        if i == 12:
            signal.raise_signal(int(number))
        yield Request(i, i * 10.0, 20, 3)
sim.run.traffic.requests_of = requests_of
# A shell in the background hands an ignored SIGINT down; else the process must have the usual handler.
signal.signal(signal.SIGINT, signal.SIG_IGN if ignored == "ignored" else signal.default_int_handler)
sys.exit(kvtwin.main(words))
"""


@pytest.mark.parametrize(
    ("number", "status", "handler"),
    [(signal.SIGINT, 130, "usual"), (signal.SIGTERM, 143, "usual"), (signal.SIGTERM, 143, "ignored")],
)
def test_a_process_that_is_told_to_end_leaves_what_is_finished(tmp_path, number, status, handler):
    words = ["run", *SMALL, "--policy", "vllm-recompute", "--out", str(tmp_path), "--quiet"]
    command = [sys.executable, "-c", SIGNALLED, str(int(number)), handler, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (status, f"kvtwin: interrupted; what finished is in {tmp_path}\n")
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["complete"] is False
    assert result["completed"] == len(table_rows(tmp_path)) > 0


@pytest.fixture
def usual_interrupt():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Rows:
    """A table in memory that raises signals at its tenth row, in the midst of counting a request."""

    def __init__(self, signals):
        self.signals = signals
        self.rows = []

    def write(self, row):
        if len(self.rows) == 10:
            for _ in range(self.signals):
                signal.raise_signal(signal.SIGINT)
        self.rows.append(row)


def interrupted_run(signals, policy=VllmRecompute):
    scenario = Scenario(workload="fixed")
    table = Rows(signals)
    requests = [Request(i, i * 10.0, 20, 3) for i in range(30)]
    return execute(build_run(prepare(scenario, "p", policy()), requests, table=table)), table.rows


@pytest.mark.parametrize("policy", [VllmRecompute, VllmV1])
def test_an_interrupt_ends_the_run_between_two_events(usual_interrupt, policy):
    """Of an engine that schedules ahead, too."""
    run, rows = interrupted_run(1, policy)
    assert run.interrupted
    assert run.error is None
    assert run.log.requests is not None
    assert len(rows) == run.log.completed == len(run.log.requests) == len(run.log.queue_s) == 11
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_ends_it_at_once(usual_interrupt):
    run, rows = interrupted_run(signals=2)
    assert run.interrupted
    assert len(rows) == 10
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_ignored_interrupt_stays_ignored(usual_interrupt):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    run, rows = interrupted_run(signals=1)
    assert not run.interrupted
    assert len(rows) == 30
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.parametrize("finished", [0, 1])
def test_an_interrupt_between_two_runs_leaves_what_there_is(tmp_path, monkeypatch, capsys, finished):
    real, begun = run_files.record, []

    def record(setup, *args, **options):
        begun.append(setup.label)
        if len(begun) > finished:
            raise KeyboardInterrupt
        return real(setup, *args, **options)

    monkeypatch.setattr(run_files, "record", record)
    labels = ["vllm-recompute", "vllm-swap", "layerkv"]
    words = [word for label in labels for word in ("--policy", label)]
    assert kvtwin.main(["compare", *SMALL, *words, "--no-figures", "--out", str(tmp_path)]) == 130
    assert begun == labels[: finished + 1]
    printed = capsys.readouterr()
    if finished:
        assert json.loads((tmp_path / "comparison.json").read_text())["policies"] == labels[:1]
        assert "vllm-recompute" in printed.out and printed.err == ""
    else:
        assert not (tmp_path / "comparison.json").exists() and printed == ("", "kvtwin: interrupted\n")


def test_an_interrupted_comparison_stops_there(tmp_path, monkeypatch, usual_interrupt, capsys):
    def interrupting(setup):
        for i in range(20):
            if i == 12:
                signal.raise_signal(signal.SIGINT)
            yield Request(i, i * 10.0, 20, 3)

    monkeypatch.setattr("sim.run.traffic.requests_of", interrupting)
    words = ["--policy", "vllm-recompute", "--policy", "vllm-swap", "--out", str(tmp_path), "--quiet"]
    assert kvtwin.main(["compare", "--no-figures", *SMALL, *words]) == 130
    assert (tmp_path / "vllm-recompute" / "result.json").exists()
    assert not (tmp_path / "vllm-swap").exists()
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["execute", "bounds_of"])
def test_an_interrupt_beside_the_bounds_leaves_the_comparison(tmp_path, monkeypatch, usual_interrupt, capsys, where):
    """Half a run with infinite memory is no bound."""
    if where == "execute":

        def half(run):
            execute(run).interrupted = True
            return run

        monkeypatch.setattr("sim.run.simulate.execute", half)
    else:
        monkeypatch.setattr("sim.bounds.compared.bounds_of", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    words = ["--policy", "vllm-recompute", "--out", str(tmp_path), "--quiet", "--no-figures", "--lift-limits"]
    assert kvtwin.main(["compare", *SMALL, *words]) == 130
    assert "compared without bounds" in capsys.readouterr().err
    assert json.loads((tmp_path / "comparison.json").read_text())["policies"] == ["vllm-recompute"]


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ([], []),
        (["--goodput", "ttft:9000"], [False]),
        (["--goodput", "ttft:9000", "--no-bound"], []),
        (["--bound"], [True]),
        (["--goodput", "ttft:9000", "--bound"], [True]),
    ],
)  # fmt: skip
def test_the_bound_is_looked_for_once_where_an_slo_is_given_or_it_is_asked_for(tmp_path, monkeypatch, words, asked):
    found = []
    monkeypatch.setattr("sim.bounds.compared.best_bound", lambda _, asked=True: found.append(asked))
    assert kvtwin.main(["compare", *SMALL, "--policy", "vllm-v1", "--no-figures", "--out", str(tmp_path), *words]) == 0
    assert found == asked


def test_compare_gives_every_policy_the_same_host_memory_unless_told(tmp_path):
    def given(*words, other="layerkv"):
        both = ("--policy", "vllm-swap", "--policy", other)
        assert kvtwin.main(["compare", *SMALL, "--quiet", "--no-figures", *both, "--out", str(tmp_path), *words]) == 0
        metrics = json.loads((tmp_path / "comparison.json").read_text())["metrics"]
        return [round(found["host_memory_gib"]) for found in metrics.values()]

    assert given() == [256, 256]
    assert given("--swap-space", "4") == [4, 4]
    # Of virtual engines, which share a GPU, each has a half.
    assert given("--swap-space", "4", "--pipeline-parallel-size", "2", other="vllm-v1") == [4, 4]
    assert given("--gpu", "t4", "--model", "qwen3-0.6b") == [89, 89]  # half of that host


@pytest.mark.parametrize(("after_s", "is_shown"), [(-1.0, True), (1e9, False)])
def test_requests_pass_through_and_the_bar_comes_late(after_s, is_shown, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(progress, "SHOW_AFTER_S", after_s)
    rows = requests(*[(0.0, 10, 1)] * 300)
    assert list(progress.track(iter(rows), "vllm-swap", len(rows))) == rows
    assert ("vllm-swap: requests arrived" in capsys.readouterr().err) == is_shown


def test_a_bar_of_runs_counts_those_that_ended_and_failed(monkeypatch):
    """Three in two seconds, one of which failed; before any time has passed there is a rate, too."""
    now_s, bars = [5.0], []
    monkeypatch.setattr(progress, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(Progress, "start", lambda bar: bars.append(bar))
    with progress.runs_bar("sweep") as begin:
        told = begin(4)
        (bar,) = bars
        assert bar.console.stderr and bar.live.transient
        (task,) = bar.tasks
        assert (task.description, task.total, task.completed) == ("sweep", 4, 0)
        assert task.fields == {"rate": 0.0, "failed": 0}
        told(SimpleNamespace(error=None))
        assert task.fields["rate"] == pytest.approx(1e9)
        now_s[0] = 7.0
        told(SimpleNamespace(error="no such GPU"))
        told(SimpleNamespace(error=None))
        assert task.completed == 3 and task.fields == {"rate": 1.5, "failed": 1}
