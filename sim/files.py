"""Writing results: atomically, and rows as they come."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import msgspec

from sim.errors import UserError

FLUSH_ROWS = 4096


def make_folder(path: Path, flag: str) -> Path:
    """Create a folder for results; a file in its place is the user's error."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{flag}: cannot create folder {path} ({error.strerror}); name another") from error
    return path


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file whole or not at all: a reader never sees half of it."""
    partial = path.with_name(path.name + ".part")
    with partial.open("wb") as file:
        write(file)
    partial.replace(path)


class CsvTable:
    """Rows to a CSV file as they come; complete lines only, so that an interrupted run leaves a readable file."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        self._file = path.open("wb")
        self._file.write(",".join(columns).encode() + b"\n")
        self._encoder = msgspec.json.Encoder()
        self._rows: list[tuple[object, ...]] = []

    def write(self, row: tuple[object, ...]) -> None:
        """Append a row of numbers and plain words."""
        self._rows.append(row)
        if len(self._rows) >= FLUSH_ROWS:
            self._flush()

    def _flush(self) -> None:
        # A JSON array of numbers and words, brackets off, is a CSV record; this encoder is the fastest at hand.
        encode = self._encoder.encode
        self._file.write(b"".join([encode(row)[1:-1] + b"\n" for row in self._rows]))
        self._rows.clear()
        self._file.flush()

    def close(self) -> None:
        """Write what is buffered."""
        self._flush()
        self._file.close()


class ParquetTable:
    """Rows to a Parquet file (zstd) in row groups; needs pyarrow (the extra `parquet`)."""

    ROWS_PER_GROUP = 65536

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        import pyarrow  # noqa: PLC0415 - optional, and slow to import
        import pyarrow.parquet  # noqa: PLC0415

        self.path = path
        self._pa = pyarrow
        self._columns = list(columns)
        self._rows: list[tuple[object, ...]] = []
        self._writer: pyarrow.parquet.ParquetWriter | None = None

    def write(self, row: tuple[object, ...]) -> None:
        """Append a row."""
        self._rows.append(row)
        if len(self._rows) >= self.ROWS_PER_GROUP:
            self._flush()

    def _flush(self) -> None:
        columns = zip(*self._rows, strict=True) if self._rows else ([] for _ in self._columns)
        table = self._pa.table(dict(zip(self._columns, map(list, columns), strict=True)))
        if self._writer is None:
            self._writer = self._pa.parquet.ParquetWriter(str(self.path), table.schema, compression="zstd")
        self._writer.write_table(table)
        self._rows.clear()

    def close(self) -> None:
        """Write what is buffered and the footer."""
        if self._rows or self._writer is None:
            self._flush()
        if self._writer is not None:
            self._writer.close()
