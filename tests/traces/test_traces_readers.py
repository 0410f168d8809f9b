"""Every format, and the traps of each: what a file says is what the stream of requests says."""

import csv
import json
import sys
import tracemalloc
from itertools import islice
from pathlib import Path

import pytest

from traces.csv_reader import CsvReader
from traces.errors import TraceError
from traces.jsonl_reader import JsonlReader
from traces.readers import detect, open_trace
from traces.request import Request
from traces.summary import summarize

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"
AZURE, MOONCAKE = SHARED / "azure2023_conv.csv", SHARED / "mooncake_synthetic_trace.jsonl"
ORACLE = SHARED.parent / "oracle" / "v1"
needs_oracle = pytest.mark.skipif(not ORACLE.exists(), reason="needs vLLM v1's workloads in ../shared (not shipped)")
needs_azure = pytest.mark.skipif(not AZURE.exists(), reason="needs the Azure 2023 trace in ../shared (not shipped)")
needs_mooncake = pytest.mark.skipif(not MOONCAKE.exists(), reason="needs the Mooncake trace in ../shared (not shipped)")

AZURE_2023 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 23:59:58.6805900,374,44\r\n"
    "2023-11-16 23:59:59.9951691,396,109\r\n"
    "2023-11-17 00:00:00.0000000,879,55"
)


def write(folder, name, text):
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def rows(path, **options):
    return [request[1:4] for request in open_trace(path, **options)]


def test_azure_2023_keeps_seven_digits_across_midnight(tmp_path):
    path = write(tmp_path, "a.csv", AZURE_2023)
    assert rows(path) == [(0.0, 374, 44), (1.3145791, 396, 109), (1.31941, 879, 55)]
    assert open_trace(path).format == "azure"


def test_azure_2024_mixes_fractions_and_carries_a_zone(tmp_path):
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-12 00:00:00.003163+00:00,10,1\n"
        "2024-05-12 00:00:01+00:00,20,2\n"
        "2024-05-12T02:00:02.5+02:00,30,3\n"
        "2024-05-12 00:00:03.1Z,40,4\n\n\n"
    )
    expected = [(0.0, 10, 1), (0.996837, 20, 2), (2.496837, 30, 3), (3.096837, 40, 4)]
    assert rows(write(tmp_path, "a.csv", text)) == expected


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "kvtwin",
            "arrival_s,prompt_tokens,output_tokens,note\n1.5,10,2,x\n2.25,20,3,y\n",
            [(1.5, 10, 2), (2.25, 20, 3)],
        ),
        (
            "burstgpt",
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
            "5,ChatGPT,472,18,490,Conversation log\n45.5,GPT-4,1087,230,1317,API log\n",
            [(0.0, 472, 18), (40.5, 1087, 230)],
        ),
        (
            "azure",
            "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2024-10-15 00:00:00.1,2,300,40\n",
            [(0.0, 300, 40)],
        ),
        ("vidur", "arrived_at,num_prefill_tokens,num_decode_tokens\n3.0,7,8\n", [(3.0, 7, 8)]),
        (
            "vidur-lengths",
            "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n74,918,992,0.08\n5,6,11,0.8\n",
            [(0.0, 74, 918), (0.0, 5, 6)],
        ),
        (
            "splitwise",
            "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n"
            "0,2,0,0.25,1,100,10\n",
            [(0.25, 100, 10)],
        ),
        (
            "mooncake",
            '{"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'
            '{"timestamp": 4500, "input_length": 512, "output_length": 6, "hash_ids": [1]}\n',
            [(0.0, 600, 5), (1.5, 512, 6)],
        ),
    ],
)
def test_formats_are_told_by_their_first_line(tmp_path, name, text, expected):
    path = write(tmp_path, "trace.any", text)
    assert detect(path) == name
    assert rows(path) == expected
    assert rows(path, format=name) == expected


PLAIN = {
    "kvtwin": "arrival_s,prompt_tokens,output_tokens,session_id,hash_ids,hash_block_tokens\n"
    + "".join(f"{i * 0.5},33,2,s_{i},1 2 {i},16\n" for i in range(5000)),
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    + "".join(f"2023-11-16 18:{i // 60:02}:{i % 60:02}.6805900,374,44\n" for i in range(2000)),
    "mooncake": "".join(
        f'{{"timestamp": {i}, "input_length": 600, "output_length": 2, "hash_ids": [1, {i}]}}\n' for i in range(3000)
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_files_are_read_a_block_at_once(tmp_path, monkeypatch, name):
    """Row by row takes ten times as long, and would give the same."""

    def refuse(*_):
        raise AssertionError("read by rows")

    for reader in (CsvReader, JsonlReader):
        monkeypatch.setattr(reader, "row", refuse)
    assert len(rows(write(tmp_path, "t", PLAIN[name]))) == PLAIN[name].count("\n") - (name != "mooncake")


@pytest.mark.parametrize("cells", ["0,5", '"0","5"', '5,"0"', "5,0"])
def test_zero_tokens_are_what_was_asked_for_quoted_or_not(tmp_path, cells):
    path = write(tmp_path, "t.csv", f"arrival_s,prompt_tokens,output_tokens\n0,{cells}\n1,7,8\n")
    with pytest.raises(TraceError, match="zero-tokens"):
        rows(path)
    assert rows(path, zero_tokens="drop") == [(1.0, 7, 8)]
    one = (0.0, 5, 1) if cells.startswith("5") else (0.0, 1, 5)
    assert rows(path, zero_tokens="one") == [one, (1.0, 7, 8)]


def test_numbers_as_pandas_writes_them_and_quotes_are_read(tmp_path):
    text = ',arrival_s,prompt_tokens,output_tokens,session_id\n0,0.0,10.0,2.0,"a,b"\n1,1.0,"11",3,plain\n'
    requests = list(open_trace(write(tmp_path, "t.csv", text)))
    assert [r[1:5] for r in requests] == [(0.0, 10, 2, "a,b"), (1.0, 11, 3, "plain")]
    assert all(type(r.prompt_tokens) is int for r in requests)


def test_bailian_joins_turns_into_sessions(tmp_path):
    lines = [
        {"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 33, "output_length": 4},
        {"chat_id": 160, "parent_chat_id": 159, "timestamp": 62.5, "input_length": 40, "output_length": 8},
        {"chat_id": 7, "parent_chat_id": -1, "timestamp": 63.0, "input_length": 16, "output_length": 8},
        {"chat_id": 161, "parent_chat_id": 160, "timestamp": 64.0, "input_length": 40, "output_length": 8},
    ]
    for line, ids in zip(lines, ([1, 2, 3], [1, 2], [9], [1]), strict=True):
        line["hash_ids"] = ids
    path = write(tmp_path, "b.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    requests = list(open_trace(path))
    assert [r.session_id for r in requests] == ["159", "159", "7", "159"]
    assert requests[1].arrival_s == pytest.approx(1.386)
    assert requests[0].hash_ids == (1, 2, 3)
    assert requests[0].hash_block_tokens == 16
    # What the cache saw may be less than the prompt, never more.
    lines[0]["hash_ids"], lines[1]["hash_ids"] = [1], [1, 2, 3, 4]
    path = write(tmp_path, "b.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(TraceError, match=r"line 2: hash_ids .*4 ids"):
        list(open_trace(path))


def test_time_units_and_block_sizes_can_be_given(tmp_path):
    text = '{"timestamp": 1, "input_length": 64, "output_length": 1, "hash_ids": [1, 2, 3, 4]}\n' * 2
    path = write(tmp_path, "m.jsonl", text.replace("1,", "7,", 1))
    with pytest.raises(TraceError, match=r"hash_ids .*4 ids where 64 tokens make 1 blocks of 512"):
        list(open_trace(path))
    text = text.replace('"timestamp": 1', '"timestamp": 3', 1)
    requests = list(open_trace(write(tmp_path, "m.jsonl", text), time_unit="s", hash_block_tokens=16, sort=True))
    assert [(r.request_id, r.arrival_s, r.hash_block_tokens) for r in requests] == [(0, 0.0, 16), (1, 2.0, 16)]


OWN = "arrival_s,prompt_tokens,output_tokens,hash_ids,hash_block_tokens,output_hash_ids,priority\n"
NAMED = [
    # 33 + 40 tokens in blocks of 16 are 3 blocks and 2 more, of which the last may go without a name.
    ("0.5,33,40,1 2 3,16,4 5,2\n", Request(0, 0.5, 33, 40, "", (1, 2, 3), 16, (4, 5), 2)),
    ("1.5,33,40,1 2 3,16,4,-1\n", Request(1, 1.5, 33, 40, "", (1, 2, 3), 16, (4,), -1)),
    ("2.5,33,40,1 2,16,,\n", Request(2, 2.5, 33, 40, "", (1, 2), 16)),
    ("3.5,33,15,1 2 3,16,,0\n", Request(3, 3.5, 33, 15, "", (1, 2, 3), 16)),
    ("4.5,5,6,,0,,9\n", Request(4, 4.5, 5, 6, priority=9)),
]


@pytest.mark.parametrize("quoted", [False, True])  # quotes are read row by row
def test_our_own_columns_name_what_is_generated_and_how_urgent(tmp_path, quoted):
    text = OWN + "".join(line for line, _ in NAMED)
    path = write(tmp_path, "t.csv", text.replace("4 5", '"4 5"') if quoted else text)
    assert list(open_trace(path)) == [request for _, request in NAMED]
    assert list(open_trace(path, hash_block_tokens=4))[:4] == [request for _, request in NAMED][:4]


def test_the_block_size_may_stand_in_the_options(tmp_path):
    text = OWN + "0.5,33,40,1 2 3,,4 5,2\n1.5,33,40,1 2 3,0,4 5,2.0\n"
    expected = [Request(i, i + 0.5, 33, 40, "", (1, 2, 3), 16, (4, 5), 2) for i in range(2)]
    assert list(open_trace(write(tmp_path, "t.csv", text), hash_block_tokens=16)) == expected


@needs_oracle
@pytest.mark.parametrize("path", sorted(ORACLE.glob("*.csv")), ids=lambda path: path.stem)
def test_workloads_of_vllms_scheduler_load_with_all_columns(path):
    columns = list(csv.DictReader(path.read_text().splitlines()))
    found = list(open_trace(path))
    assert len(found) == len(columns) > 0
    for request, row in zip(found, columns, strict=True):
        assert request[1:4] == (float(row["arrival_s"]), int(row["prompt_tokens"]), int(row["output_tokens"]))
        for name in ("hash_ids", "output_hash_ids"):
            assert " ".join(map(str, getattr(request, name))) == row.get(name, "")
        assert request.priority == int(row.get("priority", 0))
    assert bool(found[0].output_hash_ids) == ("turns" in path.stem)


def test_vllm_custom_needs_lengths(tmp_path):
    path = write(tmp_path, "v.jsonl", '{"prompt": "four", "output_tokens": 9}\n{"prompt": "12345"}\n')
    with pytest.raises(TraceError, match=r"line 1: prompt_tokens None is not given; give `--tokenizer`"):
        list(open_trace(path))
    assert rows(path, tokenizer="bytes:4", default_output_tokens=256) == [(0.0, 1, 9), (0.0, 2, 256)]
    assert rows(path, tokenizer=len, default_output_tokens=1) == [(0.0, 4, 9), (0.0, 5, 1)]


def sharegpt(*lengths, **more):
    turns = [[{"from": "human", "value": "a" * p}, {"from": "gpt", "value": "b" * o}] for p, o in lengths]
    return [{"id": str(i), "conversations": turn, **more} for i, turn in enumerate(turns)]


def test_sharegpt_follows_vllms_rule(tmp_path):
    # Too short, too long a prompt, too long together, one turn only, and two that stay.
    data = sharegpt((3, 9), (1025, 4), (1024, 1025), (4, 4), (1024, 1024))
    data.append({"conversations": [{"from": "human", "value": "hello"}]})
    trace = open_trace(write(tmp_path, "s.json", json.dumps(data, indent=1)), tokenizer=len)
    assert [r[:4] for r in trace] == [(0, 0.0, 4, 4), (1, 0.0, 1024, 1024)]
    assert trace.skipped == 4
    everything = open_trace(trace.path, tokenizer=len, sharegpt_filter=False)
    assert [r[2:4] for r in everything] == [(3, 9), (1025, 4), (1024, 1025), (4, 4), (1024, 1024)]


def test_sharegpt_larger_than_a_block_is_streamed(tmp_path):
    data = sharegpt(*[(600, 400)] * 1500)
    path = write(tmp_path, "s.json", json.dumps(data))
    assert path.stat().st_size > 1 << 20
    assert len(rows(path, tokenizer=len)) == 1500
    broken = write(tmp_path, "t.json", json.dumps(data, indent=0)[:-700])
    with pytest.raises(TraceError, match=r"t\.json, line \d+: element .* is not whole JSON; download"):
        rows(broken, tokenizer=len)


def test_a_tokenizer_of_a_file_counts(tmp_path, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"why": 0, "so": 1, "?": 2}, "?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    path = write(tmp_path, "v.jsonl", '{"prompt": "why so why not", "output_tokens": 9}\n')
    for spec in (tmp_path, tmp_path / "tokenizer.json"):
        assert rows(path, tokenizer=str(spec)) == [(0.0, 4, 9)]
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TraceError, match=r"tokenizer\.json: not a tokenizer \(.*\); give the tokenizer\.json"):
        open_trace(path, tokenizer=str(tmp_path))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(TraceError, match="needs `pip install tokenizers`; or estimate with bytes:4"):
        open_trace(path, tokenizer=str(tmp_path))


def test_sharegpt_lengths_may_be_given(tmp_path):
    path = write(tmp_path, "s.json", json.dumps(sharegpt((1, 1), prompt_tokens=50, output_tokens=60)))
    assert rows(path) == [(0.0, 50, 60)]


def test_unsorted_times_name_the_line_and_sorting_is_stable(tmp_path):
    text = "arrival_s,prompt_tokens,output_tokens\n2.0,1,1\n1.0,2,1\n2.0,3,1\n"
    path = write(tmp_path, "u.csv", text)
    with pytest.raises(TraceError, match=r"u\.csv, line 3: arrival_s '1\.0' .*kvtwin trace convert --sort"):
        list(open_trace(path))
    assert [r[:3] for r in open_trace(path, sort=True)] == [(0, 1.0, 2), (1, 2.0, 1), (2, 2.0, 3)]
    stamps = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 10:00:01.5,1,1\n2023-11-16 10:00:00.3,2,2\n"
    assert rows(write(tmp_path, "s.csv", stamps), sort=True) == [(0.0, 2, 2), (1.2, 1, 1)]


def test_order_is_checked_across_blocks(tmp_path):
    # 100,000 rows are many blocks; the step back stands at the start of one, as far as the test can tell.
    lines = [f"{i}.0,5,5\n" for i in range(100_000)]
    lines[70_000] = "3.0,5,5\n"
    path = write(tmp_path, "u.csv", "arrival_s,prompt_tokens,output_tokens\n" + "".join(lines))
    with pytest.raises(TraceError, match=r"line 70002: arrival_s '3\.0'"):
        list(open_trace(path))


def test_a_trace_can_be_read_twice_and_streams(tmp_path):
    lines = "".join(f"{i}.25,100,50\n" for i in range(80_000))
    trace = open_trace(write(tmp_path, "t.csv", "arrival_s,prompt_tokens,output_tokens\n" + lines))
    tracemalloc.start()
    count = sum(1 for _ in trace)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 80_000
    assert peak < 4_000_000  # the requests themselves would take some 20 MB
    assert list(islice(trace, 2)) == [Request(0, 0.25, 100, 50), Request(1, 1.25, 100, 50)]


@needs_azure
def test_the_real_azure_trace():
    summary = summarize(open_trace(AZURE))
    assert summary.requests == 19_366
    assert summary.duration_s == 3501.721937
    assert [round(summary.prompt_tokens.mean), summary.prompt_tokens.p50] == [1155, 1020]
    assert [summary.prompt_tokens.p90, summary.prompt_tokens.p99] == [2734.5, 4142]
    assert [round(summary.output_tokens.mean), summary.output_tokens.p50] == [211, 129]
    assert [summary.output_tokens.p90, summary.output_tokens.p99] == [424, 601]
    assert summary.interval_mean_s == pytest.approx(0.1808, abs=5e-5)
    assert summary.interval_cv == pytest.approx(1.09, abs=5e-3)


@needs_mooncake
def test_the_real_mooncake_trace():
    summary = summarize(open_trace(MOONCAKE))
    assert summary.requests == 3_993
    assert summary.prompt_tokens.mean == pytest.approx(15_326, abs=1)
    assert summary.infinite_cache_block_hits == pytest.approx(0.640, abs=5e-4)


def test_a_time_beyond_reason_is_refused(tmp_path):
    path = write(tmp_path, "t.csv", "arrival_s,prompt_tokens,output_tokens\n0,10,2\n1e300,20,3\n")
    with pytest.raises(TraceError, match=r"arrival_s reaches 1e\+300 s, more than 1e\+12; is `--time-unit` missing"):
        list(open_trace(path))


def test_prompts_of_unlike_adapters_share_no_blocks(tmp_path: Path) -> None:
    """KV depends on the adapter; a trace names blocks by what their text is."""
    path = tmp_path / "t.csv"
    rows = ["sql", "sql", "", "sql_v2"]
    path.write_text(
        "arrival_s,prompt_tokens,output_tokens,hash_ids,hash_block_tokens,lora\n"
        + "".join(f"{time},33,2,1 2 3,16,{name}\n" for time, name in enumerate(rows))
    )
    plain, apart = list(open_trace(path)), open_trace(path)
    apart.adapters_apart = True
    assert [request.lora for request in plain] == rows
    assert {request.hash_ids for request in plain} == {(1, 2, 3)}
    first, second, without, other = (request.hash_ids for request in apart)
    assert first == second and without == (1, 2, 3)
    assert len({*first, *without, *other}) == 9
    assert apart.found == {"lora"}
