"""A figure of each request that ended, beyond what memory should hold of them in a temporary file."""

from array import array
from collections.abc import Sequence
from io import FileIO
from struct import calcsize, pack
from typing import Literal

FEW = 1 << 16
"""So many values are in a list; and they are sorted sooner than numpy is imported, which sorts more in place."""


class Column:
    """Floats in order: those spilled, those packed as the file has no room, and the last, which are a list.

    Attributes:
        recent: the last; a new one is appended. An array parses each as an argument of a call.
    """

    __slots__ = ("_code", "_file", "_has_room", "_packed", "_spilled_bytes", "recent")

    def __init__(self, typecode: Literal["d", "f"]) -> None:
        self._code = typecode
        self.recent: list[float] = []
        self._packed = bytearray()
        self._file: FileIO | None = None
        self._has_room = True
        self._spilled_bytes = 0

    def spill(self) -> None:
        """Write the list to the file; where that cannot be, pack it, now and from now on."""
        from tempfile import TemporaryFile  # noqa: PLC0415 - most runs are short

        self._packed += pack(f"{len(self.recent)}{self._code}", *self.recent)
        self.recent.clear()
        if not self._has_room:
            return
        try:
            if self._file is None:
                self._file = TemporaryFile(buffering=0)  # noqa: SIM115 - it goes with the column
            self._has_room = self._file.write(self._packed) == len(self._packed)
        except OSError:
            self._has_room = False
        if self._has_room:
            self._spilled_bytes += len(self._packed)
            self._packed.clear()

    def whole(self) -> "array[float]":
        """All of them, as an array of its own."""
        last = self._packed + pack(f"{len(self.recent)}{self._code}", *self.recent)
        found = array(self._code, [0.0]) * ((self._spilled_bytes + len(last)) // calcsize(self._code))
        view, done = memoryview(found).cast("B"), 0
        if self._file is not None:
            self._file.seek(0)
            while done < self._spilled_bytes:
                done += self._file.readinto(view[done : self._spilled_bytes])
        view[done:] = last
        return found


def in_order(values: "array[float]") -> Sequence[float]:
    """The values in ascending order, which may be the array itself."""
    if len(values) <= FEW:
        return sorted(values)
    import numpy as np  # noqa: PLC0415 - takes longer to import than few values to sort

    np.frombuffer(values, values.typecode).sort()
    return values
