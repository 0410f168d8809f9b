"""A small decoder behind HTTP, in this process, with everything in reach; and a client."""

import asyncio
import json
import threading
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
from runtime_variants import policy_of

from gpu_runtime.model.sampling import GREEDY
from gpu_runtime.serve.engine import EngineThread
from gpu_runtime.serve.metrics import Metrics
from gpu_runtime.serve.run import bind, url_of
from gpu_runtime.serve.server import Server, ServerOptions
from gpu_runtime.serve.text import ByteCodec
from kvtwin.testing import build_engine, linear_machine
from kvtwin.testing.live import SMALL, build_device, check_nothing_held, tight_limits
from sim.cost.pricing import Lanes

SIZES = {"gpu": 64, "host": 64, "max_model_len": 128, "seqs": 8}


class Gate:
    """Holds iterations back while closed, and makes each take at least `pause_s`."""

    def __init__(self, device):
        self.open = threading.Event()
        self.open.set()
        self.pause_s = 0.0
        self.fault = None
        self._launch = device.launch
        device.launch = self.launch

    def launch(self, plan):
        self.open.wait(300)
        time.sleep(self.pause_s)
        if self.fault is not None:
            raise self.fault
        self._launch(plan)


class Service:
    """A server under test."""

    def __init__(self, variant, sizes, options):
        policy = policy_of(variant)
        sizes = SIZES | sizes
        caches = sizes.pop("caches", False)
        limit = replace(tight_limits(policy, **sizes), enable_prefix_caching=caches)
        self.ended = []
        machine = linear_machine(limit.block_bytes, layers=SMALL.num_layers)
        engine = build_engine(policy, limit, machine, self.ended.append)
        self.scheduler = engine.scheduler
        self.device = build_device(self.scheduler)
        self.gate = Gate(self.device)
        self.thread = EngineThread(engine, self.device, Metrics(), Lanes(), None)
        self.bound = bind("127.0.0.1", 0)
        self.url = url_of(self.bound)
        asked = {"model": "small", "root": "small", "max_model_len": limit.max_model_len, "vocab_size": 101}
        asked |= {"sampling": GREEDY} | options
        self.server = Server(self.thread, ByteCodec(101), ServerOptions(**asked))

    async def start(self):
        await self.thread.start()
        await self.server.start(self.bound)

    async def stop(self):
        """Drain; no blocks may be held."""
        self.gate.open.set()
        self.server.drain()
        await asyncio.wait_for(self.thread.finished.wait(), 300)
        await self.server.close()

    def check_empty(self):
        assert self.thread.error is None, self.thread.error
        check_nothing_held(self.device)
        assert not self.thread._open
        assert not self.thread._left
        assert not self.thread.unfinished
        assert len(self.ended) == self.thread.metrics.accepted == sum(self.thread.metrics.ended.values())

    # -- a client ------------------------------------------------------------------------------------------------

    async def post(self, body, path="/v1/completions", **more):
        """Status, decoded answer and headers."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.url + path, data=data, **more) as response:
            return response.status, await response.json(), response.headers

    async def get(self, path):
        async with self.session.get(self.url + path) as response:
            return response.status, await response.text()

    async def stream(self, body, path="/v1/completions", leave_after=None):
        """Decoded events of a stream, up to `[DONE]` or until the client leaves."""
        events = []
        async with self.session.post(self.url + path, json={"stream": True, **body}) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"].startswith("text/event-stream")
            async for line in response.content:
                if line.startswith(b"data: "):
                    events.append(line[6:].strip())
                    if leave_after is not None and len(events) == leave_after:
                        response.close()
                        return [json.loads(event) for event in events]
        assert events[-1] == b"[DONE]"
        return [json.loads(event) for event in events[:-1]]

    async def until(self, holds, seconds=300.0):
        """Wait until something holds."""
        async with asyncio.timeout(seconds):
            while not holds():
                await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(variant="vllm-recompute", *, sizes=None, crashes=False, **options):
    """A server that is drained afterwards, and must then hold nothing unless its engine crashes."""
    service = Service(variant, sizes or {}, options)
    await service.start()
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as service.session:
            yield service
            await service.stop()
    finally:
        service.thread.abort()
        service.gate.open.set()
    if not crashes:
        service.check_empty()


def token_ids(events):
    """Token ids of a stream that asked for them."""
    return [token for event in events for choice in event["choices"] for token in choice.get("token_ids", [])]
