"""What load generators, gateways and tracing keep of requests: small files made by hand after their documentation."""

import json

import pytest

from kvtwin import main
from traces.errors import TraceError
from traces.readers import detect, open_trace
from traces.served import read_served

START_NS = 1_759_813_207_500_000_000


def metric(value, unit):
    return {"value": value, "unit": unit}


def aiperf(start_ns, prompt, output, session, **changes):
    about = {"session_num": 0, "x_correlation_id": session, "turn_index": 0, "benchmark_phase": "profiling"}
    about |= {"request_start_ns": start_ns, "request_end_ns": start_ns, "was_cancelled": False, **changes}
    metrics = {
        "input_sequence_length": metric(prompt, "tokens"), "output_sequence_length": metric(output, "tokens"),
        "time_to_first_token": metric(250.0, "ms"), "request_latency": metric(1250.0, "ms"),
        "inter_chunk_latency": metric([500.0] * (output - 1), "ms"),
    }  # fmt: skip
    return {"metadata": about, "metrics": metrics, "error": None}


AIPERF = [
    aiperf(START_NS + 2_000_000_001, 550, 3, "b"),
    aiperf(START_NS, 20, 3, "a"),
    aiperf(START_NS - 9, 20, 3, "w", benchmark_phase="warmup"),
    aiperf(START_NS + 1, 20, 3, "c") | {"metrics": {"error_isl": metric(20, "tokens")}, "error": {"code": 499}},
    aiperf(START_NS + 500_000_000, 30, 3, "a", turn_index=1),
]


def guidellm(start, prompt, output, names=("request_start_time", "time_to_first_token_ms")):
    return {names[0]: start, "prompt_tokens": prompt, "output_tokens": output, names[1]: 250.0, "request_latency": 1.25}


OLD = ("start_time", "time_to_first_token_ms")
GUIDELLM = {
    "metadata": {"version": 1}, "args": {"rate": [2.0]},
    "benchmarks": [{"requests": {
        "successful": [guidellm(1759813209.5, 550, 3), guidellm(1759813207.5, 20, 3, OLD)],
        "errored": [{"request_start_time": 1759813207.6}], "incomplete": [],
    }}],
}  # fmt: skip


def chunk(text=None, usage=None):
    choices = [] if text is None else [{"index": 0, "delta": {"content": text}}]
    return {"response": "data: " + json.dumps({"choices": choices, "usage": usage}) + "\n\n"}


GENAI_PERF = {
    "service_kind": "openai", "endpoint": "v1/chat/completions",
    "experiments": [{"experiment": {"mode": "request_rate", "value": 2.0}, "requests": [
        {
            "timestamp": START_NS, "request_inputs": {"payload": json.dumps({"messages": [{"content": "12345678"}]})},
            "response_timestamps": [START_NS + n * 250_000_000 for n in (0, 1, 3, 5, 6)],
            "response_outputs": [chunk(""), chunk("a"), chunk("b"), chunk("c"), {"response": "data: [DONE]"}],
        },
        {
            "timestamp": START_NS + 2_000_000_000, "request_inputs": {"payload": "{}"},
            "response_timestamps": [START_NS + 2_250_000_000, START_NS + 3_250_000_000, START_NS + 3_250_000_001],
            "response_outputs": [chunk("ab"), chunk("c"), chunk(usage={"prompt_tokens": 550, "completion_tokens": 3})],
        },
        {"timestamp": START_NS + 5, "response_timestamps": [], "response_outputs": []},
    ]}],
}  # fmt: skip


def span(start_ns, own, parent="", status=0, **values):
    attributes = [
        {"key": f"gen_ai.{name.replace('__', '.')}", "value": {"intValue": str(value)} if isinstance(value, int) else
         {"doubleValue": value} if isinstance(value, float) else {"stringValue": value}}
        for name, value in values.items()
    ]  # fmt: skip
    about = {"traceId": "t", "spanId": own, "parentSpanId": parent, "status": {"code": status}}
    return about | {
        "startTimeUnixNano": str(start_ns), "endTimeUnixNano": str(start_ns + 1_250_000_000), "attributes": attributes,
    }  # fmt: skip


USAGE = {"usage__input_tokens": 20, "usage__output_tokens": 3}
SPANS = [
    span(START_NS - 5, "agent", operation__name="invoke_agent", **USAGE),
    # The client's call, the HTTP request in it, and the server's own span of the same request (vLLM's names).
    span(START_NS, "call", "agent", operation__name="chat", conversation__id="a", response__time_to_first_chunk=0.25,
         **USAGE),
    span(START_NS + 1, "http", "call"),
    span(START_NS + 2, "server", "http", usage__prompt_tokens=20, usage__completion_tokens=3),
    span(START_NS + 3, "failed", status=2, **USAGE),
    span(START_NS + 2_000_000_000, "alone", usage__prompt_tokens=550, usage__completion_tokens=3,
         latency__time_to_first_token=0.25),
]  # fmt: skip
OTLP = [{"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]} for spans in (SPANS[3:], SPANS[:3])]

OPENAI = [
    {"id": "r2", "object": "response", "created_at": 1759813209, "usage": {"input_tokens": 550, "output_tokens": 3},
     "previous_response_id": "r1"},
    {"custom_id": "x", "response": {"status_code": 200, "body": {
        "id": "r1", "object": "chat.completion", "created": 1759813207,
        "usage": {"prompt_tokens": 20, "completion_tokens": 3}}}},
    {"id": "r3", "object": "response", "created_at": 1759813208, "status": "failed", "usage": None},
]  # fmt: skip

FILES = {
    "aiperf": AIPERF, "guidellm": GUIDELLM, "genai-perf": GENAI_PERF, "otlp": OTLP, "openai": OPENAI,
}  # fmt: skip


def write(tmp_path, content, indent=None):
    path = tmp_path / "sent"
    rows = content if isinstance(content, list) else [content]
    path.write_text("".join(json.dumps(row, indent=indent) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", FILES)
def test_each_format_is_told_and_read_in_order_of_arrival(tmp_path, name):
    path = write(tmp_path, FILES[name])
    assert detect(path) == name
    trace = open_trace(path, tokenizer="bytes:4" if name == "genai-perf" else None)
    rows = [(r.request_id, round(r.arrival_s, 6), r.prompt_tokens, r.output_tokens) for r in trace]
    prompt = 2 if name == "genai-perf" else 20
    between = [(1, 0.5, 30, 3)] if name == "aiperf" else []
    assert rows == [(0, 0.0, prompt, 3), *between, (len(rows) - 1, 2.0, 550, 3)]
    assert trace.skipped == (2 if name == "aiperf" else 1)
    assert open_trace(path, format=name, tokenizer="bytes:4").format == name


def test_sessions_are_kept(tmp_path):
    """AIPerf's correlation ids, the conversations of spans, and responses that name the one before."""
    sessions = {
        name: [r.session_id for r in open_trace(write(tmp_path, FILES[name]))] for name in ("aiperf", "otlp", "openai")
    }
    assert sessions == {"aiperf": ["a", "a", "b"], "otlp": ["a", ""], "openai": ["r1", "r1"]}


def test_responses_chain_to_the_first_read(tmp_path):
    rows = [OPENAI[1], OPENAI[0], OPENAI[0] | {"id": "r9", "previous_response_id": "r2"}]
    assert {r.session_id for r in open_trace(write(tmp_path, rows))} == {"r1"}


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("name", ["guidellm", "genai-perf", "otlp"])
def test_whole_files_may_be_printed_over_many_lines(tmp_path, name, indent):
    assert detect(write(tmp_path, FILES[name], indent)) == name


@pytest.mark.parametrize("name", ["aiperf", "guidellm", "otlp"])
def test_a_run_with_both_times_is_a_servers_too(tmp_path, name):
    run = read_served(write(tmp_path, FILES[name]))
    assert set(run.ttft_s) == {0.25} and set(run.e2el_s) == {1.25}
    assert run.has_token_times == (name == "aiperf")


def test_chunks_are_tokens_where_genai_perf_has_no_usage(tmp_path):
    """The role and the end of the stream are none; tokens come with the chunks that have text."""
    changed = json.loads(json.dumps(GENAI_PERF))
    changed["experiments"][0]["requests"][0]["request_inputs"] = {}
    for chunk_of in changed["experiments"][0]["requests"][0]["response_outputs"][3:4]:
        chunk_of["response"] = chunk("c", {"prompt_tokens": 20, "completion_tokens": 3})["response"]
    run = read_served(write(tmp_path, changed))
    assert (run.ttft_s, run.e2el_s) == ([0.25, 0.25], [1.25, 1.25])
    assert run.gaps_s == [(0.5, 0.5), ()]


def test_a_run_without_a_time_is_no_server_s_and_units_are_the_files_own(tmp_path):
    row = aiperf(START_NS, 20, 3, "a")
    del row["metrics"]["time_to_first_token"]
    path = write(tmp_path, [row])
    with pytest.raises(TraceError, match=r"request 0 has no time of its first token: .* read the file as a trace"):
        read_served(path)
    with pytest.raises(TraceError, match="format aiperf says the units of its times; leave --time-unit out"):
        list(open_trace(path, time_unit="s"))


def test_an_unknown_file_is_told_all_formats(tmp_path):
    for text in ('{"text": 1}\n', "a,b,c\n1,2,3\n"):
        path = tmp_path / "unknown"
        path.write_text(text)
        with pytest.raises(TraceError, match=r"known formats: kvtwin, .*aiperf, .*--trace-format names"):
            detect(path)


def test_a_result_without_times_takes_another_rate(tmp_path, capsys):
    """Of SGLang and of older vLLM; what is not needed may be missing as well. `inspect` and `run` alike."""
    result = {"completed": 3, "request_throughput": 1.0, "input_lens": [10, 20, 30], "output_lens": [3, 1, 2]}
    path = write(tmp_path, result)
    run = ["run", "--trace", str(path), "--trace-format", "vllm-bench", "--quiet", "--out", str(tmp_path / "out")]
    assert main([*run, "--request-rate", "2"]) == 0
    assert main([*run[:-1], str(tmp_path / "closed"), "--max-concurrency", "2"]) == 0
    capsys.readouterr()
    assert main([*run[:-1], str(tmp_path / "none")]) == 2
    assert "field start_times is missing" in (error := capsys.readouterr().err) and "--request-rate" in error
    assert main(["trace", "inspect", str(path), "--trace-format", "vllm-bench"]) == 0
    convert = ["trace", "convert", str(path), "-o", str(tmp_path / "out.csv")]
    assert main([*convert, "--request-rate", "2"]) == 0
    assert main(convert) == 2
