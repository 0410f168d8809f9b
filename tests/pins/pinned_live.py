"""The live half: which blocks a policy moves, which pools a machine has room for, what a server answers."""

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import cache, partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from pinned import ROOT, Answers, Table, short
from pinned_traces import GONE, ODD, changed, places

sys.path.insert(0, str(ROOT / "tests/gpu_runtime"))

from pretended import PretendedDevice
from runtime_server import Service, serving
from runtime_variants import CONTIGUOUS, STREAM, TIERED, TREES, policy_of

from gpu_runtime.device import TorchDevice
from gpu_runtime.instance import LiveInstance
from gpu_runtime.kv.pool import KVPool
from gpu_runtime.machine import live_memory
from gpu_runtime.machine.live_memory import fit_to_machine
from gpu_runtime.model.sampling import Sampling
from gpu_runtime.serve import reply, server
from gpu_runtime.serve.request import NEUTRAL, Refused, read_ask
from kvtwin.testing import linear_machine, requests
from kvtwin.testing.engines import build_engine
from kvtwin.testing.live import ALIKE, GROWING, SMALL, CheckedDevice, alike, build_device, small_decoder, tight_limits
from sim.clock.arrivals import Arrivals
from sim.engine.plan import IterationPlan, StepTimes
from sim.errors import UserError
from sim.options.scenario import Scenario

# -- plans carried out -------------------------------------------------------------------------------------------------

CROWDED = (
    "vllm-recompute", "vllm-swap", "vllm-swap:batching=sarathi", "layerkv", "layerkv:batching=sarathi", STREAM,
    CONTIGUOUS, "hcache", "kvpr", "orca", "fastserve", "fastserve:memory=reserved", "distserve", "pensieve", "radix",
    "batchllm", "adaptive",
)  # fmt: skip
CACHING = ("vllm-v1", *TIERED, *TREES, "batchllm:batching=sglang", "hcache:keeps=turns", "pensieve")
SIZES = ({"gpu": 16, "seqs": 3}, {"gpu": 16, "seqs": 3, "chunked": True})


class NotedDevice(CheckedDevice):
    """Has a clock that its cost model sets; notes which blocks are copied and held."""

    clock: PretendedDevice
    notes: list[str]

    def now_s(self) -> float:
        return self.clock.now_s()

    def wait(self, until_s: float) -> None:
        self.clock.clock_s = until_s

    def execute(self, plan: IterationPlan) -> StepTimes:
        super().execute(plan)
        places = self.memory.placement
        held = {seq.request.request_id: (own.gpu, own.host, own.slots) for seq, own in places.held.items()}
        free = places.gpu.num_free, places.host.num_free
        self.notes.append(f"{plan.kind} holding {held}, free {free}, cached {list(places.cached.lists())}")
        return self.clock.execute(plan)


def move(name: str) -> Answers:
    """What a device does for requests in pools that are too small: which blocks each holds, and what is copied."""
    variant, caches = name.removesuffix(" caching"), name.endswith(" caching")
    policy = policy_of(variant)
    arrivals = alike(requests(*ALIKE[:6])) if caches else requests(*GROWING[:4])
    sizes = SIZES[(CACHING if caches else CROWDED).index(variant) % 2]
    limit = replace(tight_limits(policy, **sizes), enable_prefix_caching=caches)
    machine = linear_machine(limit.block_bytes, layers=SMALL.num_layers)
    engine = build_engine(policy, limit, machine, lambda seq: None)
    device = build_device(engine.scheduler, kind=NotedDevice, inline_copies=True)
    assert isinstance(device, NotedDevice)
    device.clock, device.notes = PretendedDevice(machine, engine.scheduler), []
    copied: list[str] = []

    def noted(copy: Callable[..., object]) -> Callable[..., object]:
        def note(*given: Any) -> object:
            copied.append(str([part for part in given if not isinstance(part, torch.Tensor | KVPool)]))
            return copy(*given)

        return note

    copies = device.memory.engine
    for method in ("copy_blocks", "copy_layer", "copy_rows"):
        setattr(copies, method, noted(getattr(copies, method)))
    with torch.inference_mode():
        LiveInstance(engine, device, Arrivals(arrivals)).serve()
    device.close()
    return {"held": device.notes, "copied": copied}


# -- memory ------------------------------------------------------------------------------------------------------------

REFUSED = (
    "ellm", "mooncake", "vllm-v1:kv-offloading-size=1", "adaptive:memory=tiered-states",
)  # fmt: skip
PLAIN = Scenario(
    model="qwen3-0.6b", gpu="l20", workload="fixed", input_len=9, output_len=9, engine_profile="kvtwin", swap_space=None
)
MOST = 1 << 36
"""Bytes that are enough for everything."""


FITS: dict[str, tuple[str, Scenario, str, str]] = {
    "on a CPU": ("vllm-v1", PLAIN, "cpu", "cpu"),
    "on a GPU": ("vllm-v1", PLAIN, "cuda", "cuda"),
    "beside a GPU": ("vllm-v1", replace(PLAIN, swap_space=0.25), "cuda", "cpu"),
    "blocks asked for": ("vllm-v1", replace(PLAIN, num_gpu_blocks_override=100), "cuda", "cuda"),
    "few seats, long passes": (
        "vllm-v1",
        replace(PLAIN, max_num_seqs=7, max_num_batched_tokens=4096, max_model_len=1000, block_size=32),
        "cuda",
        "cuda",
    ),
    "streamed": ("layerkv:decode=stream", PLAIN, "cuda", "cuda"),
    "states of turns": ("hcache:keeps=turns", PLAIN, "cpu", "cpu"),
}
"""Policy, what is asked for, device, and of which memory there is little."""


def told(act: Callable[..., object], *given: Any, **options: Any) -> str:
    """What comes of it, in one line."""
    try:
        return str(act(*given, **options))
    except (UserError, ValueError) as error:
        return f"! {error}"


def fitted(scenario: Scenario, policy: str, device: str, free: dict[str, int]) -> str:
    """What is made smaller of a scenario, where there are so many bytes free."""

    def fit() -> object:
        found = fit_to_machine(scenario, policy_of(policy), device, small_decoder())
        return {f.name: new for f in fields(found) if (new := getattr(found, f.name)) != getattr(scenario, f.name)}

    with patch.object(live_memory, "free_bytes", free.__getitem__):
        return told(fit)


def fit(name: str) -> Answers:
    """From how many bytes on pools fit, whole and made smaller, and what is said below that."""
    if name == "refused":
        everything = {"cpu": MOST, "cuda": MOST}
        return {"told": [f"{policy}: {fitted(PLAIN, policy, 'cpu', everything)}" for policy in REFUSED]}
    policy, scenario, device, tight = FITS[name]
    return {"edges": [*edges(tight, partial(fitted, scenario, policy, device))]}


def edges(tight: str, fit: Callable[[dict[str, int]], str]) -> Iterator[str]:
    """What fits into so many bytes of one kind of memory, where that changes."""

    @cache
    def at(free: int) -> str:
        return fit({"cpu": MOST, "cuda": MOST, tight: free})

    first = [least(lambda free, kind=kind: kind_of(at(free)) >= kind) for kind in (1, 2)]
    for free in sorted({0, *(max(number - 1, 0) for number in first), *first}):
        yield f"{free}: {at(free)}"


def kind_of(outcome: str) -> int:
    """0: refused, 1: something is made smaller, 2: nothing is."""
    return 0 if outcome.startswith("!") else 1 if outcome != "{}" else 2


def least(holds: Callable[[int], bool]) -> int:
    """The fewest bytes with which it holds; `MOST` where it never does."""
    low, high = 0, MOST
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


# -- answers -----------------------------------------------------------------------------------------------------------

USER = {"role": "user", "content": "hi"}
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


def said(device: TorchDevice, logits: object, seqs: Any, positions: Any) -> torch.Tensor:
    """In place of what is chosen, so that answers are the same on every machine: 13 more than the token before."""
    counts = [position - seq.request.prompt_tokens for seq, position in zip(seqs, positions, strict=True)]
    return torch.tensor([(7 + 13 * count) % 101 for count in counts], dtype=torch.int64)


async def answered(service: Service, method: str, path: str, body: Any, **more: Any) -> str:
    """Status, headers and words of an answer."""
    data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    async with service.session.request(method, service.url + path, data=data, **more) as response:
        headers = {name: response.headers[name] for name in HEADERS if name in response.headers}
        return f"{response.status} {headers} {(await response.read()).decode()!r}"


async def whole() -> list[str]:
    """Of requests one after the other."""
    found = []
    async with serving(**OPTIONS) as service:
        for method, path, body in ASKED:
            words = json.dumps(body)[:120] if not isinstance(body, bytes) else body.decode()
            found.append(f"{method} {path[:40]} {words}: {await answered(service, method, path, body)}")
        _, page = await service.get("/metrics")
        # What else is there depends on how soon the engine heard of stop strings.
        counted = ("kvtwin_requests_accepted", "kvtwin_error_answers", "kvtwin_prompt_tokens")
        found += [line.rpartition(" ")[0] for line in page.splitlines() if "_bucket" in line]
        return found + [line for line in page.splitlines() if line.startswith(counted)]


async def keyed() -> list[str]:
    """Where a key is asked for."""
    found = []
    async with serving(api_key="open") as service:
        for given in (None, "Bearer open", "bearer  open ", "Bearer shut", "Basic open"):
            sent = {} if given is None else {"Authorization": given}
            for path in (MODELS, "/health"):
                found.append(f"{given} {path}: {(await answered(service, 'GET', path, None, headers=sent))[:300]}")
    return found


async def draining() -> list[str]:
    """While what was accepted is still to be answered; and of bodies up to a limit."""
    found = []
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


SERVED = {"whole": whole, "keyed": keyed, "draining": draining}


def answer(name: str) -> Answers:
    """Whole answers of a server."""
    with (
        patch.object(TorchDevice, "_choose", said),
        patch.object(reply, "time", lambda: 1e9),
        patch.object(server, "time", lambda: 1e9),
    ):
        return {"said": [short(line, 300) for line in asyncio.run(SERVED[name]())]}


BODIES: dict[str, dict[str, Any]] = {
    "a completion": {
        "model": "a/b", "prompt": ["hey", [1, 2]], "max_tokens": 9, "n": 2, "stop": ["x", "y"], "stop_token_ids": [4],
        "min_tokens": 1, "seed": 5,
    },
    "a chat": {
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}], "stream": True,
        "stream_options": {"include_usage": True}, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1,
        "max_completion_tokens": 7, "chat_template_kwargs": {"thinking": True}, "add_generation_prompt": True,
    },
}  # fmt: skip
MORE = (
    "ignore_eos", "return_token_ids", "add_special_tokens", "continue_final_message", "add_generation_prompt", *NEUTRAL
)  # fmt: skip
VALUES = (*ODD, 0, 1, 2, 2.5, 1 << 63, -(1 << 63) - 1, False, "", {}, ["a"] * 17, {"type": "text"})


def bodies(name: str) -> Iterator[str]:
    """What bodies of requests ask for, or how they are refused, with each of their values gone or another."""
    body = BODIES[name]
    cases = product(places(body), (GONE, *VALUES))
    found = [(at, value, changed(body, at, value)) for at, value in cases]
    found += [((field,), value, {**body, field: value}) for field, value in product(MORE, VALUES)]
    for at, value, asked in found:
        try:
            text = json.dumps(asked).encode()
            answer = str(read_ask(text, chat=name == "a chat", default=Sampling(), text_of=str))
        except Refused as error:
            answer = f"{error.status} {error.param} {error.message}"
        yield f"{list(at)} {'gone' if value is GONE else repr(value)[:30]}: {short(answer, 400)}"


TABLES = {
    "live bodies": Table([*BODIES], lambda name: {"asked": [*bodies(name)]}),
    "live moves": Table([*CROWDED, *(f"{variant} caching" for variant in CACHING)], move),
    "live fits": Table([*FITS, "refused"], fit),
    "live answers": Table([*SERVED], answer),
}
