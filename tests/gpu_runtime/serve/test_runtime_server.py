"""Completions over HTTP: the tokens are the model's whatever the policy does, and no blocks are left behind."""

import asyncio
import random

import pytest
from runtime_server import serving, token_ids
from runtime_variants import FEW

from gpu_runtime.serve.metrics import EngineState, Metrics
from kvtwin.testing.live import continuation, prompt_of, tokens_alone
from sim.engine.sequence import Status
from traces.request import Request

AHEAD = "vllm-v1:async-scheduling=true"
SMALL_POOL = {"gpu": 16, "host": 60, "max_model_len": 64, "seqs": 6}
ROWS = [Request(i, 0.0, 5 + 7 * i % 23, 4 + 5 * i % 19) for i in range(14)]


def body_of(request, **more):
    return {"prompt": prompt_of(request), "max_tokens": request.output_tokens, "return_token_ids": True} | more


@pytest.mark.parametrize("variant", [*FEW, AHEAD])
def test_no_policy_changes_a_token_over_http(variant):
    async def run():
        async with serving(variant, sizes=SMALL_POOL) as service:
            answers = [
                service.stream(body_of(row)) if row.request_id % 2 else service.post(body_of(row)) for row in ROWS
            ]
            for row, answer in zip(ROWS, await asyncio.gather(*answers), strict=True):
                streamed = isinstance(answer, list)
                tokens = token_ids(answer) if streamed else answer[1]["choices"][0]["token_ids"]
                assert tokens == tokens_alone(row)
                last = answer[-1] if streamed else answer[1]
                assert last["choices"][0]["finish_reason"] == "length"
        if variant.startswith("vllm"):
            assert service.scheduler.counters.preemptions > 0
        assert all(seq.status is Status.FINISHED and not seq.error for seq in service.ended)

    asyncio.run(run())


@pytest.mark.parametrize("variant", ["vllm-v1", "vllm-recompute"])
def test_real_prompts_share_what_they_begin_with(variant):
    """The second request is the first, the third goes on from its answer, the fourth differs in its first token."""
    prompt, counts = [(5 * i) % 101 for i in range(18)], []

    async def run():
        async with serving(variant, sizes={"caches": True}) as service:

            async def ask(prompt, output_tokens):
                body = {"prompt": prompt, "max_tokens": output_tokens, "return_token_ids": True}
                _, answer, _ = await service.post(body)
                counts.append(service.ended[-1].num_cached_tokens)
                tokens = answer["choices"][0]["token_ids"]
                assert tokens == list(continuation(tuple(prompt), output_tokens))
                return tokens

            said = await ask(prompt, 9)
            assert await ask(prompt, 9) == said
            await ask([*prompt, *said, 7], 5)
            await ask([6, *prompt[1:]], 5)
            await service.until(lambda: service.thread.state.prefix_queries == 2 * 18 + 28 + 18)
            _, page = await service.get("/metrics")
            assert "vllm:prefix_cache_queries_total 82\n" in page
            assert "vllm:prefix_cache_hits_total 40\n" in page

    asyncio.run(run())
    # Blocks of four tokens; the last token of an answer has no KV.
    assert counts == [0, 16, 24, 0]


@pytest.mark.parametrize("variant", [*FEW, AHEAD])
def test_clients_that_leave_at_any_time_leave_no_block_behind(variant):
    async def client(service, row, dice, leave, seconds):
        await asyncio.sleep(dice.random() * 0.1)
        try:
            async with asyncio.timeout(seconds):
                events = await service.stream(body_of(row), leave_after=leave)
        except TimeoutError:
            return
        expected = tokens_alone(row)
        assert token_ids(events) == expected[: len(token_ids(events))]
        if leave is None:
            assert token_ids(events) == expected

    async def run():
        dice = random.Random(variant)
        async with serving(variant, sizes=SMALL_POOL) as service:
            service.gate.pause_s = 0.003
            clients = [(dice.choice([None, 1, 2, 5]), dice.choice([0.02, 0.1, 300])) for _ in ROWS[1:] + ROWS[1:]]
            # Whatever the dice say, one stays to the end and one does not.
            clients += [(None, 300), (1, 300)]
            rows = [*ROWS[1:], *ROWS[1:], ROWS[5], ROWS[5]]
            await asyncio.gather(*(client(service, row, dice, *how) for row, how in zip(rows, clients, strict=True)))
        ended = service.thread.metrics.ended
        assert ended["length"]
        assert ended["cancelled"]
        assert set(ended) == {"length", "cancelled"}
        assert sum("cancelled" in seq.error for seq in service.ended) == ended["cancelled"]
        assert service.thread.scheduler.counters.ignored == {"cancelled": ended["cancelled"]}

    asyncio.run(run())


def test_a_stream_is_one_token_a_chunk_then_the_reason_then_usage_then_done():
    async def run():
        async with serving() as service:
            asked = {"max_tokens": 6, "stream_options": {"include_usage": True}}
            events = await service.stream({"prompt": "hello", **asked})
            chat = await service.stream(
                {"messages": [{"role": "user", "content": "hello"}], **asked}, path="/v1/chat/completions"
            )
            status, whole, _ = await service.post({"prompt": "hello", "max_tokens": 6})
        texts = [event["choices"][0]["text"] for event in events[:-1]]
        assert [len(text) for text in texts] == [1] * 6 + [0]
        assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None] * 6 + ["length"]
        assert events[-1]["choices"] == []
        assert events[-1]["usage"] == {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}
        assert len({event["id"] for event in events}) == 1
        assert (status, whole["choices"][0]["text"], whole["usage"]) == (200, "".join(texts), events[-1]["usage"])
        assert chat[0]["choices"][0]["delta"]["role"] == "assistant"
        assert [len(event["choices"][0]["delta"].get("content", "")) for event in chat[:-1]] == [1] * 6 + [0]
        assert chat[-1]["usage"]["prompt_tokens"] == len("user: hello\nassistant:")

    asyncio.run(run())


@pytest.mark.parametrize("variant", [*FEW, AHEAD])
def test_a_stop_token_ends_the_answer_early_and_frees_its_blocks(variant):
    async def run():
        eos = tokens_alone(ROWS[3])[2]
        async with serving(variant, sizes=SMALL_POOL, stop=frozenset([eos])) as service:
            bodies = [
                body_of(ROWS[3]),
                body_of(ROWS[3], ignore_eos=True),
                body_of(ROWS[3], min_tokens=4, stop_token_ids=[1]),
                body_of(ROWS[1], ignore_eos=True, stop_token_ids=tokens_alone(ROWS[1])[:1]),
            ]
            answers = [answer["choices"][0] for _, answer, _ in await asyncio.gather(*map(service.post, bodies))]
        full = tokens_alone(ROWS[3])
        first = full.index(eos)
        assert (answers[0]["token_ids"], answers[0]["finish_reason"]) == (full[: first + 1], "stop")
        assert len(answers[0]["text"]) == first
        assert (answers[1]["token_ids"], answers[1]["finish_reason"]) == (full, "length")
        assert answers[2]["token_ids"][:4] == full[:4]
        assert len(answers[2]["token_ids"]) >= 4
        assert (answers[3]["token_ids"], answers[3]["finish_reason"]) == (tokens_alone(ROWS[1])[:1], "stop")

    asyncio.run(run())


def test_a_full_queue_refuses_and_recovers():
    async def run():
        async with serving(max_queue=3, sizes={"seqs": 1}) as service:
            service.gate.open.clear()
            waiting = [asyncio.create_task(service.post(body_of(row))) for row in ROWS[:3]]
            await service.until(lambda: len(service.thread.queued) == 3)
            status, answer, headers = await service.post(body_of(ROWS[3]))
            assert status == 429
            assert int(headers["Retry-After"]) >= 1
            assert "--max-queue" in answer["error"]["message"]
            service.gate.open.set()
            for row, (status, answer, _) in zip(ROWS[:3], await asyncio.gather(*waiting), strict=True):
                assert (status, answer["choices"][0]["token_ids"]) == (200, tokens_alone(row))
            assert (await service.post(body_of(ROWS[3])))[0] == 200
            _, page = await service.get("/metrics")
        assert 'kvtwin_error_answers_total{status="429"} 1' in page

    asyncio.run(run())


def test_a_client_that_leaves_the_queue_makes_room():
    async def run():
        async with serving(max_queue=2, sizes={"seqs": 1}) as service:
            service.gate.open.clear()
            waiting = [asyncio.create_task(service.post(body_of(row))) for row in ROWS[:2]]
            await service.until(lambda: len(service.thread.queued) == 2)
            waiting[1].cancel()
            service.gate.open.set()
            await service.until(lambda: service.thread.metrics.ended["cancelled"] == 1)
            assert (await waiting[0])[0] == 200
            assert (await service.post(body_of(ROWS[3])))[0] == 200

    asyncio.run(run())


def test_a_crash_of_the_engine_is_an_error_for_every_open_request():
    async def run():
        async with serving(crashes=True) as service:
            service.gate.pause_s = 0.01
            streams = [asyncio.create_task(service.stream(body_of(row))) for row in ROWS[:2]]
            await service.until(lambda: service.thread.metrics.output_tokens > 2)
            waiting = asyncio.create_task(service.post(body_of(ROWS[2], max_tokens=40)))
            await service.until(lambda: service.thread.metrics.accepted == 3)
            service.gate.fault = ZeroDivisionError("a fault")
            for events in await asyncio.gather(*streams):
                assert events[-1]["error"]["message"] == "the engine failed"
            status, answer, _ = await waiting
            assert (status, answer["error"]["type"]) == (500, "server_error")
            assert (await service.get("/health"))[0] == 503
            assert (await service.post(body_of(ROWS[0])))[0] == 503
        assert service.thread.metrics.ended == {"failed": 3}
        assert isinstance(service.thread.error, ZeroDivisionError)

    asyncio.run(run())


def test_closing_waits_for_every_answer_under_way():
    async def run():
        async with serving() as service:
            service.gate.open.clear()
            asked = [asyncio.create_task(service.post(body_of(row))) for row in ROWS[:3]]
            await service.until(lambda: service.thread.metrics.accepted == 3)
            service.server.drain()
            closing = asyncio.create_task(service.server.close())
            await asyncio.sleep(0.05)
            assert not closing.done()
            service.gate.open.set()
            assert [(await answer)[0] for answer in asked] == [200] * 3
            await closing

    asyncio.run(run())


def test_a_prompt_that_never_fits_is_refused_with_the_schedulers_reason():
    async def run():
        async with serving(sizes={"gpu": 4, "max_model_len": 64}) as service:
            for stream in (False, True):
                status, answer, _ = await service.post({"prompt": [1] * 40, "max_tokens": 2, "stream": stream})
                assert status == 400
                assert "KV blocks" in answer["error"]["message"]
            assert (await service.post({"prompt": [1] * 4, "max_tokens": 2}))[0] == 200
        assert service.thread.metrics.ended == {"ignored": 2, "length": 1}

    asyncio.run(run())


def test_a_failed_computation_ends_its_request_alone():
    async def run():
        async with serving() as service:
            service.gate.pause_s = 0.005
            streams = [asyncio.create_task(service.stream(body_of(row))) for row in ROWS[1:3]]
            await service.until(lambda: service.thread.metrics.output_tokens > 3)
            victim = next(iter(service.scheduler.batch.members))
            service.device.memory.fail(victim, "a copy was lost")
            answers = dict(zip((1, 2), await asyncio.gather(*streams), strict=True))
        (failed,) = [seq.request.prompt_tokens for seq in service.ended if seq.error]
        for number, events in answers.items():
            if ROWS[number].prompt_tokens == failed:
                assert events[-1]["error"]["message"] == "a copy was lost"
            else:
                assert token_ids(events) == tokens_alone(ROWS[number])

    asyncio.run(run())


def test_every_metric_is_on_its_line():
    metrics = Metrics()
    metrics.accepted, metrics.prompt_tokens, metrics.output_tokens = 10, 11, 12
    metrics.ended |= {"stop": 2, "length": 3}
    metrics.errors |= {503: 4, 400: 5}
    for value_s in (0.005, 0.0051, 80.5):
        metrics.ttft_s.add(value_s)
    lines = metrics.text(EngineState(1, 2, 3, 4, 5, 6, 7, 8), 9).splitlines()
    assert [line for line in lines if not line.startswith("#") and "_bucket" not in line] == [
        "vllm:prefix_cache_queries_total 7",
        "vllm:prefix_cache_hits_total 8",
        "kvtwin_requests_running 1",
        "kvtwin_requests_waiting 2",
        "kvtwin_requests_swapped 3",
        "kvtwin_gpu_blocks_free 4",
        "kvtwin_host_blocks_free 5",
        "kvtwin_preemptions_total 6",
        "kvtwin_requests_queued 9",
        "kvtwin_requests_accepted_total 10",
        'kvtwin_requests_total{outcome="length"} 3',
        'kvtwin_requests_total{outcome="stop"} 2',
        'kvtwin_error_answers_total{status="400"} 5',
        'kvtwin_error_answers_total{status="503"} 4',
        "kvtwin_prompt_tokens_total 11",
        "kvtwin_generation_tokens_total 12",
        "kvtwin_time_to_first_token_seconds_sum 80.5101",
        "kvtwin_time_to_first_token_seconds_count 3",
        "kvtwin_inter_token_latency_seconds_sum 0.0",
        "kvtwin_inter_token_latency_seconds_count 0",
    ]


def test_metrics_count_what_happened():
    async def run():
        async with serving(sizes={"gpu": 50, "host": 7}) as service:
            await asyncio.gather(*(service.post(body_of(row)) for row in ROWS[:5]))
            await service.until(lambda: service.thread.state[:4] == (0, 0, 0, 50))
            _, page = await service.get("/metrics")
        lines = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
        outputs = sum(row.output_tokens for row in ROWS[:5])
        assert float(lines['kvtwin_requests_total{outcome="length"}']) == 5
        assert float(lines["kvtwin_generation_tokens_total"]) == outputs
        assert float(lines["kvtwin_prompt_tokens_total"]) == sum(row.prompt_tokens for row in ROWS[:5])
        assert float(lines["kvtwin_time_to_first_token_seconds_count"]) == 5
        assert float(lines["kvtwin_inter_token_latency_seconds_count"]) == outputs - 5
        assert float(lines['kvtwin_inter_token_latency_seconds_bucket{le="+Inf"}']) == outputs - 5
        assert (float(lines["kvtwin_gpu_blocks_free"]), float(lines["kvtwin_host_blocks_free"])) == (50, 7)
        assert float(lines["kvtwin_requests_running"]) == float(lines["kvtwin_requests_waiting"]) == 0
        for line in page.splitlines():
            if line.startswith("# TYPE"):
                assert line.split()[-1] in ("gauge", "counter", "histogram")

    asyncio.run(run())
