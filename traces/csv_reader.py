"""Traces in CSV: Azure 2023-2025, BurstGPT, Vidur, Splitwise and our own, as one table of column names."""

import csv
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

from traces.errors import TraceError
from traces.fields import Where
from traces.files import text_blocks
from traces.hash_ids import check_hashes, check_output_hashes, hashes_fit, output_hashes_fit
from traces.rare_fields import RARE_FIELDS, RARE_NAMES, check_calls_alone
from traces.request import Request
from traces.rows import Columns, LineReader, ReadOptions, Row
from traces.stamps import TICKS_PER_S, StampClock


class CsvFormat(NamedTuple):
    """Which columns hold what. `time` None: the file has lengths only, and every request arrives at 0."""

    time: str | None
    prompt: str
    output: str
    stamps: bool = False  # times are date stamps rather than numbers
    rebased: bool = True
    session: str = ""
    hashes: str = ""
    block: str = ""
    output_hashes: str = ""
    priority: str = ""
    rare: tuple[str, ...] = ("",) * len(RARE_NAMES)

    @property
    def by_column(self) -> tuple[str, ...]:
        """Names of what `Columns` has beside times and lengths, in its order; empty where the format lacks it."""
        return self.session, self.hashes, self.block, self.output_hashes, self.priority, *self.rare

    @property
    def required(self) -> tuple[str, ...]:
        """The columns that a file of this format must have."""
        return tuple(name for name in (self.time, self.prompt, self.output) if name is not None)

    @property
    def optional(self) -> tuple[str, ...]:
        """The columns that it may have and that are read."""
        return tuple(name for name in self.by_column if name)

    @property
    def numeric(self) -> tuple[str, ...]:
        """All of them that hold numbers or stamps."""
        words = (self.session, RARE_NAMES[-1])
        return tuple(name for name in (*self.required, *self.optional) if name not in words)


# In the order of detection: the first whose required columns are all there is the file's format.
CSV_FORMATS = {
    "kvtwin": CsvFormat(
        "arrival_s",
        "prompt_tokens",
        "output_tokens",
        rebased=False,
        session="session_id",
        hashes="hash_ids",
        block="hash_block_tokens",
        output_hashes="output_hash_ids",
        priority="priority",
        rare=RARE_NAMES,
    ),
    # 2025 adds NumImages; its image tokens are not in ContextTokens' prompt text and are not read.
    "azure": CsvFormat("TIMESTAMP", "ContextTokens", "GeneratedTokens", stamps=True),
    "burstgpt": CsvFormat("Timestamp", "Request tokens", "Response tokens", session="Session ID"),
    "vidur": CsvFormat("arrived_at", "num_prefill_tokens", "num_decode_tokens", rebased=False),
    "vidur-lengths": CsvFormat(None, "num_prefill_tokens", "num_decode_tokens", rebased=False),
    "splitwise": CsvFormat("arrival_timestamp", "prompt_size", "token_size", rebased=False),
}


def split_cells(where: Where, line: str) -> list[str]:
    """Return the cells of one CSV line, or raise the `TraceError` that says why there are none."""
    try:
        return next(csv.reader([line]))
    except csv.Error as error:
        raise where.error("row", line, f"is not CSV ({error})", "check that the file is a trace at all") from None


def split_header(where: Where, line: str) -> list[str]:
    """Return the column names of a CSV header line."""
    return [name.strip() for name in split_cells(where, line)]


class CsvReader(LineReader):
    """Reads one CSV file of the given format."""

    def __init__(self, path: Path, options: ReadOptions, csv_format: CsvFormat) -> None:
        self.format = csv_format
        self.rebased = csv_format.rebased
        super().__init__(path, options)
        self.clock = StampClock()
        if csv_format.stamps:
            if options.time_unit is not None:
                raise TraceError(f"{path}: its times are date stamps; leave out the time unit ({options.time_unit})")
            self.per_s = TICKS_PER_S
        self.header: list[str] = []
        self.index: dict[str, int] = {}

    def body(self) -> Iterator[tuple[int, str]]:
        """Read the header, then yield the blocks of lines below it."""
        header_seen = False
        for number, text in text_blocks(self.path):
            while text and not header_seen:
                line, _, text = text.partition("\n")
                if line.strip():
                    self._read_header(Where(self.path, number), line)
                    header_seen = True
                number += 1
            if text:
                yield number, text
        if not header_seen:
            raise TraceError(f"{self.path}: is empty; check that it was written to its end")

    def _read_header(self, where: Where, line: str) -> None:
        self.header = split_header(where, line)
        self.index = {name: i for i, name in enumerate(self.header) if name}
        for name in (*self.format.required, *self.format.optional):
            if self.header.count(name) > 1:
                raise where.error("header", line, f"has column {name!r} twice", "keep one")
        for name in self.format.required:
            if name not in self.index:
                spare = [column for column in self.header if column not in self.format.required]
                close = get_close_matches(name, spare)
                remedy = (
                    f"rename column {close[0]!r}" if close else f"the header needs {','.join(self.format.required)}"
                )
                raise where.error("header", line, f"has no column {name!r}", remedy)
        for name in self.header:
            close = get_close_matches(name, self.format.optional, cutoff=0.8)
            if close and name not in self.format.optional:
                raise where.error("header", line, f"has an unknown column {name!r}", f"did you mean {close[0]!r}?")
        if any(self.format.rare):
            # Our own format; others have columns for others to read.
            known = (*self.format.required, *self.format.optional)
            self.unread = tuple(name for name in self.index if name not in known)
        self.time_field = self.format.time or ""

    def fast(self, text: str) -> Columns:
        """Return the columns of a block of rows without quotes, all as long as the header."""
        if '"' in text:
            raise ValueError("quoted")
        form, index = self.format, self.index
        if form.stamps:
            text = text.replace("+00:00,", ",")
        # All cells at once, with the ends of lines among them: each has to stand where a row ends.
        width, num_rows = len(self.header) + 1, text.count("\n") + 1
        cells = text.replace("\n", ",\n,").split(",")
        if len(cells) != width * num_rows - 1 or cells[width - 1 :: width].count("\n") != num_rows - 1:
            raise ValueError("ragged")
        columns = [cells[place::width] for place in range(width - 1)]
        prompts, outputs = columns[index[form.prompt]], columns[index[form.output]]
        stamps = columns[index[form.time]] if form.time else ()
        if "_" in text and any("_" in cell for name in form.numeric if name in index for cell in columns[index[name]]):
            raise ValueError("Python's digit groups are not a trace's")
        if form.stamps:
            times = self.clock.ticks(stamps)
        else:
            times = list(map(float, stamps)) if form.time else [0.0] * len(prompts)
        return self._with_optional(Columns(times, list(map(int, prompts)), list(map(int, outputs))), columns)

    def _with_optional(self, plain: Columns, columns: list[list[str]]) -> Columns:
        form = self.format
        found = [columns[self.index[name]] if name in self.index else () for name in form.by_column]
        if not any(found):
            return plain
        sessions, ids, sizes, output_ids, priorities, *rare = found
        hashes = [tuple(map(int, cell.split())) for cell in ids]
        default = self.options.hash_block_tokens or 0
        blocks = [int(cell or 0) or default for cell in sizes] if ids and sizes else [default] * len(hashes)
        if not all(map(hashes_fit, plain.prompts, hashes, blocks)):
            raise ValueError("hash ids")
        output_hashes = [tuple(map(int, cell.split())) for cell in output_ids]
        if any(output_hashes) and not (
            hashes and all(map(output_hashes_fit, plain.prompts, plain.outputs, hashes, blocks, output_hashes))
        ):
            raise ValueError("output hash ids")
        where = Where(self.path, 0)  # what is wrong is told once rows are read one by one
        told = [
            list(map(field.of_cell, repeat(where), cells, plain.prompts, plain.outputs))
            for field, cells in zip(RARE_FIELDS, rare, strict=True)
        ]
        if any(told[0]) and any(output_hashes):
            raise ValueError("tool calls")
        return Columns(*plain[:3], sessions, hashes, blocks, output_hashes, [int(c or 0) for c in priorities], *told)

    def row(self, where: Where, line: str) -> Row:
        """Return one row, quoted or not, or name its first wrong field."""
        cells = split_cells(where, line)
        if len(cells) != len(self.header):
            problem = f"has {len(cells)} fields where the header has {len(self.header)}"
            raise where.error("row", line, problem, "correct or delete the row")
        form = self.format
        zero_allowed = self.options.zero_tokens != "error"
        time, stamp = 0.0, ""
        if form.time:
            stamp = cells[self.index[form.time]].strip()
            time = self._stamp(where, stamp) if form.stamps else where.number(form.time, stamp)
        prompt = where.tokens(form.prompt, cells[self.index[form.prompt]], zero_allowed)
        output = where.tokens(form.output, cells[self.index[form.output]], zero_allowed)
        hashes, block, output_hashes = self._hashes(where, cells, prompt, output)
        urgency = self._cell(cells, form.priority)
        priority = where.whole(form.priority, urgency) if urgency else 0
        session = cells[self.index[form.session]] if form.session in self.index else ""
        rare = [self._cell(cells, name) for name in form.rare]
        told = [field.of_cell(where, cell, prompt, output) for field, cell in zip(RARE_FIELDS, rare, strict=True)]
        check_calls_alone(where, rare[0], told[0], output_hashes)
        request = Request(0, time, prompt, output, session, hashes, block, output_hashes, priority, *told)
        return Row(stamp, request)

    def _cell(self, cells: list[str], name: str) -> str:
        """Return what an optional column holds; nothing where the file lacks it."""
        return cells[self.index[name]].strip() if name in self.index else ""

    def _stamp(self, where: Where, stamp: str) -> float:
        try:
            return self.clock.tick(stamp)
        except ValueError:
            remedy = "write it as 2023-11-16 18:15:46.6805900, with +00:00 or nothing behind it"
            raise where.error(self.time_field, stamp, "is not a date stamp", remedy) from None

    def _hashes(
        self, where: Where, cells: list[str], prompt: int, output: int
    ) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
        form = self.format
        hashes = self._ids(where, cells, form.hashes)
        own = block = 0
        if form.hashes in self.index:
            size = self._cell(cells, form.block)
            own = where.tokens(form.block, size, zero_allowed=True) if size else 0
            block = own or self.options.hash_block_tokens or 0
        block_field = form.block if own else ""
        check_hashes(where, prompt, hashes, block, block_field)
        output_hashes = self._ids(where, cells, form.output_hashes)
        check_output_hashes(where, prompt, output, hashes, block, output_hashes, block_field)
        return hashes, block, output_hashes

    def _ids(self, where: Where, cells: list[str], field: str) -> tuple[int, ...]:
        text = self._cell(cells, field)
        try:
            if "_" in text:
                raise ValueError
            return tuple(map(int, text.split()))
        except ValueError:
            remedy = "write hash ids as whole numbers with spaces between them"
            raise where.error(field, text, "is not a list of numbers", remedy) from None
