"""What a server makes of requests: bodies read or refused, whole answers, and its metrics page, word by word."""

import asyncio
import json
from collections.abc import Iterator
from itertools import product
from typing import Any
from unittest.mock import patch

from runtime_server import Service, serving

from gpu_runtime.device import TorchDevice
from gpu_runtime.serve import reply, server
from gpu_runtime.serve.metrics import EngineState, Metrics
from gpu_runtime.serve.request import Refused, read_ask

NUMBERS: tuple[Any, ...] = (None, 0, 1, 2, -1, 1.0, 1.5, True, False, "1", [], {}, [1], {"a": 1}, "", "x" * 70)
FIELDS: dict[str, tuple[Any, ...]] = {
    "n": NUMBERS,
    "max_tokens": NUMBERS,
    "max_completion_tokens": NUMBERS,
    "min_tokens": NUMBERS,
    "temperature": NUMBERS,
    "top_p": NUMBERS,
    "min_p": NUMBERS,
    "top_k": NUMBERS,
    "seed": NUMBERS,
    "stream": NUMBERS,
    "ignore_eos": NUMBERS,
    "return_token_ids": NUMBERS,
    "model": NUMBERS,
    "best_of": NUMBERS,
    "logprobs": NUMBERS,
    "top_logprobs": NUMBERS,
    "prompt_logprobs": NUMBERS,
    "echo": NUMBERS,
    "suffix": NUMBERS,
    "logit_bias": NUMBERS,
    "frequency_penalty": NUMBERS,
    "presence_penalty": NUMBERS,
    "repetition_penalty": NUMBERS,
    "tools": NUMBERS,
    "functions": NUMBERS,
    "response_format": (*NUMBERS, {"type": "text"}, {"type": "json_object"}),
    "use_beam_search": NUMBERS,
    "stop": (*NUMBERS, ["a", ""], ["a", 1], list("abcdefghijklmnop"), list("abcdefghijklmnopq"), "é"),
    "stop_token_ids": (*NUMBERS, [0, 5, 5], [1, -1], [1, True], [1, 1.0], [[1]]),
    "stream_options": (*NUMBERS, {"include_usage": True}, {"include_usage": 1}, {"include_usage": None}),
}
PROMPTS = (
    *NUMBERS,
    "hi",
    ["hi"],
    ["hi", [1, 2]],
    ["hi", ""],
    ["hi", []],
    ["hi", 5],
    [[1], "a"],
    [[1], [-1]],
    [1, "a"],
    [[1, 2], [3.5]],
    [0, 1],
    [-1],
    list(range(80)),
    ["x" * 61, [1] * 61, 7],
    [None],
    [{}],
)
USER = {"role": "user", "content": "hi"}
PART = {"type": "text", "text": "one "}
MESSAGES = (
    *NUMBERS,
    [USER],
    [USER, USER],
    [{"role": "user"}],
    [{"role": "assistant"}],
    [{"role": 1, "content": "a"}],
    [{"content": "a"}],
    [{"role": "system", "content": [PART, PART]}],
    [USER, "x"],
    [[USER]],
    [{"role": "user", "content": [PART, {"type": "image"}]}],
    [{"role": "user", "content": [{"text": "a"}]}],
    [{"role": "user", "content": [{"type": "text", "text": 1}]}],
    [{"role": "user", "content": 5}],
    [{"role": "assistant", "content": None, "tool_calls": []}],
    [{"role": "tool", "content": None}],
)
BODIES = (
    b"",
    b"{",
    b"[1]",
    b"5",
    b'"a"',
    b"null",
    b"\xff",
    b"[" * 2000,
    b'{"prompt": "\\ud800"}',
    b"[1, 2, 3" + b", 4" * 30 + b"]",
    json.dumps("y" * 59).encode(),
    json.dumps("y" * 57).encode(),
    json.dumps("y" * 58).encode(),
)
STREAMED = (
    {"include_usage": True},
    {"include_usage": False},
    {"include_usage": "x"},
    {"continuous_usage_stats": True},
    {"continuous_usage_stats": False},
    {},
)


def read(body: object, *, chat: bool = False) -> str:
    """What a body asks for, but for what it usually does; or why it is refused."""
    try:
        found = vars(read_ask(body if isinstance(body, bytes) else json.dumps(body).encode(), chat=chat))
    except Refused as refused:
        return f"! {refused.status} {refused.param} {refused.message} {refused.headers}"
    usual = vars(read_ask(b'{"messages": [{"role": "u", "content": ""}]}' if chat else b'{"prompt": "."}', chat=chat))
    return str({name: value for name, value in found.items() if value != usual[name]})


def asking() -> Iterator[str]:
    """Every field with every kind of value."""
    for name, values in FIELDS.items():
        for value in values:
            yield f"{name} {value!r}: {read({'prompt': '.', name: value})}"
    for value, stream in product(STREAMED, (True, False)):
        yield f"{value} {stream}: {read({'prompt': '.', 'stream_options': value, 'stream': stream})}"
    for prompt in PROMPTS:
        yield f"prompt {prompt!r}: {read({'prompt': prompt})}"
    for messages in MESSAGES:
        yield f"messages {messages!r}: {read({'messages': messages}, chat=True)}"
    yield f"no prompt: {read({})}"
    yield f"no messages: {read({'prompt': 'a'}, chat=True)}"
    for body in BODIES:
        yield f"{body[:90]}: {read(body)}"
    both = {"prompt": ".", "max_tokens": 5, "max_completion_tokens": 6}
    yield f"both: {read(both)}"


# -- answers -----------------------------------------------------------------------------------------------------------

TEXT, CHAT, MODELS = "/v1/completions", "/v1/chat/completions", "/v1/models"
OPTIONS = {"model": "a/b", "root": "small.json", "stop": frozenset({40}), "max_queue": 5, "api_key": None}
ASKED: tuple[tuple[str, str, Any], ...] = (
    ("GET", MODELS, None),
    ("GET", f"{MODELS}/a/b", None),
    ("GET", f"{MODELS}/{'c' * 70}", None),
    ("GET", "/health", None),
    ("GET", "/nothing", None),
    ("GET", TEXT, None),
    ("DELETE", CHAT, None),
    ("POST", MODELS, {}),
    ("HEAD", "/health", None),
    *(
        ("POST", TEXT, {"prompt": "hey", **more})
        for more in (
            {},
            {"max_tokens": 1},
            {"max_tokens": 3, "n": 2},
            {"max_tokens": 4, "return_token_ids": True},
            {"ignore_eos": True},
            {"ignore_eos": True, "max_tokens": 60},
            {"min_tokens": 9},
            {"stop": "("},
            {"stop": ["]", "BO"]},
            {"stop": "+8E", "stream": True},
            {"stop": "%X", "stream": True},
            {"stop": ["BO", "%+"], "min_tokens": 5},
            {"stop": ["v%+", "%"]},
            {"stop": "!!"},
            {"stop_token_ids": [20]},
            {"stop_token_ids": [20], "min_tokens": 2},
            {"stream": True},
            {"stream": True, "max_tokens": 2, "return_token_ids": True, "stream_options": {"include_usage": True}},
            {"temperature": 0, "max_tokens": 1},
            {"temperature": 1, "max_tokens": 1},
            {"temperature": 0, "max_tokens": 1, "stream": True},
            {"model": "a/b", "max_tokens": 1},
            {"model": "b"},
            {"n": 6},
            {"n": 5, "max_tokens": 1},
            {"max_tokens": 125},
            {"max_tokens": 126},
        )
    ),
    *(
        ("POST", TEXT, {"prompt": prompt, "max_tokens": 2})
        for prompt in (
            ["a", "bc"],
            [[1], [2, 3]],
            [[100]],
            [[101]],
            [[5, 300]],
            [1, 2],
            "a" * 126,
            "a" * 127,
            "a" * 128,
            "é",
            ["a"] * 6,
            "b" * 20_001,
            ["b", "b" * 128],
        )
    ),
    ("POST", TEXT, {"prompt": "a" * 120}),
    ("POST", CHAT, {"messages": [USER]}),
    ("POST", CHAT, {"messages": [USER], "max_tokens": 2}),
    ("POST", CHAT, {"messages": [USER], "max_tokens": 2, "stream": True}),
    ("POST", CHAT, {"messages": [USER], "stream": True, "stop": "8E", "stream_options": {"include_usage": True}}),
    ("POST", CHAT, {"messages": [{"role": "user", "content": "a" * 128}]}),
    ("POST", CHAT, {"messages": [USER], "max_tokens": 200}),
    ("POST", CHAT, {"messages": [USER], "n": 2, "max_tokens": 2}),
    ("POST", CHAT, {"messages": []}),
    ("POST", TEXT, {}),
    ("POST", TEXT, b"{"),
)
"""Method, path and body. One after the other: what a batch holds would depend on the machine."""
HEADERS = ("Content-Type", "X-Kvtwin-Notice", "Allow", "Retry-After", "WWW-Authenticate", "Connection", "Cache-Control")


def said(device: TorchDevice, seqs: Any, chosen: object) -> None:
    """In place of what was chosen, so that answers are the same on every machine: 13 more than the token before."""
    for seq in seqs:
        count = len(device.tokens.of(seq)) - seq.request.prompt_tokens
        token = (7 + 13 * count) % 101
        device.tokens.append(seq, token)
        if device.on_token is not None:
            device.on_token(seq, token, device.now_s())


async def answered(service: Service, method: str, path: str, body: Any, **more: Any) -> str:
    """Status, headers and words of an answer."""
    data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    async with service.session.request(method, service.url + path, data=data, **more) as response:
        headers = {name: response.headers[name] for name in HEADERS if name in response.headers}
        return f"{response.status} {headers} {(await response.read()).decode()!r}"


async def answers() -> list[str]:
    """Of requests one after the other."""
    found = []
    async with serving(**OPTIONS) as service:
        for method, path, body in ASKED:
            words = json.dumps(body)[:120] if not isinstance(body, bytes) else body.decode()
            found.append(f"{method} {path[:40]} {words}: {await answered(service, method, path, body)}")
        _, page = await service.get("/metrics")
        # What else is there depends on how soon the engine heard of stop strings.
        counted = ("kvtwin_requests_accepted", "kvtwin_error_answers", "kvtwin_prompt_tokens")
        found += [line for line in page.splitlines() if line.startswith(counted)]
    async with serving(api_key="open") as service:
        for given in (None, "Bearer open", "bearer  open ", "Bearer shut", "Basic open", "open", "Bearer"):
            sent = {} if given is None else {"Authorization": given}
            for path in (MODELS, "/health", "/metrics"):
                found.append(f"{given} {path}: {(await answered(service, 'GET', path, None, headers=sent))[:300]}")
    async with serving(max_body=300) as service:
        for size in (200, 400):
            words = await answered(service, "POST", TEXT, {"prompt": "a" * 20, "max_tokens": 1, "user": "u" * size})
            found.append(f"a body of {size}: {words}")
        service.gate.open.clear()
        waiting = asyncio.create_task(answered(service, "POST", TEXT, {"prompt": "late", "max_tokens": 1}))
        await service.until(lambda: service.thread.unfinished)
        service.server.drain()
        for method, path in (("GET", "/health"), ("POST", TEXT), ("GET", MODELS)):
            body = {"prompt": "more"} if method == "POST" else None
            found.append(f"{method} {path} while it drains: {await answered(service, method, path, body)}")
        service.gate.open.set()
        found.append(f"what was accepted: {await waiting}")
    return found


def answering() -> Iterator[str]:
    """Whole answers of a server."""
    with (
        patch.object(TorchDevice, "_emit", said),
        patch.object(reply, "time", lambda: 1e9),
        patch.object(server, "time", lambda: 1e9),
    ):
        yield from asyncio.run(answers())


def counting() -> Iterator[str]:
    """The metrics page of counts made by hand."""
    metrics = Metrics()
    yield from metrics.text(EngineState(), 0).splitlines()
    metrics.accepted, metrics.prompt_tokens, metrics.output_tokens = 11, 12, 13
    metrics.ended |= {"stop": 2, "length": 3}
    metrics.errors |= {404: 1, 400: 2}
    for value in (0.0, 0.001, 0.0011, 0.5, 80.0, 81.0):
        metrics.ttft_s.add(value)
    for value in (0.002, 5.0, 6.0, 6.0):
        metrics.itl_s.add(value)
    yield from metrics.text(EngineState(1, 2, 3, 4, 5, 6, 7, 8), 9).splitlines()


TOPICS = {"asking": asking, "answering": answering, "counting": counting}
