"""One run of a server: from a set-up and a bound socket to the `Run` that a result is made from."""

import asyncio
import errno
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from gpu_runtime.live import LiveOptions, build_device, describe_machine
from gpu_runtime.model.decoder import Decoder
from gpu_runtime.model.sampling import Sampling
from gpu_runtime.serve.engine import EngineThread
from gpu_runtime.serve.metrics import Metrics
from gpu_runtime.serve.request import Refused, sampling_of
from gpu_runtime.serve.server import Server, ServerOptions
from gpu_runtime.serve.text import Codec
from sim.errors import UserError
from sim.results.metrics import TableSink
from sim.run.prepare import Setup
from sim.run.runs import Recording, Run, build_engine
from sim.specs.json_file import read_json_object

GENERATION_FILE = "generation_config.json"
EOS_FILES = ("config.json", GENERATION_FILE)
CRASH_FILE = "crash.txt"


def bind(host: str, port: int) -> socket.socket:
    """A socket bound, not listening yet; UserError where that cannot be."""
    if not 0 <= port < 1 << 16:
        # The resolver would take it modulo 65,536.
        raise UserError(f"--port: {port} is no port; give 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--host {host} --port {port}: cannot listen ({reason}); choose others") from None
    return bound


def is_public(bound: socket.socket) -> bool:
    """Whether other machines may reach a socket."""
    return not ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


def url_of(bound: socket.socket) -> str:
    """Where a bound socket is reached."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def stop_tokens(folder: Path | None) -> frozenset[int]:
    """The end-of-text tokens that a checkpoint's files name; none without one."""
    found: set[int] = set()
    for name in EOS_FILES if folder is not None else ():
        path = Path(folder or ".") / name
        value = read_json_object(path).get("eos_token_id") if path.is_file() else None
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            raise UserError(f"{path}: eos_token_id {value!r} is neither a token id nor a list of them: correct it")
        found |= set(ids)
    return frozenset(found)


def default_sampling(folder: Path | None) -> Sampling:
    """What a checkpoint's `generation_config.json` suggests, as vLLM takes it (`--generation-config auto`).

    Raises:
        UserError: a value that no request may have.
    """
    path = (folder or Path()) / GENERATION_FILE
    if folder is None or not path.is_file():
        return Sampling()
    suggested = read_json_object(path)
    if suggested.get("repetition_penalty") not in (None, 1):
        print(f"kvtwin: warning: {path}: repetition_penalty is not computed, answers come without it", file=sys.stderr)
    try:
        return sampling_of(suggested, Sampling())
    except Refused as refused:
        raise UserError(f"{path}: {refused.message}; correct it") from None


def perform(
    setup: Setup,
    table: TableSink | None,
    keep: Recording,
    decoder: Decoder,
    live: LiveOptions,
    codec: Codec,
    options: ServerOptions,
    bound: socket.socket,
    *,
    folder: Path,
    begin: Callable[[], object],
    announce: Callable[[], object],
) -> Run:
    """Serve until told to stop by SIGTERM or SIGINT and every accepted request has ended; a second one ends at once.

    Args:
        folder: where the traceback of a crash goes.
        begin: called before the first request is taken, or when there is a crash to be told.
        announce: called when requests are taken.

    Raises:
        UserError: the device has no memory for what serving needs before its first request.
    """
    parts = build_engine(setup, table, keep)
    device = build_device(parts.scheduler, decoder, live, setup.scenario.kv_cache_dtype)
    thread = EngineThread(parts.engine, device, Metrics(), parts.lanes, parts.series, live.seed)
    machine = describe_machine(device.decoder)
    run = Run(engines=[parts], instances=[thread.instance], backend="kvtwin-live", machine=machine)

    def ready() -> None:
        begin()
        announce()

    run.interrupted = asyncio.run(serve(thread, codec, options, bound, ready))
    if isinstance(thread.error, UserError):
        raise thread.error
    if thread.error is not None:
        run.error = f"the engine failed: {type(thread.error).__name__}: {thread.error}".splitlines()[0]
        begin()
        (folder / CRASH_FILE).write_text("".join(traceback.format_exception(thread.error)), encoding="utf-8")
    return run


async def serve(
    thread: EngineThread, codec: Codec, options: ServerOptions, bound: socket.socket, announce: Callable[[], object]
) -> bool:
    """Serve until stopped; returns whether requests were left unfinished."""
    server = Server(thread, codec, options)
    loop, aborted = asyncio.get_running_loop(), []

    def stop() -> None:
        if server.draining:
            aborted.append(True)
            thread.abort()
            _restore(loop)
        server.drain()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    loop.set_exception_handler(_Told())
    await thread.start()
    if thread.error is None:
        await server.start(bound)
        announce()
    await thread.finished.wait()
    await server.close()
    _restore(loop)
    return bool(aborted)


class _Told:
    """Says once that descriptors ran out, in a line; asyncio tries to accept again, and logs a traceback each time."""

    def __init__(self) -> None:
        self._is_told = False

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif not self._is_told:
            self._is_told = True
            print(f"kvtwin: {error.strerror}: connections wait; raise the limit (ulimit -n)", file=sys.stderr)


def _restore(loop: Any) -> None:  # noqa: ANN401
    """A third signal is Python's to handle."""
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)
