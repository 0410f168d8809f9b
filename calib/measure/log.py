"""`PointLog`: what has been measured so far, one durable line a point, so that a killed run resumes where it was."""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from calib.measure.capacity import Capacity
from calib.measure.points import Point
from sim.errors import UserError


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="line", tag="header"):
    """The first line: what must not change when the run resumes.

    Attributes:
        settings: of the run and of the machine; another run with other ones is refused.
        limits: what the plan was made from.
        begun: date and time (UTC) of the first start.
    """

    settings: dict[str, str]
    limits: Capacity
    begun: str


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="line", tag="point"):
    """A point, the seconds of its repeats in the order they were taken, and the device's readings at the end."""

    point: Point
    repeats_s: list[float]
    readings: dict[str, float] = {}


class Skipped(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="line", tag="skipped"):
    """A point that could not be measured, and why."""

    point: Point
    reason: str


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="line", tag="note"):
    """The state of the machine before or after a stretch of measuring."""

    when: str
    state: dict[str, str | float]


Line = Header | Measured | Skipped | Note


class PointLog:
    """The log of one folder.

    Attributes:
        header: its first line.
        measured: repeats in seconds by point, in the order of measuring.
        readings: of the device at the end of each, where it told any.
        skipped: reasons by point.
        notes: states of the machine.
    """

    def __init__(self, path: Path, header: Header) -> None:
        """Open a log, or begin it with `header`.

        Raises:
            UserError: the log is of another run: it names each setting that differs; or it is damaged.
        """
        self.path = path
        self.header = header
        self.measured: dict[Point, list[float]] = {}
        self.readings: dict[Point, dict[str, float]] = {}
        self.skipped: dict[Point, str] = {}
        self.notes: list[Note] = []
        whole = self._read()
        self._file = path.open("r+b" if path.exists() else "wb")
        # A line without its end was being written when the run was killed.
        self._file.truncate(whole)
        self._file.seek(whole)
        if not whole:
            self._append(header)

    def _read(self) -> int:
        """Take the file's lines in; returns the bytes of all whole lines."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read ({error.strerror}): give another --out") from error
        whole = data[: data.rfind(b"\n") + 1]
        decoder = msgspec.json.Decoder(Line)
        for number, text in enumerate(whole.splitlines(), start=1):
            try:
                line = decoder.decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise self._damaged(number, str(error)) from error
            if isinstance(line, Header) != (number == 1):
                raise self._damaged(number, "a header belongs on line 1 and nowhere else")
            self._take(line)
        return len(whole)

    def _damaged(self, number: int, reason: str) -> UserError:
        return UserError(
            f"{self.path}: line {number}: {reason}: delete the file to measure anew, or give another --out"
        )

    def _take(self, line: Line) -> None:
        if isinstance(line, Header):
            self._check(line.settings)
            self.header = line
        elif isinstance(line, Measured):
            self.measured[line.point] = line.repeats_s
            if line.readings:
                self.readings[line.point] = line.readings
        elif isinstance(line, Skipped):
            self.skipped[line.point] = line.reason
        else:
            self.notes.append(line)

    def _check(self, recorded: Mapping[str, str]) -> None:
        now = self.header.settings
        names = [name for name in {**recorded, **now} if recorded.get(name) != now.get(name)]
        if names:
            what = "; ".join(
                f"{name} was {recorded.get(name, 'absent')}, is {now.get(name, 'absent')}" for name in names
            )
            raise UserError(f"{self.path}: holds another calibration ({what}): give another --out")

    def has(self, point: Point) -> bool:
        """Whether a point is done with: measured, or skipped."""
        return point in self.measured or point in self.skipped

    def add(self, line: Measured | Skipped | Note) -> None:
        """Write a line, so that it survives whatever happens next."""
        self._take(line)
        self._append(line)

    def _append(self, line: Line) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()
