"""The values of one row and how a wrong one is told: file, line, field, value, what is wrong, what to do."""

import math
from contextlib import suppress
from pathlib import Path

from traces.errors import TraceError

TIME_UNITS = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}  # how many of them make a second
MOST_SECONDS = 1e12  # 30,000 years
MOST_TOKENS = 10**9  # a longer request is a column taken for another
ZERO_REMEDY = "correct the row, or read it with `--zero-tokens drop` or `--zero-tokens one`"


def shown(value: object, limit: int = 60) -> str:
    """Return `value` as it stands in a message: one line, not longer than `limit` characters."""
    # Values of megabytes are cut before they are written out.
    text = repr(value[:limit] if isinstance(value, str) else value)
    return text if len(text) <= limit else text[: limit - 4] + "..." + text[-1]


class Where:
    """A line of a file: the place that the messages of its fields name."""

    __slots__ = ("line", "path")

    def __init__(self, path: Path, line: int) -> None:
        self.path, self.line = path, line

    def error(self, field: str, value: object, problem: str, remedy: str) -> TraceError:
        """Return the one-line error for `field` holding `value`."""
        return TraceError(f"{self.path}, line {self.line}: {field} {shown(value)} {problem}; {remedy}")

    def number(self, field: str, value: object) -> float:
        """Return `value` (text or a JSON number) as a finite float."""
        try:
            if isinstance(value, bool) or not isinstance(value, str | int | float) or "_" in str(value):
                raise ValueError
            number = float(value)
        except (ValueError, OverflowError):
            raise self.error(field, value, "is not a number", "correct or delete the row") from None
        if not math.isfinite(number):
            raise self.error(field, value, "is not finite", "correct or delete the row")
        return number

    def tokens(self, field: str, value: object, zero_allowed: bool = False) -> int:
        """Return `value` as a token count of at least 1 (0 where `zero_allowed`)."""
        number = self.number(field, value)
        if number != int(number):
            raise self.error(field, value, "is a fraction", "token counts are whole numbers: correct the row")
        if number < 0:
            raise self.error(field, value, "is negative", "token counts start at 1: correct or delete the row")
        if number == 0 and not zero_allowed:
            raise self.error(field, value, "is no request at all", ZERO_REMEDY)
        if number > MOST_TOKENS:
            raise self.error(field, value, f"is more than {MOST_TOKENS:,} tokens", "check which column holds what")
        return int(number)

    def whole(self, field: str, value: object) -> int:
        """Return `value` as a whole number of either sign, with all its digits."""
        number = self.number(field, value)
        if number != int(number):
            raise self.error(field, value, "is a fraction", "write a whole number")
        with suppress(ValueError):
            return int(str(value))
        return int(number)  # as pandas writes them: 2.0


def seconds_divisor(unit: str) -> int:
    """Return how many of `unit` ("s", "ms", "us", "ns") make a second."""
    if unit not in TIME_UNITS:
        raise TraceError(f"time unit {unit!r} is unknown; give one of {', '.join(TIME_UNITS)}")
    return TIME_UNITS[unit]
