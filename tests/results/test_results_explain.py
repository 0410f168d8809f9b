"""Timelines that explain: iterations with their reasons, requests' phases; `kvtwin explain`, its causes add up."""

import gzip
import json
from itertools import pairwise

import numpy as np
import pytest
from small_results import finished

import kvtwin
from sim.options.scenario import Scenario
from sim.results import tails
from sim.results.timeline import ITERATIONS, Steps, merge_timelines, read_timeline, step_name, timeline_events, why
from sim.run.runs import Recording
from sim.systems import POLICIES

KEPT = Recording(timeline=True)
POOLS = {name for name, kind in POLICIES.items() if kind.composition["stage"] == "hand-over"}
BASE = {"workload": "sharegpt", "num_prompts": 40, "num_gpu_blocks_override": 120, "num_cpu_blocks_override": 600}
BASE |= {"max_model_len": 1024, "seed": 1, "request_rate": 20.0}


def options_for(policy, **changes):
    pools = {"prefill_replicas": 1, "decode_replicas": 1, "link_gbps": 100.0} if policy in POOLS else {}
    return Scenario(**(BASE | pools | changes))


@pytest.mark.parametrize(
    "policy", ["vllm-v1", "vllm-swap", "layerkv", "layerkv:decode=stream", "fastserve", "distserve", "adaptive"]
)
def test_every_iteration_is_a_slice_and_every_request_is_admitted_in_one(policy):
    run = finished(policy, KEPT, options_for(policy.partition(":")[0]))
    admitted = set()
    for parts, instance in zip(run.engines, run.instances, strict=True):
        steps = parts.journal.steps
        assert sum(step.iterations for step in steps) == instance.iterations
        assert all(one.end_s <= other.start_s + 1e-9 for one, other in pairwise(steps))
        admitted |= {i for step in steps for i in step.admitted}
        for step in steps:
            assert step_name(step)
            assert why(step).endswith("blocks free")
    ended = {row.request_id for row in run.log.requests if not row.error}
    assert ended <= admitted
    phases = {i: found for parts in run.engines for i, found in parts.journal.phases.items()}
    for row in run.log.requests:
        if row.error:
            continue
        begins = [begin_s for begin_s, _ in phases[row.request_id]]
        assert begins == sorted(begins)
        assert len(run.engines) > 1 or phases[row.request_id][0][1] == "prefill"


def test_arrows_start_in_slices_and_every_arrow_ends():
    events = timeline_events(finished("vllm-recompute", KEPT, options_for("vllm-recompute")))
    starts = {event["ts"] for event in events if event["ph"] == "X" and event["tid"] == ITERATIONS}
    arrows = [event for event in events if event["ph"] in "stf"]
    assert arrows
    assert {event["ts"] for event in arrows} <= starts
    for request_id in {event["id"] for event in arrows}:
        kinds = [event["ph"] for event in arrows if event["id"] == request_id]
        assert (kinds[0], kinds[-1], set(kinds[1:-1]) <= {"t"}) == ("s", "f", True)


def test_preempted_requests_have_a_span_while_they_are_away():
    run = finished("vllm-recompute", KEPT, options_for("vllm-recompute"))
    events = timeline_events(run)
    assert run.engines[0].scheduler.counters.preemptions > 0
    names = {event["name"] for event in events if event["ph"] == "b"}
    assert {"queue", "prefill", "decode", "preempted", "recompute"} <= names


def run_words(folder, *words, policy="vllm-recompute"):
    given = ["--workload", "sharegpt", "--num-prompts", "40", "--request-rate", "20", "--max-model-len", "1024"]
    given += ["--num-gpu-blocks-override", "120", "--num-cpu-blocks-override", "600", "--seed", "1", "--quiet"]
    assert kvtwin.main(["run", *given, "--policy", policy, "--out", str(folder), *words]) == 0


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("explain")
    run_words(folder, "--timeline")
    return folder


def explained(folder, request_id, capsys):
    assert kvtwin.main(["explain", str(folder), "--request", str(request_id)]) == 0
    return capsys.readouterr().out


def test_a_request_that_waited_for_memory_is_told_so(kept, capsys):
    result = json.loads((kept / "result.json").read_text())
    longest = max(range(40), key=result["queue_times"].__getitem__)
    text = explained(kept, longest, capsys)
    assert f"Request {longest} arrived at {result['start_times'][longest]:,.3f} s" in text
    assert "what kept the next in the queue from starting was KV memory" in text
    assert "It was admitted at " in text
    assert "requests waited before it" in text or "request waited before it" in text


def test_what_was_decided_as_a_request_came_kept_it_waiting_not_the_iteration_before(tmp_path, capsys):
    """Two at once, one seat: the iteration that begins as the second comes knows of it."""
    words = "run --workload fixed --request-rate inf --num-prompts 2 --input-len 100 --output-len 5 --max-num-seqs 1"
    assert kvtwin.main([*words.split(), "--timeline", "--quiet", "--out", str(tmp_path)]) == 0
    text = explained(tmp_path, 1, capsys)
    assert "what kept the next in the queue from starting was no seat left (max-num-seqs)" in text
    assert "when it came" not in text


def test_every_request_can_be_explained(kept, capsys):
    texts = [explained(kept, i, capsys) for i in range(40)]
    assert any("lost its KV and waited to be computed again" in text for text in texts)
    assert not any("None" in text or "nan" in text for text in texts)


def test_without_a_timeline_it_says_which_flag_keeps_one(tmp_path, capsys):
    run_words(tmp_path)
    text = explained(tmp_path, 0, capsys)
    assert "run it again with --timeline" in text
    assert "Its TTFT of" in text


def test_unknown_requests_and_a_folder_without_a_run_are_refused(kept, tmp_path, capsys):
    for folder, request, told in (
        (kept, 40, "ids are 0 to 39"),
        (kept, -1, "ids are 0 to 39"),
        (tmp_path, 0, "no resu"),
    ):
        assert kvtwin.main(["explain", str(folder), "--request", str(request)]) == 2
        assert told in capsys.readouterr().err
    with pytest.raises(SystemExit):
        kvtwin.main(["explain", str(kept)])
    assert "one of the arguments --request --slowest --beyond is required" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("result.json", lambda data: data[: len(data) // 2]),
        ("result.json", lambda data: data.replace(b'"completed":40', b'"completed":' + b"9" * 400)),
        ("result.json", lambda data: data.replace(b'"ttfts":[', b'"ttfts":[1.0,')),
        ("timeline.json.gz", lambda data: data[:-20]),
        ("timeline.json.gz", lambda data: gzip.compress(gzip.decompress(data).replace(b'"admitted"', b'"let in"'))),
    ],
)
def test_damaged_files_are_named(kept, tmp_path, capsys, name, damage):
    for file in ("result.json", "timeline.json.gz"):
        (tmp_path / file).write_bytes((kept / file).read_bytes())
    data = (kept / name).read_bytes()
    assert damage(data) != data
    (tmp_path / name).write_bytes(damage(data))
    for request in ("0", "39"):
        assert kvtwin.main(["explain", str(tmp_path), "--request", request]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"kvtwin: {tmp_path / name}: ") and error.count("\n") == 1


def test_timelines_open_together(kept, tmp_path):
    merge_timelines(tmp_path / "both.json.gz", (kept, kept))
    assert len(read_timeline(tmp_path / "both.json.gz")) == 2 * len(read_timeline(kept / "timeline.json.gz"))


def test_of_like_iterations_that_stand_as_one_a_wait_counts_one():
    """Ten of 10 ms in one slice. What comes 22 ms after its begin waits for the third, at its begin or end for none."""
    told = {"limit": "none", "decodes": 3, "iterations": 10}
    steps = Steps.of([{"ts": 1e6, "dur": 1e5, "args": told}])
    assert steps.looks_from_s(np.array([1.022, 1.0, 1.1])) == pytest.approx([1.03, 1.0, 1.1])


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
