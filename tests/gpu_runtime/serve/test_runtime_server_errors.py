"""What a server refuses, and that nothing a client sends breaks it."""

import asyncio
import json
import socket
import threading

import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runtime_server import serving

from gpu_runtime.serve import answer as serve_answer

GOOD = {"prompt": [1, 2, 3], "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"


@pytest.fixture(scope="module")
def running():
    """A server on a thread of its own, and a way to send it bytes."""
    ready, holder = threading.Event(), {}

    async def run():
        async with serving() as service:
            holder.update(service=service, loop=asyncio.get_running_loop(), over=asyncio.Event())
            ready.set()
            await holder["over"].wait()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    assert ready.wait(300)

    def send(body, path=COMPLETIONS, **more):
        service = holder["service"]
        return asyncio.run_coroutine_threadsafe(service.post(body, path, **more), holder["loop"]).result(300)

    send.service = holder["service"]
    yield send
    holder["loop"].call_soon_threadsafe(holder["over"].set)
    thread.join(300)
    assert not thread.is_alive()
    holder["service"].check_empty()


REFUSED = [
    (b'{"prompt": "\\ud800"}', None, "not JSON"),
    (b"[" * 5000, None, "nested too deeply"),
    (b"[1]", None, "not a JSON object"),
    ({"prompt": ["a", [500]]}, "prompt[1]", "beyond the vocabulary"),
    ({"prompt": [1] * 120, "max_tokens": 9}, "max_tokens", "send at most 8"),
    ({**GOOD, "max_tokens": 10**30}, "max_tokens", "beyond the context"),
    ({**GOOD, "min_tokens": 5, "max_tokens": 4}, "min_tokens", "more than max_tokens, 4"),
    ({**GOOD, "stop_token_ids": [1 << 40]}, "stop_token_ids", "beyond the vocabulary"),
    ({**GOOD, "n": 10**40}, "n", "that may wait"),
]
"""Of each kind one; all fields with other values are pinned (`pinned_live.py`)."""
REFUSED_CHATS = [
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", "no text"),
    ({"messages": [{"role": "user", "content": "x" * 200}]}, "messages", "leave no room"),
    ({**CHAT, "tools": [{"type": "function"}]}, "tools", "not supported"),
]


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [(COMPLETIONS, *case) for case in REFUSED] + [(CHATS, *case) for case in REFUSED_CHATS],
)
def test_a_body_that_asks_for_the_impossible_is_refused_by_field(running, path, body, param, message):
    status, answer, _ = running(body, path)
    assert status == 400
    error = answer["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert message in error["message"]
    assert len(error["message"]) < 250


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "text"}),
        (COMPLETIONS, {"prompt": ["text"], "max_tokens": 1}),
        (COMPLETIONS, {"prompt": [[5, 6]], "max_tokens": None}),
        (COMPLETIONS, {**GOOD, "n": 1, "best_of": 1, "logprobs": None, "echo": False, "stop": [], "user": "me"}),
        (COMPLETIONS, {**GOOD, "max_completion_tokens": 3, "top_p": 1, "top_k": -1, "seed": 5, "unheard_of": {}}),
        (COMPLETIONS, {"prompt": [1] * 120, "max_tokens": 8, "model": "small"}),
        (COMPLETIONS, {**GOOD, "n": 2, "stop": "\n"}),
        (CHATS, {"messages": [{"role": "assistant", "content": None}, {"role": "user", "content": "hi"}]}),
        (CHATS, CHAT),
        (CHATS, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}),
        (CHATS, {**CHAT, "logprobs": False, "tools": [], "response_format": {"type": "text"}}),
    ],
)
def test_what_clients_usually_send_is_accepted(running, path, body):
    status, answer, _ = running(body, path)
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] >= 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "min_tokens", "stream", "stream_options",
    "ignore_eos", "temperature", "top_p", "n", "best_of", "logprobs", "stop", "stop_token_ids", "logit_bias", "tools",
    "response_format", "return_token_ids", "echo", "seed", "top_k", "min_p",
]  # fmt: skip
MESSAGES = st.lists(st.fixed_dictionaries({"role": st.text(max_size=4), "content": JSON}) | JSON, max_size=3)
BODIES = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(FIELDS, JSON)
    | {
        "prompt": st.lists(st.integers(-1, 110), max_size=5) | st.text(max_size=9) | JSON,
        "messages": MESSAGES | JSON,
        "max_tokens": st.integers(-1, 5) | JSON,
        "stream": st.none(),
    },
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=BODIES | JSON, chat=st.booleans())
def test_no_json_breaks_the_server(running, capfd, body, chat):
    status, answer, _ = running(body, CHATS if chat else COMPLETIONS)
    assert status in (200, 400, 404)
    assert status == 200 or answer["error"]["message"]
    assert capfd.readouterr().err == ""


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.binary(max_size=60), cut=st.integers(0, 60), good=st.booleans())
def test_no_bytes_break_the_server(running, capfd, body, cut, good):
    if good:
        body = json.dumps(GOOD).encode()[:cut] + body[cut:]
    status, answer, _ = running(body)
    assert status in (200, 400)
    assert status == 200 or answer["error"]["message"]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: nine\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nabcd",
    ],
)
def test_what_is_no_http_leaves_the_server_well(running, capfd, raw):
    host, port = running.service.bound.getsockname()
    with socket.create_connection((host, port), timeout=120) as connection:
        connection.sendall(raw)
        connection.shutdown(socket.SHUT_WR)
        while answer := connection.recv(4096):
            assert b" 500 " not in answer.split(b"\r\n")[0]
            assert b"Traceback" not in answer
    assert running(GOOD)[0] == 200
    assert "Traceback" not in capfd.readouterr().err


def test_an_api_key_is_asked_for_and_checked():
    async def run():
        async with serving(api_key="s3cret") as service:
            for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cret"}):
                status, answer, headers = await service.post(GOOD, headers=header)
                assert (status, answer["error"]["type"]) == (401, "authentication_error")
                assert headers["WWW-Authenticate"] == "Bearer"
                assert "s3cret" not in answer["error"]["message"]
            assert (await service.get("/v1/models"))[0] == 401
            assert (await service.get("/health"))[0] == 200
            assert (await service.get("/metrics"))[0] == 200
            assert (await service.post(GOOD, headers={"Authorization": "Bearer s3cret"}))[0] == 200
            assert (await service.post(GOOD, headers={"Authorization": "bearer \udcff"}))[0] == 401

    asyncio.run(run())


def test_a_fault_of_ours_is_told_in_a_line_here_and_not_there(capfd, monkeypatch):
    """And a text without tokens is the client's."""

    async def run():
        async with serving() as service:
            monkeypatch.setattr(service.server._codec, "encode", lambda text, **_: {}[text])
            status, answer, _ = await service.post({"prompt": "text", "max_tokens": 2})
            assert (status, answer["error"]["message"]) == (500, "internal error")
            assert capfd.readouterr().err == "kvtwin: POST /v1/completions: KeyError: 'text'\n"
            monkeypatch.setattr(service.server._codec, "encode", lambda text, **_: [])
            status, answer, _ = await service.post({"prompt": ["text", "more"], "max_tokens": 2})
            assert (status, answer["error"]["message"]) == (400, "prompt[0]: has no tokens; send some text")
            assert capfd.readouterr().err == ""

    asyncio.run(run())


def test_a_client_that_sends_or_takes_nothing_is_given_up(monkeypatch):
    async def run():
        async with serving() as service:
            service.gate.pause_s = 0.005
            host, port = service.bound.getsockname()
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
            assert b" 408 " in await asyncio.wait_for(reader.readline(), 300)
            writer.close()

            async def stuck(self, data):
                await asyncio.sleep(60)

            with monkeypatch.context() as patch:
                patch.setattr(web.StreamResponse, "write", stuck)
                with pytest.raises(Exception, match=r"disconnected|payload|reset"):
                    await service.stream({"prompt": [1], "max_tokens": 100})
            await service.until(lambda: service.thread.metrics.ended["cancelled"] == 1)
            assert (await service.post(GOOD))[0] == 200

    monkeypatch.setattr(serve_answer, "STALLED_S", 0.1)
    asyncio.run(run())


def test_a_client_that_does_not_take_the_end_of_a_stream_is_given_up(monkeypatch):
    """Its tokens have all been sent: nothing else would ever let go of the connection."""
    write = web.StreamResponse.write

    async def stuck(self, data):
        await (asyncio.sleep(60) if data.endswith(b"[DONE]\n\n") else write(self, data))

    async def run():
        async with serving() as service:
            with pytest.raises(Exception, match=r"disconnected|payload|reset"):
                await service.stream({"prompt": [1], "max_tokens": 3})
            assert service.thread.metrics.ended["length"] == 1

    monkeypatch.setattr(web.StreamResponse, "write", stuck)
    monkeypatch.setattr(serve_answer, "STALLED_S", 0.1)
    asyncio.run(run())
