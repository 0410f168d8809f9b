"""What traces are read as, made, changed and told, or refused as: a line each, pinned in `golden/traces/`.

    python tests/sim/pinned_traces.py      # writes golden/traces/*.txt anew

Read the difference: it is what a user sees change. `pinned_requests` has what is made of requests.
"""

import contextlib
import gzip
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))

from goldens import GOLDEN, rounded, short

from traces.errors import TraceError
from traces.readers import FORMATS, open_trace

TRACES = GOLDEN / "traces"
FILE = Path("t")

HEADERS = {
    "kvtwin": "arrival_s,prompt_tokens,output_tokens,session_id,hash_ids,hash_block_tokens,output_hash_ids,priority",
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens",
    "burstgpt": "Timestamp,Session ID,Model,Request tokens,Response tokens",
    "vidur": "arrived_at,num_prefill_tokens,num_decode_tokens,pd_ratio",
    "vidur-lengths": "num_prefill_tokens,num_decode_tokens",
    "splitwise": "request_id,arrival_timestamp,prompt_size,token_size",
}
ROWS = {
    "kvtwin": "{time},{prompt},{output},,,,,",
    "azure": "2023-11-16 18:15:{time},{prompt},{output}",
    "burstgpt": "{time},s{time},GPT-4,{prompt},{output}",
    "vidur": "{time},{prompt},{output},0.5",
    "vidur-lengths": "{prompt},{output}",
    "splitwise": "7,{time},{prompt},{output}",
    "mooncake": '{{"timestamp": {time}, "input_length": {prompt}, "output_length": {output}}}',
    "bailian": '{{"chat_id": {time}, "parent_chat_id": 5.5, "timestamp": {time}, "input_length": {prompt}, '
    '"output_length": {output}}}',
    "vllm-custom": '{{"prompt": "{time}", "prompt_len": {prompt}, "output_len": {output}}}',
    "sharegpt": '{{"id": "{time}", "prompt_len": {prompt}, "output_tokens": {output}, "conversations": []}}',
}
USUAL = (("05.5", 40, 50), ("06.25", 7, 8), ("06.25", 512, 9))
TIMES = (
    "",
    "05.5",
    "05.4999999",
    "-1",
    "-0.0",
    "0",
    "x",
    "nan",
    "inf",
    "1_0",
    " 07 ",
    '"08"',
    "59.9999999",
    "60",
    "1e12",
    "1.1e12",
    "1e400",
    "true",
    "[]",
)
TOKENS = (
    "",
    "0",
    "-0",
    "0.0",
    "1",
    "1.0",
    "-1",
    "1.5",
    "1e3",
    "nan",
    "Infinity",
    "1_0",
    " 7 ",
    '"7"',
    "1000000000",
    "1000000001",
    "1e400",
    "true",
    "null",
    '"x"',
)


def text_of(name: str, rows: Iterable[tuple[object, object, object]]) -> str:
    """A file of a format."""
    form = ROWS[name].replace('{time}, "input', "{number}, ").replace("{number}, _length", '{number}, "input_length')
    lines = []
    for time, prompt, output in rows:
        number = str(time)
        # JSON has no leading zeros.
        number = number.lstrip("0") if number[:1] == "0" and number[1:2].isdigit() else number
        lines.append(
            form.format(
                time=number if name in ("bailian", "mooncake") else time, prompt=prompt, output=output, number=number
            )
        )
    if name == "sharegpt":
        return "[" + ",\n".join(lines) + "]\n"
    return "\n".join(([HEADERS[name]] if name in HEADERS else []) + lines) + "\n"


def told(act: Callable[..., object], *given: Any, **options: Any) -> str:
    """What comes of it, in one line."""
    try:
        found = act(*given, **options)
    except TraceError as error:
        return f"! {error}"
    return json.dumps(rounded(found), ensure_ascii=False)


def read(text: str | bytes, **options: Any) -> str:
    """A file's format, its requests and how many rows were left out; short where they are plain."""
    FILE.write_bytes(text.encode() if isinstance(text, str) else text)

    def act() -> object:
        trace = open_trace(FILE, **options)
        rows = [list(request[1:])[: 3 if request[4:] == ("", (), 0, (), 0) else None] for request in trace]
        return [trace.format, *rows, trace.skipped]

    return told(act)


def reading() -> Iterator[str]:
    """Every format with every oddity."""
    for name in ROWS:
        yield f"-- {name}"
        for what, data in files(name):
            yield f"{what}: {read(data, **lax(name))}"
        for at, field in product((0, 2), range(3)):
            for value in TIMES if not field else TOKENS:
                rows = [list(row) for row in USUAL]
                rows[at][field] = value
                yield f"row {at} field {field} {value!r}: {read(text_of(name, rows), **lax(name))}"
        for policy in ("drop", "one", "none"):
            zeros = text_of(name, [("05.5", 0, 9), *USUAL, ("07", 9, 0), ("07", 0, 0), ("08", 9, 9)])
            yield f"zeros {policy}: {read(zeros, zero_tokens=policy, **lax(name))}"
            yield f"only zeros {policy}: {read(text_of(name, [('05', 0, 0)]), zero_tokens=policy, **lax(name))}"
        mixed = text_of(name, [("07", 4, 4), *USUAL, ("02", 5, 5)])
        yield f"sorted: {read(mixed, sort=True, **lax(name))}"
        for unit in ("s", "ms", "us", "ns", "h"):
            yield f"unit {unit}: {read(text_of(name, USUAL), time_unit=unit, **lax(name))}"
        for form in (*FORMATS, "kvtwn"):
            yield f"as {form}: {read(text_of(name, USUAL), format=form)}"


def lax(name: str) -> dict[str, Any]:
    """Options that a grid of lengths needs."""
    return {"sharegpt_filter": False} if name == "sharegpt" else {}


def files(name: str) -> Iterator[tuple[str, str | bytes]]:
    """The usual rows in unusual files."""
    text = text_of(name, USUAL)
    lines = text.splitlines()
    yield "plain", text
    yield "CRLF", text.replace("\n", "\r\n")
    yield "BOM", b"\xef\xbb\xbf" + text.encode()
    yield "gzip", gzip.compress(text.encode(), mtime=0)
    yield "half a gzip", gzip.compress(text.encode(), mtime=0)[:-9]
    yield "Latin", text.encode() + b"\n\n caf\xe9s\n"
    yield "Latin at the end", text.encode() + b"caf\xe9"
    yield "no newline", text.rstrip("\n")
    yield "blanks", "\n  \n" + "\n\n \n".join(lines) + "\n \n\n"
    yield "twice", text + text
    yield "short row", "\n".join([*lines[:-1], lines[-1][: len(lines[-1]) // 2]])
    yield "long row", "\n".join([*lines[:-1], lines[-1] + ",1"])
    yield "quoted", "\n".join([*lines[:-1], lines[-1] + ' "']) if name not in HEADERS else text.replace("512", '"512"')
    yield "column more", "\n".join(f"{line},{i or 'note'}" for i, line in enumerate(lines))
    yield "header with spaces", text.replace(",", " , ", 2)
    yield "nothing", ""
    yield "blank", " \n\n"
    yield "head alone", lines[0] + "\n"
    for column in HEADERS.get(name, "").split(","):
        yield f"without {column!r}", text.replace(column, "x", 1)
        yield f"{column!r} misspelt", text.replace(column, column[:-1], 1)
        yield f"{column!r} twice", "\n".join(f"{line},{i or column}" for i, line in enumerate(lines))


NAMED = (
    (33, 40, "1 2 3", "16", "4 5", "2"),
    (33, 40, "1 2", "16", "", ""),
    (32, 1, "1 2", "16", "", "-3"),
    (33, 40, "1 2 3", "16", "4", "1.0"),
    (33, 40, "1 2 3", "", "4 5", "0"),
    (33, 40, "1 2 3", "0", "4 5", "0"),
    (33, 40, "1 2 3 4", "16", "", "0"),
    (33, 40, "1", "16", "", "0"),
    (33, 40, "1 2 3", "16", "4 5 6", "0"),
    (33, 40, "1 2 3", "16", " ", "x"),
    (33, 40, "1 2", "16", "4 5", "0"),
    (33, 40, "", "16", "4 5", "0"),
    (33, 40, "", "", "", "5"),
    (33, 40, "1 2 3", "-1", "4 5", "0"),
    (33, 40, "1 2 3", "1.5", "", "1.5"),
    (33, 40, "1 b 3", "16", "", "0"),
    (33, 40, "1 2_ 3", "16", "", "0"),
    (16, 16, "1", "16", "2", "0"),
    (16, 16, "1", "16", "", "0"),
    (16, 16, "1", "16", "2 3", "0"),
    (1, 1, "-1", "16", "", "1_0"),
    (33, 40, "1 2 3", "16", "x", "0"),
    (33, 40, "1 2 3", "17", "4 5 6", "99999999999999999999"),
)


def naming() -> Iterator[str]:
    """Hash ids, sessions and priorities."""
    for row in NAMED:
        prompt, output, ids, block, more, urgency = row
        for quoted, given in product(("", '"'), (None, 16)):
            line = f"0,{prompt},{output},s,{quoted}{ids}{quoted},{block},{more},{urgency}\n"
            yield f"{line.strip()} {given}: {read(HEADERS['kvtwin'] + chr(10) + line, hash_block_tokens=given)}"
        for name, given in product(("mooncake", "bailian"), (None, 16)):
            found: dict[str, object] = {"timestamp": 1.5, "input_length": prompt, "output_length": output}
            for field, value in (("hash_ids", ids), ("output_hash_ids", more)):
                if value:
                    found[field] = [int(word) if word.lstrip("-").isdecimal() else word for word in value.split()]
            if urgency:
                found["priority"] = (
                    float(urgency) if urgency == "1.5" else None if urgency == "x" else int(float(urgency))
                )
            if name == "bailian":
                found |= {"chat_id": 7, "parent_chat_id": -1}
            line = json.dumps(found) + "\n"
            yield f"{line.strip()} {given}: {read(line, hash_block_tokens=given)}"
    chats = [(3, -1), (4, 3), (5, None), (6, 4), ("a", 5), (9, 8), (3, 6)]
    lines = [
        {"chat_id": chat, "parent_chat_id": parent, "timestamp": 1, "input_length": 9, "output_length": 9}
        for chat, parent in chats
    ]
    yield f"chats: {read(chr(10).join(map(json.dumps, lines)))}"
    for value in (0, -1, 10**9, 10**9 + 1):
        for name in ("hash_block_tokens", "default_prompt_tokens", "default_output_tokens"):
            yield f"{name} {value}: {read(text_of('kvtwin', USUAL), **{name: value})}"


def words() -> Iterator[str]:
    """Prompts in words, counted and left out."""
    sizes = (0, 3, 4, 1024, 1025, 1100)
    talks = [
        [{"from": "human", "value": "a" * p}, {"from": "gpt", "content": "b" * o}] for p, o in product(sizes, sizes)
    ]
    elements: list[object] = [{"conversations": talk} for talk in talks]
    for keep, policy in product((True, False), ("error", "drop", "one")):
        text = json.dumps(elements[7:] if policy == "error" and not keep else elements)
        yield f"{keep} {policy}: {read(text, tokenizer=len, sharegpt_filter=keep, zero_tokens=policy)}"
    odd = (
        [],
        {},
        5,
        {"conversations": 5},
        {"conversation": talks[-1]},
        {"conversations": [5, 6]},
        {"conversations": talks[-1][:1]},
        {"conversations": [{}, {}]},
        {"prompt_tokens": 9, "output_len": 8},
        {"prompt_tokens": 9, "conversations": talks[-1]},
        {"completion_tokens": 9, "conversations": talks[-1]},
    )
    for element in odd:
        for options in ({}, {"tokenizer": len}, {"default_prompt_tokens": 11, "default_output_tokens": 12}):
            yield f"{json.dumps(element)[:70]} {sorted(options)}: {read(json.dumps([element]), **options)}"
            yield f"{json.dumps(element)[:70]} {sorted(options)} a line: {read(json.dumps(element), **options)}"
    for row in (
        {"prompt": "a é b"},
        {"prompt": "", "output_tokens": 5},
        {"prompt": 5},
        {"prompt": "a", "output_len": 0},
    ):
        for options in (
            {},
            {"tokenizer": "bytes:2"},
            {"default_prompt_tokens": 11, "default_output_tokens": 12},
            {"tokenizer": len, "default_output_tokens": 1, "zero_tokens": "one"},
        ):
            yield f"{json.dumps(row)} {list(options)}: {read(json.dumps(row), **options)}"
    for tokenizer in ("bytes:0", "bytes:", "bytes:x", "bytes:1", "bytes:-1", "nowhere", "."):
        yield f"{tokenizer}: {read(json.dumps({'prompt': 'four', 'output_len': 3}), tokenizer=tokenizer)}"
    for text in ("[1", '[{"a"', "[", "[]", "[ , ]", "{", '{"a": 1}', '{"prompt": 1}{"prompt": 2}', "[{}]\n\n\n[5]"):
        yield f"{text!r}: {read(text)}"


TOPICS = {"reading": reading, "naming": naming, "words": words}


def lines(topic: Callable[[], Iterable[str]]) -> list[str]:
    """Of a topic."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), patch.dict(os.environ, {"COLUMNS": "110"}):
        return [short(line, 240) for line in topic()]


if __name__ == "__main__":
    import pinned_requests

    for name, topic in (TOPICS | pinned_requests.TOPICS).items():
        (TRACES / f"{name}.txt").write_text("\n".join(lines(topic)) + "\n")
