"""Writing traces: our own CSV and Mooncake's JSONL, streamed to a temporary file and moved into place when whole."""

import csv
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import TextIO

from traces.errors import TraceError
from traces.request import Request

PLAIN = ("arrival_s", "prompt_tokens", "output_tokens")
FULL = (*PLAIN, "session_id", "hash_ids", "hash_block_tokens", "output_hash_ids", "priority")
_AT_ONCE = 4096


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """Open a text file beside `path` that takes its place when the block ends well, and vanishes when it does not."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        file = temporary.open("w", encoding="utf-8", newline="")
    except OSError as error:
        remedy = "check that its folder exists and can be written"
        raise TraceError(f"{path}: cannot be written ({error.strerror or error}); {remedy}") from None
    try:
        with file:
            yield file
        os.replace(temporary, path)  # noqa: PTH105  (atomic, also onto an existing file)
    except OSError as error:
        raise TraceError(f"{path}: cannot be written ({error.strerror or error}); check space and rights") from None
    finally:
        temporary.unlink(missing_ok=True)


def write_trace(requests: Iterable[Request], path: str | Path) -> int:
    """Write requests to `path` (Mooncake's JSONL where it ends in .jsonl, else our CSV); return how many.

    Reading the CSV back gives the very same requests. Raises `TraceError` where the file cannot be written or there is
    no request.
    """
    path = Path(path)
    with replacing(path) as file:
        count = _write_jsonl(requests, file) if path.suffix == ".jsonl" else _write_csv(requests, file)
        if not count:
            raise TraceError(f"{path}: not written, as no request is left; widen the window or check the input")
    return count


def _write_csv(requests: Iterable[Request], file: TextIO) -> int:
    """Write plain rows as long as no request has more than those columns; from then on, all columns."""
    stream = iter(requests)
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(PLAIN)
    count = 0
    while block := list(islice(stream, _AT_ONCE)):
        if any(r.session_id or r.hash_ids or r.output_hash_ids or r.priority for r in block):
            _widen(file)
            return count + _write_full(chain(block, stream), file)
        file.writelines(f"{r.arrival_s!r},{r.prompt_tokens},{r.output_tokens}\n" for r in block)
        count += len(block)
    return count


def _widen(file: TextIO) -> None:
    """Give the rows written so far the columns that a later request turned out to need."""
    file.flush()
    narrow = Path(file.name)
    wide = narrow.with_suffix(".wide")
    with narrow.open(encoding="utf-8") as source, wide.open("w", encoding="utf-8", newline="") as target:
        next(source)
        target.write(",".join(FULL) + "\n")
        target.writelines(line.rstrip("\n") + ",,,0,,0\n" for line in source)
    # The open file must stay the one that is renamed in the end, so the wide text is copied back into it.
    file.seek(0)
    with wide.open(encoding="utf-8", newline="") as source:
        file.writelines(source)
    wide.unlink()


def _write_full(requests: Iterable[Request], file: TextIO) -> int:
    writer = csv.writer(file, lineterminator="\n")
    count = 0
    for count, request in enumerate(requests, 1):  # noqa: B007  (the count is the result)
        _, arrival_s, prompt, output, session, hashes, block, output_hashes, priority = request
        if "\n" in session or "\r" in session:
            raise TraceError(f"request {request.request_id}: session_id {session!r} holds a line break; rename it")
        names, output_names = (" ".join(map(str, ids)) for ids in (hashes, output_hashes))
        writer.writerow((repr(arrival_s), prompt, output, session, names, block, output_names, priority))
    return count


def _write_jsonl(requests: Iterable[Request], file: TextIO) -> int:
    """Write Mooncake's keys; times in milliseconds, whole where they are. Output ids and priorities go beside them.

    The format has no place for sessions nor for the tokens of a hash block: sessions are left out, and blocks of other
    than Mooncake's 512 tokens need `--hash-block-tokens` when the file is read.
    """
    count = 0
    for count, request in enumerate(requests, 1):  # noqa: B007
        milliseconds = round(request.arrival_s * 1000, 6)
        row: dict[str, object] = {
            "timestamp": int(milliseconds) if milliseconds.is_integer() else milliseconds,
            "input_length": request.prompt_tokens,
            "output_length": request.output_tokens,
        }
        if request.hash_ids:
            row["hash_ids"] = request.hash_ids
        if request.output_hash_ids:
            row["output_hash_ids"] = request.output_hash_ids
        if request.priority:
            row["priority"] = request.priority
        file.write(json.dumps(row) + "\n")
    return count
