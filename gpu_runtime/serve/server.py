"""`Server`: OpenAI's HTTP interface before an `EngineThread`. Needs aiohttp (the extra `serve`).

Every error is OpenAI's JSON error object. A request is accepted once it has passed every check; from then on it is
answered whatever happens, and its request ends in the engine when its client leaves.
"""

import asyncio
import hmac
import logging
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from socket import socket
from time import time
from typing import cast

from aiohttp import web

from gpu_runtime.model.sampling import Sampling
from gpu_runtime.serve import answer as serve_answer
from gpu_runtime.serve.choice import Choice
from gpu_runtime.serve.connections import Connections
from gpu_runtime.serve.engine import EngineThread
from gpu_runtime.serve.reply import Reply, encode, error_object
from gpu_runtime.serve.request import COMPLETION_TOKENS, Ask, Refused, read_ask
from gpu_runtime.serve.text import Codec
from gpu_runtime.serve.ticket import Events

MIN_BODY_LIMIT = 1 << 20
BODY_BYTES_PER_TOKEN = 64
LONG_TEXT = 20_000
"""Characters from which a text is tokenised beside the event loop."""
STATUS_HELP = {
    404: "no such path: /v1/completions, /v1/chat/completions, /v1/models, /v1/models/ID, /health and /metrics exist",
    405: "this path does not take that method",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class ServerOptions:
    """What a server is asked to be.

    Attributes:
        model: name that clients use. root: what it stands for.
        stop: the model's own end-of-text tokens.
        max_queue: most accepted requests without a first token.
        sampling: what a request that says nothing gets.
        max_body: bytes of a body; None: what a prompt of `max_model_len` tokens may take.
    """

    model: str
    root: str
    max_model_len: int
    vocab_size: int
    stop: frozenset[int] = frozenset()
    max_queue: int = 512
    api_key: str | None = None
    max_body: int | None = None
    sampling: Sampling = field(default_factory=Sampling)


class Server:
    """Answers HTTP until closed."""

    def __init__(self, thread: EngineThread, codec: Codec, options: ServerOptions) -> None:
        self._thread, self._codec, self._options = thread, codec, options
        self._metrics = thread.metrics
        model = {"id": options.model, "object": "model", "created": int(time()), "owned_by": "kvtwin"}
        self._card = model | {"root": options.root, "max_model_len": options.max_model_len}
        self._connections: Connections | None = None
        self._site: asyncio.Server | None = None
        self._answering = 0
        self._quiet = asyncio.Event()
        self.draining = False
        limit = options.max_body or max(MIN_BODY_LIMIT, BODY_BYTES_PER_TOKEN * options.max_model_len)
        app = web.Application(middlewares=[self._watch, self._guard], client_max_size=limit)
        app.router.add_post("/v1/completions", partial(self._complete, chat=False))
        app.router.add_post("/v1/chat/completions", partial(self._complete, chat=True))
        app.router.add_get("/v1/models", self._models)
        # Names may have slashes.
        app.router.add_get("/v1/models/{name:.+}", self._model)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics_page)
        self._limit = limit
        # A handler whose client has gone is cancelled, and its request with it.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        # What is no HTTP is answered with status 400; its traceback does not help.
        logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)

    async def start(self, bound: socket) -> None:
        """Listen on a socket that is bound."""
        await self._runner.setup()
        self._connections = Connections(cast(web.Server, self._runner.server))
        self._site = await asyncio.get_running_loop().create_server(self._connections.protocol, sock=bound)

    def drain(self) -> None:
        """Refuse new requests; those accepted go on."""
        self.draining = True
        self._thread.close()

    async def close(self) -> None:
        """Let answers under way reach their clients, then stop listening."""
        self._quiet.clear()
        while self._answering:
            await self._quiet.wait()
            self._quiet.clear()
        if self._site is not None:
            self._site.close()
        await self._runner.cleanup()

    # -- around every request ------------------------------------------------------------------------------------

    @web.middleware
    async def _watch(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        connections, transport = cast(Connections, self._connections), request.transport
        connections.begun(transport)
        try:
            return await handler(request)
        finally:
            connections.ended(transport)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._authorise(request)
            return await handler(request)
        except Refused as refused:
            return self._error(refused)
        except web.HTTPRequestEntityTooLarge:
            return self._error(Refused(413, f"the body is larger than {self._limit} bytes; send a shorter prompt"))
        except web.HTTPException as error:
            allowed = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
            return self._error(Refused(error.status, STATUS_HELP.get(error.status, error.reason), headers=allowed))
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:  # A fault of ours: one line here, no detail there.
            print(f"kvtwin: {request.method} {request.path}: {type(error).__name__}: {error}", file=sys.stderr)
            return self._error(Refused(500, "internal error"))

    def _authorise(self, http: web.Request) -> None:
        key = self._options.api_key
        if key is None or not http.path.startswith("/v1/"):
            return
        scheme, _, given = http.headers.get("Authorization", "").partition(" ")
        known = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), key.encode())
        if scheme.lower() != "bearer" or not known:
            why = "the API key is wrong" if given else "an API key is missing"
            header = {"WWW-Authenticate": "Bearer"}
            raise Refused(401, f"{why}; send the header Authorization: Bearer KEY", headers=header)

    def _error(self, refused: Refused) -> web.Response:
        self._metrics.errors[refused.status] += 1
        return web.json_response(body=encode(error_object(refused)), status=refused.status, headers=refused.headers)

    # -- pages ---------------------------------------------------------------------------------------------------

    async def _models(self, http: web.Request) -> web.Response:
        return web.json_response(body=encode({"object": "list", "data": [self._card]}))

    async def _model(self, http: web.Request) -> web.Response:
        name, served = http.match_info["name"], self._options.model
        if name != served:
            raise Refused(404, f"model: {name[:60]!r} is not served; use {served!r}", param="model")
        return web.json_response(body=encode(self._card))

    async def _health(self, http: web.Request) -> web.Response:
        ready = not self.draining and not self._thread.finished.is_set()
        return web.json_response(body=encode({"status": "ok" if ready else "draining"}), status=200 if ready else 503)

    async def _metrics_page(self, http: web.Request) -> web.Response:
        text = self._metrics.text(self._thread.state, len(self._thread.queued))
        return web.Response(body=text.encode(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    # -- completions ---------------------------------------------------------------------------------------------

    async def _complete(self, http: web.Request, *, chat: bool) -> web.StreamResponse:
        self._refuse_if_draining()
        try:
            async with asyncio.timeout(serve_answer.STALLED_S):
                body = await http.read()
        except TimeoutError:
            raise Refused(408, f"the body took more than {serve_answer.STALLED_S:g} s; send it faster") from None
        except web.RequestPayloadError as error:
            reason = str(error).splitlines()[-1].strip()
            raise Refused(400, f"the body cannot be read ({reason}); send it whole, as its headers say") from None
        ask = read_ask(body, chat=chat, default=self._options.sampling, text_of=self._codec.chat)
        sized = await self._sized(ask)
        # Nothing is awaited from these checks to the acceptance: they are still true when it happens.
        self._refuse_if_draining()
        if len(self._thread.queued) + len(sized) * ask.n > self._options.max_queue:
            message = f"{self._options.max_queue} requests wait for their first token (--max-queue); try again later"
            raise Refused(429, message, headers={"Retry-After": "1"})
        stop = ask.stop if ask.ignore_eos else ask.stop | self._options.stop
        events = Events()
        choices = [
            Choice(
                self._thread.submit(prompt, max_tokens, stop, ask.min_tokens, events, index, ask.sampling_of(index)),
                self._codec.answer(),
                ask.stop_texts,
            )
            for index, (prompt, max_tokens) in enumerate(pair for pair in sized for _ in range(ask.n))
        ]
        self._answering += 1
        try:
            send = serve_answer.send_stream if ask.stream else serve_answer.send_whole
            return await send(http, events, Reply(ask, self._options.model, choices), self._thread.stop)
        finally:
            self._answering -= 1
            self._quiet.set()
            for choice in choices:
                self._thread.cancel(choice.ticket)

    def _refuse_if_draining(self) -> None:
        if self.draining or self._thread.finished.is_set():
            raise Refused(
                503, "the server is shutting down; send the request elsewhere", headers={"Connection": "close"}
            )

    async def _sized(self, ask: Ask) -> list[tuple[list[int], int]]:
        """Token ids of each prompt, and output tokens: `Refused` unless both fit the context."""
        options = self._options
        if ask.model is not None and ask.model != options.model:
            raise Refused(404, f"model: {ask.model[:60]!r} is not served; use {options.model!r}", param="model")
        if len(ask.prompts) * ask.n > options.max_queue:
            why = f"answers are more than the {options.max_queue} that may wait (--max-queue); ask for fewer"
            raise Refused(400, f"n: {len(ask.prompts)} prompts times n {str(ask.n)[:20]} {why}", param="n")
        found: list[tuple[list[int], int]] = []
        for i, prompt in enumerate(ask.prompts):
            name = "messages" if ask.chat else "prompt" if len(ask.prompts) == 1 else f"prompt[{i}]"
            if isinstance(prompt, str):
                encode_text = partial(self._codec.encode, prompt, special_tokens=ask.special_tokens)
                prompt = await asyncio.to_thread(encode_text) if len(prompt) > LONG_TEXT else encode_text()
            found.append((prompt, self._output_tokens(ask, name, prompt)))
        return found

    def _output_tokens(self, ask: Ask, name: str, prompt: list[int]) -> int:
        options, length = self._options, len(prompt)
        if not length:
            raise Refused(400, f"{name}: has no tokens; send some text", param=name)
        for param, tokens in ((name, prompt), ("stop_token_ids", ask.stop)):
            if (largest := max(tokens, default=0)) >= options.vocab_size:
                why = f"is beyond the vocabulary of {options.vocab_size} tokens"
                raise Refused(400, f"{param}: token id {largest} {why}", param=param)
        left = options.max_model_len - length
        max_tokens = ask.max_tokens
        if max_tokens is None:
            max_tokens = left if ask.chat else min(left, COMPLETION_TOKENS)
        if left < 1:
            why = f"tokens leave no room in a context of {options.max_model_len}; send at most {length + left - 1}"
            raise Refused(400, f"{name}: {length} {why}", param=name)
        if max_tokens > left:
            why = f"after {length} prompt tokens is beyond the context of {options.max_model_len}; send at most {left}"
            raise Refused(400, f"max_tokens: {max_tokens} {why}", param="max_tokens")
        return max_tokens
