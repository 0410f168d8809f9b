"""What `vllm bench serve --save-result --save-detailed` writes of each request; `kvtwin run` writes it too.

The file is one JSON object. Arrays have an element a request, in the order in which the requests were sent:

    input_lens, output_lens   tokens; 0 output tokens of a request that failed
    start_times               when it was sent, s of the client's clock (newer vLLM only)
    ttfts                     first chunk minus start, s; 0 of a request that failed
    itls                      gaps between the chunks that came, s: one a token, unless chunks held several
    latencies                 last token minus start, s (kvtwin's own)
    errors                    why it failed; empty of one that did not

Whatever else it holds (statistics, texts) is not looked at.
"""

import json
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from traces.errors import TraceError
from traces.fields import MOST_TOKENS
from traces.files import pieces
from traces.rows import Columns, Reader

T = TypeVar("T")

DETAILED = "run `vllm bench serve` with --save-result --save-detailed (SGLang's `bench_serving`: --output-details)"
NO_TIMES = "SGLang and older versions of vLLM do not save them: take a newer `vllm bench serve`"
ROLE_CHUNK_S = 1e-3
"""A chat's answer begins with a chunk that names the role: the first token comes right behind it."""


class BenchRow(NamedTuple):
    """What was measured of one request: s, of the client's clock; None what the file does not say.

    `gaps_s` are the gaps between its tokens; empty where they are not known one by one.
    """

    arrival_s: float | None
    prompt_tokens: int | None
    output_tokens: int | None
    ttft_s: float
    e2el_s: float
    gaps_s: tuple[float, ...] = ()
    failed: bool = False


class _Result(msgspec.Struct):
    input_lens: list[int] | None = None
    output_lens: list[int] | None = None
    start_times: list[float] | None = None
    ttfts: list[float] | None = None
    itls: list[list[float]] | None = None
    latencies: list[float] | None = None
    errors: list[str | None] | None = None


def read_bench(path: Path, *, measured: bool = True) -> list[BenchRow]:
    """The requests of a result, in file order, with their times if `measured`.

    Raises `TraceError` for a file that is none or lacks the details.
    """
    text = "".join(pieces(path))
    try:
        found = _decoded(text)
    except (msgspec.DecodeError, RecursionError) as error:
        several = "trailing characters" in str(error)
        remedy = (
            "keep one result a file (vLLM's --append-result and SGLang's --output-file add more)"
            if several
            else "give the file as vLLM wrote it"
        )
        raise TraceError(f"{path}: is not the result of a benchmark: {error}; {remedy}") from None
    prompts = _array(path, "input_lens", found.input_lens, None)
    count = len(prompts)
    outputs = _array(path, "output_lens", found.output_lens, count)
    if not measured:
        found = _without_times(found, count)
    ttfts = _array(path, "ttfts", found.ttfts, count)
    errors = [""] * count if found.errors is None else _array(path, "errors", found.errors, count)
    starts = [None] * count if found.start_times is None else _array(path, "start_times", found.start_times, count)
    gaps = [[]] * count if found.itls is None else _array(path, "itls", found.itls, count)
    if found.latencies is None and found.itls is None:
        raise TraceError(f"{path}: field itls is missing; {DETAILED}")
    if found.latencies is not None:
        latencies = _array(path, "latencies", found.latencies, count)
    else:
        latencies = [ttft + sum(own) for ttft, own in zip(ttfts, gaps, strict=True)]
    rows = []
    for i, output in enumerate(outputs):
        row = BenchRow(starts[i], prompts[i], output, ttfts[i], latencies[i], _of_tokens(gaps[i], output))
        rows.append(row._replace(failed=bool(errors[i]) or output == 0 or (ttfts[i] == 0.0 and latencies[i] == 0.0)))
        check_row(f"{path}: request {i}", rows[-1])
    return rows


UNKNOWN_S = 1.0


def _without_times(found: _Result, count: int) -> _Result:
    """The result with times that are never looked at where it has none: failures are told by the errors alone then."""
    times = found.ttfts if found.ttfts is not None and len(found.ttfts) == count else [UNKNOWN_S] * count
    return msgspec.structs.replace(found, ttfts=times, latencies=times, itls=None)


def _decoded(text: str) -> _Result:
    try:
        return msgspec.json.decode(text, type=_Result)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError as error:
        # Python writes NaN, which JSON does not have, where a statistic has no value.
        try:
            whole = json.loads(text)
        except ValueError:
            raise error from None
        try:
            return msgspec.convert(whole, _Result)
        except UnicodeEncodeError:
            raise msgspec.ValidationError("half a character (a lone surrogate) where a number goes") from None


def _array(path: Path, name: str, values: list[T] | None, count: int | None) -> list[T]:
    if values is None:
        raise TraceError(f"{path}: field {name} is missing; {DETAILED}")
    if count is not None and len(values) != count:
        raise TraceError(f"{path}: field {name} holds {len(values)} values, input_lens {count}; is the file whole?")
    return values


def _of_tokens(gaps_s: list[float], output_tokens: int) -> tuple[float, ...]:
    """The gaps, where there is one before each token but the first; else none."""
    if len(gaps_s) == output_tokens and gaps_s and gaps_s[0] < ROLE_CHUNK_S:
        gaps_s = gaps_s[1:]
    return tuple(gaps_s) if len(gaps_s) == output_tokens - 1 else ()


def check_row(where: str, row: BenchRow) -> None:
    """Raise the `TraceError` that names what cannot be of a request that did not fail."""
    if row.failed:
        return
    for name, count in (("prompt tokens", row.prompt_tokens), ("output tokens", row.output_tokens)):
        if count is not None and not 1 <= count <= MOST_TOKENS:
            raise TraceError(f"{where}: {count} {name}; correct or delete the request")
    if row.arrival_s is not None and not isfinite(row.arrival_s):
        raise TraceError(f"{where}: arrives at {row.arrival_s} s; correct or delete the request")
    if not 0.0 < row.ttft_s <= row.e2el_s * (1 + 1e-9) < float("inf") or any(gap < 0.0 for gap in row.gaps_s):
        raise TraceError(
            f"{where}: first token {row.ttft_s} s and last token {row.e2el_s} s after its start cannot be; "
            "both are seconds, the first more than 0 and not after the last"
        )


class BenchReader(Reader):
    """A result as a trace: arrivals and lengths of the requests that did not fail, in order of arrival.

    Without times all arrive at 0, where another rate replaces them (`needs_times`). What was measured may be missing.
    """

    time_field = "start_times"

    def raw_columns(self) -> Iterator[Columns]:
        """Yield all requests at once."""
        rows = [row for row in read_bench(self.path, measured=False) if not row.failed or self._skip()]
        if self.options.needs_times and any(row.arrival_s is None for row in rows):
            raise TraceError(f"{self.path}: field start_times is missing; {NO_TIMES}, or give arrivals: --request-rate")
        rows.sort(key=lambda row: row.arrival_s or 0.0)
        yield Columns(
            [row.arrival_s or 0.0 for row in rows],
            [row.prompt_tokens or 0 for row in rows],
            [row.output_tokens or 0 for row in rows],
        )

    def _skip(self) -> bool:
        self.skipped += 1
        return False
