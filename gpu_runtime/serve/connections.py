"""`Connections`: those that have sent no whole header yet get little time, and there are not many of them.

aiohttp waits for a header for ever. A client that sends none, or a byte a minute, would keep a connection as long.
"""

import asyncio
from collections.abc import Callable

HEADER_S = 10.0
"""A new connection that has sent no whole header for so long is closed, s."""
IDLE_S = 75.0
"""So is one that has had an answer and has sent no other header, s."""
MOST_HALF_OPEN = 1024
"""New connections without a whole header; the oldest makes room for the next. So do those that idle."""
SHARE = 4
"""Of the descriptors that the process may have, each of the two kinds gets at most one part in so many."""


def most_waiting() -> int:
    """Connections of a kind that may wait for a header, so that others can still be made."""
    try:
        import resource  # noqa: PLC0415 - POSIX has it
    except ImportError:
        return MOST_HALF_OPEN
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_HALF_OPEN if soft == resource.RLIM_INFINITY else max(1, min(MOST_HALF_OPEN, soft // SHARE))


class Connections:
    """Watches the connections of a server.

    Args:
        factory: makes the protocol that answers a connection.
    """

    def __init__(self, factory: Callable[[], asyncio.Protocol]) -> None:
        self._factory, self._most = factory, most_waiting()
        self._half_open: dict[asyncio.BaseTransport, asyncio.TimerHandle] = {}
        self._idle: dict[asyncio.BaseTransport, asyncio.TimerHandle] = {}

    def protocol(self) -> asyncio.Protocol:
        """The protocol of a connection that is being made."""
        return _Watched(self._factory(), self)

    def made(self, transport: asyncio.BaseTransport) -> None:
        """A connection is there, and nothing of a request."""
        self._wait(self._half_open, HEADER_S, transport)

    def begun(self, transport: asyncio.BaseTransport | None) -> None:
        """A request's header has come."""
        if transport is not None:
            self.lost(transport)

    def ended(self, transport: asyncio.BaseTransport | None) -> None:
        """A request has been answered: another may follow."""
        if transport is not None and not transport.is_closing():
            self.lost(transport)
            self._wait(self._idle, IDLE_S, transport)

    def lost(self, transport: asyncio.BaseTransport) -> None:
        """A header of this connection is not waited for any more."""
        for waiting in (self._half_open, self._idle):
            if transport in waiting:
                waiting.pop(transport).cancel()

    def _wait(
        self,
        waiting: dict[asyncio.BaseTransport, asyncio.TimerHandle],
        seconds: float,
        transport: asyncio.BaseTransport,
    ) -> None:
        while len(waiting) >= self._most:
            self._close(next(iter(waiting)))
        waiting[transport] = asyncio.get_running_loop().call_later(seconds, self._close, transport)

    def _close(self, transport: asyncio.BaseTransport) -> None:
        self.lost(transport)
        if isinstance(transport, asyncio.Transport):
            transport.abort()


class _Watched(asyncio.Protocol):
    """Hands everything on, and tells of the connection's beginning and end."""

    def __init__(self, inner: asyncio.Protocol, connections: Connections) -> None:
        self._inner, self._connections = inner, connections
        self.data_received, self.eof_received = inner.data_received, inner.eof_received
        self.pause_writing, self.resume_writing = inner.pause_writing, inner.resume_writing
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._connections.made(transport)
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._connections.lost(self._transport)
        self._inner.connection_lost(exc)
