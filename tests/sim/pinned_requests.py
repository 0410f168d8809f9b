"""What is made of requests: workloads, changes, summaries, files, measured runs, and `kvtwin trace` word by word."""

import contextlib
import gzip
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from goldens import digest
from pinned_traces import FILE, USUAL, read, text_of, told

import kvtwin
from traces import transforms
from traces.catalogue import entries
from traces.generators import generate
from traces.lengths import fit
from traces.request import Request
from traces.served import read_served
from traces.summary import summarize
from traces.workloads import WORKLOADS
from traces.writers import write_trace


def sent() -> list[Request]:
    """A trace of everything."""
    ids = [((1, 2, 3), (4, 5)), ((1, 2, 6), (7,)), ((), ()), ((1, 9), ()), ((1, 2, 3), (4, 5))]
    return [
        Request(i, at_s, 33, 40 - i, f"s{i % 2}" if i % 3 else "", names, 16 if names else 0, more, i % 3 - 1)
        for i, (at_s, (names, more)) in enumerate(zip((0.0, 0.5, 0.5, 0.5, 4.25), ids, strict=True))
    ]


def generated(name: str, **given: Any) -> list[object]:
    """The second and third request, those where a further chunk is drawn, and digests of the first and last ones."""
    requests = [request[:] for request in generate(name, num_prompts=40 if given else 4200, **given)]
    return [*requests[1:3], *requests[4096:4098], digest(requests[:40]), digest(requests[-100:])]


def pairs(requests: Iterable[Request]) -> list[object]:
    """Requests as plain rows."""
    return [request[:] for request in requests]


def generating() -> Iterator[str]:
    """The first requests of every workload."""
    usual = ({}, {"seed": 5}, {"input_len": 60, "output_len": 7}, {"burstiness": 0.5}, {"request_rate": 3.0})
    options = {name: [*usual, {"request_rate": float("inf")}] for name in WORKLOADS}
    options["uniform"] += [{"range_ratio": ratio} for ratio in (0, 0.25, 1, 1.5)] + [{"input_len": 1, "output_len": 2}]
    options["ramp"] += [{"end_rate": 0.5}, {"end_rate": 1.0}, {"end_rate": 1e9}, {"request_rate": 5e8}]
    options["burst"] += [
        {"burst_factor": 3.0},
        {"burst_period": 20.0},
        {"burst_duration": 59.0},
        {"burst_duration": 60.0},
    ]
    options["sessions"] += [
        {"turns": 1.0},
        {"think_time": 1.0},
        {"shared_prefix": 0},
        {"shared_prefix": 40, "prefix_groups": 3},
        {"range_ratio": 0.0},
        {"max_context": 1200},
        {"max_context": 1087},
        {"hash_block_tokens": 100},
        {"range_ratio": 0.0, "max_context": 1281},
        {"range_ratio": 0.0, "max_context": 1280},
    ]
    for name, found in options.items():
        for given in found:
            yield f"{name} {given}: {told(generated, name, **given)}"
    for name, given in (
        ("fixd", {}),
        ("xyz", {}),
        ("fixed", {"turns": 1}),
        ("sessions", {"turn": 1}),
        ("ramp", {"x": 1}),
        ("fixed", {"input_len": 0}),
        ("fixed", {"output_len": 10**9 + 1}),
        ("fixed", {"seed": -1}),
    ):
        yield f"{name} {given}: {told(generated, name, **given)}"
    for name, count in (("sharegpt", 500), ("azure-conv-2023", 500), ("uniform", 99), ("uniform", 100)):
        yield f"fit of {count} of {name}: {told(fit, generate(name, num_prompts=count, seed=2))}"


def changed(how: str, *given: Any) -> list[object]:
    """What a transform makes."""
    return pairs(getattr(transforms, how)(*given))


def changing() -> Iterator[str]:
    """Transforms, summaries and written files."""

    trace = sent()
    broken = trace[1]._replace(session_id="a\nb")
    for factor in (0.5, 2.0, 0.0, 1e-10):
        yield f"scale {factor}: {told(changed, 'scale_rate', trace, factor)}"
    for bounds in ((0.5, 4.25), (0.5, 4.3), (0.0, 0.5), (1.0, 1.0), (-1.0, 1.0), (5.0, 9.0)):
        yield f"window {bounds}: {told(changed, 'window', trace, *bounds)}"
    for tokens in (1, 2, 3, 20, 40, 41, 64, 71, 72, 73, 74):
        yield f"clip {tokens}: {told(changed, 'clip', trace, tokens)}"
    yield f"ties: {told(changed, 'spread_ties', trace)}"
    yield f"ties at the end: {told(changed, 'spread_ties', trace[:4])}"
    yield f"ties alone: {told(changed, 'spread_ties', trace[1:4])}"
    yield f"merge: {told(changed, 'merge', trace, trace[2:])}"
    yield f"merge one: {told(changed, 'merge', trace)}"
    for n in (0, 1, 9, 10**9, 10**9 + 1):
        yield f"head {n}: {told(changed, 'head', trace, n)}"
    for given in ((2.0,), (2.0, 0.5, 3), (float("inf"),), (0.0,), (1.0, 0.0), (1.0, 1e-4), (1.0, 9e-5), (1.0, 1.0, -1)):
        yield f"rate {given}: {told(changed, 'at_request_rate', trace, *given)}"
    for name, found in (("all", trace), ("one", trace[:1]), ("plain", trace[2:3] * 3), ("none", [])):
        yield f"summary of {name}: {told(lambda stream: summarize(stream).to_dict(), found)}"
    for name, found in (
        ("all", trace),
        ("plain", trace[2:3] * 3),
        ("late", [Request(0, 0.1, 2, 3)] * 2 + trace[:2]),
        ("last", [Request(0, 1e-7, 2, 3)] * 4096 + trace[:1]),
        ("none", []),
        ("bad", [broken]),
    ):
        for suffix in (".csv", ".jsonl"):
            path = Path(f"{name}{suffix}")
            yield f"written {path}: {told(write_trace, iter(found), path)}"
            yield repr(path.read_text()[-900:]) if path.exists() else "no file"


RESULT = {
    "completed": 2,
    "request_throughput": 1.0,
    "input_lens": [10, 20, 30, 40],
    "output_lens": [3, 1, 0, 2],
    "ttfts": [0.25, 0.5, 0.0, 0.125],
    "itls": [[0.0625, 0.125], [], [], [0.5]],
    "start_times": [100.5, 100.0, 101.0, 102.0],
    "errors": ["", "", "no", ""],
}
CELLS = {
    "arrival_s": ("5", "4", "9"),
    "prompt_tokens": ("10", "20", "30"),
    "output_tokens": ("3", "1", "9"),
    "ttft_ms": ("250", "500", "0"),
    "e2el_ms": ("1250", "500", "0"),
}
COLUMNS = {
    "arrival_s": ("issue_s", "x"),
    "prompt_tokens": ("prompt_len", "x"),
    "output_tokens": ("output_len", "x"),
    "ttft_ms": ("ttft_s", "first_token_s", "x", "run"),
    "e2el_ms": ("e2el_s", "latency_s", "latency_ms", "last_token_s", "x"),
}


def measured(text: str | bytes, trace: list[Request] | None = None) -> str:
    """A file as what a server's client measured."""
    FILE.write_bytes(text.encode() if isinstance(text, str) else text)

    def act() -> object:
        found = read_served(FILE, trace)
        times = [found.token_times_s(i) for i in range(len(found.requests))]
        seen = (found.ttft_s, found.e2el_s, found.gaps_s, found.left_out, found.tpot_s, found.has_token_times, times)
        return [pairs(found.requests), *seen]

    return told(act)


def table(columns: dict[str, tuple[str, ...]]) -> str:
    """Of a row a request."""
    return "\n".join(",".join(row) for row in zip(*((name, *cells) for name, cells in columns.items()), strict=True))


ODD = (0, -1, 1, None, 0.0005, 0.001, 10**9, 10**9 + 1, float("nan"), "x", [], [0.0005, 0.5], [0.002, 1, 2], [0.5, -1])


def serving() -> Iterator[str]:
    """Results of benchmarks and tables of requests."""
    results: dict[str, dict[str, object]] = {"whole": RESULT}
    for name, value in RESULT.items():
        results[f"without {name}"] = {key: item for key, item in RESULT.items() if key != name}
        if isinstance(value, list):
            for odd in (
                0,
                -1,
                1,
                None,
                0.0005,
                0.001,
                10**9,
                10**9 + 1,
                float("nan"),
                "x",
                [],
                [0.0005, 0.5],
                [0.002, 1, 2],
                [0.5, -1],
            ):
                results[f"{name} {odd}"] = RESULT | {name: [odd, *value[1:]]}
            results[f"{name} short"] = RESULT | {name: value[1:]}
    results["latencies"] = RESULT | {"latencies": [0.4, 0.5, 0.0, 0.625]}
    results["latencies alone"] = results["without itls"] | {"latencies": [0.25, 0.5 - 1e-12, 0.0, 0.625]}
    results["latencies too short"] = results["without itls"] | {"latencies": [0.25, 0.5 - 1e-6, 0.0, 0.625]}
    for name, result in results.items():
        text = json.dumps(result)
        yield f"{name}: {measured(text)}"
        yield f"{name} as a trace: {read(text)}"
    for text in (
        json.dumps(RESULT, indent=1),
        b"\xef\xbb\xbf \n" + json.dumps(RESULT).encode(),
        json.dumps(RESULT) * 2,
        gzip.compress(json.dumps(RESULT).encode(), mtime=0),
        "{",
        "[]",
        "",
    ):
        yield f"{digest(str(text))}: {measured(text)}"
    trace = [Request(i, i, 10 * i + 10, 5) for i in range(3)]
    for column, others in COLUMNS.items():
        for other in (column, *others):
            text = table({other if name == column else name: cells for name, cells in CELLS.items()})
            yield f"{column} as {other}: {measured(text)}"
            yield f"{column} as {other}, beside: {measured(text, trace)}"
        for value in ("", "0", "-1", "x", "nan", "1.5", "1e12", "600"):
            yield f"{column} {value!r}: {measured(table(CELLS | {column: (value, *CELLS[column][1:])}))}"
    yield f"beside others: {measured(json.dumps(RESULT), trace=sent()[:4])}"
    yield f"beside few: {measured(json.dumps(RESULT), trace=sent()[:3])}"


COMMANDS = """
inspect t.csv
inspect t.csv --json
inspect plain.csv
inspect t.jsonl
inspect z.csv
inspect z.csv --zero-tokens drop
inspect z.csv --zero-tokens one --json
inspect nowhere.csv
inspect .
convert t.csv -o -
convert t.csv -o o.csv --window 0.5: --clip 50 --rate-scale 2 --spread-ties --head 3
convert t.csv -o o.csv --window :1
convert t.csv -o o.csv --window 9
convert t.csv -o o.csv --window a:b
convert t.csv -o o.csv --window 1:0
convert t.csv t.csv -o o.jsonl --request-rate 2 --burstiness 0.5 --seed 4
convert t.csv -o o.csv --request-rate inf
convert z.csv -o - --zero-tokens drop
convert z.csv -o o.csv --zero-tokens drop
convert t.csv -o nowhere/o.csv
convert t.csv -o .
generate fixed -o g.csv --num-prompts 3
generate fixed -o - --num-prompts 2 --input-len 5 --output-len 6 --request-rate 2 --seed 1
generate sessions -o g.csv --num-prompts 3 --turns 2 --shared-prefix 32 --hash-block-tokens 32 --seed 9
generate fixed -o g.csv --turns 2
generate fixd -o g.csv
generate fixed -o g.csv --num-prompts 0
fetch nothing
fetch azure-conv-2024
fetch azure-conv-2023 --sha256 12
fetch azure-conv-2023 --url ftp://x
fetch azure-conv-2023 -o folder
list
"""


def commanding() -> Iterator[str]:
    """Exit status and words of commands, and what they write."""
    write_trace(sent(), "t.csv")
    write_trace(sent()[2:3] * 3, "plain.csv")
    write_trace(sent(), "t.jsonl")
    Path("z.csv").write_text(text_of("kvtwin", [("0", 0, 5), *USUAL]))
    Path("folder", entries()[0].file_name).mkdir(parents=True)
    for words in COMMANDS.strip().splitlines():
        yield f"$ {words}"
        heard = io.StringIO()
        written = {path: path.read_text() for path in sorted(Path().glob("*.*"))}
        with contextlib.redirect_stdout(heard), contextlib.redirect_stderr(heard):
            status = kvtwin.main(["trace", *words.split()])
        yield from (line.rstrip() for line in heard.getvalue().splitlines())
        for path in sorted(Path().glob("*.*")):
            if written.get(path) != path.read_text():
                yield from (f"{path}: {line}" for line in path.read_text().splitlines())
        yield f"exit status {status}"


TOPICS = {"generating": generating, "changing": changing, "serving": serving, "commanding": commanding}
