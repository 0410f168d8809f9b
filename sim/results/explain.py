"""`kvtwin explain`: what became of one request and why it waited, in sentences, from what a run has saved."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import UNSET

from sim.errors import UserError
from sim.results.figures.style import time_text as _time
from sim.results.metrics import EndedRequest
from sim.results.result import RESULT_FILE, read_requests
from sim.results.schema import Result
from sim.results.time_use import LIMIT_NAMES
from sim.results.timeline import TIMELINE_FILE, Steps, TraceEvent, iterations_of, read_timeline, request_spans


def explain(folder: Path, request_id: int) -> list[str]:
    """Sentences about one request; UserError where there is no such run or request."""
    result = read_requests(folder)
    found = _request(result, request_id, folder / RESULT_FILE)
    prompt = _tokens(found.prompt_tokens)
    told = [f"Request {request_id} arrived at {_moment(found.arrival_s)} with {prompt} of prompt."]
    if found.error:
        return [*told, f"It was not completed: {found.error}."]
    told.append(
        f"It got {_tokens(found.output_tokens)} in {_time(found.e2el_s)} under {result.policy}: "
        f"{_time(found.queue_s)} in the queue, {_time(found.ttft_s - found.queue_s)} to its first token, "
        f"{_time(found.e2el_s - found.ttft_s)} from there to the last."
    )
    told += _beside_others(result, found)
    timeline = folder / TIMELINE_FILE
    if not timeline.is_file():
        why = f"Why it waited is in {TIMELINE_FILE}, which this run did not keep: run it again with --timeline."
        return [*told, why]
    try:
        return [*told, *_why(read_timeline(timeline), found, request_id)]
    except (KeyError, TypeError) as error:
        raise UserError(f"{timeline}: not a timeline that a run left ({error!r}); run it again") from error


def _request(result: Result, request_id: int, path: Path) -> EndedRequest:
    ids = result.request_ids or []
    place = bisect_left(ids, request_id)
    if place == len(ids) or ids[place] != request_id:
        span = f"{ids[0]} to {ids[-1]}" if ids else "none"
        raise UserError(f"--request {request_id}: no such request ended in {path}; ids are {span}")
    columns: tuple[Any, ...] = (ids, result.start_times, result.input_lens, result.output_lens, result.queue_times)
    columns += (result.ttfts, result.latencies, result.errors)
    return EndedRequest(*(column[place] for column in columns if column is not UNSET))


def _beside_others(result: Result, found: EndedRequest) -> Iterator[str]:
    shares = []
    for values, own_s in ((result.ttfts, found.ttft_s), (result.latencies, found.e2el_s)):
        completed = [v for v, error in zip(values or (), result.errors or (), strict=True) if not error]
        shares.append(sum(value < own_s for value in completed) / len(completed) * 100)
    yield (
        f"Its TTFT of {_time(found.ttft_s)} is longer than that of {shares[0]:.0f} % of the requests, "
        f"its end-to-end latency than that of {shares[1]:.0f} %."
    )


def _why(events: Sequence[TraceEvent], found: EndedRequest, request_id: int) -> Iterator[str]:
    slices = _slices(events, request_id)
    if not slices:
        yield "The timeline does not say which request was admitted when: run it again with --timeline."
        return
    spans = sorted((span[1:] for span in request_spans(events) if span[0] == request_id), key=itemgetter(1))
    # On the engine's clock, which has the front end's time not yet in it.
    scheduled_s = next((end_s for name, _, end_s in spans if name == "queue"), found.arrival_s + found.queue_s)
    steps = Steps.of(slices)
    under_way = int(steps.at(np.array(found.arrival_s)))
    ahead = slices[under_way]["args"]["waiting"] if under_way >= 0 else 0
    yield from _queueing(steps, found, scheduled_s, ahead)
    admission = next(step for step in slices if request_id in step["args"]["admitted"])
    others = len(admission["args"]["admitted"]) - 1
    yield (
        f"It was admitted at {_moment(admission['ts'] / 1e6)}, {_alone(others)}, in an iteration of "
        f"{_tokens(admission['args']['tokens'])} that took {_time(admission['dur'] / 1e6)}: {admission['args']['why']}."
    )
    for name, start_s, end_s in spans:
        if name not in ("queue", "prefill", "decode"):
            yield from _interruption(steps, name, start_s, end_s)
    yield from _decoding(steps, found, spans)


def _slices(events: Sequence[TraceEvent], request_id: int) -> list[dict[str, Any]]:
    """The iterations of the engine that first admitted the request, in order."""
    engines = iterations_of(events).values()
    return next((own for own in engines if any(request_id in step["args"]["admitted"] for step in own)), [])


def _bound_s(steps: Steps, begin_s: float, end_s: float) -> dict[str, float]:
    """Seconds of a span by what kept the next request from starting; only of what did."""
    found = steps.bound_s(np.array(begin_s), np.array(end_s))
    return {limit: float(seconds) for limit, seconds in found.items() if seconds > 0.0}


def _queueing(steps: Steps, found: EndedRequest, scheduled_s: float, ahead: int) -> Iterator[str]:
    looks_s = min(float(steps.looks_from_s(np.array(found.arrival_s))), scheduled_s)
    bound_s = _bound_s(steps, looks_s, scheduled_s)
    if looks_s > found.arrival_s:
        bound_s["under way"] = looks_s - found.arrival_s
    if not bound_s:
        yield "It was scheduled as it came."
        return
    if ahead:
        yield f"{ahead:,} request{'s' if ahead != 1 else ''} waited before it when it came."
    for name, seconds in sorted(bound_s.items(), key=lambda item: -item[1]):
        if name == "under way":
            yield f"{_time(seconds)} of its wait was the rest of the iteration that ran when it came."
        elif name == "none":
            yield f"{_time(seconds)} of its wait no request was kept back: it was not the engine's turn to look."
        else:
            share = seconds / found.queue_s * 100 if found.queue_s else 0.0
            cause = f"what kept the next in the queue from starting was {LIMIT_NAMES[name]}"
            yield f"For {_time(seconds)} ({share:.0f} %) {cause}."
    front_s = found.arrival_s + found.queue_s - scheduled_s
    if front_s > 1e-6:
        yield f"{_time(front_s)} passed between client and engine (HTTP, tokenisation)."


AWAY = {
    "preempted": "lost its KV and waited to be computed again",
    "swapped out": "was swapped out to the host",
    "parked": "was parked: in no batch, its KV held or on its way",
    "coming back": "waited for its KV to come back from the host",
    "recompute": "was computed again",
    "tool": "waited for a tool",
}


def _interruption(steps: Steps, name: str, start_s: float, end_s: float) -> Iterator[str]:
    if end_s <= start_s:
        return
    bound_s = _bound_s(steps, start_s, end_s)
    limit = max(bound_s, key=lambda name: bound_s[name], default="none")
    is_kept = limit in LIMIT_NAMES and name not in ("recompute", "tool")
    cause = f", while this was short: {LIMIT_NAMES[limit]}" if is_kept else ""
    yield f"At {_moment(start_s)} it {AWAY.get(name, name)} for {_time(end_s - start_s)}{cause}."


def _decoding(steps: Steps, found: EndedRequest, spans: Sequence[tuple[str, float, float]]) -> Iterator[str]:
    decode = next(((np.array(start_s), np.array(end_s)) for name, start_s, end_s in spans if name == "decode"), None)
    if decode is None or found.output_tokens < 2:
        return
    sizes = steps.decodes
    batch, weight, others_s = (float(steps.seconds(*decode, of)) for of in (sizes, np.ones_like(sizes), sizes == 0))
    tpot_s = (found.e2el_s - found.ttft_s) / (found.output_tokens - 1)
    stalled = f"; {_time(others_s)} went to prefills of others, during which nothing decoded" if others_s else ""
    mean = f"{batch / weight:.0f}" if weight else ""
    size = f", with {mean} request{'s' * (mean != '1')} decoding at a time" if mean else ""
    yield f"Its tokens came {_time(tpot_s)} apart{size}{stalled}."


def _moment(seconds: float) -> str:
    return f"{seconds:,.3f} s"


def _tokens(count: int) -> str:
    return f"{count:,} token{'s' if count != 1 else ''}"


def _alone(others: int) -> str:
    return "alone" if not others else f"with {others} other{'s' if others != 1 else ''}"
