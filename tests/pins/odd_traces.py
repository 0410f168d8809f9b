"""Files of traces, usual and odd: what is read of them is pinned, and does not depend on the way of reading."""

import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from pinned import rounded

from traces.errors import TraceError
from traces.readers import open_trace

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
    "", "05.5", "05.4999999", "-1", "-0.0", "0", "x", "nan", "inf", "1_0", " 07 ", '"08"', "59.9999999", "60", "1e12",
    "1.1e12", "1e400", "true", "[]",
)  # fmt: skip
TOKENS = (
    "", "0", "-0", "0.0", "1", "1.0", "-1", "1.5", "1e3", "nan", "Infinity", "1_0", " 7 ", '"7"', "1000000000",
    "1000000001", "1e400", "true", "null", '"x"',
)  # fmt: skip


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
