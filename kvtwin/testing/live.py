"""What every system must keep to where torch executes it. Run it over a preset: `check(MyPolicy())`. Needs torch.

A small random decoder is served in real time, and after every plan what was executed must be what was planned: the
blocks that moved, where and in which layer groups, and as many block ids in use as the scheduler counts. Whatever is
evicted, offloaded, streamed or computed again, every token is the one that its request gets alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import msgspec
import torch

from gpu_runtime.device import PromptOf, TorchDevice
from gpu_runtime.device_memory import DeviceMemory
from gpu_runtime.instance import LiveInstance
from gpu_runtime.kv.pool import KVPool
from gpu_runtime.model.attention_batch import AttentionBatch
from gpu_runtime.model.config import DecoderConfig
from gpu_runtime.model.decoder import Decoder, greedy
from gpu_runtime.tokens.token_ids import answer_to
from gpu_runtime.tokens.trace_prompts import TracePrompts
from kvtwin.testing.conformance import calling, limits_of
from kvtwin.testing.engines import Machine, build_engine, limits, linear_machine, requests
from sim.clock.arrivals import Arrivals
from sim.engine.limits import Counters, Limits
from sim.engine.plan import IterationPlan, StepTimes
from sim.engine.scheduler import Scheduler
from sim.engine.sequence import Sequence, Status
from sim.systems.base import Policy
from traces.request import Request

SMALL = DecoderConfig(
    name="small",
    num_layers=4,
    hidden_size=48,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=80,
    vocab_size=101,
    max_position_embeddings=512,
)
BLOCK_SIZE = 4
"""Tokens a block, so that short requests have several."""
ROWS = tuple((0.0, 5 + 7 * i % 23, 4 + 5 * i % 19) for i in range(14))
"""Arrival, prompt and output of requests that contend for the pools of `tight_limits`."""
GROWING = tuple((0.0, 14 + 7 * i % 13, 20 + 5 * i % 19) for i in range(10))
"""The same for requests whose outputs are long: what is admitted outgrows the pools."""
ALIKE = tuple((0.0, 14 + 7 * i % 13, 6 + 5 * i % 19) for i in range(14))
"""The same for requests whose prompts begin alike (`alike`)."""
CHUNK = 16
"""Token budget where prompts are computed in chunks."""

prompt_of = TracePrompts(SMALL.vocab_size, 0)
"""Token ids that depend on nothing but the request's number and hash ids, as long as it hears of no answers."""


@lru_cache
def small_decoder(num_layers: int = SMALL.num_layers) -> Decoder:
    """Random weights in single precision on the CPU, always the same."""
    config = msgspec.structs.replace(SMALL, num_layers=num_layers)
    return Decoder.random(config, device="cpu", dtype=torch.float32, seed=3)


class CheckedDevice(TorchDevice):
    """Holds every iteration against its plan, and block ids against counts."""

    def launch(self, plan: IterationPlan) -> None:
        super().launch(plan)
        self.check_executed(plan)


def build_device(
    scheduler: Scheduler,
    *,
    decoder: Decoder | None = None,
    kind: type[TorchDevice] = CheckedDevice,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    inline_copies: bool = False,
    spare_blocks: int = 0,
    prompt_of: PromptOf = prompt_of,
    **options: Any,  # noqa: ANN401
) -> TorchDevice:
    """A device of a scheduler with the small decoder, on the CPU unless told otherwise; `options` are `TorchDevice`'s.

    As on CUDA, copies run beside: what may go wrong between threads shall be seen.
    """
    memory = DeviceMemory(
        decoder or small_decoder(),
        scheduler,
        torch.device(device),
        dtype,
        inline_copies=inline_copies,
        spare_blocks=spare_blocks,
    )
    return kind(memory, prompt_of=prompt_of, **options)


@dataclass
class Served:
    """What a live run left."""

    scheduler: Scheduler
    device: TorchDevice
    instance: LiveInstance
    ended: list[Sequence]
    tokens: dict[int, list[int]] = field(default_factory=dict)
    """By request id."""
    plans: list[tuple[IterationPlan, float, StepTimes]] = field(default_factory=list)

    @property
    def counters(self) -> Counters:
        """The scheduler's."""
        return self.scheduler.counters


def serve(
    policy: Policy,
    arrivals: Iterable[Request],
    limit: Limits,
    *,
    machine: Machine | None = None,
    **options: Any,  # noqa: ANN401
) -> Served:
    """Serve requests in real time; AssertionError or InvariantError where anything goes another way than planned.

    `machine` has the prices that the policy is told. `options` are those of `build_device`.
    """
    ended: list[Sequence] = []
    layers = options.get("decoder", small_decoder()).config.num_layers
    engine = build_engine(policy, limit, machine or linear_machine(limit.block_bytes, layers=layers), ended.append)
    scheduler = engine.scheduler
    device = build_device(scheduler, **options)
    served = Served(scheduler, device, LiveInstance(engine, device, Arrivals(arrivals)), ended)
    device.on_token = lambda seq, token, _: served.tokens.setdefault(seq.request.request_id, []).append(token)
    served.instance.observer = lambda *facts: served.plans.append(facts)
    try:
        device.start()
        with torch.inference_mode():
            served.instance.serve()
    finally:
        device.close()
    check_nothing_held(device)
    return served


def check_nothing_held(device: TorchDevice) -> None:
    """AssertionError or InvariantError unless every block, id and token of every sequence has been given back."""
    for pool in (device.scheduler.gpu, device.scheduler.host):
        assert pool.free == pool.num_blocks
    device.memory.check()
    device.memory.check_counts()
    assert not device.memory.placement.held
    assert not device.memory.placement.under_way
    assert not device.tokens


def check_tokens(served: Served, arrivals: Iterable[Request]) -> list[Sequence]:
    """Every request ended once; those completed have their own tokens. Returns these."""
    by_id = {request.request_id: request for request in arrivals}
    assert sorted(seq.request.request_id for seq in served.ended) == sorted(by_id)
    completed = [seq for seq in served.ended if seq.status is Status.FINISHED and not seq.error]
    for seq in completed:
        number = seq.request.request_id
        said = served.tokens[number]
        assert said == tokens_alone(by_id[number], served.device.decoder, said), seq
    return completed


def tight_limits(
    policy: Policy, *, chunked: bool = False, gpu: int = 16, host: int = 60, seqs: int = 6, max_model_len: int = 64
) -> Limits:
    """Small pools; prompts in chunks or whole, where the policy leaves the choice."""
    limit = limits(gpu, host, block_size=BLOCK_SIZE, max_model_len=max_model_len)
    return limits_of(policy, limit, seqs, CHUNK if chunked else None)


def alike(arrivals: Iterable[Request], kinds: int = 3, common: int = 3) -> list[Request]:
    """The requests, named: prompts of one of some kinds begin with the same blocks, `common` of them at most."""
    found: list[Request] = []
    for request in arrivals:
        number, blocks = request.request_id, -(-request.prompt_tokens // BLOCK_SIZE)
        ids = tuple(number % kinds * 100 + i if i < common else (number + 1) * 1000 + i for i in range(blocks))
        found.append(request._replace(hash_ids=ids, hash_block_tokens=BLOCK_SIZE))
    return found


def check(policy: Policy) -> None:
    """Serve workloads that contend for memory and for seats, prompts in chunks and whole, with copies beside the
    computation and in its thread; where prefixes can be cached, with such that begin alike."""
    if policy.can_cache_prefixes:
        hit_tokens = 0
        # A sequence that shares only with running ones finds them in a larger pool.
        pools = (False, 16), (True, 16), (False, 60)
        for limit in {tight_limits(policy, chunked=chunked, gpu=gpu, host=36) for chunked, gpu in pools}:
            arrivals = alike(requests(*ALIKE[:8]))
            served = serve(policy, arrivals, replace(limit, enable_prefix_caching=True))
            assert len(check_tokens(served, arrivals)) == len(arrivals)
            hit_tokens += served.counters.prefix_hit_tokens
        assert hit_tokens
    # Of chunks, seats and copies in the computation's thread each pair of choices is met.
    for rows, chunked, seqs, inline in (
        (ROWS[:8], False, 6, False),
        (ROWS[:8], True, 2, False),
        (GROWING[:7], False, 2, True),
        (GROWING[:7], True, 6, True),
    ):
        arrivals = requests(*rows)
        limit = tight_limits(policy, chunked=chunked, host=36, seqs=seqs)
        served = serve(policy, arrivals, limit, inline_copies=inline)
        assert len(check_tokens(served, arrivals)) == len(rows)
    if arrivals := [request for request in calling(policy, requests(*ROWS), speed=20) if request.calls]:
        limit = tight_limits(policy, chunked=True, gpu=28, seqs=3, max_model_len=256)
        served = serve(policy, arrivals, limit)
        assert len(check_tokens(served, arrivals)) == len(arrivals)


# -- one request alone ---------------------------------------------------------------------------------------------


def tokens_alone(request: Request, decoder: Decoder | None = None, guess: Iterable[int] = ()) -> list[int]:
    """The greedy continuation of a request's prompt, by the small decoder unless told, with no other request there; of
    what tools answer, too, where it calls them. A `guess` of it saves time, and changes nothing."""
    prompt = context = tuple(prompt_of(request))
    found, guess = [], tuple(guess)
    for call in request.calls:
        stretch = continuation(context, call.after_tokens - len(found), decoder, guess[len(found) : call.after_tokens])
        found += stretch
        context += (*stretch, *answer_to(prompt, call.returned_tokens))
    return [*found, *continuation(context, request.output_tokens - len(found), decoder, guess[len(found) :])]


@lru_cache(maxsize=10_000)
def continuation(
    prompt: tuple[int, ...], output_tokens: int, decoder: Decoder | None = None, guess: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """The greedy continuation of a prompt, by the small decoder unless told, with no other request there.

    A pass keeps what it confirms of the `guess`, and the token behind that: one is enough where all is right.
    """
    found = guess[: output_tokens - 1]
    while True:
        chosen = _chosen(decoder or small_decoder(), [*prompt, *found])[len(prompt) - 1 :]
        right = next((i for i, token in enumerate(found) if token != chosen[i]), len(found))
        found = tuple(chosen[: right + 1])
        if len(found) == output_tokens:
            return found


@torch.inference_mode()
def _chosen(decoder: Decoder, tokens: list[int]) -> list[int]:
    """The greedy token behind each."""
    blocks = -(-len(tokens) // BLOCK_SIZE)
    pool = KVPool(decoder.config, blocks, BLOCK_SIZE, decoder.config.num_layers, decoder.device, decoder.dtype)
    batch = AttentionBatch.build([len(tokens)], [0], [[pool.ids.allocate(blocks)]], pool.block_tokens, pool.device)
    rows = torch.arange(len(tokens), device=pool.device)
    return greedy(decoder.forward(torch.tensor(tokens, device=pool.device), batch, pool, rows)).tolist()
