"""Bad input ends in one line that names file, line, field, value and remedy."""

import errno
import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from traces.errors import TraceError
from traces.readers import CSV_FORMATS, open_trace

OWN = "arrival_s,prompt_tokens,output_tokens\n0.0,10,2\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n"
JSONL = '{"timestamp": 0, "input_length": 10, "output_length": 2}\n'
NAMED = "arrival_s,prompt_tokens,output_tokens,hash_ids,hash_block_tokens,output_hash_ids,priority\n"
OWN_SLOS = "arrival_s,prompt_tokens,output_tokens,slos\n"
IMAGES = "arrival_s,prompt_tokens,output_tokens,images\n"
CALLS = "arrival_s,prompt_tokens,output_tokens,tool_calls,hash_ids,hash_block_tokens,output_hash_ids\n"


def then(more, output=2):
    """A right line of JSON, and one of 9 prompt tokens with these fields."""
    return JSONL + f'{{"timestamp": 1, "input_length": 9, "output_length": {output}, {more}}}\n'


BAD_ROWS = [
    # text, line, then what the message must hold: field, value, remedy
    (OWN + '1.0,"' + "9" * 200_000 + '",2\n', 3, ["row", "not CSV", "field limit"]),
    (JSONL + JSONL.replace(": 0", ": 1" + "0" * 400), 2, ["timestamp 10"]),
    (OWN + "1," + "x" * 80 + ",2\n", 3, [f"prompt_tokens '{'x' * 55}...' is not a number"]),
    (JSONL + "3\n", 2, ["line '3'", "not a JSON object", "one object a line"]),
    (JSONL + "[" * 100_000 + "\n", 2, ["not JSON"]),
    ("[" + '{"a":' * 100_000, 1, ["element", "nested too deeply"]),
    ('[{"conversations": 3}]', 1, ["conversations 3", "not a list of turns"]),
    # All rows are as long as one another, and longer than the header.
    (OWN.replace("2\n", "2,7\n"), 2, ["4 fields where the header has 3"]),
    # Two ragged rows whose fields add up to two whole ones must not be read as such.
    (OWN + "1,2\n3,4,5,6\n", 3, ["2 fields where the header has 3"]),
    (AZURE + "2023-11-16 18:15:40.0,1,1\n", 3, ["TIMESTAMP", "18:15:40.0", "earlier", "--sort"]),
    ("[\n1]", 2, ["element 1", "not a conversation"]),
    (JSONL + '{"timestamp": 1, "input_length": 10}\n', 2, ["'output_length'", "timestamp,input_length", "add"]),
    (JSONL + '{"timestamp": 1, "input_length": true, "output_length": 2}\n', 2, ["input_length True", "not a number"]),
    (then('"hash_ids": "x"'), 2, ["hash_ids", "'x'", "not a list"]),
    # The row's own block size overrules the flag, which is therefore no remedy.
    (NAMED + "0.0,33,2,1 2,16,,\n1.0,33,2,1,16,,\n", 3, ["hash_ids (1,)", "1 ids where 33 tokens make 3 blocks of 16",
                                                       "correct hash_block_tokens or the row"]),
    (NAMED + "0.0,33,40,1 2 3,16,4 5 6,0\n", 2, ["output_hash_ids (4, 5, 6)", "correct hash_block_tokens",
                                                 "3 ids where 33 + 40 tokens add 2 blocks of 16"]),
    (then('"hash_ids": [1], "output_hash_ids": [2]'), 2, ["output_hash_ids (2,)", "9 + 2 tokens add 0 blocks of 512",
                                                          "--hash-block-tokens"]),
    (OWN_SLOS + "0.0,33,40,ttft:0.5s\n", 2, ["slos", "'ttft:0.5s'", "NAME:MILLISECONDS", "ttft:500 tpot:50"]),
    (OWN_SLOS + "0.0,33,40,tpot:5 tpot:6\n", 2, ["slos", "tpot is given twice"]),
    (then('"slos": 500'), 2, ["slos 500", "not text"]),
    (OWN_SLOS.replace("slos", "acceptance_rate") + "0.0,33,40,70\n", 2, ["acceptance_rate '70'", "0 and 1", "as 0.7"]),
    (then('"acceptance_rate": true'), 2, ["acceptance_rate True", "not a number"]),
    (then('"lora": ["sql"]'), 2, ["lora ['sql']", "not the name of an adapter", "sql-7b"]),
    (then('"priority": true'), 2, ["priority True", "not a number"]),
    (CALLS + "0,33,40,1:2,,,\n", 2, ["tool_calls '1:2'", "not a list of tool calls", "40:1.5:32;90:0.3:8"]),
    (CALLS + "0,33,40,1_0:2:3,,,\n", 2, ["tool_calls '1_0:2:3'", "not a list of tool calls"]),
    (CALLS + "0,33,40,9:1:1;9:1:1,,,\n", 2, ["tool_calls", "is not in order"]),
    (CALLS + "0,33,40,40:1:1,,,\n", 2, ["tool_calls '40:1:1'", "beyond the request's 40 output tokens"]),
    (CALLS + "0,33,40,9:inf:1,,,\n", 2, ["tool_calls '9:inf:1'", "negative"]),
    (CALLS + "0,33,40,9:1:-1,,,\n", 2, ["tool_calls '9:1:-1'", "negative"]),
    (CALLS + "0,33,40,9:1:1,1 2 3,16,4 5\n", 2, ["tool_calls", "beside output_hash_ids", "leave one out"]),
    (then('"tool_calls": [[1, 2]]', 40), 2, ["tool_calls [[1, 2]]", "not a list of tool calls", "[[AFTER_TOKENS"]),
    (then('"tool_calls": [[1, true, 2]]', 40), 2, ["tool_calls", "not a list of tool calls"]),
    (then('"tool_calls": [[50, 1, 2]]', 40), 2, ["beyond the request's 40 output tokens", "[[AFTER_TOKENS"]),
    (IMAGES + "0,33,40,1:2\n", 2, ["images '1:2'", "not a list of images", "OFFSET:TOKENS:ID", "12:576:7;700:576:8"]),
    (IMAGES + "0,33,40,1:2:0.5\n", 2, ["images '1:2:0.5'", "not a list of images"]),
    (IMAGES + "0,33,40,0:9:1;8:2:1\n", 2, ["images '0:9:1;8:2:1'", "out of order"]),
    (IMAGES + "0,33,40,0:0:1\n", 2, ["images '0:0:1'", "without tokens"]),
    (IMAGES + "0,33,40,-1:3:1\n", 2, ["images '-1:3:1'", "places counted from 0"]),
    (IMAGES + "0,33,40,30:4:1\n", 2, ["images '30:4:1'", "beyond the prompt's 33"]),
    (then('"images": [[1, 2]]'), 2, ["images [[1, 2]]", "not a list of images", "[[OFFSET, TOKENS, ID]"]),
    (then('"images": [[1, 2, "cat"]]'), 2, ["images", "not a list of images"]),
    (then('"images": [[5, 5, 1]]'), 2, ["images [[5, 5, 1]]", "beyond the prompt's 9"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "line", "parts"), BAD_ROWS)
def test_a_bad_row_is_named(tmp_path, text, line, parts):
    path = tmp_path / "bad.trace"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        list(open_trace(path))
    message = str(caught.value)
    assert "\n" not in message
    assert f"{path}, line {line}: " in message
    for part in parts:
        assert part in message
    assert ";" in message  # what to do stands behind the semicolon


COLUMNS = "arrival_s,prompt_tokens,output_tokens"
SELF = "symbolic link"
NO_TRACES = {
    # What is in the file, options, and what is told after its name.
    "no column known": ("a,b,c", {}, f"line 1: .*no known format.*write the columns {COLUMNS}"),
    "columns that lack": ("arrival_s,zzz", {}, "line 1: .*nearest: kvtwin.*add prompt_tokens,output_tokens"),
    # One that is like a column that lacks; one that is needed itself is left alone.
    "a like column": ("arrival_s,zzz,output_token", {}, "rename column 'output_token' to 'output_tokens'"),
    "an optional one": (f"{COLUMNS},sesion_id", {}, "'sesion_id'.*did you mean 'session_id'"),
    "an object of nothing known": ('{"text": 1}', {}, "line 1: .*no known format.*timestamp"),
    "and needed": (
        "arrival_s,output_tokens\n1,2", {"format": "kvtwin"},
        "no column 'prompt_tokens'; the header needs arrival_s,prompt_tokens,output_",
    ),
    "a format that is none": (OWN, {"format": "azur"}, r"format 'azur' is unknown; did you mean 'azure'\?"),
    "far on in a line": (
        OWN.encode() + "é".encode() * 99_999 + b"\xff\n", {}, "line 3: byte 0xff at column 199999 is not UTF-8"
    ),
    "not there": (None, {}, "no such file; check the path"),
    "a circle of links": (SELF, {}, rf"cannot be read \({os.strerror(errno.ELOOP)}\); check the path and its rights"),
    "before 0 when sorted": (OWN + "-1.5,5,2\n", {"sort": True}, r"times start at -1\.5 s, before 0; shift the trace"),
}  # fmt: skip


@pytest.mark.parametrize("case", NO_TRACES)
def test_a_file_that_is_no_trace_is_named(tmp_path, case):
    content, options, told = NO_TRACES[case]
    path = tmp_path / "trace"
    if content == SELF:
        path.symlink_to(path)
    elif content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode() + b"\n")
    with pytest.raises(TraceError, match=told) as caught:
        list(open_trace(path, **options))
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value) or options.get("format") == "azur"


def test_a_folder_is_no_trace_and_a_column_that_is_not_read_may_stand_twice(tmp_path):
    with pytest.raises(TraceError, match="is a directory"):
        open_trace(tmp_path)
    (tmp_path / "t.csv").write_text(f"{COLUMNS},note,note\n0,5,6,a,b\n")
    assert len(list(open_trace(tmp_path / "t.csv"))) == 1


@pytest.mark.parametrize("quote", ["", '"'])
def test_a_billion_tokens_are_the_most(tmp_path, quote):
    path = tmp_path / "t.csv"
    for tokens, is_right in ((10**9, True), (10**9 + 1, False)):
        path.write_text(OWN + f"1.0,{quote}{tokens}{quote},{tokens}\n")
        found = outcome(path)
        assert (found[-1][2:4] == (tokens, tokens)) if is_right else f"{tokens}" in found


@pytest.mark.parametrize(
    ("begin", "rows"), [("0,5,", 3), ("{", 0), ('{"timestamp": 0, "input_length": 1, "output_length": 2, "x": "', 3)]
)
def test_a_line_without_end_is_refused_and_not_held(tmp_path, monkeypatch, begin, rows):
    monkeypatch.setattr("traces.files.MOST_LINE_CHARS", 1 << 18)
    path = tmp_path / "long"
    row = OWN if begin.startswith("0") else '{"timestamp": 0, "input_length": 1, "output_length": 2}\n'
    with path.open("w") as file:
        file.write(row * (rows > 0))
        file.write(begin)
        # A hole in the file: 10 GB that cannot be read in this test's time.
        file.truncate(10**10)
    number = 1 + row.count("\n") * (rows > 0)
    with pytest.raises(TraceError, match=rf"long, line {number}: is longer than 262144 characters; is it a trace"):
        list(open_trace(path))


def test_an_element_without_end_is_refused_and_not_held(tmp_path, monkeypatch):
    monkeypatch.setattr("traces.text_reader.MOST_LINE_CHARS", 1 << 18)
    path = tmp_path / "long.json"
    with path.open("w") as file:
        file.write('[{"conversations": [{"value": "')
        file.truncate(10**10)
    with pytest.raises(TraceError, match=r"line 1: element '\{.*' is longer than 262144 characters; is it a trace"):
        list(open_trace(path))


def test_long_files_on_one_line_are_read(tmp_path, monkeypatch):
    for module in ("files", "text_reader"):
        monkeypatch.setattr(f"traces.{module}.MOST_LINE_CHARS", 1 << 18)
    turns = json.dumps({"conversations": [{"value": "why " * 20}, {"value": "so " * 20}]})
    (tmp_path / "sharegpt.json").write_text(f"[{', '.join([turns] * 9000)}]")
    assert len(list(open_trace(tmp_path / "sharegpt.json", tokenizer="bytes:4"))) == 9000
    many = 80_000
    served = {"completed": many, "request_throughput": 1.0, "input_lens": [5] * many, "output_lens": [2] * many}
    served |= {"ttfts": [0.1] * many, "itls": [[0.1]] * many, "start_times": [0.1] * many}
    (tmp_path / "bench.json").write_text(json.dumps(served))
    assert len(list(open_trace(tmp_path / "bench.json"))) == many


@pytest.mark.parametrize("name", ["/dev/zero", "pipe"])
def test_what_can_be_read_but_once_or_has_no_end_is_refused(tmp_path, name):
    path = tmp_path / name
    if name == "pipe":
        os.mkfifo(path)
    with pytest.raises(TraceError, match=rf"{name}: is a pipe or a device, .* write it to a file first"):
        open_trace(path)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"time_unit": "h"}, "time unit 'h' is unknown; give one of s, ms, us, ns"),
        ({"zero_tokens": "no"}, "zero_tokens 'no'"),
        ({"hash_block_tokens": 0}, "hash_block_tokens 0 is too small"),
        ({"tokenizer": "bytes:x"}, "bytes:4"),
        ({"tokenizer": "/no/such/tokenizer.json"}, "no such file"),
    ],
)
def test_bad_options(tmp_path, options, match):
    path = tmp_path / "t.csv"
    path.write_text(OWN)
    with pytest.raises(TraceError, match=match):
        open_trace(path, **options)


def outcome(path, **options):
    try:
        return list(open_trace(path, **options))
    except TraceError as error:
        return str(error)


HEADERS = ["", NAMED.strip(), "[", *(",".join(form.required) for form in CSV_FORMATS.values()), JSONL.strip()]
PIECES = ["1", "2.5", "-1", "nan", "2023-11-16 18:15:46.68", *',,,\n\n"{}[:x\r']
PIECES += ['{"conversations": [{"value": "a"}]}', '{"timestamp": 0, "input_length": 1, "output_length": 1}', "\ufeff"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
@given(st.sampled_from(HEADERS), st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=25))
def test_whatever_is_in_a_file_it_is_read_or_told_in_one_line(tmp_path, header, pieces):
    path = tmp_path / "any"
    path.write_text(header + "\n" + "".join(pieces), encoding="utf-8", errors="ignore")
    try:
        requests = list(open_trace(path, tokenizer=len, default_output_tokens=1, sharegpt_filter=False))
    except TraceError as error:
        assert "\n" not in str(error)
        assert str(path) in str(error)
    else:
        assert all(r.prompt_tokens >= 1 and r.output_tokens >= 1 and r.arrival_s >= 0 for r in requests)
        assert [r.request_id for r in requests] == list(range(len(requests)))
