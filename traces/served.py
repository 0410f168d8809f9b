"""`ServedRun`: requests that a real server was sent, and when each had its first and its last token.

Read from a result of `vllm bench serve` (`traces.bench`), from what other clients keep where it has both times
(`traces.clients`), or from a table (CSV) with a row a request, whose columns are

    arrival_s or issue_s; prompt_tokens or prompt_len; output_tokens or output_len     (or a trace beside it)
    first_token_s, s of the same clock; or ttft_s, ttft_ms after arrival
    last_token_s; or e2el_s, latency_s, e2el_ms, latency_ms after arrival
"""

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from traces.bench import NO_TIMES, BenchRow, check_row, read_bench
from traces.clients import read_sent
from traces.errors import TraceError
from traces.fields import Where
from traces.files import reading
from traces.readers import CLIENTS, detect
from traces.request import Request
from traces.rows import ReadOptions

ARRIVAL = ("arrival_s", "issue_s")
PROMPT, OUTPUT = ("prompt_tokens", "prompt_len"), ("output_tokens", "output_len")
FIRST, LAST = ("first_token_s", "ttft_s", "ttft_ms"), ("last_token_s", "e2el_s", "latency_s", "e2el_ms", "latency_ms")


@dataclass(frozen=True)
class ServedRun:
    """A run of a server; sequences have an element a request, in order of arrival.

    Attributes:
        requests: `request_id` is the place in that order, arrivals count from the first.
        ttft_s, e2el_s: first and last token minus arrival, s.
        gaps_s: gaps between the tokens, s; empty of a request whose tokens were not seen one by one.
        left_out: requests that failed.
    """

    path: Path
    requests: list[Request]
    ttft_s: list[float]
    e2el_s: list[float]
    gaps_s: list[tuple[float, ...]]
    left_out: int

    @property
    def tpot_s(self) -> list[float | None]:
        """Seconds a token after the first; None of a request of one token."""
        return [
            (last - first) / (request.output_tokens - 1) if request.output_tokens > 1 else None
            for request, first, last in zip(self.requests, self.ttft_s, self.e2el_s, strict=True)
        ]

    @property
    def has_token_times(self) -> bool:
        """Whether most answers were seen token by token."""
        seen = sum(len(gaps) == r.output_tokens - 1 for r, gaps in zip(self.requests, self.gaps_s, strict=True))
        return 2 * seen > len(self.requests) and any(self.gaps_s)

    def token_times_s(self, i: int) -> list[float]:
        """When the tokens of request `i` came, s after the first arrival; only the first where no more is known."""
        at_s = self.requests[i].arrival_s + self.ttft_s[i]
        times_s = [at_s]
        for gap_s in self.gaps_s[i]:
            at_s += gap_s
            times_s.append(at_s)
        return times_s


def read_served(path: Path, trace: Sequence[Request] | None = None) -> ServedRun:
    """The run in a file.

    Args:
        path: a result or a table, told by its first character.
        trace: what was sent, in the order of the file: prefixes, and whatever lengths and arrivals the file lacks.

    Raises:
        TraceError: a file that cannot be read, lacks the details or does not go with the trace.
    """
    with reading(path), path.open("rb") as file:
        is_result = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"\x1f")
    client = _client(path) if is_result else None
    if client is not None:
        rows = list(_of_client(path, client))
    else:
        rows = read_bench(path) if is_result else list(_table(path))
    if trace is not None:
        rows = list(_beside(path, rows, trace))
    pairs = zip(rows, [None] * len(rows) if trace is None else trace, strict=True)
    kept = [(_sent(path, is_result, row, known), row) for row, known in pairs if not row.failed]
    if not kept:
        raise TraceError(f"{path}: holds no request that did not fail; see its errors")
    kept.sort(key=lambda found: found[0].arrival_s)
    origin_s = kept[0][0].arrival_s
    return ServedRun(
        path,
        [sent._replace(request_id=i, arrival_s=sent.arrival_s - origin_s) for i, (sent, _) in enumerate(kept)],
        [row.ttft_s for _, row in kept],
        [row.e2el_s for _, row in kept],
        [row.gaps_s for _, row in kept],
        len(rows) - len(kept),
    )


def _client(path: Path) -> str | None:
    """The format of a file that a client wrote, if it is one of those that `traces.clients` reads."""
    try:
        name = detect(path)
    except TraceError:
        return None
    return name if name in CLIENTS else None


def _of_client(path: Path, name: str) -> Iterator[BenchRow]:
    for i, sent in enumerate(read_sent(path, name, ReadOptions())):
        if sent is None or not sent.output_tokens:
            yield BenchRow(0.0, None, None, 0.0, 0.0, failed=True)
            continue
        if sent.ttft_s is None or sent.e2el_s is None:
            lacks = "first token" if sent.ttft_s is None else "last token"
            raise TraceError(
                f"{path}: request {i} has no time of its {lacks}: a run is compared by both; keep the requests that "
                "were streamed, or read the file as a trace"
            )
        gaps = sent.gaps_s if len(sent.gaps_s) == sent.output_tokens - 1 else ()
        row = BenchRow(sent.start_ns / 1e9, sent.prompt_tokens, sent.output_tokens, sent.ttft_s, sent.e2el_s, gaps)
        check_row(f"{path}: request {i}", row)
        yield row


def _sent(path: Path, is_result: bool, row: BenchRow, known: Request | None) -> Request:
    """The request of a row, `known` from a trace or not; TraceError where neither says enough."""
    if row.arrival_s is None:
        lacks = f"field start_times is missing; {NO_TIMES}" if is_result else f"no column {' or '.join(ARRIVAL)}; add"
        raise TraceError(f"{path}: {lacks}, or give a trace with the arrivals")
    if row.prompt_tokens is None or row.output_tokens is None:
        raise TraceError(f"{path}: no columns {PROMPT[0]},{OUTPUT[0]}; add them, or give the trace that was sent")
    request = known or Request(0, 0.0, row.prompt_tokens, row.output_tokens)
    return request._replace(arrival_s=row.arrival_s, output_tokens=row.output_tokens)


def _beside(path: Path, rows: list[BenchRow], trace: Sequence[Request]) -> Iterable[BenchRow]:
    """The rows, with what the trace knows and they do not."""
    if len(trace) != len(rows):
        raise TraceError(
            f"{path}: holds {len(rows)} requests, the trace {len(trace)}; give the requests that were sent, in order"
        )
    for i, (row, request) in enumerate(zip(rows, trace, strict=True)):
        if not row.failed and row.prompt_tokens not in (None, request.prompt_tokens):
            raise TraceError(
                f"{path}: request {i} has {row.prompt_tokens} prompt tokens, {request.prompt_tokens} in the trace; "
                "give the requests that were sent, in order"
            )
        yield BenchRow(
            request.arrival_s if row.arrival_s is None else row.arrival_s,
            request.prompt_tokens,
            request.output_tokens if row.output_tokens is None else row.output_tokens,
            *row[3:],
        )


def _table(path: Path) -> Iterable[BenchRow]:
    with reading(path), path.open(encoding="utf-8-sig", newline="") as file:
        lines = csv.DictReader(file)
        header = lines.fieldnames or ()
        arrival, prompt, output = (_column(header, names) for names in (ARRIVAL, PROMPT, OUTPUT))
        first, last = _column(header, FIRST), _column(header, LAST)
        if first is None or last is None:
            wanted = ",".join((FIRST if first is None else LAST)[:2])
            raise TraceError(f"{path}: is neither a benchmark's result nor a table with {wanted}; see its header")
        if "run" in header:
            raise TraceError(f"{path}: column run tells several runs apart; keep the rows of one, without it")
        for line in lines:
            where = Where(path, lines.line_num)
            prompts = None if prompt is None else where.tokens(prompt, line[prompt], True)
            outputs = None if output is None else where.tokens(output, line[output], True)
            arrival_s = None if arrival is None else where.number(arrival, line[arrival])
            ttft_s, e2el_s = (_after(where, line, name, arrival_s) for name in (first, last))
            failed = outputs == 0 or ttft_s == e2el_s == 0.0
            row = BenchRow(arrival_s, prompts, outputs, ttft_s, e2el_s, failed=failed)
            check_row(f"{path}, line {where.line}", row)
            yield row


def _column(header: Sequence[str], names: Sequence[str]) -> str | None:
    return next((name for name in names if name in header), None)


def _after(where: Where, line: dict[str, str], name: str, arrival_s: float | None) -> float:
    """Seconds after arrival."""
    value = where.number(name, line[name])
    if name.endswith("_ms"):
        return value / 1e3
    if name in (FIRST[0], LAST[0]):
        if arrival_s is None:
            raise where.error(name, line[name], "is a time of a clock", f"add the column {ARRIVAL[0]} of that clock")
        return value - arrival_s
    return value
