"""Changes to a stream of requests: each takes an iterable and yields new requests, one at a time, in order.

All of them stream and none changes its input; ids are renumbered where requests are dropped or joined.
"""

import heapq
from collections.abc import Iterable, Iterator
from itertools import accumulate, islice
from operator import itemgetter

from traces.errors import TraceError
from traces.hash_ids import output_blocks
from traces.rates import check_between, check_count, check_rate, check_seed
from traces.request import Request


def scale_rate(requests: Iterable[Request], factor: float) -> Iterator[Request]:
    """Yield the requests `factor` times as fast (2: twice the rate, arrivals halved)."""
    check_between("rate scale", factor, "2 doubles the rate, 0.5 halves it")
    return (request._replace(arrival_s=request.arrival_s / factor) for request in requests)


def window(requests: Iterable[Request], start_s: float, end_s: float) -> Iterator[Request]:
    """Yield the requests that arrive in [start_s, end_s), with `start_s` as the new 0."""
    if not 0 <= start_s < end_s:
        raise TraceError(f"window {start_s}:{end_s} is empty; give START below END, both in seconds and not negative")
    return _window(requests, start_s, end_s)


def _window(requests: Iterable[Request], start_s: float, end_s: float) -> Iterator[Request]:
    count = 0
    for request in requests:
        if request.arrival_s >= end_s:
            return  # streams are in order: nothing further belongs to the window
        if request.arrival_s >= start_s:
            yield request._replace(request_id=count, arrival_s=request.arrival_s - start_s)
            count += 1


def clip(requests: Iterable[Request], max_tokens: int) -> Iterator[Request]:
    """Fit each request into a context of `max_tokens`, prompt, answers of tools and output together.

    The output is kept up to half of the context and the prompt is cut to what is left; the output gives way only where
    the prompt is short. Hash ids are trimmed to the blocks that still hold what they name: all of the prompt where only
    the output is cut, its full blocks alone where the answer now begins at another place. Calls of tools stay that come
    before the last token and whose answers, the first ones first, fill no more than half of the context. Of images stay
    those that the prompt still has whole; what is left of one that is cut is text.
    """
    if max_tokens < 2:
        raise TraceError(f"clip {max_tokens} is too small; a request needs 2 tokens, one of prompt and one of output")
    return (request if request.most_tokens <= max_tokens else _clip(request, max_tokens) for request in requests)


def _clip(request: Request, max_tokens: int) -> Request:
    prompt, output, calls = request.prompt_tokens, request.output_tokens, request.calls
    if calls:
        returned = accumulate(call.returned_tokens for call in calls)
        calls = calls[: sum(tokens <= max_tokens // 2 - 1 for tokens in returned)]
        max_tokens -= sum(call.returned_tokens for call in calls)
    prompt = max(1, min(prompt, max_tokens - min(output, max_tokens // 2)))
    output = min(output, max_tokens - prompt)
    if not (request.hash_ids or request.calls or request.images):
        return Request(request.request_id, request.arrival_s, prompt, output, *request[4:])
    hashes, output_hashes, block = request.hash_ids, request.output_hash_ids, request.hash_block_tokens
    if hashes and prompt < request.prompt_tokens:
        # What is generated now is not what the ids say, neither behind the prompt nor in its last block.
        hashes, output_hashes = hashes[: prompt // block], ()
    elif output_hashes:
        output_hashes = output_hashes[: output_blocks(prompt, output, block)]
    return request._replace(
        prompt_tokens=prompt,
        output_tokens=output,
        hash_ids=hashes,
        output_hash_ids=output_hashes,
        calls=tuple(call for call in calls if call.after_tokens < output),
        images=tuple(image for image in request.images if image.offset + image.num_tokens <= prompt),
    )


def spread_ties(requests: Iterable[Request]) -> Iterator[Request]:
    """Spread requests that share a time stamp evenly over the span up to the next stamp.

    Traces that round arrivals down (Mooncake's conversations to 3 s) would otherwise arrive in lumps that never were:
    n requests at t before the next stamp u arrive at t, t + (u - t)/n, ... The last stamp's requests have no next one
    and are spread over the span before them (nothing where the trace has one stamp only).
    """
    span = 0.0
    group: list[Request] = []
    for request in requests:
        if group and request.arrival_s > group[0].arrival_s:
            span = request.arrival_s - group[0].arrival_s
            yield from _spread(group, span)
            group = []
        group.append(request)
    yield from _spread(group, span)


def _spread(group: list[Request], span_s: float) -> Iterator[Request]:
    for i, request in enumerate(group):
        yield request._replace(arrival_s=request.arrival_s + span_s * i / len(group)) if i else request


def merge(*streams: Iterable[Request]) -> Iterator[Request]:
    """Yield the requests of all streams in order of arrival, renumbered; the earlier stream first where they tie.

    Ids of different traces name different text and images, so from the second stream on they are told apart (id *
    number of streams + the stream's number); a single stream keeps its ids. Sessions get the stream's number as a
    prefix.
    """
    if len(streams) == 1:
        return iter(streams[0])
    apart = [_told_apart(stream, i, len(streams)) for i, stream in enumerate(streams)]
    merged = heapq.merge(*apart, key=itemgetter(1))
    return (request._replace(request_id=i) for i, request in enumerate(merged))


def _told_apart(stream: Iterable[Request], number: int, streams: int) -> Iterator[Request]:
    for request in stream:
        if request.hash_ids or request.session_id or request.images:
            session = f"{number}:{request.session_id}" if request.session_id else ""
            hashes, output_hashes = (
                tuple(ident * streams + number for ident in ids) for ids in (request.hash_ids, request.output_hash_ids)
            )
            images = tuple(one._replace(image_id=one.image_id * streams + number) for one in request.images)
            request = request._replace(
                session_id=session, hash_ids=hashes, output_hash_ids=output_hashes, images=images
            )
        yield request


def head(requests: Iterable[Request], n: int) -> Iterator[Request]:
    """Yield the first `n` requests."""
    check_count("number of requests", n)
    return islice(requests, n)


def at_request_rate(
    requests: Iterable[Request], rate_per_s: float, burstiness: float = 1.0, seed: int = 0
) -> Iterator[Request]:
    """Replace the arrivals by a random process, as `vllm bench serve --request-rate --burstiness` does.

    Intervals are gamma distributed with shape `burstiness` and mean 1/rate: 1 is a Poisson process, less is burstier,
    more is steadier. The first request arrives at 0. `rate_per_s` of infinity puts all of them at 0.
    """
    check_rate(rate_per_s, burstiness)
    check_seed(seed)
    return _at_request_rate(requests, rate_per_s, burstiness, seed)


def _at_request_rate(requests: Iterable[Request], rate_per_s: float, burstiness: float, seed: int) -> Iterator[Request]:
    from traces.arrivals import unit_times  # noqa: PLC0415  (numpy, which replaying a trace does not need)

    times = unit_times(burstiness, seed)
    for request in requests:
        yield request._replace(arrival_s=next(times) / rate_per_s)
