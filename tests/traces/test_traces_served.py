"""Results of benchmarks and tables of a server's requests: what they say of each request, and how bad ones are told."""

import json
from pathlib import Path

import pytest

from traces.errors import TraceError
from traces.readers import detect, open_trace
from traces.request import Request
from traces.served import ServedRun, read_served

MEASURED = Path(__file__).resolve().parents[3] / "shared" / "measured" / "vllm019-rtx4090"
needs_measured = pytest.mark.skipif(not MEASURED.exists(), reason="needs a measured run in ../shared (not shipped)")

# As `vllm bench serve --save-result --save-detailed` writes them: sent in this order, the third one failed.
RESULT = {
    "date": "20260101-120000",
    "backend": "vllm",
    "num_prompts": 4,
    "request_rate": "inf",
    "duration": 3.0,
    "completed": 3,
    "failed": 1,
    "request_throughput": 1.0,
    "input_lens": [10, 20, 30, 40],
    "output_lens": [3, 1, 0, 2],
    "ttfts": [0.25, 0.5, 0.0, 0.125],
    "itls": [[0.0625, 0.125], [], [], [0.5]],
    "start_times": [100.5, 100.0, 101.0, 102.0],
    "generated_texts": ["a b c", "d", "", "e f"],
    "errors": ["", "", "Internal Server Error", ""],
    "mean_ttft_ms": 1.0,
}


def write(folder, data, name="result.json", **how):
    path = folder / name
    path.write_text(data if isinstance(data, str) else json.dumps(data, **how))
    return path


def without(*names):
    return {name: value for name, value in RESULT.items() if name not in names}


def test_a_result_holds_what_the_client_measured_of_each_request_in_order_of_arrival(tmp_path):
    run = read_served(write(tmp_path, RESULT))
    assert [request[:4] for request in run.requests] == [(0, 0.0, 20, 1), (1, 0.5, 10, 3), (2, 2.0, 40, 2)]
    assert (run.ttft_s, run.e2el_s) == ([0.5, 0.25, 0.125], [0.5, 0.4375, 0.625])
    assert run.tpot_s == [None, 0.09375, 0.5]
    assert (run.gaps_s, run.left_out) == ([(), (0.0625, 0.125), (0.5,)], 1)
    assert run.has_token_times
    assert [run.token_times_s(i) for i in range(3)] == [[0.5], [0.75, 0.8125, 0.9375], [2.125, 2.625]]


@pytest.mark.parametrize("indent", [None, 2])
def test_a_result_is_a_trace_too(tmp_path, indent):
    path = write(tmp_path, RESULT, indent=indent)
    assert detect(path) == "vllm-bench"
    trace = open_trace(path)
    assert [request[:4] for request in trace] == [(0, 0.0, 20, 1), (1, 0.5, 10, 3), (2, 2.0, 40, 2)]
    assert trace.skipped == 1


def test_the_time_of_the_last_token_may_be_given(tmp_path):
    """`kvtwin run` writes it: gaps need not be there."""
    data = without("itls") | {"latencies": [0.75, 0.5, 0.0, 0.625]}
    run = read_served(write(tmp_path, data))
    assert (run.e2el_s, run.gaps_s) == ([0.5, 0.75, 0.625], [(), (), ()])
    assert read_served(write(tmp_path, data | {"itls": RESULT["itls"]})).e2el_s == run.e2el_s


def test_a_request_failed_that_says_why_or_has_no_token_or_no_time(tmp_path):
    """The third named an error; without the errors it is told by what it lacks."""
    data = without("errors")
    for more in ({}, {"ttfts": [0.25, 0.5, 0.25, 0.125]}, {"output_lens": [3, 1, 5, 2]}):
        assert read_served(write(tmp_path, data | more)).left_out == 1
    both = {"ttfts": [0.25, 0.5, 0.25, 0.125], "output_lens": [3, 1, 5, 2]}
    assert read_served(write(tmp_path, data | both)).left_out == 0
    assert read_served(write(tmp_path, RESULT | both)).left_out == 1


def test_a_gap_of_a_millisecond_is_that_of_a_token(tmp_path):
    """A chunk that names the role takes less."""
    data = RESULT | {"itls": [[0.001, 0.0625, 0.125], [], [], [0.5]]}
    assert read_served(write(tmp_path, data)).gaps_s[1] == ()
    data = RESULT | {"itls": [[0.0009, 0.0625, 0.125], [], [], [0.5]]}
    assert read_served(write(tmp_path, data)).gaps_s[1] == (0.0625, 0.125)


def test_what_a_result_lacks_may_come_from_the_trace_that_was_sent(tmp_path):
    trace = [
        Request(i, 10.0 + i, tokens, 9, hash_ids=(i,), hash_block_tokens=64)
        for i, tokens in enumerate((10, 20, 30, 40))
    ]
    run = read_served(write(tmp_path, without("start_times")), trace)
    assert [(r.arrival_s, r.output_tokens, r.hash_ids) for r in run.requests] == [
        (0, 3, (0,)),
        (1, 1, (1,)),
        (3, 2, (3,)),
    ]
    assert [r.arrival_s for r in read_served(write(tmp_path, RESULT), trace).requests] == [0.0, 0.5, 2.0]


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        (without("input_lens", "output_lens", "ttfts", "itls", "errors"), ["field input_lens", "--save-detailed"]),
        (without("start_times"), ["field start_times", "newer", "trace"]),
        (RESULT | {"output_lens": [3, 1]}, ["output_lens holds 2 values, input_lens 4"]),
        (RESULT | {"start_times": [100.5, 100.0, 101.0, float("inf")]}, ["request 3", "arrives at inf s"]),
        (RESULT | {"itls": [[0.5, -0.125], [], [], [0.5]]}, ["request 0", "first token 0.25 s and last token 0.625"]),
        (RESULT | {"output_lens": [0, 0, 0, 0]}, ["no request that did not fail"]),
        (json.dumps(RESULT) + "\n" + json.dumps(RESULT), ["--append-result", "SGLang"]),
        ("{", ["not the result of a benchmark"]),
    ],
)
def test_a_result_that_says_too_little_is_refused_by_name(tmp_path, data, parts):
    path = write(tmp_path, data)
    with pytest.raises(TraceError) as refused:
        read_served(path)
    assert [part for part in [str(path), *parts] if part not in str(refused.value)] == [], refused.value


@pytest.mark.parametrize(
    ("trace", "part"),
    [([Request(0, 0.0, 10, 3)], "holds 4 requests, the trace 1"), ([Request(0, 0.0, 11, 3)] * 4, "11 in the trace")],
)
def test_a_trace_that_was_not_the_one_sent_is_refused(tmp_path, trace, part):
    with pytest.raises(TraceError, match=part):
        read_served(write(tmp_path, RESULT), trace)


TABLES = (
    "arrival_s,prompt_tokens,output_tokens,first_token_s,last_token_s\n5,10,3,5.25,6.25\n4,20,1,4.5,4.5\n",
    "issue_s,prompt_len,output_len,ttft_ms,tpot_ms,latency_ms\n5,10,3,250,500,1250\n4,20,1,500,0,500\n",
    "arrival_s,prompt_tokens,output_tokens,ttft_s,e2el_s\n5,10,3,0.25,1.25\n4,20,1,0.5,0.5\n9,9,0,0,0\n",
)


@pytest.mark.parametrize("text", TABLES)
def test_a_table_holds_arrival_first_and_last_token(tmp_path, text):
    run = read_served(write(tmp_path, text, "table.csv"))
    assert [request[:4] for request in run.requests] == [(0, 0.0, 20, 1), (1, 1.0, 10, 3)]
    assert (run.ttft_s, run.e2el_s, run.has_token_times) == ([0.5, 0.25], [0.5, 1.25], False)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a,b\n1,2\n", ["first_token_s,ttft_s"]),
        (TABLES[0].replace("arrival_s,", "x,"), ["first_token_s", "arrival_s"]),
        (TABLES[0].replace("prompt_tokens", "x"), ["prompt_tokens", "trace"]),
        (TABLES[0].replace("5.25", "soon"), ["line 2", "first_token_s", "'soon'"]),
        (TABLES[2].replace("arrival_s", "run,arrival_s"), ["column run tells several runs apart"]),
        (TABLES[1].replace("250,", "2500,"), ["line 2", "first token 2.5"]),
    ],
)
def test_a_table_that_says_too_little_is_refused_by_name(tmp_path, text, parts):
    with pytest.raises(TraceError) as refused:
        read_served(write(tmp_path, text, "table.csv"))
    assert [part for part in parts if part not in str(refused.value)] == [], refused.value


@needs_measured
def test_a_measured_run_goes_with_its_trace():
    run = read_served(MEASURED / "measured.csv", list(open_trace(MEASURED / "trace.csv")))
    assert len(run.requests) == 300
    assert sum(run.ttft_s) / 300 == pytest.approx(65.5, abs=0.1)
    assert all(request.hash_ids for request in run.requests)


@pytest.mark.parametrize(("itls", "told"), [([[0.1], [0.1]], True), ([[0.1], []], False), ([[0.1], [], [0.1]], True)])
def test_more_than_half_of_the_answers_must_be_seen_token_by_token(itls, told):
    count = len(itls)
    requests = [Request(i, 0.0, 5, 2) for i in range(count)]
    assert ServedRun(Path(), requests, [0.5] * count, [0.7] * count, [*map(tuple, itls)], 0).has_token_times == told


def test_a_request_that_took_no_time_failed_and_one_of_a_single_token_did_not(tmp_path):
    rows = "arrival_s,prompt_tokens,output_tokens,ttft_s,e2el_s\n0,9,2,0,0\n1,9,1,1,1\n"
    run = read_served(write(tmp_path, rows, "t.csv"))
    assert (run.left_out, run.ttft_s, run.e2el_s) == (1, [1.0], [1.0])
