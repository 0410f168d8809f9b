"""`kvtwin explain --slowest` and `--beyond`: what the slowest requests waited for beside all others, and what ran then.

Causes are told by the timeline: what each engine's iterations were bound by while a request waited. Without one, a
result says how long requests were in the queue and behind it, and what else was running then.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.errors import UserError
from sim.results.figures.style import time_text as _time
from sim.results.result import RESULT_FILE, read_requests
from sim.results.time_use import LIMIT_NAMES
from sim.results.timeline import TIMELINE_FILE, Steps, TraceEvent, iterations_of, read_timeline, request_spans

Array = NDArray[np.float64]
METRICS = {"ttft": "TTFT", "e2el": "end-to-end latency"}
DEFAULT_PERCENTILE = 99.0
MOST_NEIGHBOURS = 5
LEAST_S = 1e-6
"""Causes that took less, of the set and of all others, are not listed."""
CLUSTERED = 0.75
"""Share of a set whose shortest span of arrivals is told."""
DENSE = 0.5
"""Share of the run below which such a span is worth telling."""
RUNNING, QUEUED = "computing, beside others", "in the queue"
UNDER_WAY = "the rest of the iteration that ran as it came"
FRONT_END = "HTTP and tokeniser"
DECODING, BEHIND_PROMPTS = "decoding", "others' prompts, while it could have decoded"
NOT_ITS_TURN = "not the engine's turn to look"


@dataclass(frozen=True)
class Neighbour:
    """A request that ran while those of the set waited.

    `waits_s` of their waits passed while it ran, in all; `share` is its part of the tokens that ran then.
    """

    request_id: int
    prompt_tokens: int
    output_tokens: int
    waits_s: float
    share: float


@dataclass(frozen=True)
class Tail:
    """The slowest requests of a run beside the others.

    Attributes:
        metric: of `METRICS`.
        ids: of the set, slowest first.
        values_s, others_s: the metric of the set and of all others, s.
        causes: by cause, mean seconds in the set and among all others, largest difference first.
        prompt_tokens: mean of the set and of all others.
        span_s: begin and length of the shortest span in which three quarters of the set arrived, s.
        run_s: from the first arrival to the last.
        has_timeline: whether causes are told apart.
    """

    metric: str
    ids: list[int]
    values_s: Array
    others_s: Array
    causes: list[tuple[str, float, float]]
    prompt_tokens: tuple[float, float]
    span_s: tuple[float, float]
    run_s: float
    neighbours: list[Neighbour]
    has_timeline: bool


@dataclass(frozen=True)
class _Requests:
    """Of those completed: ids and times on the clients' clock, s; shape (requests,)."""

    ids: NDArray[np.int64]
    arrival_s: Array
    queue_s: Array
    ttft_s: Array
    e2el_s: Array
    prompts: Array
    outputs: Array


def tail_of(folder: Path, *, slowest: int | None = None, beyond: float | None = None, metric: str = "ttft") -> Tail:
    """The tail of a saved run: its `slowest` requests, or those `beyond` a percentile of the metric.

    Raises:
        UserError: no such run, one without requests one by one, or a set that is empty or everything.
    """
    timeline = folder / TIMELINE_FILE
    events = read_timeline(timeline) if timeline.is_file() else None
    requests = _requests(folder)
    values_s = requests.ttft_s if metric == "ttft" else requests.e2el_s
    count = len(values_s)
    size = slowest
    if size is None:
        # Those above the percentile, which ties may leave empty: then the slowest alone.
        size = max(1, int((values_s > np.percentile(values_s, DEFAULT_PERCENTILE if beyond is None else beyond)).sum()))
    if not 1 <= size < count:
        remedy = f"give 1 to {count - 1}, to have others beside them"
        raise UserError(f"--slowest: {size} of {count} completed requests; {remedy}")
    order = np.argsort(-values_s, kind="stable")
    chosen, rest = order[:size], order[size:]
    causes = _causes(requests, events, metric)
    rows = [(name, float(seconds[chosen].mean()), float(seconds[rest].mean())) for name, seconds in causes.items()]
    rows = [row for row in rows if max(row[1:]) >= LEAST_S]
    arrivals = np.sort(requests.arrival_s[chosen])
    most = max(0, int(np.ceil(CLUSTERED * size)) - 1)
    widths = arrivals[most:] - arrivals[: size - most]
    first = int(np.argmin(widths))
    return Tail(
        metric,
        [int(i) for i in requests.ids[chosen]],
        values_s[chosen],
        values_s[rest],
        sorted(rows, key=lambda row: row[2] - row[1]),
        (float(requests.prompts[chosen].mean()), float(requests.prompts[rest].mean())),
        (float(arrivals[first]), float(widths[first])),
        float(np.ptp(requests.arrival_s)),
        _neighbours(requests, chosen),
        events is not None,
    )


def _requests(folder: Path) -> _Requests:
    result = read_requests(folder)
    done = np.array([not error for error in result.errors or ()], bool)
    columns: list[Any] = [result.request_ids, result.start_times, result.queue_times, result.ttfts, result.latencies]
    columns += [result.input_lens, result.output_lens]
    found = [np.asarray(column)[done] for column in columns]
    if len(found[0]) < 2:
        raise UserError(f"{folder / RESULT_FILE}: {len(found[0])} completed requests have no others beside them")
    return _Requests(found[0], *(np.asarray(column, float) for column in found[1:]))


def _causes(requests: _Requests, events: Sequence[TraceEvent] | None, metric: str) -> dict[str, Array]:
    """Seconds of each request up to its first or last token, by cause; together they are the metric."""
    queue_s, total_s = requests.queue_s, requests.ttft_s if metric == "ttft" else requests.e2el_s
    found: dict[str, Array] = {QUEUED: queue_s.copy(), RUNNING: requests.ttft_s - queue_s}
    if metric != "ttft":
        found[DECODING] = total_s - requests.ttft_s
    if events is None:
        return found
    engines, scheduled_s, ended_s, away = _timeline(requests, events)
    found |= {FRONT_END: requests.arrival_s + queue_s - scheduled_s, UNDER_WAY: np.zeros_like(queue_s)}
    found[QUEUED] = scheduled_s - requests.arrival_s
    for engine, own in engines:
        begin_s, end_s = requests.arrival_s[own], scheduled_s[own]
        from_s = np.minimum(engine.looks_from_s(begin_s), end_s)
        found[UNDER_WAY][own] = from_s - begin_s
        for limit, seconds in engine.bound_s(from_s, end_s).items():
            name = LIMIT_NAMES.get(limit, NOT_ITS_TURN)
            found.setdefault(name, np.zeros_like(queue_s))[own] += seconds
        if metric != "ttft":
            first_s = ended_s[own] - (total_s - requests.ttft_s)[own]
            others_s = engine.seconds(first_s, ended_s[own], engine.decodes == 0)
            found.setdefault(BEHIND_PROMPTS, np.zeros_like(queue_s))[own] += others_s
            found[DECODING][own] -= others_s
    for name, spans in away.items():
        if spans.behind_first and metric == "ttft":
            continue
        rows, begin_s, end_s = np.array(spans.rows), np.array(spans.begin_s), np.array(spans.end_s)
        inside = DECODING if spans.behind_first else RUNNING
        np.add.at(found.setdefault(name, np.zeros_like(queue_s)), rows, end_s - begin_s)
        np.add.at(found[inside], rows, begin_s - end_s)
        for engine, own in engines if spans.behind_first else ():
            # What is away waits for that, not for the prompts of others.
            here = np.isin(rows, own)
            others_s = engine.seconds(begin_s[here], end_s[here], engine.decodes == 0)
            np.add.at(found[BEHIND_PROMPTS], rows[here], -others_s)
            np.add.at(found[DECODING], rows[here], others_s)
    told = sum((seconds for name, seconds in found.items() if name in {*LIMIT_NAMES.values(), NOT_ITS_TURN, UNDER_WAY}))
    found[QUEUED] = found[QUEUED] - told
    return found


@dataclass(frozen=True)
class _Away:
    """Spans in which requests were away from the batch for one reason: their places, begin and end, s."""

    behind_first: bool
    """Whether they lie behind the first token."""
    rows: list[int] = field(default_factory=list)
    begin_s: list[float] = field(default_factory=list)
    end_s: list[float] = field(default_factory=list)


def _timeline(
    requests: _Requests, events: Sequence[TraceEvent]
) -> tuple[list[tuple[Steps, NDArray[np.int64]]], Array, Array, dict[str, _Away]]:
    """Engines with the places of their requests, when each request was scheduled and ended (on the engine's clock),
    and spans away from the batch by name."""
    place: dict[object, int] = {int(ident): i for i, ident in enumerate(requests.ids)}
    scheduled_s, ended_s = requests.arrival_s + requests.queue_s, requests.arrival_s + requests.e2el_s
    phases = [(place[span[0]], *span[1:]) for span in request_spans(events) if span[0] in place]
    first_s = ended_s.copy()
    for i, name, begin_s, end_s in phases:
        if name == "queue":
            scheduled_s[i] = end_s
        elif name == "decode":
            first_s[i], ended_s[i] = begin_s, end_s
    away: dict[str, _Away] = {}
    for i, name, begin_s, end_s in phases:
        if name not in ("queue", "prefill", "decode"):
            behind = begin_s >= first_s[i]
            spans_of = away.setdefault(f"{name}, after the first token" if behind else name, _Away(behind))
            spans_of.rows.append(i)
            spans_of.begin_s.append(begin_s)
            spans_of.end_s.append(end_s)
    seen: set[int] = set()
    engines = []
    for own in iterations_of(events).values():
        admitted = [place[i] for step in own for i in step["args"]["admitted"] if i in place and i not in seen]
        admitted = list(dict.fromkeys(admitted))
        seen.update(int(requests.ids[i]) for i in admitted)
        engines.append((Steps.of(own), np.array(admitted, np.int64)))
    return engines, scheduled_s, ended_s, away


def _neighbours(requests: _Requests, chosen: NDArray[np.int64]) -> list[Neighbour]:
    """Those that ran while the set waited, most tokens times seconds first."""
    begin_s, end_s = requests.arrival_s + requests.queue_s, requests.arrival_s + requests.e2el_s
    waits_s = np.zeros(len(begin_s))
    for i in chosen:
        # Until it was scheduled itself.
        overlap = np.minimum(end_s, begin_s[i]) - np.maximum(begin_s, requests.arrival_s[i])
        waits_s += np.maximum(0.0, overlap)
    weight = waits_s * (requests.prompts + requests.outputs / 2)
    order = np.argsort(-weight, kind="stable")[:MOST_NEIGHBOURS]
    total = float(weight.sum())
    return [
        Neighbour(
            int(requests.ids[j]), int(requests.prompts[j]), int(requests.outputs[j]), float(waits_s[j]),
            float(weight[j]) / total,
        )
        for j in order
        if weight[j] > 0.0
    ]  # fmt: skip


def sentences(found: Tail) -> list[str]:
    """The tail in sentences and a table of causes."""
    lines = head_sentences(found)
    rows = cause_rows(found)
    if rows:
        width = max(len(cause) for cause, *_ in rows)
        rows.insert(0, ("mean time a request", "these", "others", "more"))
        lines += ["", *(f"{cause:<{width}}  {own:>9}  {other:>9}  {more:>9}" for cause, own, other, more in rows), ""]
    lines += neighbour_sentences(found)
    if not found.has_timeline:
        lines.append(f"What bound the engine meanwhile is in {TIMELINE_FILE}: run it again with --timeline.")
    return lines


def cause_rows(found: Tail) -> list[tuple[str, str, str, str]]:
    """Of each cause its mean time in the set, among the others, and what the set has more."""
    return [
        (cause, _time(own_s), _time(other_s), ("-" if own_s < other_s - LEAST_S else "") + _time(abs(own_s - other_s)))
        for cause, own_s, other_s in found.causes
    ]


def head_sentences(found: Tail) -> list[str]:
    """Which requests they are, and when they came."""
    count, others = len(found.ids), len(found.others_s)
    name = METRICS[found.metric]
    lines = [
        f"The {count:,} of {count + others:,} requests with the longest {name}: {_time(found.values_s.min())} to "
        f"{_time(found.values_s.max())}, {_time(found.values_s.mean())} in the mean; the others' mean is "
        f"{_time(found.others_s.mean())}."
    ]
    shown = ", ".join(map(str, found.ids[:10])) + (", ..." if count > 10 else "")
    own_tokens, other_tokens = found.prompt_tokens
    lines.append(
        f"They are {shown}, with {own_tokens:,.0f} tokens of prompt in the mean; the others have {other_tokens:,.0f}."
    )
    if count > 2 and found.span_s[1] < DENSE * CLUSTERED * found.run_s:
        begin_s, length_s = found.span_s
        lines.append(
            f"Three quarters of them arrived within {_time(length_s)} from {begin_s:,.1f} s on; all arrivals take "
            f"{_time(found.run_s)}."
        )
    return lines


def neighbour_sentences(found: Tail) -> list[str]:
    """Which requests ran while they waited."""
    if not found.neighbours:
        return []
    return [
        "While they waited, these ran, by the tokens that they held and for how long:",
        *(
            f"  request {one.request_id}: {one.prompt_tokens:,} tokens of prompt, {one.output_tokens:,} of output, "
            f"beside {_time(one.waits_s)} of the waits, {one.share:.0%} of the token-seconds"
            for one in found.neighbours
        ),
    ]
