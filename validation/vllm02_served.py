"""What vLLM 0.2.3's server adds to an iteration: CPU time of its processes, with and without it. No GPU, no model.

python validation/vllm02_served.py VLLM    # a checkout of vLLM 0.2.3

Needs ray 2.5.1, fastapi 0.110, uvicorn[standard] 0.29, pydantic 1.10 and aiohttp.

Served as DistServe's authors did (`--engine-use-ray --worker-use-ray`, streamed answers): API server, engine and worker
are processes, and every iteration's sequences pass through Ray twice, tokens and text. The API server and the engine's
asynchronous loop are VLLM's own; engine and worker hand on what theirs do, with the same fields, and compute nothing.
Alone, the engine is in the caller's process, as when the authors timed iterations. The difference is the server's.
"""

import argparse
import asyncio
import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from statistics import linear_regression
from types import ModuleType, SimpleNamespace
from uuid import uuid4

BATCHES = (1, 2, 4, 8, 16, 32, 64, 96)
ITERATIONS = 120
"""Output tokens of each request."""
PROMPT_TOKENS, PROMPT_CHARACTERS, OUTPUT_TOKENS = 770, 3311, 180
"""Of ShareGPT's requests in those runs, half-way through their answers; 4.3 characters a token are assumed."""
BLOCK_TOKENS = 16
PORT = 18230
GPU_S = 0.012
"""The worker sleeps so long: no process computes ahead of another."""

Times = tuple[float, ...]


class Answer(SimpleNamespace):
    """A request's or a sequence's fields, as vLLM's own classes have them."""


class Worker:
    """Takes an iteration's sequences and gives a token for each."""

    def execute_method(self, _method: str, sequences: list[Answer]) -> list[Answer]:
        """An iteration."""
        time.sleep(GPU_S)
        return [
            Answer(samples=[Answer(parent_seq_id=i, output_token=5, logprobs={5: -1.0})]) for i in range(len(sequences))
        ]

    def cpu_s(self) -> float:
        """CPU time of this process so far, s."""
        return time.process_time()


class Engine:
    """Hands each iteration's sequences to the worker and their answers to the caller."""

    def __init__(self, *_: object) -> None:
        self.ray = import_module("ray")
        self.worker = self.ray.remote(num_cpus=0)(Worker).remote()
        self.requests: dict[str, Answer] = {}

    def add_request(self, request_id: str, prompt: str, sampling_params: object, **_: object) -> None:
        """Queue a request; its tokens are not looked up."""
        tokens = [7919 * i % 50_000 for i in range(PROMPT_TOKENS + OUTPUT_TOKENS)]
        self.requests[request_id] = Answer(
            prompt=prompt, ids=tokens[:PROMPT_TOKENS], out=tokens[PROMPT_TOKENS:], sampling=sampling_params, done=0
        )

    def abort_request(self, request_ids: Sequence[str]) -> None:
        """Requests leave when they are answered."""

    def step(self) -> list[Answer]:
        """An iteration of all requests."""
        blocks = list(range((PROMPT_TOKENS + OUTPUT_TOKENS) // BLOCK_TOKENS))
        sequences = [
            Answer(
                request_id=name,
                is_prompt=False,
                sampling_params=r.sampling,
                block_tables={0: blocks[:]},
                seq_data={0: Answer(prompt_token_ids=r.ids, output_token_ids=r.out, cumulative_logprob=-1.0)},
            )
            for name, r in self.requests.items()
        ]
        self.ray.get(self.worker.execute_method.remote("execute_model", sequences))
        outputs = []
        for name, r in list(self.requests.items()):
            r.done += 1
            finished = r.done == ITERATIONS
            text = Answer(
                index=0, text=" token" * OUTPUT_TOKENS, token_ids=r.out, cumulative_logprob=-1.0, logprobs=None
            )
            outputs.append(
                Answer(
                    request_id=name,
                    prompt=r.prompt,
                    prompt_token_ids=r.ids,
                    prompt_logprobs=None,
                    outputs=[text],
                    finished=finished,
                )
            )
            if finished:
                del self.requests[name]
        return outputs

    def cpu_s(self) -> Times:
        """CPU time of engine and worker so far, s."""
        return time.process_time(), self.ray.get(self.worker.cpu_s.remote())


class ServedEngine(Engine):
    """An asynchronous actor, as vLLM's is."""

    async def step_async(self) -> list[Answer]:
        """Makes Ray run the actor in an event loop."""
        return self.step()


def start_ray() -> None:
    """Ray, its workers finding this module."""
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    import_module("ray").init(num_cpus=2, include_dashboard=False, log_to_driver=False)


def served(vllm: Path) -> None:
    """The API server."""

    def module(name: str, path: Path | None = None, **names: object) -> None:
        found = ModuleType(name)
        if path:
            found.__path__ = [str(path)]
        vars(found).update(names)
        sys.modules[name] = found

    module("vllm", vllm / "vllm")
    for name in ("engine", "entrypoints"):
        module(f"vllm.{name}", vllm / "vllm" / name)
    module("vllm.config", ModelConfig=object)
    module("vllm.engine.arg_utils", AsyncEngineArgs=object)
    module("vllm.engine.llm_engine", LLMEngine=Engine)
    module("vllm.engine.ray_utils", initialize_cluster=None, ray=import_module("ray"))
    module("vllm.utils", random_uuid=lambda: uuid4().hex)
    module("vllm.logger", init_logger=logging.getLogger)
    module("vllm.outputs", RequestOutput=Answer)
    module("vllm.sampling_params", SamplingParams=Answer)
    asynchronous = import_module("vllm.engine.async_llm_engine").AsyncLLMEngine
    api_server = import_module("vllm.entrypoints.api_server")
    start_ray()
    asynchronous._engine_class = ServedEngine
    engine = asynchronous(worker_use_ray=True, engine_use_ray=True, log_requests=False)
    vars(api_server)["engine"] = engine

    @api_server.app.get("/cpu_s")
    async def cpu_s() -> Times:  # pyright: ignore[reportUnusedFunction]
        return time.process_time(), *await engine.engine.cpu_s.remote()

    import_module("uvicorn").run(api_server.app, host="127.0.0.1", port=PORT, log_level="warning")


def alone() -> None:
    """Print the CPU time of `ITERATIONS` of each batch without a server, s; the first is a warm-up."""
    start_ray()
    engine = Engine()
    prompt = "word " * (PROMPT_CHARACTERS // 5)
    for batch in (1, *BATCHES):
        before = engine.cpu_s()
        for i in range(batch):
            engine.add_request(str(i), prompt, Answer(max_tokens=ITERATIONS))
        while engine.requests:
            engine.step()
        print(sum(engine.cpu_s()) - sum(before), flush=True)


async def ask() -> list[float]:
    """The CPU time of `ITERATIONS` of each batch with the server, s; the first is a warm-up."""
    aiohttp = import_module("aiohttp")
    url = f"http://127.0.0.1:{PORT}"
    prompt = "word " * (PROMPT_CHARACTERS // 5)
    question = {"prompt": prompt, "max_tokens": ITERATIONS, "ignore_eos": True, "stream": True}
    seconds = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def cpu_s() -> float:
            async with session.get(url + "/cpu_s") as response:
                return sum(await response.json())

        async def generate() -> None:
            async with session.post(url + "/generate", json=question) as response:
                async for _ in response.content.iter_any():
                    pass

        for _ in range(100):
            try:
                await cpu_s()
                break
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(1)
        for batch in (1, *BATCHES):
            before = await cpu_s()
            await asyncio.gather(*(generate() for _ in range(batch)))
            seconds.append(await cpu_s() - before)
    return seconds


def main() -> None:
    """Print the CPU time of an iteration with the server and without, and what the server adds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vllm", type=Path)
    vllm = parser.parse_args().vllm
    if not (vllm / "vllm/engine/async_llm_engine.py").exists():
        print(f"{vllm} has no vLLM: nothing to measure")
        return
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}

    def child(call: str) -> list[str]:
        return [sys.executable, "-c", f"import pathlib, vllm02_served; vllm02_served.{call}"]

    without = [float(x) for x in subprocess.check_output(child("alone()"), env=here, text=True).split()]
    server = subprocess.Popen(child(f"served(pathlib.Path({str(vllm)!r}))"), env=here)
    try:
        with_it = asyncio.run(ask())
    finally:
        server.terminate()
    print(f"{'batch':>5}{'alone, ms':>12}{'served':>9}{'added':>9}{'a sequence':>12}")
    added = []
    for batch, alone_s, served_s in zip(BATCHES, without[1:], with_it[1:], strict=True):
        alone_ms, served_ms = (1e3 * s / ITERATIONS for s in (alone_s, served_s))
        added.append(served_ms - alone_ms)
        print(f"{batch:>5}{alone_ms:>12.2f}{served_ms:>9.2f}{added[-1]:>9.2f}{added[-1] / batch:>12.3f}")
    each, base = linear_regression(BATCHES, added)
    print(f"the server adds {base:.1f} ms and {each:.2f} ms a sequence to an iteration")


if __name__ == "__main__":
    main()
