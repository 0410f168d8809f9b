"""A figure of each request that ended, beyond what memory should hold of them in a temporary file."""

from array import array
from collections.abc import Sequence
from io import FileIO
from typing import Literal

FEW = 1 << 16
"""So many values are sorted sooner than numpy is imported; of more it sorts them in place."""


class Column:
    """Floats in order: those in memory after those spilled.

    Attributes:
        append: adds one.
    """

    __slots__ = ("_file", "_recent", "_spilled_bytes", "append")

    def __init__(self, typecode: Literal["d", "f"]) -> None:
        self._recent = array(typecode)
        self.append = self._recent.append
        self._file: FileIO | None = None
        self._spilled_bytes = 0

    def spill(self) -> bool:
        """Write them to the file; False where that cannot be, and all stay in memory from now on."""
        from tempfile import TemporaryFile  # noqa: PLC0415 - most runs are short

        size = len(self._recent) * self._recent.itemsize
        try:
            if self._file is None:
                self._file = TemporaryFile(buffering=0)  # noqa: SIM115 - it goes with the column
            is_whole = self._file.write(self._recent) == size
        except OSError:
            return False
        if is_whole:
            self._spilled_bytes += size
            del self._recent[:]
        return is_whole

    def whole(self) -> "array[float]":
        """All of them, as an array of its own."""
        if self._file is None:
            return self._recent[:]
        code = self._recent.typecode
        found = array(code, [0.0]) * (self._spilled_bytes // self._recent.itemsize + len(self._recent))
        view, done = memoryview(found).cast("B"), 0
        self._file.seek(0)
        while done < self._spilled_bytes:
            done += self._file.readinto(view[done : self._spilled_bytes])
        view[done:] = memoryview(self._recent).cast("B")
        return found


def in_order(values: "array[float]") -> Sequence[float]:
    """The values in ascending order, which may be the array itself."""
    if len(values) <= FEW:
        return sorted(values)
    import numpy as np  # noqa: PLC0415 - takes longer to import than few values to sort

    np.frombuffer(values, values.typecode).sort()
    return values
