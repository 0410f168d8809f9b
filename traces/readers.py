"""`open_trace`: any known trace file as a stream of `Request`s.

Formats and how they are told apart (by the header's columns or the first object's keys, never by the file's name):

    kvtwin         arrival_s,prompt_tokens,output_tokens[,session_id,hash_ids,hash_block_tokens,
                   output_hash_ids,priority,tool_calls,slos,acceptance_rate,images,lora]              (s, our own)
    azure          TIMESTAMP,[NumImages,]ContextTokens,GeneratedTokens                                (date stamps)
    burstgpt       Timestamp,[Session ID,Elapsed time,]Model,Request tokens,Response tokens,...       (s)
    vidur          arrived_at,num_prefill_tokens,num_decode_tokens; vidur-lengths has no times        (s)
    splitwise      ...,arrival_timestamp,...,prompt_size,token_size                                   (s)
    mooncake       {"timestamp", "input_length", "output_length", "hash_ids"} a line, and our own
                   "output_hash_ids", "priority", "tool_calls", "slos", "acceptance_rate", "images"
                   and "lora" where it has them                                                      (ms)
    bailian        the same with "chat_id" and "parent_chat_id" a line                                (s)
    vllm-custom    {"prompt", "output_tokens"} a line                                                 (no times)
    sharegpt       [{"conversations": [{"value"}, {"value"}]}]                                        (no times)
    vllm-bench     {"input_lens", "output_lens", "start_times"}: what `vllm bench serve` and we save, and, without
                   times, older ones and SGLang's `bench_serving --output-details`                  (s)
    aiperf, guidellm, genai-perf, otlp, openai
                   what clients, gateways and tracing keep of requests (`traces.clients`)              (own)

Any of them may be gzipped, begin with a byte-order mark, end its lines with CRLF and lack the last newline.
"""

from collections.abc import Callable, Iterator
from difflib import get_close_matches
from itertools import chain
from operator import itemgetter
from pathlib import Path

from traces.adapters import apart
from traces.csv_reader import CSV_FORMATS, CsvReader, split_header
from traces.errors import TraceError
from traces.fields import Where
from traces.files import pieces, text_blocks
from traces.jsonl_reader import JSONL_FORMATS, JsonlReader, parse_object
from traces.request import Request
from traces.rows import Reader, ReadOptions, ZeroTokens, requests_of
from traces.text_reader import ShareGptReader, VllmCustomReader, load_tokenizer

BENCH_KEYS = {"completed", "request_throughput"}
CLIENTS = ("aiperf", "guidellm", "genai-perf", "otlp", "openai")
"""Formats that `traces.clients` reads."""
FORMATS = (*CSV_FORMATS, *JSONL_FORMATS, "vllm-custom", "sharegpt", "vllm-bench", *CLIENTS)
SKIPPED = {
    "sharegpt": "vLLM's rule for ShareGPT",
    "vllm-bench": "they failed",
    **dict.fromkeys(CLIENTS, "they failed, were cancelled or warmed up"),
}
"""Why readers leave rows out without being asked to."""
ALL_FORMATS = f"known formats: {', '.join(FORMATS)}; --trace-format names one"


class Trace:
    """A trace file: iterate over it for its `Request`s, in order of arrival; each iteration reads the file anew."""

    def __init__(self, path: Path, name: str, options: ReadOptions) -> None:
        self.path = path
        self.format = name
        self.options = options
        self.skipped = 0  # rows left out by the latest iteration so far, on request or by the format's rule
        self.unread: tuple[str, ...] = ()  # columns that nothing reads, of a file of our own format
        self.found: set[str] = set()  # of `images` and `lora`, what a request that was read so far has
        self.adapters_apart = False  # whether prompts of unlike adapters are to have unlike `hash_ids`, as their KV is

    def __repr__(self) -> str:
        return f"Trace({str(self.path)!r}, format={self.format!r})"

    def __iter__(self) -> Iterator[Request]:
        if self.options.sort:
            return self._sorted()
        return chain.from_iterable(self._blocks())

    @property
    def left_out(self) -> list[str]:
        """What of the file, as far as it was read, is in no request: sentences."""
        reason = SKIPPED.get(self.format, "--zero-tokens drop")
        told = [f"{self.skipped:,} rows of {self.path} left out ({reason})"] if self.skipped else []
        return [*told, f"{self.path}: nothing reads column {', '.join(self.unread)}"] if self.unread else told

    def _reader(self) -> Reader:
        if self.format in CSV_FORMATS:
            return CsvReader(self.path, self.options, CSV_FORMATS[self.format])
        if self.format in JSONL_FORMATS:
            return JsonlReader(self.path, self.options, JSONL_FORMATS[self.format])
        if self.format == "vllm-bench":
            from traces.bench import BenchReader  # noqa: PLC0415 - msgspec is slow to import, and few traces need it

            return BenchReader(self.path, self.options)
        if self.format in CLIENTS:
            from traces.clients import ClientReader  # noqa: PLC0415 - likewise

            return ClientReader(self.path, self.options, self.format)
        return (VllmCustomReader if self.format == "vllm-custom" else ShareGptReader)(self.path, self.options)

    def _blocks(self) -> Iterator[Iterator[Request]]:
        reader, count = self._reader(), 0
        for columns in reader.columns():
            self.skipped, self.unread = reader.skipped, reader.unread
            if any(columns.images):
                self.found.add("images")
            if any(columns.loras):
                self.found.add("lora")
                if self.adapters_apart:
                    hashes, output_hashes = columns.hashes, columns.output_hashes
                    columns = columns._replace(
                        hashes=list(map(apart, columns.loras, hashes)),
                        output_hashes=list(map(apart, columns.loras, output_hashes)),
                    )
            yield requests_of(columns, count)
            count += len(columns.times)
        self.skipped = reader.skipped

    def _sorted(self) -> Iterator[Request]:
        requests = sorted(chain.from_iterable(self._blocks()), key=itemgetter(1))
        origin = requests[0].arrival_s if self._reader().rebased else 0.0
        if requests[0].arrival_s - origin < 0:
            raise TraceError(f"{self.path}: times start at {requests[0].arrival_s} s, before 0; shift the trace")
        for request_id, request in enumerate(requests):
            # Rounded to the nanosecond: taking differences of differences must not add digits to the file's own.
            arrival_s = round(request.arrival_s - origin, 9) if origin else request.arrival_s
            yield request._replace(request_id=request_id, arrival_s=arrival_s)


def _detect_jsonl(where: Where, line: str) -> str:
    row = parse_object(where, line)
    keys = row.keys()
    for name, form in JSONL_FORMATS.items():
        if keys >= set(form.required):
            return name
    if "conversations" in keys or "conversation" in keys:
        return "sharegpt"
    if "prompt" in keys:
        return "vllm-custom"
    if keys >= BENCH_KEYS:
        return "vllm-bench"
    from traces.clients import told_by_keys  # noqa: PLC0415 - most traces are told by now

    if (client := told_by_keys(row)) is not None:
        return client
    own = "; ".join(f"{name}: {','.join(form.required)}" for name, form in JSONL_FORMATS.items())
    remedy = f"write one of {own} a line, or name the format ({ALL_FORMATS})"
    raise where.error("keys", ",".join(keys), "belong to no known format", remedy)


KEYS_OF_WHOLE = {"otlp": "resourceSpans", "genai-perf": "experiments", "guidellm": "benchmarks"}
"""Keys that tell files of one object over many lines, or one long line; else they are a benchmark's result."""


def _detect_whole(start: str) -> str:
    return next((name for name, key in KEYS_OF_WHOLE.items() if f'"{key}"' in start), "vllm-bench")


def _detect_csv(where: Where, line: str) -> str:
    header = set(split_header(where, line))
    for name, form in CSV_FORMATS.items():
        if header >= set(form.required):
            return name
    overlap = {name: len(header & set(form.required)) for name, form in CSV_FORMATS.items()}
    nearest = max(overlap, key=lambda name: overlap[name])
    form = CSV_FORMATS[nearest if overlap[nearest] else "kvtwin"]
    missing = [name for name in form.required if name not in header]
    spare = sorted(header.difference(form.required))
    close = [(column, name) for column in spare for name in get_close_matches(column, missing, n=1)]
    hint = "rename column {!r} to {!r}".format(*close[0]) if close else f"add {','.join(missing)}"
    if not overlap[nearest] and not close:
        hint = f"write the columns {','.join(form.required)}"
    raise where.error("header", line, f"belongs to no known format (nearest: {nearest})", f"{hint} ({ALL_FORMATS})")


def detect(path: Path) -> str:
    """Return the name of the format of `path`, by its first line that is not blank. Raises `TraceError`."""
    start = next(filter(None, map(str.lstrip, pieces(path))), "")
    if start.startswith("["):
        return "sharegpt"
    if start.startswith("{") and ("\n" not in start or start.split("\n", 1)[0].strip() == "{"):
        # One object, on one line, which may be long, or printed over many.
        found = _detect_whole(start)
        if found != "vllm-bench" or "\n" in start or all(f'"{key}"' in start for key in BENCH_KEYS):
            return found
    for number, text in text_blocks(path):
        for offset, line in enumerate(text.split("\n")):
            start = line.strip()
            if start:
                where = Where(path, number + offset)
                return _detect_jsonl(where, start) if start.startswith("{") else _detect_csv(where, start)
    raise TraceError(f"{path}: is empty; check that it was written to its end")


def open_trace(
    path: str | Path,
    *,
    format: str | None = None,
    time_unit: str | None = None,
    hash_block_tokens: int | None = None,
    default_prompt_tokens: int | None = None,
    default_output_tokens: int | None = None,
    tokenizer: str | Callable[[str], int] | None = None,
    zero_tokens: ZeroTokens = "error",
    sharegpt_filter: bool = True,
    sort: bool = False,
    needs_times: bool = True,
) -> Trace:
    """Open a trace file; its rows are read as the returned `Trace` is iterated over, a block at a time.

    Arrivals are seconds after the first request, except in `kvtwin`, `vidur` and `splitwise` files, whose times are
    kept; formats without times put every request at 0 (see `traces.transforms.at_request_rate`).

    - `format`: one of `FORMATS`; by default it is detected.
    - `time_unit`: "s", "ms", "us" or "ns" for numeric times, where a tool wrote them in another unit than the format's.
    - `hash_block_tokens`: tokens of a prefix block, where it is not the format's (Mooncake 512, Bailian 16).
    - `tokenizer`, `default_prompt_tokens`, `default_output_tokens`: lengths of prompts that a file gives in words; a
      tokenizer is a function from text to a count, a path to a tokenizer.json, or "bytes:4" for an estimate.
    - `zero_tokens`: what a row of zero prompt or output tokens is: an "error", to "drop", or a request of "one".
    - `sharegpt_filter`: apply vLLM's rule of which conversations to keep.
    - `needs_times`: whether a result of a benchmark without the times of its requests is an error; else they are 0.
    - `sort`: sort by time, stably, holding the whole trace in memory; otherwise a time that steps back is an error.

    Raises `TraceError`, at once for a file that cannot be opened or told, while iterating for a bad row.
    """
    path = Path(path)
    if format is None:
        format = detect(path)
    elif format not in FORMATS:
        close = get_close_matches(format, FORMATS, cutoff=0.5)
        remedy = f"did you mean {close[0]!r}?" if close else f"give one of {', '.join(FORMATS)}"
        raise TraceError(f"{path}: format {format!r} is unknown; {remedy}")
    if isinstance(tokenizer, str):
        tokenizer = load_tokenizer(tokenizer)
    options = ReadOptions(
        time_unit=time_unit,
        hash_block_tokens=hash_block_tokens,
        sort=sort,
        zero_tokens=zero_tokens,
        tokenizer=tokenizer,
        default_prompt_tokens=default_prompt_tokens,
        default_output_tokens=default_output_tokens,
        sharegpt_filter=sharegpt_filter,
        needs_times=needs_times,
    )
    return Trace(path, format, options)
