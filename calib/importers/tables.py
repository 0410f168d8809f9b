"""Reading other people's CSV tables: columns by name, cells as numbers, faults named."""

import csv
from collections.abc import Sequence
from pathlib import Path

from calib.samples import read_text
from sim.errors import UserError


class Table:
    """A CSV file with a header; `line` counts from the top of the file."""

    def __init__(self, path: Path, required: Sequence[str]) -> None:
        self.path = path
        rows = [row for row in csv.reader(read_text(path).splitlines()) if row]
        if not rows:
            raise UserError(f"{path}: is empty: give a CSV file with a header")
        self.columns = {name.strip(): i for i, name in enumerate(rows[0])}
        self.rows = rows[1:]
        for name in required:
            if name not in self.columns:
                raise UserError(f"{path}: column {name!r} is missing: is this the right table? it has {self._shown()}")
        for i, row in enumerate(self.rows):
            if len(row) != len(rows[0]):
                raise UserError(f"{path}: line {i + 2}: {len(row)} values for {len(rows[0])} columns: repair the file")

    def _shown(self) -> str:
        names = list(self.columns)
        return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")

    def __len__(self) -> int:
        return len(self.rows)

    def text(self, row: int, column: str) -> str:
        """A cell as it stands; empty where the table has no such column."""
        index = self.columns.get(column)
        return "" if index is None else self.rows[row][index].strip()

    def number(self, row: int, column: str, default: float | None = None) -> float:
        """A cell as a number; `default` where it is empty or the column is absent."""
        cell = self.text(row, column)
        if cell == "" and default is not None:
            return default
        try:
            return float(cell)
        except ValueError as error:
            raise UserError(f"{self.path}: line {row + 2}: {column} = {cell!r} is not a number: correct it") from error

    def integer(self, row: int, column: str, default: int | None = None) -> int:
        """A cell as a whole number."""
        value = self.number(row, column, default)
        if value != int(value):
            raise UserError(f"{self.path}: line {row + 2}: {column} = {value} is not a whole number: correct it")
        return int(value)
