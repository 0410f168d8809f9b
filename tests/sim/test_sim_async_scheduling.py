"""`--async-scheduling`: one engine, and several."""

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
    "more",
    [
        ["--replicas", "2"],
        ["--policy", "vllm-v1:stage=hand-over", "--prefill-replicas", "1", "--decode-replicas", "1"],
    ],
)
def test_several_engines_hide_their_host_time_too(tmp_path, more):
    tpot_ms = {}
    more = [*more, "--link-gbps", "100"] if "--prefill-replicas" in more else more
    for flag in ("--async-scheduling", "--no-async-scheduling"):
        words = [*BASE, *more, flag, "--request-rate", "20", "--out", str(tmp_path / flag)]
        assert main(words) == 0
        result = json.loads((tmp_path / flag / "result.json").read_text())
        assert result["completed"] == 20
        tpot_ms[flag] = result["mean_tpot_ms"]
    assert tpot_ms["--async-scheduling"] < tpot_ms["--no-async-scheduling"]


def test_host_time_that_is_not_hidden_is_refused(tmp_path, capsys):
    words = [*BASE, "--async-scheduling", "--engine-profile", "vllm-v1", "--out", str(tmp_path / "out")]
    assert main(words) == 2
    assert "--engine-profile vllm-v1: its host time is added to each iteration" in capsys.readouterr().err
