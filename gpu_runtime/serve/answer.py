"""Sending an answer: whole or streamed, to clients that may be slow or gone.

The headers of a stream wait for its first token, so that a failure before it still has its status.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from gpu_runtime.serve.reply import DONE, Reply, encode, error_object, event
from gpu_runtime.serve.request import Refused
from gpu_runtime.serve.text import TextOf
from gpu_runtime.serve.ticket import End, Ticket

STALLED_S = 30.0
"""A client that sends or takes nothing for so long is given up, s."""
FLUSH_POLL_S = 0.005
SSE_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
GREEDY = {"X-Kvtwin-Notice": "decoding is greedy: temperature has no effect"}


async def send_whole(http: web.Request, ticket: Ticket, reply: Reply, text_of: TextOf) -> web.StreamResponse:
    """Answer with one JSON object when the request has ended."""
    while not isinstance(found := await ticket.events.get(), End):
        reply.add("" if found.is_stop else text_of(found.token), found.token)
    if found.error:
        raise Refused(found.status, found.error)
    body, notice = encode(reply.whole(found.reason)), GREEDY if reply.ask.greedy_notice else None
    response = web.json_response(body=body, headers=notice)
    async with _limited(http) as limit:
        limit.reschedule(_later())
        await response.prepare(http)
        await response.write_eof()
        await _sent(http)
    return response


async def send_stream(http: web.Request, ticket: Ticket, reply: Reply, text_of: TextOf) -> web.StreamResponse:
    """Answer with server-sent events, one a token."""
    found = await ticket.events.get()
    if isinstance(found, End) and found.error:
        raise Refused(found.status, found.error)
    response = web.StreamResponse(headers=SSE_HEADERS | (GREEDY if reply.ask.greedy_notice else {}))
    async with _limited(http) as limit:
        await response.prepare(http)
        while not isinstance(found, End):
            limit.reschedule(_later())
            await response.write(reply.chunk("" if found.is_stop else text_of(found.token), found.token))
            limit.reschedule(None)
            found = await ticket.events.get()
        limit.reschedule(_later())
        if found.error:
            await response.write(event(error_object(Refused(found.status, found.error))) + DONE)
        else:
            await response.write(reply.end(found.reason))
        await response.write_eof()
        await _sent(http)
    return response


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
