"""Samples of single kernels, beside those of whole layers: gzipped CSV with a struct's fields as columns."""

import csv
import gzip
from collections.abc import Iterable, Mapping
from io import StringIO
from pathlib import Path
from typing import TypeVar

import msgspec

from sim.errors import UserError
from sim.files import write_atomically

T = TypeVar("T", bound=msgspec.Struct)


def write_kernel_samples(path: Path, samples: Iterable[msgspec.Struct], comments: Mapping[str, str]) -> None:
    """Write samples of one kind gzipped, whole or not at all; `comments` become lines `# key: value`."""
    rows = list(samples)
    text = StringIO()
    text.writelines(f"# {key}: {value}\n" for key, value in comments.items())
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(rows[0].__struct_fields__)
    writer.writerows(msgspec.structs.astuple(row) for row in rows)
    write_atomically(path, lambda file: file.write(gzip.compress(text.getvalue().encode(), mtime=0)))


def read_kernel_samples(path: Path, kind: type[T], what: str) -> list[T]:
    """The samples of a file that `write_kernel_samples` wrote. UserError for one that holds no samples of `what`."""
    try:
        lines = [line for line in gzip.decompress(path.read_bytes()).decode().splitlines() if line[:1] != "#"]
        return msgspec.convert(list(csv.DictReader(lines)), list[kind], strict=False)
    except (OSError, EOFError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise UserError(
            f"{path}: holds no samples of {what} ({error}): give a gzipped CSV with their columns"
        ) from error
