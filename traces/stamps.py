"""Date stamps of the Azure traces, kept to all their seven fraction digits.

`datetime` keeps six, and pandas gives 2023's stamps nanoseconds and 2024's microseconds, so stamps are read here: as
ticks of 100 ns, exact in a float for some 28 years around the first day seen.
"""

import re
from collections.abc import Iterable
from datetime import date

TICKS_PER_S = 10_000_000
# Ticks of the first day start here, not at 0: adding seconds times 1e7 (which may miss a whole number by 1e-7) to a
# number this large rounds to the whole tick, so that differences of stamps are exact decimals.
_FIRST_DAY = 1e13
_MINUTE = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T]([01]\d|2[0-3]):([0-5]\d):", re.ASCII)
_SECONDS = re.compile(r"(?:[0-5]\d(?:\.\d{1,9})?\n)+", re.ASCII)
_SECOND = re.compile(r"([0-5]\d(?:\.\d{1,9})?) ?(Z|UTC|([+-])(\d\d):?(\d\d))?", re.ASCII)


class StampClock(dict[str, float]):
    """Ticks of each minute met so far, keyed by the stamp's text up to the seconds; one clock per reading of a file."""

    def __init__(self) -> None:
        self._first_day: int | None = None

    def __missing__(self, minute: str) -> float:
        match = _MINUTE.fullmatch(minute)
        if match is None:
            raise ValueError(minute)
        year, month, day, hours, minutes = map(int, match.groups())
        ordinal = date(year, month, day).toordinal()
        if self._first_day is None:
            self._first_day = ordinal
        elapsed_s = (ordinal - self._first_day) * 86_400 + hours * 3_600 + minutes * 60
        self[minute] = ticks = _FIRST_DAY + elapsed_s * TICKS_PER_S
        return ticks

    def ticks(self, stamps: Iterable[str]) -> list[float]:
        """Return the ticks of stamps that carry no zone (or whose zone was cut off). Raises `ValueError`."""
        seconds = [stamp[17:] for stamp in stamps]
        if not _SECONDS.fullmatch("\n".join(seconds) + "\n"):
            raise ValueError("seconds are not written as they should be")
        return [self[stamp[:17]] + float(second) * TICKS_PER_S for stamp, second in zip(stamps, seconds, strict=True)]

    def tick(self, stamp: str) -> float:
        """Return the ticks of one stamp, with or without a zone. Raises `ValueError`."""
        match = _SECOND.fullmatch(stamp[17:])
        if match is None:
            raise ValueError(stamp)
        ticks = self[stamp[:17]] + float(match[1]) * TICKS_PER_S
        if match[3] is None:
            return ticks
        offset_s = int(match[4]) * 3_600 + int(match[5]) * 60
        return ticks - (offset_s if match[3] == "+" else -offset_s) * TICKS_PER_S
