"""A small decoder behind HTTP, in this process, with everything in reach; and a client."""

import asyncio
import json
import threading
import time
from contextlib import asynccontextmanager

import aiohttp
import torch
from runtime_live import DECODER, spec
from runtime_small import SMALL

from gpu_runtime.device import TorchDevice
from gpu_runtime.serve.engine import EngineThread
from gpu_runtime.serve.metrics import Metrics
from gpu_runtime.serve.run import bind, url_of
from gpu_runtime.serve.server import Server, ServerOptions
from gpu_runtime.serve.text import ByteCodec
from kvtwin.testing import DECODE, PREFILL, CheckedEngine, limits
from sim.cost.forms import LinearCost
from sim.cost.pricing import Lanes
from sim.engine.itl import GapCollector
from sim.engine.limits import Deployment
from sim.scenario import parse_policy
from sim.specs.hardware import load_hardware
from sim.systems.layerkv import LayerKV

SIZES = {"gpu": 64, "host": 64, "max_model_len": 128, "seqs": 8, "tokens": 128, "block_size": 4}


class Gate:
    """Holds iterations back while closed, and makes each take at least `pause_s`."""

    def __init__(self, device):
        self.open = threading.Event()
        self.open.set()
        self.pause_s = 0.0
        self.fault = None
        self._execute = device.execute
        device.execute = self.execute

    def execute(self, plan):
        self.open.wait(20)
        time.sleep(self.pause_s)
        if self.fault is not None:
            raise self.fault
        return self._execute(plan)


class Service:
    """A server under test."""

    def __init__(self, variant, sizes, options):
        policy, limit = parse_policy(variant, {})[1], limits(**(SIZES | sizes))
        cost = LinearCost(PREFILL, DECODE, 3e-4, limit.block_bytes, limit.block_bytes / limit.block_size / 4)
        self.scheduler = policy.scheduler(limit, GapCollector(), Deployment(spec(), load_hardware("a100-80g"), 1, cost))
        self.ended = []
        engine = CheckedEngine(self.scheduler, policy.length_predictor(0), self.ended.append)
        self.device = TorchDevice(
            DECODER,
            self.scheduler,
            limit,
            layer_group=1 if isinstance(policy, LayerKV) else SMALL.num_layers,
            prompt_of=lambda request: [],
            device="cpu",
            dtype=torch.float32,
            scratch_blocks=4 * limit.num_cpu_blocks + 64,
            inline_copies=False,
        )
        self.gate = Gate(self.device)
        self.thread = EngineThread(engine, self.device, Metrics(), Lanes(), None)
        self.bound = bind("127.0.0.1", 0)
        self.url = url_of(self.bound)
        asked = {"model": "small", "root": "small", "max_model_len": limit.max_model_len, "vocab_size": 101} | options
        self.server = Server(self.thread, ByteCodec(101), ServerOptions(**asked))

    async def start(self):
        await self.thread.start()
        await self.server.start(self.bound)

    async def stop(self):
        """Drain; nothing may be held by anyone."""
        self.gate.open.set()
        self.server.drain()
        await asyncio.wait_for(self.thread.finished.wait(), 20)
        await self.server.close()

    def check_empty(self):
        assert self.thread.error is None, self.thread.error
        assert self.scheduler.gpu.free == self.scheduler.gpu.num_blocks
        assert self.scheduler.host.free == self.scheduler.host.num_blocks
        assert not self.device.placement.held
        assert not self.device.tokens
        assert not self.thread._open
        assert not self.thread._left
        assert not self.thread.unfinished
        assert len(self.ended) == self.thread.metrics.accepted == sum(self.thread.metrics.ended.values())
        self.device.check()

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

    async def until(self, holds, seconds=10.0):
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
