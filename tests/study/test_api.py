"""`import kvtwin`: the same runs as the command line's, as tables, refused in the same words; its examples run."""

import argparse
import doctest
import errno
import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure
from small_results import flags

import kvtwin
import kvtwin.api
from kvtwin import Scenario, UserError, command_line
from sim.cost.profile import load_profile
from sim.options.policies import parse_policy
from sim.specs.hardware import load_hardware
from sim.systems.layerkv.preset import LayerKV

ROOT = Path(kvtwin.__file__).parents[1]
OPTIONS = {"workload": "sharegpt", "num_prompts": 60, "request_rate": 8.0, "gpu": "l20", "goodput": ("ttft:300",)}
CROWD, FLAGS = kvtwin.Scenario(**OPTIONS), flags(**OPTIONS)


def test_a_run_in_python_is_the_command_lines(tmp_path):
    status = kvtwin.main(["run", *FLAGS, "--policy", "layerkv", "--out", str(tmp_path), "--quiet", "--timeline"])
    saved, run = kvtwin.load_result(tmp_path), kvtwin.simulate(CROWD, "layerkv")
    assert status == 0
    assert run.result == saved.result
    pd.testing.assert_frame_equal(run.requests, saved.requests)
    pd.testing.assert_frame_equal(run.series, saved.series, rtol=1e-8, check_dtype=False)


def test_results_show_themselves_in_a_line_and_in_a_notebook_as_a_table():
    both = kvtwin.compare(CROWD, ["vllm-v1", "layerkv"])
    for shown in (both.runs[0], both.runs[0].result, both):
        assert "vllm-v1: 60 requests; TTFT mean" in repr(shown) and "SLOs met by" in repr(shown)
        assert len(repr(shown)) < 400 and "\n" not in repr(shown)
    assert "<th>layerkv</th>" in both._repr_html_() and "Mean TTFT (ms)" in both.runs[0]._repr_html_()
    assert both.sentences[0] == "All on the engine vllm-v1-async."


def test_the_tables_agree_with_the_result():
    run = kvtwin.simulate(CROWD, "vllm-recompute")
    assert len(run.requests) == run.result.num_prompts == 60
    assert run.requests["ttft_s"].mean() * 1e3 == pytest.approx(run.result.mean_ttft_ms)
    assert run.metrics["p99_tpot_ms"] == run.result.p99_tpot_ms
    assert run.series["time_s"].is_monotonic_increasing


def test_requests_are_in_the_order_of_the_trace_whoever_ends_first():
    burst = kvtwin.Scenario(workload="uniform", num_prompts=20, request_rate=float("inf"), gpu="l20")
    found = kvtwin.simulate(burst, "vllm-recompute").requests
    assert list(found["request_id"]) == list(range(20))
    # All came at once; the last to end is not the last of the trace.
    assert not (found["ttft_s"] + found["tpot_s"] * (found["output_tokens"] - 1)).is_monotonic_increasing


def test_several_engines_have_a_column_and_a_figure():
    two = kvtwin.simulate(kvtwin.Scenario(workload="sharegpt", num_prompts=40, request_rate=8.0, gpu="l20", replicas=2))
    assert set(two.requests["engine"]) == set(two.series["engine"]) == {0, 1}
    assert two.series["time_s"].is_monotonic_increasing
    assert isinstance(two.figure("engines"), Figure)


def test_a_comparison_has_metrics_by_policy_sentences_and_figures():
    both = kvtwin.compare(CROWD, ["vllm-recompute", "layerkv:slo-aware=false"])
    assert list(both.table.columns) == ["vllm-recompute", "layerkv:slo-aware=false"]
    ttft = both["layerkv:slo-aware=false"].result.mean_ttft_ms
    assert both.table.loc["Mean TTFT (ms)", "layerkv:slo-aware=false"] == ttft
    assert set(both.table.loc["Host KV memory (GiB/GPU)"]) == {256.0}
    assert len(both.sentences) == 2
    assert all(isinstance(both.figure(name), Figure) for name in ("ttft_tpot", "queueing", "memory", "lanes"))


def test_a_preset_is_labelled_as_its_text_would_be():
    policy = LayerKV(slo_aware=False)
    run = kvtwin.simulate(CROWD, policy)
    assert run.label == "layerkv:slo-aware=False"
    assert parse_policy(run.label, {})[1] == policy
    assert run.result.mean_ttft_ms == kvtwin.simulate(CROWD, "layerkv:slo-aware=false").result.mean_ttft_ms


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: kvtwin.simulate(kvtwin.Scenario()), "--trace FILE and --workload NAME"),
        (lambda: kvtwin.simulate(kvtwin.Scenario(workload="fixed", seed="x")), "'x' is not a whole number"),
        (lambda: kvtwin.compare(CROWD, []), "name one or more"),
        (lambda: kvtwin.compare(CROWD, ["layerkv", "layerkv"]), "each once"),
        (lambda: kvtwin.load_result("nowhere"), "nowhere/result.json: cannot be read"),
        (lambda: kvtwin.simulate(CROWD).figure("tftt"), "'tftt' is not one of ttft_tpot"),
        (lambda: kvtwin.compare(CROWD, ["vllm-v1"])["layerkv"], "there are: vllm-v1"),
    ],
)
def test_bad_input_is_one_line(act, words):
    with pytest.raises(kvtwin.UserError, match=None) as caught:
        act()
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_run_that_was_interrupted_is_none(monkeypatch):
    """Nor is one that ended in an error."""
    execute = kvtwin.api.execute
    for ends, error in (({"interrupted": True}, KeyboardInterrupt), ({"error": "a bad row"}, UserError)):

        def ended(build, ends=ends):
            run = execute(build)
            for name, value in ends.items():
                setattr(run, name, value)
            return run

        monkeypatch.setattr(kvtwin.api, "execute", ended)
        with pytest.raises(error, match=ends.get("error")):
            kvtwin.simulate(kvtwin.Scenario(workload="fixed", num_prompts=2), "vllm-v1")


def test_errors_of_profiles_are_those_recorded():
    found = kvtwin.profile_errors("a100-80g-imported", "h100-imported")
    assert list(found.columns) == ["a100-80g-imported", "h100-imported"]
    shipped = load_profile("h100-imported", load_hardware("h100")).residuals
    assert shipped and found["h100-imported"].dropna().to_dict() == shipped
    with pytest.raises(UserError, match="profiles: none is named"):
        kvtwin.profile_table()


def test_a_bad_trace_is_one_line(tmp_path):
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,10,5\n1,x,5\n")
    with pytest.raises(kvtwin.UserError, match="line 3"):
        kvtwin.simulate(kvtwin.Scenario(trace=str(tmp_path / "t.csv")))


def test_a_folder_without_its_table_is_told(tmp_path):
    kvtwin.main(["run", *FLAGS, "--out", str(tmp_path), "--quiet"])
    table = next(tmp_path.glob("requests.*"))
    table.write_bytes(b"\x00\x01")
    with pytest.raises(kvtwin.UserError, match="run it again"):
        kvtwin.load_result(tmp_path)
    table.unlink()
    with pytest.raises(kvtwin.UserError, match="run it again"):
        kvtwin.load_result(tmp_path)


def raising(error: BaseException, before: Exception | None = None) -> argparse.Namespace:
    """A command that ends in an error, and what it was handling then."""

    def run(arguments: argparse.Namespace) -> int:
        try:
            if before is not None:
                raise before
        except Exception:
            raise error  # noqa: B904 - as rich does
        raise error

    return argparse.Namespace(run=run)


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (UserError("two\n lines"), 2, "kvtwin: two\\n lines\n"),
        (
            OSError(errno.ENOSPC, "No space"),
            2,
            "kvtwin: standard output: [Errno 28] No space; make room, or name another\n",
        ),
        (OSError(errno.EDQUOT, "No more", "a"), 2, "kvtwin: [Errno 122] No more: 'a'; make room, or name another\n"),
        (OSError(errno.EACCES, "Denied"), 2, "kvtwin: [Errno 13] Denied\n"),
        (KeyboardInterrupt(), 130, "kvtwin: interrupted\n"),
    ],
)
def test_how_a_command_ends_is_told_in_a_line(capsys, error, status, told):
    assert command_line._run(raising(error)) == status
    assert capsys.readouterr().err == told


def test_a_reader_that_left_ends_a_command_quietly(monkeypatch, capsys):
    """rich makes an exit of it; another exit stays one."""
    monkeypatch.setattr(command_line, "_unread", lambda: 141)
    assert command_line._run(raising(BrokenPipeError())) == 141
    assert command_line._run(raising(SystemExit(1), before=BrokenPipeError())) == 141
    with pytest.raises(SystemExit) as end:
        command_line._run(raising(SystemExit(3)))
    assert (end.value.code, capsys.readouterr().err) == (3, "")


def test_the_examples_in_docstrings_run():
    found = doctest.testmod(kvtwin.api)
    assert found.attempted > 5 and not found.failed


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_the_example_programs_run(path, tmp_path):
    """The search with half of its requests, drawn twice."""
    code = path.read_text().replace('"num-prompts": 600', '"num-prompts": 300').replace('"seeds": 3', '"seeds": 2')
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert len(done.stdout.splitlines()) > 3


@pytest.mark.parametrize(
    ("use", "heavy"),
    [
        ("import kvtwin", {"pandas", "matplotlib", "numpy", "joblib"}),
        ("import kvtwin; kvtwin.simulate, kvtwin.sweep, kvtwin.regime_map, kvtwin.tune", {"matplotlib", "scipy"}),
    ],
)
def test_importing_the_package_imports_nothing_heavy(use, heavy):
    code = f"import sys; {use}; print(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("words", "told"), [(["--sed=3", "--zzz"], "--sed=3 --zzz; did you mean --seed?"), (["--out", "x", "y"], "y")]
)
def test_the_first_flag_that_is_unknown_has_its_nearest(capsys, words, told):
    with pytest.raises(SystemExit) as end:
        kvtwin.main(["run", *words])
    assert end.value.code == 2
    assert capsys.readouterr().err == f"kvtwin run: unrecognized arguments: {told} (see kvtwin run --help)\n"


SMALL = Scenario(workload="fixed", num_prompts=3, input_len=20, output_len=3, gpu="l20")
STUDY = {"workload": "fixed", "sweep": {"grid": {"seed": [1, 2]}}}


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda out: kvtwin.simulate(None), "scenario: None is not a kvtwin.Scenario"),
        (lambda out: kvtwin.simulate(SMALL, 3), "policy: 3 is not a policy's text"),
        (lambda out: kvtwin.simulate(SMALL, kvtwin.Policy), "policy: <class"),
        (lambda out: kvtwin.compare(SMALL, "layerkv"), "policies: 'layerkv' is not a list"),
        (lambda out: kvtwin.compare(SMALL, [None]), "policy: None is not"),
        (lambda out: kvtwin.compare({}, ["layerkv"]), "scenario: {} is not"),
        (lambda out: kvtwin.sweep(STUDY, out, jobs="a"), "jobs: 'a' is not a number of processes"),
        (lambda out: kvtwin.sweep(STUDY, out, jobs=True), "jobs: True is not"),
        (lambda out: kvtwin.sweep(STUDY, out, max_seconds=-1), "max_seconds: -1 is not greater than 0"),
        (lambda out: kvtwin.sweep(STUDY, out, address=3), "address: 3 is not"),
        (lambda out: kvtwin.sweep(STUDY, None), "out: None is not a path"),
        (lambda out: kvtwin.sweep(None, out), "study: None is not a study file"),
        (lambda out: kvtwin.sweep({1: 2}, out), "study: the key: 1 is not text"),
        (lambda out: kvtwin.sweep({"sweep": {"grid": {1: [2]}}}, out), "study: the key: 1 is not text"),
        (lambda out: kvtwin.tune(3, out), "study: 3 is not"),
        (lambda out: kvtwin.regime_map(STUDY, "a\0b"), r"out: 'a\x00b' names no file"),
        (lambda out: kvtwin.load_result(None), "folder: None is not a path"),
        (lambda out: kvtwin.profile_table("l20-derived", 3), "profiles: 3 is not"),
        (lambda out: kvtwin.profile_errors(None), "profiles: None is not"),
        (lambda out: kvtwin.simulate(Scenario(trace="a\0b")), r"--trace: 'a\x00b' is not text in quotes, without NUL"),
    ],
)
def test_a_wrong_type_is_told(tmp_path, call, told):
    with pytest.raises(UserError) as caught:
        call(tmp_path / "out")
    assert told in str(caught.value) and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_presets_whose_options_have_other_types_are_told():
    from sim.systems.layerkv.preset import LayerKV  # noqa: PLC0415

    for decode in (None, [], "a", 3.0):
        with pytest.raises(UserError, match=r"policy: layerkv decode: .* is not promote or stream"):
            kvtwin.simulate(SMALL, LayerKV(decode=decode))


def test_half_a_character_where_a_number_goes_is_told(tmp_path, capsys):
    """Python reads a lone surrogate out of JSON; as text it cannot be written."""
    rows = {"input_lens": ["\ud800"], "output_lens": [2], "start_times": [0.0], "ttfts": [0.1], "itls": [[0.1]]}
    (tmp_path / "b.json").write_text(json.dumps(rows))
    words = ["validate", "--against", str(tmp_path / "b.json"), "--gpu", "l20", "--out", str(tmp_path / "out")]
    assert kvtwin.main(words) == 2
    assert "b.json: is not the result of a benchmark: half a character" in capsys.readouterr().err
