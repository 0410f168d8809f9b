"""The frame of every line-by-line reader: blocks of rows read at once, and row by row where a block is unusual.

A reader says how a block of lines becomes columns (`fast`, which may fail on anything it does not expect) and how one
line becomes a row (`row`, which names whatever is wrong with it). The frame joins them: a block that `fast` refuses,
or whose values are not plainly right, is read again row by row, so the common case costs about a microsecond a row and
the wrong case still ends in one line that names file, line, field, value and remedy.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import compress, islice, repeat
from math import inf, isfinite
from operator import le
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from traces.errors import TraceError
from traces.fields import MOST_SECONDS, MOST_TOKENS, TIME_UNITS, Where, seconds_divisor
from traces.files import text_blocks
from traces.rates import check_count
from traces.request import Image, Request, ToolCall, as_request
from traces.slos import SLOs

ZeroTokens = Literal["error", "drop", "one"]
ZERO_TOKENS: tuple[ZeroTokens, ...] = ("error", "drop", "one")


class ReadOptions(msgspec.Struct, frozen=True):
    """How a trace is to be read; `traces.readers.open_trace` explains each."""

    time_unit: str | None = None
    hash_block_tokens: int | None = None
    sort: bool = False
    zero_tokens: ZeroTokens = "error"
    tokenizer: Callable[[str], int] | None = None
    default_prompt_tokens: int | None = None
    default_output_tokens: int | None = None
    sharegpt_filter: bool = True
    needs_times: bool = True

    def __post_init__(self) -> None:
        if self.time_unit is not None:
            seconds_divisor(self.time_unit)
        if self.zero_tokens not in ZERO_TOKENS:
            raise TraceError(f"zero_tokens {self.zero_tokens!r} is unknown; give one of {', '.join(ZERO_TOKENS)}")
        for name in ("hash_block_tokens", "default_prompt_tokens", "default_output_tokens"):
            value = getattr(self, name)
            if value is not None:
                check_count(name, value)


class Columns(NamedTuple):
    """Some rows of a trace, column by column. An empty optional column stands for "none has one"."""

    times: list[float]  # as the file counts them; seconds after the first request once `Reader.columns` yields them
    prompts: list[int]
    outputs: list[int]
    sessions: Sequence[str] = ()
    hashes: Sequence[tuple[int, ...]] = ()
    blocks: Sequence[int] = ()  # tokens of a hash block
    output_hashes: Sequence[tuple[int, ...]] = ()
    priorities: Sequence[int] = ()
    calls: Sequence[tuple[ToolCall, ...]] = ()
    slos: Sequence[SLOs | None] = ()
    acceptance_rates: Sequence[float | None] = ()
    images: Sequence[tuple[Image, ...]] = ()
    loras: Sequence[str] = ()


_MISSING = tuple(Request._field_defaults.values())  # in the order of the optional columns


def requests_of(columns: Columns, first_id: int) -> Iterator[Request]:
    """The requests of rows whose times are seconds; the first of them has that id."""
    ids = range(first_id, first_id + len(columns.times))
    times, prompts, outputs, *optional = columns
    more = (column or repeat(missing) for column, missing in zip(optional, _MISSING, strict=True))
    return map(as_request, zip(ids, times, prompts, outputs, *more, strict=False))


class Row(NamedTuple):
    """One row: its time as it stands in the file (for messages), and what it says, that time as a number."""

    shown: object
    request: Request


def plainly_right(columns: Columns, previous: float, ordered: bool) -> bool:
    """Say whether every value is legal and the times go on from `previous` without stepping back."""
    times = columns.times
    return (
        min(columns.prompts) >= 1
        and min(columns.outputs) >= 1
        and max(columns.prompts) <= MOST_TOKENS
        and max(columns.outputs) <= MOST_TOKENS
        and isfinite(sum(times))
        and (not ordered or (times[0] >= previous and all(map(le, times, islice(times, 1, None)))))
    )


def without_zeros(columns: Columns, policy: ZeroTokens) -> Columns:
    """Apply the policy for rows of zero prompt or output tokens (`error` leaves them for the checks to find)."""
    if policy == "error" or (min(columns.prompts) and min(columns.outputs)):
        return columns
    if policy == "one":
        return columns._replace(prompts=[n or 1 for n in columns.prompts], outputs=[n or 1 for n in columns.outputs])
    keep = [bool(p and o) for p, o in zip(columns.prompts, columns.outputs, strict=True)]
    return Columns(*(list(compress(column, keep)) for column in columns))  # pyright: ignore[reportArgumentType]


class Reader(ABC):
    """One reading of one file; made anew for each iteration over the trace."""

    rebased = True  # whether times count from the first request (else they are kept as the file has them)
    default_unit = "s"
    time_field = "time"

    def __init__(self, path: Path, options: ReadOptions) -> None:
        self.path = path
        self.options = options
        self.per_s = TIME_UNITS[options.time_unit or self.default_unit]
        self.unread: tuple[str, ...] = ()  # columns that nothing reads
        self.skipped = 0  # rows left out on request (`zero_tokens="drop"`) or by the format's own rule (ShareGPT)

    @abstractmethod
    def raw_columns(self) -> Iterator[Columns]:
        """Yield the rows in file order, checked, times as the file counts them."""

    def columns(self) -> Iterator[Columns]:
        """Yield the rows in file order, times in seconds; raise `TraceError` where there is none."""
        origin = None if self.rebased else 0.0
        empty = True
        for columns in self.raw_columns():
            if not columns.times:
                continue
            empty = False
            if origin is None:
                origin = columns.times[0]
            if origin or self.per_s != 1:
                per_s = self.per_s
                columns = columns._replace(times=[(time - origin) / per_s for time in columns.times])
            if max(columns.times) > MOST_SECONDS:
                raise TraceError(
                    f"{self.path}: {self.time_field} reaches {max(columns.times):g} s, more than {MOST_SECONDS:g}; is "
                    "`--time-unit` missing, or the column another?"
                )
            yield columns
        if empty:
            skipped = f" ({self.skipped} rows skipped)" if self.skipped else ""
            raise TraceError(f"{self.path}: holds no request{skipped}; check that it was written to its end")


class LineReader(Reader):
    """A reader of files with one request a line."""

    @abstractmethod
    def fast(self, text: str) -> Columns:
        """Return the columns of a block of lines; TraceError, LookupError, TypeError or ValueError: read it by rows."""

    @abstractmethod
    def row(self, where: Where, line: str) -> Row:
        """Return one row, or raise the `TraceError` that names what is wrong."""

    def body(self) -> Iterator[tuple[int, str]]:
        """Yield the blocks of lines that hold requests, with the number of each block's first line."""
        return text_blocks(self.path)

    def raw_columns(self) -> Iterator[Columns]:
        """Yield the rows in file order, checked, times as the file counts them."""
        previous = -inf if self.rebased else 0.0
        ordered = not self.options.sort
        for number, text in self.body():
            columns = self._at_once(text.rstrip("\n"), previous, ordered)
            if columns is None:
                columns = self._row_by_row(number, text, previous)
            if columns.times and ordered:
                previous = columns.times[-1]
            yield columns

    def _at_once(self, text: str, previous: float, ordered: bool) -> Columns | None:
        """Return the block's columns, or None where it needs to be read row by row."""
        try:
            whole = self.fast(text)
            columns = without_zeros(whole, self.options.zero_tokens)
            if not columns.times or not plainly_right(columns, previous, ordered):
                return None
        except (TraceError, LookupError, TypeError, ValueError, OverflowError, RecursionError):
            return None
        self.skipped += len(whole.times) - len(columns.times)
        return columns

    def _row_by_row(self, number: int, text: str, previous: float) -> Columns:
        rows: list[Request] = []
        policy = self.options.zero_tokens
        for line_number, line in enumerate(text.rstrip("\n").split("\n"), number):
            if not line.strip():
                continue
            where = Where(self.path, line_number)
            shown, request = self.row(where, line)
            if not self.options.sort:
                if request.arrival_s < previous:
                    raise self._out_of_order(where, shown, request.arrival_s)
                previous = request.arrival_s
            if request.prompt_tokens and request.output_tokens:
                rows.append(request)
            elif policy == "drop":
                self.skipped += 1
            else:
                prompt, output = request.prompt_tokens or 1, request.output_tokens or 1
                rows.append(request._replace(prompt_tokens=prompt, output_tokens=output))
        columns = zip(*rows, strict=True) if rows else [()] * len(Request._fields)
        _, times, prompts, outputs, *optional = columns
        return Columns(list(times), list(prompts), list(outputs), *optional)

    def _out_of_order(self, where: Where, shown: object, time: float) -> TraceError:
        if not self.rebased and time < 0:
            return where.error(self.time_field, shown, "is negative", "times start at 0: correct or shift the trace")
        return where.error(
            self.time_field,
            shown,
            "is earlier than the row before it",
            "sort the trace: `kvtwin trace convert --sort`",
        )
