"""Writing results: atomically, and rows as they come."""

from argparse import ArgumentTypeError
from array import array
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from struct import pack
from typing import IO, Any

import msgspec

from sim.errors import UserError

FLUSH_ROWS = 4096


def out_folder(text: str) -> Path:
    """What `--out` names, for argparse; nothing is not the folder one stands in."""
    if not text:
        raise ArgumentTypeError("'' names no folder; . is this one")
    return Path(text)


def make_folder(path: Path, flag: str) -> Path:
    """Create a folder for results; a file in its place is the user's error."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{flag}: cannot create folder {path} ({error.strerror}); name another") from error
    return path


MOST_TEXT_BYTES = 1 << 26
"""Of what is no regular file: pipes and devices may have no end."""


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, a byte-order mark at its begin left out.

    Raises:
        UserError: something without end, or not UTF-8.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        data = file.read() if path.is_file() else file.read(MOST_TEXT_BYTES + 1)
    if len(data) > MOST_TEXT_BYTES and not path.is_file():
        raise UserError(f"{path}: more than {MOST_TEXT_BYTES >> 20} MiB came from it: name a file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}): save it as UTF-8") from error


def without_links(path: Path) -> Path:
    """The place that a path names, whatever symbolic links lead there. UserError where they lead in a circle."""
    try:
        place = path.resolve()
    except RuntimeError:  # before Python 3.13
        place = path
    if place.is_symlink():
        raise UserError(f"{path}: its symbolic links lead in a circle; name another place")
    return place


def write_atomically(path: Path, content: bytes | Callable[[IO[bytes]], object]) -> None:
    """Write a file whole or not at all: a reader never sees half of it. `content` is bytes, or writes into a file.

    The file that a symbolic link names is replaced, not the link. Pipes and devices are written through.
    """

    def write(file: IO[bytes]) -> None:
        if isinstance(content, bytes):
            file.write(content)
        else:
            content(file)

    path = without_links(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        with path.open("wb") as file:
            write(file)
        return
    partial = path.with_name(path.name + ".part")
    try:
        with partial.open("wb") as file:
            write(file)
        partial.replace(path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            # Writing tells the reason alone.
            error.filename = str(path)
        raise


def folder_name(label: str) -> str:
    """A policy's label as a folder name."""
    return "".join(c if c.isalnum() or c in "-_.=," else "_" for c in label)


class CsvTable:
    """Rows to a CSV file as they come; complete lines only, so that an interrupted run leaves a readable file."""

    def __init__(self, path: Path, columns: Sequence[str], flush_rows: int = FLUSH_ROWS) -> None:
        self.path = path
        self._flush_rows = flush_rows
        self._file = path.open("wb")
        self._file.write(",".join(columns).encode() + b"\n")
        self._file.flush()
        self._encoder = msgspec.json.Encoder()
        self._rows: list[tuple[object, ...]] = []

    def write(self, row: tuple[object, ...]) -> None:
        """Append a row of numbers and plain words."""
        self._rows.append(row)
        if len(self._rows) >= self._flush_rows:
            self._flush()

    def _flush(self) -> None:
        # A JSON array of numbers and words, brackets off, is a CSV record; this encoder is the fastest at hand.
        if self._rows:
            self._file.write(self._encoder.encode(self._rows)[2:-2].replace(b"],[", b"\n") + b"\n")
        self._rows.clear()
        self._file.flush()

    def close(self) -> None:
        """Write what is buffered."""
        self._flush()
        self._file.close()


class InOrder:
    """Rows in order of their first values, 0, 1, 2 and so on, however they come: those that come early are held."""

    def __init__(self, table: "CsvTable | ParquetTable") -> None:
        self._table = table
        self._next = 0
        self._held: dict[int, tuple[object, ...]] = {}

    def write(self, row: tuple[Any, ...]) -> None:
        """Take a row, and write those that are due."""
        held = self._held
        held[row[0]] = row
        while (due := held.pop(self._next, None)) is not None:
            self._table.write(due)
            self._next += 1

    def close(self) -> None:
        """Write what is held, whatever is missing before it."""
        for _, row in sorted(self._held.items()):
            self._table.write(row)
        self._held.clear()
        self._table.close()


class ParquetTable:
    """Rows to a Parquet file (zstd) in row groups; needs pyarrow (the extra `parquet`).

    Columns are int64, float64 or text as the first row has them. They are built from buffers: `pyarrow.array` would
    import pandas wherever it is installed.
    """

    ROWS_PER_GROUP = 65536

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        # Optional, and slow to import.
        self._pa: Any = import_module("pyarrow")
        self._parquet: Any = import_module("pyarrow.parquet")
        self.path = path
        self._columns = list(columns)
        self._types: list[type] = []
        self._rows: list[tuple[Any, ...]] = []
        self._writer: Any = None

    def write(self, row: tuple[object, ...]) -> None:
        """Append a row."""
        self._rows.append(row)
        if len(self._rows) >= self.ROWS_PER_GROUP:
            self._flush()

    def _flush(self) -> None:
        pa = self._pa
        if self._rows and not self._types:
            self._types = [type(value) for value in self._rows[0]]
        if self._rows:
            columns = [*map(self._column, self._types, zip(*self._rows, strict=True))]
        else:
            columns = [pa.nulls(0) for _ in self._columns]
        table = pa.Table.from_arrays(columns, names=self._columns)
        if self._writer is None:
            # Numbers are told apart: a dictionary of them takes time and room.
            words = [name for name, kind in zip(self._columns, self._types, strict=False) if kind is str]
            self._writer = self._parquet.ParquetWriter(
                str(self.path), table.schema, compression="zstd", use_dictionary=words
            )
        self._writer.write_table(table)
        self._rows.clear()

    def _column(self, kind: type, values: tuple[Any, ...]) -> Any:  # noqa: ANN401 - a pyarrow.Array
        pa = self._pa
        if kind is not str:
            typed, code = (pa.int64(), "q") if kind is int else (pa.float64(), "d")
            packed = pack(f"{len(values)}{code}", *values)
            return pa.Array.from_buffers(typed, len(values), [None, pa.py_buffer(packed)])
        words = [value.encode() for value in values]
        ends = array("i", accumulate(map(len, words), initial=0))
        return pa.Array.from_buffers(pa.utf8(), len(words), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(words))])

    def close(self) -> None:
        """Write what is buffered and the footer."""
        if self._rows or self._writer is None:
            self._flush()
        if self._writer is not None:
            self._writer.close()
