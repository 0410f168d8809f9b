"""A CSV of runs that goes on where it was stopped: what it has already is not run again."""

import csv
import io
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TypeVar

from rich.progress import track

from sim.files import write_atomically

Piece = TypeVar("Piece", bound=Hashable)
Name = TypeVar("Name", bound=Hashable)
Row = Mapping[str, object]


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV; none where there is no such file."""
    return list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []


def write(path: Path, rows: Sequence[Row]) -> None:
    """All rows, at once."""
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    write_atomically(path, lambda file: file.write(text.getvalue().encode()))


def run_missing(
    path: Path,
    asked: Mapping[Piece, Sequence[Name]],
    name_of: Callable[[Mapping[str, str]], tuple[Piece, Name]],
    run: Callable[[Piece, Sequence[Name]], list[dict[str, object]]],
    workers: int = 1,
) -> None:
    """Run of each piece what `path` lacks, and write it there piece by piece, in the order of `asked`.

    Args:
        path: the CSV.
        asked: what is to be run of each piece, by name.
        name_of: what a row of the CSV is of.
        run: rows of a piece, one for each of the names that it is given, in their order.
        workers: processes.
    """
    found: dict[tuple[Piece, Name], Row] = {name_of(row): row for row in read(path)}
    order = dict.fromkeys((piece, name) for piece, names in asked.items() for name in names)
    with ProcessPoolExecutor(workers) as pool:
        futures: dict[Future[list[dict[str, object]]], tuple[Piece, list[Name]]] = {}
        for piece, names in asked.items():
            if missing := [name for name in names if (piece, name) not in found]:
                futures[pool.submit(run, piece, missing)] = piece, missing
        for future in track(as_completed(futures), description="cells", total=len(futures)):
            piece, missing = futures[future]
            found |= {(piece, name): row for name, row in zip(missing, future.result(), strict=False)}
            keys = [*(key for key in order if key in found), *(key for key in found if key not in order)]
            write(path, [found[key] for key in keys])
