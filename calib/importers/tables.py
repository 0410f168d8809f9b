"""Reading other people's CSV tables: columns by name, cells as numbers, faults named."""

import csv
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path

from calib.samples import read_text
from sim.errors import UserError


class Table:
    """A CSV file with a header, of words and of numbers that are never negative; `lines` are those of the file."""

    def __init__(self, path: Path, required: Sequence[str]) -> None:
        self.path = path
        reader = csv.reader(read_text(path).splitlines())
        try:
            found = [(reader.line_num, row) for row in reader if row]
        except csv.Error as error:
            raise UserError(f"{path}: line {reader.line_num}: not CSV ({error}): repair the file") from error
        if not found:
            raise UserError(f"{path}: is empty: give a CSV file with a header")
        self.lines, rows = [line for line, _ in found[1:]], [row for _, row in found]
        self.columns = {name.strip(): i for i, name in enumerate(rows[0])}
        self.rows = rows[1:]
        for name in required:
            if name not in self.columns:
                raise UserError(f"{path}: column {name!r} is missing: is this the right table? it has {self._shown()}")
        for line, row in zip(self.lines, self.rows, strict=True):
            if len(row) != len(rows[0]):
                raise UserError(f"{path}: line {line}: {len(row)} values for {len(rows[0])} columns: repair the file")

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
            value = float(cell)
        except ValueError as error:
            raise UserError(f"{self._place(row)}: {column} = {cell!r} is not a number: correct it") from error
        if not isfinite(value) or value < 0:
            raise UserError(f"{self._place(row)}: {column} = {cell!r} is not a finite number of 0 or more: correct it")
        return value

    def integer(self, row: int, column: str, default: int | None = None) -> int:
        """A cell as a whole number."""
        value = self.number(row, column, default)
        if value != int(value):
            raise UserError(f"{self._place(row)}: {column} = {value} is not a whole number: correct it")
        return int(value)

    def _place(self, row: int) -> str:
        return f"{self.path}: line {self.lines[row]}"


def at_tokens(curve: Mapping[int, float], tokens: int) -> float | None:
    """Seconds at a number of tokens, linearly between its neighbours; None outside the curve."""
    near = neighbours(tokens, sorted(curve))
    return sum(weight * curve[point] for point, weight in near) if near else None


def neighbours(value: int, grid: Sequence[int]) -> Sequence[tuple[int, float]]:
    """Grid values around `value` with the weights of linear interpolation; none outside the ascending grid."""
    if value in grid:
        return ((value, 1.0),)
    above = bisect_left(grid, value)
    if above in (0, len(grid)):
        return ()
    low, high = grid[above - 1], grid[above]
    weight = (value - low) / (high - low)
    return ((low, 1 - weight), (high, weight))
