"""Several prompts, several answers, stop strings; connections that send no request; OpenAI's own client."""

import asyncio
import resource

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runtime_server import serving

from gpu_runtime.serve import connections
from gpu_runtime.serve.choice import Choice
from gpu_runtime.serve.text import PRINTABLE
from gpu_runtime.serve.ticket import Ticket, Token
from kvtwin.testing.live import continuation
from traces.request import Request

PROMPTS = [[5, 6, 7], [8, 9], [5, 6, 7, 8, 9, 10]]


def text_of(tokens):
    return "".join(PRINTABLE[token % len(PRINTABLE)] for token in tokens)


def said(prompt, output_tokens):
    return list(continuation(tuple(prompt), output_tokens))


def run(body, **options):
    async def whole():
        async with serving(**options) as service:
            await body(service)
        return service

    return asyncio.run(whole())


# -- several answers -------------------------------------------------------------------------------------------------


def test_prompts_and_n_are_answered_in_order():
    async def body(service):
        asked = {"prompt": PROMPTS, "n": 2, "max_tokens": 6, "return_token_ids": True}
        status, answer, _ = await service.post(asked)
        assert status == 200
        expected = [said(prompt, 6) for prompt in PROMPTS for _ in range(2)]
        assert [choice["token_ids"] for choice in answer["choices"]] == expected
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
        # Each prompt counts once, as it does for OpenAI.
        assert answer["usage"] == {"prompt_tokens": 11, "completion_tokens": 36, "total_tokens": 47}
        events = await service.stream({**asked, "stream_options": {"include_usage": True}})
        texts, reasons = [""] * 6, [None] * 6
        for event in events[:-1]:
            (choice,) = event["choices"]
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] = choice["finish_reason"]
        assert texts == [text_of(tokens) for tokens in expected]
        assert reasons == ["length"] * 6
        assert events[-1]["usage"] == answer["usage"]

    assert run(body).thread.metrics.ended == {"length": 12}


def test_every_answer_asked_for_takes_a_place_in_the_queue():
    async def body(service):
        service.gate.open.clear()
        first = asyncio.create_task(service.post({"prompt": PROMPTS[0], "max_tokens": 2}))
        await service.until(lambda: len(service.thread.queued) == 1)
        assert (await service.post({"prompt": PROMPTS[1], "n": 2, "max_tokens": 2}))[0] == 429
        second = asyncio.create_task(service.post({"prompt": PROMPTS[1], "n": 1, "max_tokens": 2}))
        await service.until(lambda: len(service.thread.queued) == 2)
        service.gate.open.set()
        assert [(await task)[0] for task in (first, second)] == [200, 200]

    run(body, max_queue=2)


def test_a_client_that_leaves_leaves_all_its_answers():
    async def body(service):
        service.gate.pause_s = 0.01
        await service.stream({"prompt": PROMPTS, "n": 2, "max_tokens": 60}, leave_after=3)
        await service.until(lambda: service.thread.metrics.ended["cancelled"] == 6)

    run(body)


# -- stop strings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("variant", "stream"), [("vllm-v1", False), ("layerkv", True)])
def test_an_answer_ends_before_a_stop_string(variant, stream):
    async def body(service):
        full = text_of(said(PROMPTS[0], 40))
        # What comes first ends it, wherever it stands in the list.
        for stop, end in ((full[7:10], 7), ([full[20:22], full[9:13]], 9), (["no such text", full[0]], 0)):
            end = min(full.find(text) for text in ([stop] if isinstance(stop, str) else stop) if text in full)
            asked = {"prompt": PROMPTS[0], "max_tokens": 40, "stop": stop}
            if stream:
                choices = [event["choices"][0] for event in await service.stream(asked)]
                text = "".join(choice["text"] for choice in choices)
                assert [choice["finish_reason"] for choice in choices][-2:] == [None, "stop"]
            else:
                (choice,) = (await service.post(asked))[1]["choices"]
                text = choice["text"]
                assert choice["finish_reason"] == "stop"
            assert text == full[:end]
        await service.until(lambda: service.thread.metrics.ended["stop"] == 3)

    service = run(body, variant=variant)
    # They end as complete, after few tokens more than were sent.
    assert set(service.thread.metrics.ended) == {"stop"}
    assert not any(seq.error for seq in service.ended)


def test_one_answer_may_stop_and_another_go_on():
    async def body(service):
        first, second = (text_of(said(prompt, 30)) for prompt in PROMPTS[:2])
        stop = next(first[i : i + 2] for i in range(4, 28) if first[i : i + 2] not in second)
        _, answer, _ = await service.post({"prompt": PROMPTS[:2], "max_tokens": 30, "stop": stop})
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "length"]
        assert [choice["text"] for choice in answer["choices"]] == [first[: first.find(stop)], second]

    run(body)


@given(
    st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.integers(0, 12),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_text_is_held_back_only_while_it_may_be_a_stop_string(text, stops, least, dice):
    """Against a search in the whole text, for tokens of no, one or more characters."""
    pieces, rest = [], text
    while rest:
        size = dice.randint(0, 3)
        pieces.append(rest[:size])
        rest = rest[size:]
    choice = Choice(Ticket(Request(0, 0.0, 1, 9), [], frozenset(), least), lambda number: pieces[number], stops)
    sent = ""
    for number in range(len(pieces)):
        sent += choice.add(Token(number, False))
        so_far = "".join(pieces[: number + 1])
        if choice.reason is not None:
            assert min(so_far.find(stop) for stop in stops if stop in so_far) == len(sent) or least > 1
            assert any(so_far[len(sent) :].startswith(stop) for stop in stops)
            assert number + 1 >= least
            return
        assert so_far.startswith(sent)
        assert len(so_far) - len(sent) < max(map(len, stops), default=1)
        assert least > 1 or not any(stop in so_far for stop in stops)
    assert sent + choice.end("length") == text


# -- connections -----------------------------------------------------------------------------------------------------


async def silent(service, data=b""):
    """A connection that has sent something that is no whole header; what is read from it in the end."""
    host, port = service.bound.getsockname()[:2]
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(data)
    return reader, writer


async def closed(reader):
    """Whether the other side closes, soon, without a word."""
    try:
        async with asyncio.timeout(300):
            return await reader.read() == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("data", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: "])
def test_a_header_that_does_not_come_is_not_waited_for(monkeypatch, data):
    monkeypatch.setattr(connections, "HEADER_S", 0.2)

    async def body(service):
        reader, writer = await silent(service, data)
        assert await closed(reader)
        writer.close()
        # A client that is slow in reading its answer is none of these.
        service.gate.pause_s = 0.1
        status, _, _ = await service.post({"prompt": [1, 2], "max_tokens": 5})
        assert status == 200

    run(body)


def test_the_oldest_half_open_connection_makes_room(monkeypatch):
    monkeypatch.setattr(connections, "MOST_HALF_OPEN", 3)

    async def body(service):
        opened = [await silent(service, b"GET") for _ in range(3)]
        await service.until(lambda: len(service.server._connections._half_open) == 3)
        assert (await service.get("/health"))[0] == 200
        assert await closed(opened[0][0])
        assert len(service.server._connections._half_open) == 2
        for _, writer in opened:
            writer.close()
        await service.until(lambda: not service.server._connections._half_open)

    run(body)


class Open(asyncio.Transport):
    """A connection that stays open until it is aborted."""

    is_aborted = False

    def is_closing(self):
        return self.is_aborted

    def abort(self):
        self.is_aborted = True


@pytest.mark.parametrize(("soft", "most"), [(120, 30), (resource.RLIM_INFINITY, 1024)])
def test_a_connection_without_a_header_leaves_descriptors_to_others(monkeypatch, soft, most):
    """150 of them stopped /health under 120 descriptors; those that have had an answer count apart."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))

    async def body():
        watched, opened = connections.Connections(asyncio.Protocol), [Open() for _ in range(most + 2)]
        for transport in opened:
            watched.made(transport)
        assert [transport.is_aborted for transport in opened] == [True, True] + [False] * most
        for transport in (idle := [Open() for _ in range(most + 1)]):
            watched.ended(transport)
        assert [transport.is_aborted for transport in idle] == [True] + [False] * most

    asyncio.run(body())


# -- a client that is not ours ---------------------------------------------------------------------------------------


def test_openais_own_client():
    openai = pytest.importorskip("openai")

    async def body(service):
        client = openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="secret", max_retries=0)
        expected = text_of(said(PROMPTS[0], 8))
        assert [model.id async for model in client.models.list()] == ["small"]
        assert (await client.models.retrieve("small")).owned_by == "kvtwin"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("large")
        done = await client.completions.create(model="small", prompt=PROMPTS[0], max_tokens=8, temperature=0, n=2)
        assert [choice.text for choice in done.choices] == [expected] * 2
        assert done.usage.total_tokens == 3 + 16
        stopped = await client.completions.create(model="small", prompt=PROMPTS[0], max_tokens=8, stop=expected[4:6])
        assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (
            expected[: expected.find(expected[4:6])],
            "stop",
        )
        messages = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None},
            {"role": "user", "content": [{"type": "text", "text": "there"}]},
        ]
        chat = await client.chat.completions.create(model="small", messages=messages, max_completion_tokens=5)
        assert chat.choices[0].message.role == "assistant"
        stream = await client.chat.completions.create(
            model="small", messages=messages, max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
        events = [event async for event in stream]
        text = "".join(choice.delta.content or "" for event in events for choice in event.choices)
        assert text == chat.choices[0].message.content
        assert events[-1].usage.completion_tokens == 5
        with pytest.raises(openai.BadRequestError, match="logprobs"):
            await client.completions.create(model="small", prompt="x", logprobs=2)
        await client.close()
        other = openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="wrong", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            await other.models.list()
        await other.close()

    run(body, api_key="secret")
