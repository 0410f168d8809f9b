"""`kvtwin explain --slowest` and `--beyond`: causes add up to the latency, and planted ones are named."""

import json

import numpy as np
import pytest
from test_results_explain import run_words

import kvtwin
from sim.results import tails
from sim.results.timeline import read_timeline


def said(capsys, folder, *words, status=0):
    assert kvtwin.main(["explain", str(folder), *map(str, words)]) == status
    found = capsys.readouterr()
    return found.out if not status else found.err


@pytest.mark.parametrize("metric", ["ttft", "e2el"])
@pytest.mark.parametrize("policy", ["vllm-recompute", "vllm-v1", "vllm-swap", "layerkv"])
def test_causes_add_up_to_the_latency_of_every_request(tmp_path, policy, metric):
    run_words(tmp_path, "--timeline", "--no-figures", policy=policy)
    requests = tails._requests(tmp_path)
    causes = tails._causes(requests, read_timeline(tmp_path / "timeline.json.gz"), metric)
    whole = requests.ttft_s if metric == "ttft" else requests.e2el_s
    np.testing.assert_allclose(sum(causes.values()), whole, atol=1e-6)
    assert all(seconds.min() > -1e-6 for seconds in causes.values())


def test_one_long_request_is_named_by_those_that_waited_for_it(tmp_path, capsys):
    """Most of the memory is one request's for seconds: the ones behind it waited for memory, beside it."""
    path = tmp_path / "trace.csv"
    rows = [(0.1 * i, 20, 5) for i in range(30)] + [(3.0, 900, 120)] + [(3.1 + 0.01 * i, 150, 5) for i in range(10)]
    rows += [(20.0 + 0.1 * i, 20, 5) for i in range(30)]
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{a},{p},{o}\n" for a, p, o in rows))
    words = f"run --trace {path} --max-model-len 1040 --num-gpu-blocks-override 66 --policy vllm-recompute --quiet"
    words += f" --no-enable-chunked-prefill --timeline --no-figures --out {tmp_path / 'run'}"
    assert kvtwin.main(words.split()) == 0
    text = said(capsys, tmp_path / "run", "--slowest", 8)
    assert "The 8 of 71 requests with the longest TTFT" in text
    assert text.split("more\n")[1].startswith("KV memory")
    assert text.split("for how long:\n")[1].startswith("  request 30: 900 tokens of prompt")
    assert "Three quarters of them arrived within" in text
    assert said(capsys, tmp_path / "run", "--beyond", "p90").startswith("The 7 of 71")


def test_without_a_timeline_queues_alone_are_told(tmp_path, capsys):
    run_words(tmp_path, "--no-figures")
    text = said(capsys, tmp_path, "--beyond", "p80", "--by", "e2el")
    assert "in the queue" in text and "run it again with --timeline" in text and "KV memory" not in text
    completed = json.loads((tmp_path / "result.json").read_text())["completed"]
    for words, part in (
        (["--slowest", completed], f"--slowest: {completed} of {completed} completed requests; give 1 to"),
        (["--slowest", 0], "give 1 to"),
        (["--beyond", "most"], "--beyond: 'most' is no percentile"),
        (["--request", 1, "--by", "ttft"], "--by: goes with --slowest"),
    ):
        assert part in said(capsys, tmp_path, *words, status=2)
