"""Small deployments for tests: round constants, tiny pools, and an engine that checks itself after every step."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import simpy

from sim.clock.arrivals import Arrivals
from sim.clock.driver import Instance, Observer
from sim.cost.forms import CostModel, LinearCost
from sim.cost.lanes import SEND_BUFFER_LAYERS
from sim.cost.pricing import Lanes
from sim.engine.engine import Engine
from sim.engine.itl import GapCollector
from sim.engine.plan import IterationPlan, StepTimes
from sim.engine.sequence import Sequence
from sim.policies.base import Deployment, Limits, Policy, Scheduler
from sim.policies.layerkv import LayerKVScheduler
from sim.policies.vllm import VllmScheduler
from sim.results.metrics import Goodput, RequestLog
from sim.specs.hardware import load_hardware
from sim.specs.models import ModelSpec, load_model
from traces.request import Request

PREFILL = (0.005, 4e-5, 2e-9)
DECODE = (0.02, 2e-5, 6e-7)
SWAP_S_PER_BLOCK = 3e-4


def tiny_model(layers: int = 4) -> ModelSpec:
    """A model with few layers; only shapes matter."""
    return msgspec.structs.replace(load_model("llama-2-7b"), name="tiny", num_layers=layers)


def limits(
    gpu: int = 100,
    host: int = 1000,
    *,
    block_size: int = 16,
    max_model_len: int = 4096,
    seqs: int = 256,
    tokens: int | None = None,
    chunked: bool = False,
    block_bytes: float = 1.0,
) -> Limits:
    budget = tokens or (512 if chunked else max(max_model_len, 2048))
    return Limits(gpu, host, block_size, block_bytes, max_model_len, seqs, budget, chunked)


def requests(*rows: tuple[float, int, int]) -> list[Request]:
    """(arrival_s, prompt_tokens, output_tokens) rows as requests."""
    return [Request(i, *row) for i, row in enumerate(rows)]


@dataclass
class Outcome:
    scheduler: Scheduler
    instance: Instance
    lanes: Lanes
    log: RequestLog
    gaps: GapCollector
    ended: list[Sequence] = field(default_factory=list)
    plans: list[tuple[IterationPlan, float, StepTimes]] = field(default_factory=list)
    tokens: dict[int, list[float]] = field(default_factory=dict)

    def by_id(self) -> dict[int, Sequence]:
        return {seq.request.request_id: seq for seq in self.ended}


class CheckedEngine(Engine):
    """Recounts every block after every step; the pools must agree, and Eq. 5 must balance."""

    __slots__ = ("last",)

    def commit(self, plan: IterationPlan, times: StepTimes) -> None:
        super().commit(plan, times)
        check_pools(self.scheduler)
        pool = self.scheduler.gpu
        before = getattr(self, "last", (pool.num_blocks, 0, 0))
        # Avail(t+1) = Avail(t) + Released(t) - Allocated(t)
        assert pool.free == before[0] + (pool.num_released - before[1]) - (pool.num_allocated - before[2])
        self.last = (pool.free, pool.num_released, pool.num_allocated)


def check_pools(scheduler: Scheduler) -> None:
    """Used blocks of both tiers, counted sequence by sequence."""
    assert isinstance(scheduler, VllmScheduler)
    size = scheduler.limits.block_size
    batch = scheduler.batch
    gpu = host = 0
    assert batch.context_tokens == sum(batch.num_tokens_of(seq) for seq in batch.members)
    assert batch.blocks_needed(1) == sum(batch.needs_block(seq) for seq in batch.members)
    if not isinstance(scheduler, LayerKVScheduler):
        gpu = sum(-(-(batch.num_tokens_of(seq) - 1) // size) for seq in batch.members)
        gpu += scheduler.partial.num_blocks if scheduler.partial else 0
        host = sum(seq.num_blocks for seq in scheduler.swapped)
    else:
        layers = scheduler.layers
        for seq in batch.members:
            blocks = -(-(batch.num_tokens_of(seq) - 1) // size)
            assert seq.layers_on_gpu == layers or seq in scheduler.streaming
            gpu += seq.layers_on_gpu * blocks
            host += (layers - seq.layers_on_gpu) * blocks
        for seq in scheduler.parked:
            gpu += seq.layers_on_gpu * seq.num_blocks
            host += (layers - seq.layers_on_gpu) * seq.num_blocks
        for seq in scheduler.promoting:
            gpu += layers * seq.num_blocks
            host += (layers - seq.layers_on_gpu) * seq.num_blocks
        if scheduler.partial is not None:
            seq = scheduler.partial
            missing = layers - seq.layers_on_gpu
            gpu += (seq.layers_on_gpu + min(SEND_BUFFER_LAYERS, missing)) * seq.num_blocks
            host += missing * seq.num_blocks
        gpu += scheduler._releasing
        host += scheduler._host_reserved
    assert scheduler.gpu.num_blocks - scheduler.gpu.free == gpu
    assert scheduler.host.num_blocks - scheduler.host.free == host


def simulate(
    policy: Policy,
    arrivals: Iterable[Request],
    limit: Limits,
    *,
    cost: CostModel | None = None,
    model: ModelSpec | None = None,
    jump: bool = True,
    checked: bool = True,
    goodput: Goodput | None = None,
    record: bool = False,
    seed: int = 0,
    observe: Observer | None = None,
    holder: list[Scheduler] | None = None,
) -> Outcome:
    """Run a policy on the virtual clock with everything in reach."""
    model = model or tiny_model()
    if cost is None:
        kv_bytes = limit.block_bytes / limit.block_size / model.num_layers
        cost = LinearCost(PREFILL, DECODE, SWAP_S_PER_BLOCK, limit.block_bytes, kv_bytes)
    gaps = GapCollector()
    deployment = Deployment(model, load_hardware("a100-80g"), 1, cost)
    scheduler = policy.scheduler(limit, gaps, deployment)
    if holder is not None:
        holder.append(scheduler)
    log = RequestLog(goodput=goodput)
    lanes = Lanes(keep_intervals=True)
    env = simpy.Environment()
    outcome = Outcome(scheduler, Instance.__new__(Instance), lanes, log, gaps)
    if record:
        scheduler.record_tokens(outcome.tokens)

    def end(seq: Sequence) -> None:
        outcome.ended.append(seq)
        log.end(seq)

    kind = CheckedEngine if checked else Engine
    engine = kind(scheduler, policy.length_predictor(seed), end)
    outcome.instance = Instance(
        env, engine, cost, Arrivals(arrivals), lanes, layers=model.num_layers, jump=jump,
        observer=observe or (lambda *facts: outcome.plans.append(facts)),
    )  # fmt: skip
    env.run(until=env.process(outcome.instance.serve()))
    return outcome
