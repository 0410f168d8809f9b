"""`--async-scheduling`: one engine, and nothing else so far."""

import json

import pytest

from kvtwin import main

BASE = ["run", "--workload", "fixed", "--num-prompts", "20", "--input-len", "40", "--output-len", "30", "--quiet"]


def test_the_next_step_is_scheduled_without_the_last_tokens(tmp_path):
    """The price of an iteration is the same; who ends keeps its place for one iteration more."""
    runs = {}
    for flag in ("--async-scheduling", "--no-async-scheduling"):
        assert main([*BASE, flag, "--request-rate", "20", "--out", str(tmp_path / flag)]) == 0
        runs[flag] = json.loads((tmp_path / flag / "result.json").read_text())
        assert runs[flag]["completed"] == 20
    assert runs["--async-scheduling"]["scenario"]["policy_options"]["async_scheduling"] is True
    assert runs["--async-scheduling"]["latencies"] != runs["--no-async-scheduling"]["latencies"]


@pytest.mark.parametrize(
    "more", [["--replicas", "2"], ["--prefill-replicas", "1", "--decode-replicas", "1", "--link-gbps", "100"]]
)
def test_what_it_does_not_go_with_is_refused(tmp_path, capsys, more):
    assert main([*BASE, "--async-scheduling", *more, "--out", str(tmp_path / "out")]) == 2
    assert "--async-scheduling: goes with one engine" in capsys.readouterr().err


def test_host_time_that_is_not_hidden_is_refused(tmp_path, capsys):
    words = [*BASE, "--async-scheduling", "--engine-profile", "vllm-v1", "--out", str(tmp_path / "out")]
    assert main(words) == 2
    assert "--engine-profile vllm-v1: its host time is added to each iteration" in capsys.readouterr().err
