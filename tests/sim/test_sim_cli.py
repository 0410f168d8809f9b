"""`kvtwin run` and `kvtwin compare`: what they write and print, how they start, and what an interrupt leaves."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kvtwin
from sim import run_files
from sim.files import folder_name
from sim.prepare import prepare
from sim.scenario import Scenario
from sim.simulate import build_run, execute
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
    assert printed.err == ""
    assert names(tmp_path / "out" / "figures") == FIGURES
    for name in FIGURES:
        assert (tmp_path / "out" / "figures" / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "looked_at", "shown"), [((), True, True), (("--quiet",), True, False), ((), False, False)]
)
def test_a_bar_of_requests_is_shown_to_who_looks(tmp_path, monkeypatch, words, looked_at, shown):
    bars = []

    def track(requests, label, total):
        bars.append((label, total))
        return requests

    monkeypatch.setattr("sim.progress.track", track)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: looked_at)
    assert kvtwin.main(["run", *SMALL, "--policy", "vllm-swap", "--out", str(tmp_path), *words]) == 0
    assert bars == [("vllm-swap", 5)] * shown and len(table_rows(tmp_path)) == 5


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
    assert kvtwin.main(["compare", *words, "--policy", "layerkv", "--out", str(tmp_path / "both")]) == 0
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


@pytest.mark.parametrize(
    ("body", "needed"),
    [
        ("import kvtwin", set()),
        ("import kvtwin\ntry: kvtwin.main(['run', '--help'])\nexcept SystemExit: pass", set()),
        (
            "import kvtwin\nassert kvtwin.main(['run', *{words}, '--quiet', '--timeline']) == 0",
            {"numpy", "pyarrow", "simpy"},
        ),
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(tmp_path, body, needed):
    words = [*SMALL, "--policy", "layerkv", "--out", str(tmp_path / "out")]
    code = body.replace("{words}", repr(words)) + SHOW
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    modules = set(done.stderr.split())
    assert "kvtwin" in modules
    assert modules & HEAVY == needed


RUN = ("run", *SMALL, "--policy", "vllm-swap", "--out", "out")
PRINTING = (RUN, ("trace", "list"), ("trace", "list", "--json"), ("profile", "list"), ("profile", "show", "a100-80g"))


def prints_to(place, command, folder):
    """A process of a command whose standard output is `place`."""
    words = [sys.executable, "-m", "kvtwin", *command]
    path = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        words, stdout=place, stderr=subprocess.PIPE, text=True, timeout=60, check=False, cwd=folder, env=path
    )


@pytest.mark.parametrize("command", PRINTING, ids=" ".join)
def test_output_that_nobody_reads_is_no_traceback(tmp_path, command):
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


@pytest.mark.parametrize("name", ["argparse", "sim.cli", "sim.scenario", "simpy"])
def test_an_interrupt_while_modules_load_is_told_in_one_line(tmp_path, name):
    code = INTERRUPTING.format(name=name, out=str(tmp_path))
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "kvtwin: interrupted\n")


# -- interrupts ------------------------------------------------------------------------------------------------------


def interrupted_process(command, number, begun, *, usual=True, folder):
    """Send a signal to `kvtwin` some time after it began to write `begun`; its status and errors."""
    # A shell in the background hands an ignored SIGINT down; else the process must have the usual one.
    handler = signal.SIG_DFL if usual else signal.SIG_IGN
    process = subprocess.Popen(
        [sys.executable, "-m", "kvtwin", *command, "--out", str(folder), "--quiet"],
        stderr=subprocess.PIPE, text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, handler),
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not list(folder.glob(begun)) and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.8)
        assert process.poll() is None
        process.send_signal(number)
        sent = time.monotonic()
        _, errors = process.communicate(timeout=20)
        assert time.monotonic() - sent < 10
    finally:
        process.kill()
    return process.returncode, errors


LONG = ["--workload", "fixed", "--num-prompts", "5000000", "--input-len", "20", "--output-len", "3"]
LONG += ["--request-rate", "50"]


@pytest.mark.parametrize("usual", [True, False])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_process_leaves_what_is_finished(tmp_path, number, status, usual):
    if number == signal.SIGINT and not usual:
        pytest.skip("an ignored SIGINT stays ignored")
    command = ["run", *LONG, "--policy", "vllm-recompute"]
    found, errors = interrupted_process(command, number, "requests.*", usual=usual, folder=tmp_path)
    assert errors == f"kvtwin: interrupted; what finished is in {tmp_path}\n"
    assert found == status
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["complete"] is False
    assert result["completed"] == len(table_rows(tmp_path)) > 0


def test_a_comparison_that_is_ended_compares_what_it_has(tmp_path):
    command = ["compare", *LONG, "--policy", "vllm-recompute", "--policy", "vllm-swap"]
    status, _ = interrupted_process(command, signal.SIGTERM, "vllm-recompute/requests.*", folder=tmp_path)
    assert status == 143
    assert "vllm-recompute" in (tmp_path / "comparison.md").read_text()
    assert json.loads((tmp_path / "vllm-recompute" / "result.json").read_text())["completed"] > 0


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


def test_a_run_left_alone_is_not_interrupted(usual_interrupt):
    run, rows = interrupted_run(signals=0)
    assert not run.interrupted
    assert len(rows) == 30
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

    monkeypatch.setattr("sim.traffic.requests_of", interrupting)
    words = ["--policy", "vllm-recompute", "--policy", "vllm-swap", "--out", str(tmp_path), "--quiet"]
    assert kvtwin.main(["compare", *SMALL, *words]) == 130
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

        monkeypatch.setattr("sim.simulate.execute", half)
    else:
        monkeypatch.setattr("sim.bounds.compared.bounds_of", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    words = ["--policy", "vllm-recompute", "--out", str(tmp_path), "--quiet", "--bounds"]
    assert kvtwin.main(["compare", *SMALL, *words]) == 130
    assert "compared without bounds" in capsys.readouterr().err
    assert json.loads((tmp_path / "comparison.json").read_text())["policies"] == ["vllm-recompute"]


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ([], []),
        (["--goodput", "ttft:9000"], [(None, False)]),
        (["--bounds"], [(None, True)]),
        (["--bound"], [(True, False)]),
    ],
)  # fmt: skip
def test_bounds_are_looked_for_where_an_slo_is_given_or_they_are_asked_for(tmp_path, monkeypatch, words, asked):
    found = []
    monkeypatch.setattr("sim.bounds.compared.bounds_of", lambda *_, bound, lifted: found.append((bound, lifted)))
    assert kvtwin.main(["compare", *SMALL, "--policy", "vllm-v1", "--no-figures", "--out", str(tmp_path), *words]) == 0
    assert found == asked


def test_where_a_policy_failed_no_bounds_are_looked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("sim.bounds.compared.bounds_of", lambda *_, **__: pytest.fail("bounds of a part"))
    monkeypatch.setattr("sim.run_files.exit_status", lambda run: 1)
    words = ["--policy", "vllm-v1", "--no-figures", "--goodput", "ttft:9000", "--bounds", "--out", str(tmp_path)]
    assert kvtwin.main(["compare", *SMALL, *words]) == 1


def test_compare_gives_every_policy_the_same_host_memory_unless_told(tmp_path):
    def given(*words):
        both = ("--policy", "vllm-swap", "--policy", "layerkv")
        assert kvtwin.main(["compare", *SMALL, "--quiet", *both, "--out", str(tmp_path), *words]) == 0
        metrics = json.loads((tmp_path / "comparison.json").read_text())["metrics"]
        return [round(found["host_memory_gib"]) for found in metrics.values()]

    assert given() == [256, 256]
    assert given("--swap-space", "4") == [4, 4]
    assert given("--gpu", "t4", "--model", "qwen3-0.6b") == [89, 89]  # half of that host
