"""What load generators, gateways and tracing keep of each request, read as a trace or as a server's run.

    aiperf       `profile_export.jsonl` of NVIDIA's AIPerf (its documentation of 0.13): a record a line, {"metadata":
                 {"request_start_ns", "x_correlation_id", "benchmark_phase", "was_cancelled"}, "metrics": {NAME:
                 {"value", "unit"}}, "error"}
    guidellm     `benchmarks.json` of GuideLLM: {"benchmarks": [{"requests": {"successful": [...]}}]}; of each request
                 its tokens, start (`start_time` until 0.2, then `request_start_time`), first token and latency
    genai-perf   `profile_export.json` that GenAI-Perf has of Perf Analyzer: {"experiments": [{"requests":
                 [{"timestamp", "response_timestamps", "request_inputs", "response_outputs"}]}]}, ns
    otlp         OTLP in JSON, {"resourceSpans": [{"scopeSpans": [{"spans": [...]}]}]}, as one object or one a line (the
                 collector's file exporter); spans with `gen_ai.usage.input_tokens` and `.output_tokens` (semantic
                 conventions 1.27 and later), or vLLM's own `.prompt_tokens` and `.completion_tokens`
    openai       responses, one a line: {"created", "usage": {"prompt_tokens", "completion_tokens"}} of completions,
                 {"created_at", "usage": {"input_tokens", "output_tokens"}} of the Responses API, or the Batch API's
                 {"response": {"body": ...}} around either; times are whole seconds

Requests that failed, were cancelled or belong to a warm-up are left out and counted. Whatever else a file holds is not
looked at. Requests come in any order, as they ended, and are sorted by their start.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from traces.errors import TraceError
from traces.fields import MOST_SECONDS, TIME_UNITS, Where, shown
from traces.files import pieces
from traces.rows import Columns, Reader, ReadOptions
from traces.text_reader import json_objects, lengths

Json = Mapping[str, object]
S = 1_000_000_000
"""Nanoseconds in a second."""


class Sent(NamedTuple):
    """A request as a client saw it; None and nothing what the file does not say.

    `start_ns` is on the client's clock; `ttft_s` and `e2el_s` are first and last token after it, `gaps_s` lies between
    the tokens.
    """

    start_ns: int
    prompt_tokens: int
    output_tokens: int
    session: str = ""
    ttft_s: float | None = None
    e2el_s: float | None = None
    gaps_s: tuple[float, ...] = ()


class Nth(Where):
    """A request of a file: the place that the messages of its fields name."""

    __slots__ = ()

    def error(self, field: str, value: object, problem: str, remedy: str) -> TraceError:
        return TraceError(f"{self.path}, request {self.line}: {field} {shown(value)} {problem}; {remedy}")


OWN = ("prompt_tokens",), ("output_tokens",)
Records = Iterator[Sent | None]
"""The requests of a file in its order, None for one that is left out."""


def _dict(value: object) -> Json:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _first(row: Json, *names: str) -> object:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _integer(text: str) -> int | str:
    """A whole number of as many digits as Python reads; else the text."""
    return int(text) if re.fullmatch(r"-?\d{1,400}", text) else text


def _nanoseconds(where: Where, name: str, value: object, unit: str) -> int:
    if value is None:
        raise where.error(name, None, "is not given", "a trace needs the start of each request: delete the request")
    value = _integer(value) if isinstance(value, str) else value
    number = value if isinstance(value, int) and not isinstance(value, bool) else where.number(name, value)
    if abs(number) > MOST_SECONDS * TIME_UNITS[unit]:
        raise where.error(name, value, f"is more than {MOST_SECONDS:g} s", "correct or delete the row")
    return number * (S // TIME_UNITS[unit]) if isinstance(number, int) else round(number * S / TIME_UNITS[unit])


def _seconds(where: Where, name: str, value: object, unit: str) -> float | None:
    return None if value is None else where.number(name, value) / TIME_UNITS[unit]


def _whole(path: Path) -> Json:
    try:
        found = json.loads("".join(pieces(path)))
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: is not whole JSON ({error}); give the file as it was written") from None
    return _dict(found)


def _only_one(path: Path, runs: list[object], name: str) -> Json:
    """The one run of a file: several are several loads, which are no one trace."""
    if len(runs) != 1:
        raise TraceError(
            f"{path}: field {name} holds {len(runs)} runs, each with a load of its own; keep one, for example the "
            f"first with `jq '.{name} |= [.[0]]'`"
        )
    return _dict(runs[0])


# -- AIPerf ----------------------------------------------------------------------------------------------------------


def _aiperf(path: Path, options: ReadOptions) -> Records:
    for line, value in json_objects(path):
        where, record = Where(path, line), _dict(value)
        about, metrics = _dict(record.get("metadata")), _dict(record.get("metrics"))
        if record.get("error") or about.get("was_cancelled") or about.get("benchmark_phase") == "warmup":
            yield None
            continue

        def seconds(name: str, where: Where = where, metrics: Json = metrics) -> list[float]:
            metric = _dict(metrics.get(name))
            unit, value = metric.get("unit"), metric.get("value")
            values = value if isinstance(value, list) else [] if value is None else [value]
            if values and unit not in ("s", "sec", *TIME_UNITS):
                raise where.error(f"{name}.unit", unit, "is no unit of time", f"give one of {', '.join(TIME_UNITS)}")
            per_s = TIME_UNITS.get(str(unit), 1)
            return [where.number(name, one) / per_s for one in values]

        counts = {
            "prompt_tokens": _dict(metrics.get("input_sequence_length")).get("value"),
            "output_tokens": _dict(_first(metrics, "output_sequence_length", "output_token_count")).get("value"),
        }
        ttft, e2el = seconds("time_to_first_token"), seconds("request_latency")
        yield Sent(
            _nanoseconds(where, "metadata.request_start_ns", about.get("request_start_ns"), "ns"),
            *lengths(where, counts, options),
            str(about.get("x_correlation_id") or ""),
            ttft[0] if ttft else None,
            e2el[0] if e2el else None,
            tuple(seconds("inter_chunk_latency")),
        )


# -- GuideLLM --------------------------------------------------------------------------------------------------------


def _guidellm(path: Path, options: ReadOptions) -> Records:
    run = _only_one(path, _list(_whole(path).get("benchmarks")), "benchmarks")
    requests = _dict(run.get("requests") or run.get("request_stats"))
    for name in ("errored", "incomplete"):
        yield from [None] * len(_list(requests.get(name)))
    for i, value in enumerate(_list(requests.get("successful"))):
        where, row = Nth(path, i), _dict(value)
        start = _first(row, "request_start_time", "start_time")
        ttft_s = _seconds(where, "time_to_first_token_ms", row.get("time_to_first_token_ms"), "ms")
        e2el_s = _seconds(where, "request_latency", row.get("request_latency"), "s")
        yield Sent(
            _nanoseconds(where, "request_start_time", start, "s"),
            *lengths(where, row, options, (row.get("prompt"), row.get("output")), OWN),
            str(_dict(row.get("info")).get("conversation_id") or ""),
            ttft_s,
            e2el_s,
        )


# -- GenAI-Perf ------------------------------------------------------------------------------------------------------


def _genai_perf(path: Path, options: ReadOptions) -> Records:
    run = _only_one(path, _list(_whole(path).get("experiments")), "experiments")
    for i, value in enumerate(_list(run.get("requests"))):
        where, row = Nth(path, i), _dict(value)
        chunks = [_chunk(output) for output in _list(row.get("response_outputs"))]
        at_ns = [_nanoseconds(where, "response_timestamps", at, "ns") for at in _list(row.get("response_timestamps"))]
        # The role, the end of the stream and the usage come in chunks without text.
        told_ns = [at for at, (text, _) in zip(at_ns, chunks, strict=False) if text]
        if not told_ns:
            yield None
            continue
        usage = next((usage for _, usage in reversed(chunks) if usage), {})
        sent = _dict(row.get("request_inputs"))
        start_ns = _nanoseconds(where, "timestamp", row.get("timestamp"), "ns")
        counted = {"output_tokens": len(told_ns)} if options.default_output_tokens is None else {}
        yield Sent(
            start_ns,
            *lengths(where, {**counted, **usage}, options, (_prompt_text(sent), None), USAGE),
            str(sent.get("session_id") or ""),
            (told_ns[0] - start_ns) / S,
            (told_ns[-1] - start_ns) / S,
            tuple((after - before) / S for before, after in pairwise(told_ns)),
        )


USAGE = ("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens")


def _chunk(output: object) -> tuple[str, Json]:
    """Text and usage of a part of an answer: Triton's `text_output`, or a chunk of OpenAI's API as it was sent."""
    found = _dict(output)
    if "text_output" in found:
        return str(found["text_output"]), {}
    chunk = _parsed(str(found.get("response") or "").strip().removeprefix("data:").strip())
    texts = [""]
    for choice in map(_dict, _list(chunk.get("choices"))):
        said = _dict(choice.get("delta") or choice.get("message"))
        texts.append(str(choice.get("text") or said.get("content") or said.get("reasoning_content") or ""))
    return "".join(texts), _dict(chunk.get("usage"))


def _prompt_text(sent: Json) -> str | None:
    """The prompt of a request in words, if it has one."""
    if "text_input" in sent:
        return str(sent["text_input"])
    payload = _parsed(str(sent.get("payload") or ""))
    if isinstance(payload.get("prompt"), str):
        return str(payload["prompt"])
    said = [_dict(message).get("content") for message in _list(payload.get("messages"))]
    return "\n".join(map(str, said)) if said else None


def _parsed(text: str) -> Json:
    with suppress(ValueError, RecursionError):
        return _dict(json.loads(text))
    return {}


# -- OpenTelemetry ---------------------------------------------------------------------------------------------------

SPAN_KEYS = (
    ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens"),
    ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens"),
)
FIRST_TOKEN_KEYS = ("gen_ai.latency.time_to_first_token", "gen_ai.response.time_to_first_chunk")
OF_MODELS = (None, "chat", "text_completion", "generate_content")
"""Values of `gen_ai.operation.name`: an agent's span sums up those of its calls."""
FAILED = (2, "STATUS_CODE_ERROR")


def _otlp(path: Path, options: ReadOptions) -> Records:
    spans: dict[str, tuple[Nth, Json, Json]] = {}
    parents: dict[str, str] = {}
    for i, span in enumerate(_spans(path)):
        own = str(span.get("spanId") or f"number {i}")
        parents[own] = str(span.get("parentSpanId") or "")
        values = {str(_dict(a).get("key")): _otlp_value(_dict(a).get("value")) for a in _list(span.get("attributes"))}
        if (
            any(_first(values, *keys) is not None for keys in SPAN_KEYS)
            and values.get("gen_ai.operation.name") in OF_MODELS
        ):
            spans[own] = Nth(path, i), span, values
    for own, (where, span, values) in spans.items():
        if any(above in spans for above in _above(own, parents)):
            # The server's own span of what a client's has already.
            continue
        if _dict(span.get("status")).get("code") in FAILED:
            yield None
            continue
        start_ns = _nanoseconds(where, "startTimeUnixNano", span.get("startTimeUnixNano"), "ns")
        end = span.get("endTimeUnixNano")
        yield Sent(
            start_ns,
            *lengths(where, values, options, keys=SPAN_KEYS),
            str(values.get("gen_ai.conversation.id") or ""),
            _seconds(where, FIRST_TOKEN_KEYS[0], _first(values, *FIRST_TOKEN_KEYS), "s"),
            None if end is None else (_nanoseconds(where, "endTimeUnixNano", end, "ns") - start_ns) / S,
        )


def _above(span: str, parents: Mapping[str, str]) -> Iterator[str]:
    """The spans that a span is in, from the nearest on."""
    seen = {span}
    while (span := parents.get(span, "")) and span not in seen:
        seen.add(span)
        yield span


def _spans(path: Path) -> Iterator[Json]:
    for _, value in json_objects(path):
        for resource in _list(_dict(value).get("resourceSpans")):
            found = _dict(resource)
            for scope in _list(found.get("scopeSpans") or found.get("instrumentationLibrarySpans")):
                yield from map(_dict, _list(_dict(scope).get("spans")))


def _otlp_value(value: object) -> object:
    """An attribute's: whole numbers are written as strings."""
    found = _dict(value)
    if "intValue" in found:
        return _integer(str(found["intValue"]))
    return _first(found, "doubleValue", "stringValue")


# -- OpenAI ----------------------------------------------------------------------------------------------------------


def _openai(path: Path, options: ReadOptions) -> Records:
    roots: dict[str, str] = {}
    for line, value in json_objects(path):
        where, row = Where(path, line), _dict(value)
        batched = _dict(row.get("response"))
        row = _dict(batched.get("body")) if "body" in batched else row
        if row.get("error") or row.get("status") in ("failed", "cancelled") or not _dict(row.get("usage")):
            yield None
            continue
        usage, own = _dict(row.get("usage")), str(row.get("id") or "")
        before = str(row.get("previous_response_id") or "")
        roots[own] = roots.get(before, before or own)
        yield Sent(
            _nanoseconds(where, "created", _first(row, "created", "created_at"), "s"),
            *lengths(where, usage, options, keys=USAGE),
            roots[own],
        )


READERS: Mapping[str, Callable[[Path, ReadOptions], Records]] = {
    "aiperf": _aiperf,
    "guidellm": _guidellm,
    "genai-perf": _genai_perf,
    "otlp": _otlp,
    "openai": _openai,
}


def told_by_keys(row: Json) -> str | None:
    """The format of a file whose first object this is, by its keys; None if it is none of these."""
    if "resourceSpans" in row:
        return "otlp"
    if {"metadata", "metrics"} <= row.keys():
        return "aiperf"
    if "benchmarks" in row:
        return "guidellm"
    if "experiments" in row:
        return "genai-perf"
    body = _dict(row.get("response")).get("body")
    return "openai" if ("body" in _dict(row.get("response")) and body is not None) or "usage" in row else None


def read_sent(path: Path, name: str, options: ReadOptions) -> Records:
    """The requests of a file in one of the formats `READERS`. Raises `TraceError` for what cannot be read."""
    return READERS[name](path, options)


class ClientReader(Reader):
    """What a client kept as a trace: starts and lengths, in order of their start."""

    default_unit = "ns"

    def __init__(self, path: Path, options: ReadOptions, name: str) -> None:
        if options.time_unit is not None:
            raise TraceError(f"{path}: format {name} says the units of its times; leave --time-unit out")
        super().__init__(path, options)
        self._read = partial(read_sent, path, name, options)

    def raw_columns(self) -> Iterator[Columns]:
        """Yield all requests at once."""
        rows: list[Sent] = []
        policy = self.options.zero_tokens
        for sent in self._read():
            if sent is None or (policy != "one" and not (sent.prompt_tokens and sent.output_tokens)):
                self.skipped += 1
            else:
                rows.append(sent)
        rows.sort(key=lambda sent: sent.start_ns)
        has_sessions = any(sent.session for sent in rows)
        yield Columns(
            [sent.start_ns for sent in rows],
            [sent.prompt_tokens or 1 for sent in rows],
            [sent.output_tokens or 1 for sent in rows],
            [sent.session for sent in rows] if has_sessions else (),
        )
