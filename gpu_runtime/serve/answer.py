"""Sending an answer: whole or streamed, to clients that may be slow or gone.

The headers of a stream wait for its first token, so that a failure before it still has its status.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from gpu_runtime.serve.reply import DONE, Reply, encode, error_object, event
from gpu_runtime.serve.request import Refused
from gpu_runtime.serve.ticket import End, Events, Ticket, Token

STALLED_S = 30.0
"""A client that sends or takes nothing for so long is given up, s."""
FLUSH_POLL_S = 0.005
Stop = Callable[[Ticket], object]
SSE_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


async def send_whole(http: web.Request, events: Events, reply: Reply, stop: Stop) -> web.StreamResponse:
    """Answer with one JSON object when all choices have ended. `stop` ends those that have met a stop string."""
    texts = [""] * len(reply.choices)
    async for index, found in _until_ended(events, reply, stop):
        choice = reply.choices[index]
        if isinstance(found, End) and found.error:
            raise Refused(found.status, found.error)
        texts[index] += choice.end(found.reason) if isinstance(found, End) else choice.add(found)
    response = web.json_response(body=encode(reply.whole(texts)))
    async with _limited(http) as limit:
        limit.reschedule(_later())
        await response.prepare(http)
        await response.write_eof()
        await _sent(http)
    return response


async def send_stream(http: web.Request, events: Events, reply: Reply, stop: Stop) -> web.StreamResponse:
    """Answer with server-sent events, one a token; `stop` as for `send_whole`."""
    response = web.StreamResponse(headers=SSE_HEADERS)
    async with _limited(http) as limit:
        last = b""
        async for index, found in _until_ended(events, reply, stop):
            fault = Refused(found.status, found.error) if isinstance(found, End) and found.error else None
            if not response.prepared:
                if fault:
                    raise fault
                await response.prepare(http)
            if fault:
                last = event(error_object(fault)) + DONE
                break
            limit.reschedule(_later())
            choice = reply.choices[index]
            if isinstance(found, End):
                data = reply.end(index, choice.end(found.reason))
            else:
                data = reply.chunk(index, choice.add(found), found.token)
                if choice.reason is not None:
                    data += reply.end(index, "")
            await response.write(data)
            limit.reschedule(None)
        else:
            last = reply.end_all()
        limit.reschedule(_later())
        await response.write(last)
        await response.write_eof()
        await _sent(http)
    return response


async def _until_ended(events: Events, reply: Reply, stop: Stop) -> AsyncIterator[tuple[int, Token | End]]:
    """What comes until every choice has a reason to have ended, which the caller gives it."""
    left = len(reply.choices)
    while left:
        index, found = await events.get()
        choice = reply.choices[index]
        if choice.reason is not None:
            # Behind a stop string: what the engine computed until it heard of it.
            continue
        yield index, found
        if choice.reason is not None:
            left -= 1
            if not isinstance(found, End):
                stop(choice.ticket)


@asynccontextmanager
async def _limited(http: web.Request) -> AsyncIterator[asyncio.Timeout]:
    """Give up a client that takes nothing; one that has gone is no fault, its request is cancelled elsewhere."""
    try:
        async with asyncio.timeout(None) as limit:
            yield limit
    except TimeoutError:
        if http.transport is not None:
            http.transport.abort()
    except ConnectionError:
        pass


def _later() -> float:
    return asyncio.get_running_loop().time() + STALLED_S


async def _sent(http: web.Request) -> None:
    """Return when what was written has left this process: it may end right after the last answer."""
    while http.transport is not None and http.transport.get_write_buffer_size():
        await asyncio.sleep(FLUSH_POLL_S)
