"""Writing traces: our own CSV and Mooncake's JSONL, streamed to a temporary file and put into place when whole."""

import csv
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TextIO, cast

from traces.errors import TraceError
from traces.rare_fields import RARE_FIELDS, RARE_NAMES
from traces.request import Request

PLAIN = ("arrival_s", "prompt_tokens", "output_tokens")
FULL = (*PLAIN, "session_id", "hash_ids", "hash_block_tokens", "output_hash_ids", "priority")
COLUMNS = (PLAIN, *((*FULL, *RARE_NAMES[:count]) for count in range(len(RARE_NAMES) + 1)))
"""A row that needs a rare field's column has those before it, too."""
_EMPTY = (",,,0,,0", *([","] * len(RARE_NAMES)))
"""What a row has in the columns that the next of `COLUMNS` has more."""
_AT_ONCE = 4096
_CHARS_AT_ONCE = 1 << 16


STANDARD_OUTPUT = Path("-")


@contextmanager
def writing(path: Path) -> Iterator[TextIO]:
    """Open a text file for reading back and writing, whose text goes to `path` when the block ends well.

    A file is replaced whole, the one that a symbolic link names too. Devices, pipes and standard output (`-`) are
    written through. Raises `TraceError`.
    """
    try:
        if path == STANDARD_OUTPUT:
            if sys.stdout is None:
                raise TraceError("-: standard output is closed; name a file")
            with _spooled(sys.stdout) as file:
                yield file
        elif path.exists() and not path.is_file() and not path.is_dir():
            # Opened before the work, as a shell does: a reader at the other end sees a writer.
            with path.open("w", encoding="utf-8", newline="") as sink, _spooled(sink) as file:
                yield file
        else:
            with _replacing(path.resolve()) as file:
                yield file
    except BrokenPipeError:
        raise
    except (OSError, RuntimeError) as error:  # RuntimeError: before Python 3.13, symbolic links in a circle
        reason = getattr(error, "strerror", None) or error
        remedy = "check that its folder exists, its rights and the space left"
        raise TraceError(f"{path}: cannot be written ({reason}); {remedy}") from None


@contextmanager
def _spooled(sink: TextIO) -> Iterator[TextIO]:
    """Text that may be rewritten until it is whole, for where nothing can be taken back."""
    with _scratch() as file:
        yield file
        file.seek(0)
        _copy(file, sink)
        sink.flush()


def _scratch() -> TextIO:
    from tempfile import TemporaryFile  # noqa: PLC0415 - every command imports this module

    return cast(TextIO, TemporaryFile("w+", encoding="utf-8", newline=""))


def _copy(source: TextIO, target: TextIO) -> None:
    while block := source.read(_CHARS_AT_ONCE):
        target.write(block)


@contextmanager
def _replacing(path: Path) -> Iterator[TextIO]:
    """A file beside `path` that takes its place when the block ends well, and vanishes when it does not."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("w+", encoding="utf-8", newline="") as file:
            yield file
        os.replace(temporary, path)  # noqa: PTH105  (atomic, also onto an existing file)
    finally:
        temporary.unlink(missing_ok=True)


def write_trace(requests: Iterable[Request], path: str | Path) -> int:
    """Write requests to `path` (Mooncake's JSONL where it ends in .jsonl, else our CSV; `-`: standard output).

    Returns how many. Reading the CSV back gives the very same requests. Raises `TraceError` where the file cannot be
    written or there is no request.
    """
    path = Path(path)
    with writing(path) as file:
        count = _write_jsonl(requests, file) if path.suffix == ".jsonl" else _write_csv(requests, file)
        if not count:
            raise TraceError(f"{path}: not written, as no request is left; widen the window or check the input")
    return count


def _write_csv(requests: Iterable[Request], file: TextIO) -> int:
    """Write the fewest of `COLUMNS` that all requests so far need; from the first that needs more on, more."""
    stream = iter(requests)
    csv.writer(file, lineterminator="\n").writerow(PLAIN)
    count = level = 0
    while block := list(islice(stream, _AT_ONCE)):
        needed = max(map(_level, block))
        while level < needed:
            _widen(file, level)
            level += 1
        if level:
            _write_rows(block, file, len(COLUMNS[level]))
        else:
            file.writelines(f"{r.arrival_s!r},{r.prompt_tokens},{r.output_tokens}\n" for r in block)
        count += len(block)
    return count


def _level(request: Request) -> int:
    """Which of `COLUMNS` a request needs."""
    for count, value in zip(range(len(RARE_NAMES), 0, -1), reversed(request), strict=False):
        if value not in ((), None, ""):
            return count + 1
    return int(bool(request.session_id or request.hash_ids or request.output_hash_ids or request.priority))


def _widen(file: TextIO, level: int) -> None:
    """Give the rows written so far the columns that a later request turned out to need."""
    file.seek(0)
    next(file)
    with _scratch() as wide:
        wide.write(",".join(COLUMNS[level + 1]) + "\n")
        wide.writelines(line.rstrip("\n") + _EMPTY[level] + "\n" for line in file)
        # The open file must stay the one that takes the path's place, so the wide text is copied back into it.
        file.seek(0)
        wide.seek(0)
        _copy(wide, file)


def _write_rows(requests: Iterable[Request], file: TextIO, num_columns: int) -> None:
    writer = csv.writer(file, lineterminator="\n")
    for request in requests:
        _, arrival_s, prompt, output, session, hashes, block, output_hashes, priority = request[:9]
        for field, name in (("session_id", session), (RARE_NAMES[-1], request.lora)):
            if "\n" in name or "\r" in name:
                raise TraceError(f"request {request.request_id}: {field} {name!r} holds a line break; rename it")
        names, output_names = (" ".join(map(str, ids)) for ids in (hashes, output_hashes))
        row = (repr(arrival_s), prompt, output, session, names, block, output_names, priority)
        pairs = zip(RARE_FIELDS, request[9:], strict=True)
        told = ("" if value is None else field.cell(value) for field, value in pairs)
        writer.writerow((*row, *told)[:num_columns])


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
        for field, value in zip(RARE_FIELDS, request[9:], strict=True):
            if value not in ((), None, ""):
                row[field.name] = field.json(value)
        file.write(json.dumps(row) + "\n")
    return count
