"""`kvtwin trace` from the command line's arguments to what is printed and written."""

import argparse
import json
from pathlib import Path

import pytest

from traces.cli import add_trace
from traces.errors import TraceError
from traces.readers import open_trace

TRACE = "arrival_s,prompt_tokens,output_tokens\n0.0,100,10\n1.0,200,20\n2.0,300,30\n2.0,400,400\n4.0,500,50\n"


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(TRACE)
    return path


def kvtwin(*words):
    parser = argparse.ArgumentParser()
    add_trace(parser)
    args = parser.parse_args([*map(str, words)])
    return args.run(args)


SESSIONS = """arrival_s,prompt_tokens,output_tokens,session_id,hash_ids,hash_block_tokens
0.0,32,2,a,1 2,16
0.5,48,4,a,1 2 3,16
0.5,0,9,b,,16
2.0,32,2,b,1 9,16
2.0,1600,2,b,,16
"""


def test_inspect_prints_all_that_there_is(tmp_path, capsys, monkeypatch):
    """Of 112 named tokens 48 hit, of 1,712 in all; 3 of 7 blocks. Two thirds of a second between requests."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    Path("s.csv").write_text(SESSIONS)
    kvtwin("inspect", "s.csv", "--zero-tokens", "drop")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "s.csv (kvtwin)"
    assert [" ".join(line.strip("│┃ ").split()) for line in lines if "│" in line] == [
        "requests │ 4",
        "duration │ 2.0 s",
        "request rate │ 1.5 /s",
        "interval mean, CV │ 666.7 ms, 0.935",
        "correlation of lengths │ -0.324",
        "arrive with the one before │ 25.0% (see convert --spread-ties)",
        "sessions │ 2",
        "prompt tokens in an infinite prefix cache │ 2.8%",
        "prefix blocks in it │ 42.9%",
        "rows skipped │ 1",
        "prompt │ 428 │ 40 │ 1,134 │ 1,553 │ 1,600 │ 1,712",
        "output │ 2 │ 2 │ 3 │ 4 │ 4 │ 10",
    ]


def test_convert_applies_its_steps_in_order(trace, tmp_path, capsys):
    out = tmp_path / "out.csv"
    kvtwin("convert", trace, "-o", out, "--window", "1:4", "--clip", "500", "--rate-scale", "2", "--spread-ties")
    assert capsys.readouterr().out == f"wrote 3 requests to {out}\n"
    assert [r[:4] for r in open_trace(out)] == [(0, 0.0, 200, 20), (1, 0.5, 300, 30), (2, 0.75, 250, 250)]


def test_convert_merges_sorts_and_heads(trace, tmp_path):
    unsorted = tmp_path / "u.csv"
    unsorted.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n3.0,7,7\n0.5,8,8\n")
    out = tmp_path / "out.csv"
    with pytest.raises(TraceError, match="--sort"):
        kvtwin("convert", trace, unsorted, "-o", out)
    assert not out.exists()
    kvtwin("convert", trace, unsorted, "-o", out, "--sort", "--head", "3")
    assert [r[1:3] for r in open_trace(out)] == [(0.0, 100), (0.5, 8), (1.0, 200)]


def test_convert_in_place_and_to_jsonl(trace, tmp_path):
    kvtwin("convert", trace, "-o", trace, "--rate-scale", "0.5")
    assert [r.arrival_s for r in open_trace(trace)] == [0.0, 2.0, 4.0, 4.0, 8.0]
    out = tmp_path / "o.jsonl"
    kvtwin("convert", trace, "-o", out)
    assert open_trace(out).format == "mooncake"
    assert list(open_trace(out)) == list(open_trace(trace))


def test_convert_gives_words_arrivals(tmp_path, capsys):
    data = tmp_path / "s.json"
    turns = [{"from": "human", "value": "a" * 40}, {"from": "gpt", "value": "b" * 80}]
    data.write_text(json.dumps([{"conversations": turns}] * 50 + [{"conversations": []}]))
    out = tmp_path / "out.csv"
    kvtwin("convert", data, "-o", out, "--tokenizer", "bytes:4", "--request-rate", "4", "--seed", "3")
    assert "50 requests" in (shown := capsys.readouterr().out)
    assert "1 rows skipped" in shown
    requests = list(open_trace(out))
    assert {r[2:4] for r in requests} == {(10, 20)}
    assert 6 < requests[-1].arrival_s < 20


def test_generate_writes_what_the_library_generates(tmp_path, capsys):
    out = tmp_path / "g.csv"
    kvtwin("generate", "sessions", "-o", out, "--num-prompts", 50, "--turns", 2, "--seed", 4)
    assert "wrote 50 requests" in capsys.readouterr().out
    assert len({r.session_id for r in open_trace(out)}) > 5
    with pytest.raises(TraceError, match="no option 'turns'"):
        kvtwin("generate", "fixed", "-o", out, "--turns", 2)


def test_list_and_fetch(capsys):
    kvtwin("list", "--json")
    names = [item["name"] for item in json.loads(capsys.readouterr().out)]
    kvtwin("list")
    table = capsys.readouterr().out
    assert all(name in table for name in names)
    with pytest.raises(TraceError, match="--sha256 HEX"):
        kvtwin("fetch", "azure-conv-2024")


@pytest.mark.parametrize("text", ["5", "a:b", "9:5", "-1:4"])
def test_windows_are_checked(trace, tmp_path, text):
    with pytest.raises(TraceError, match="window"):
        kvtwin("convert", trace, "-o", tmp_path / "o.csv", f"--window={text}")


def test_adapters_are_drawn_by_rank_and_seed(tmp_path: Path) -> None:
    """Zipf's law: of four adapters the first has 12 of 25 requests; the same seed draws the same."""
    source, paths = tmp_path / "t.csv", [tmp_path / name for name in ("one.csv", "again.csv", "other.csv")]
    source.write_text("arrival_s,prompt_tokens,output_tokens\n" + "0,1,1\n" * 5000)
    for path, seed in zip(paths, "001", strict=True):
        assert kvtwin("convert", source, "--loras", 4, "--lora-skew", 1, "--seed", seed, "-o", path) == 0
    one, again, other = (path.read_text() for path in paths)
    assert one == again != other
    assert {request.lora for request in open_trace(paths[0])} == {f"lora-{rank}" for rank in range(1, 5)}
    assert one.count("lora-1") == pytest.approx(5000 * 12 / 25, abs=4 * (5000 * 12 * 13 / 625) ** 0.5)


@pytest.mark.parametrize("words", [("--loras", 0), ("--loras", 2, "--lora-skew", -1), ("--loras", 2, "--lora-skew", 9)])
def test_adapters_that_cannot_be_drawn_are_refused(tmp_path: Path, words: tuple[object, ...]) -> None:
    with pytest.raises(TraceError, match="lora"):
        kvtwin("generate", "fixed", "--num-prompts", 2, "--request-rate", 1, *words, "-o", tmp_path / "o.csv")
    assert not any(tmp_path.iterdir())
