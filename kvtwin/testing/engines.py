"""One builder of small engines: round constants, tiny pools, and an engine that recounts itself after every step."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import simpy

from kvtwin.testing.questions import ask_twice
from sim.clock.arrivals import Arrivals
from sim.clock.batch_queue import BatchQueue
from sim.clock.cluster import Cluster
from sim.clock.instance import Instance, Observer
from sim.cost.engine_profile import EngineProfile
from sim.cost.forms import LinearCost, build_cost
from sim.cost.host import Host
from sim.cost.model import CostModel
from sim.cost.pricing import Lanes
from sim.cost.profile import Profile, linear_profile, load_profile
from sim.engine.changes import Move
from sim.engine.engine import Engine
from sim.engine.itl import GapCollector
from sim.engine.limits import Deployment, Limits, Role, WindowLimits
from sim.engine.plan import IterationPlan, StepTimes
from sim.engine.predictor import LengthPredictor
from sim.engine.scheduler import Scheduler
from sim.engine.sequence import TRANSITIONS, CallingSequence, Status
from sim.engine.sequence import Sequence as Seq
from sim.engine.windowed_batch import WindowedBatch
from sim.results.goodput import Goodput
from sim.results.metrics import RequestLog
from sim.specs.hardware import HardwareSpec, load_hardware
from sim.specs.models import ModelSpec, load_model
from sim.systems.base import Policy
from sim.topology.routers import LeastLoaded
from sim.version import is_compiled
from traces.request import Request

PREFILL = (0.005, 4e-5, 2e-9)
DECODE = (0.02, 2e-5, 6e-7)
SWAP_S_PER_BLOCK = 3e-4
"""Linear coefficients of the default machine: p0, p1, p2; d0, d1, d2 (s); s per swapped block."""


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
    window: WindowLimits | None = None,
) -> Limits:
    """Small limits; the token budget is vLLM's where none is given."""
    budget = tokens or (512 if chunked else max(max_model_len, 2048))
    return Limits(gpu, host, block_size, block_bytes, max_model_len, seqs, budget, chunked, window=window)


def requests(*rows: tuple[float, int, int]) -> list[Request]:
    """(arrival_s, prompt_tokens, output_tokens) rows as requests."""
    return [Request(i, *row) for i, row in enumerate(rows)]


@dataclass(frozen=True, repr=False)
class Machine:
    """What a small engine runs on."""

    model: ModelSpec
    cost: CostModel
    profile: Profile
    hardware: HardwareSpec
    tensor_parallel_size: int = 1
    role: Role = "both"

    def __repr__(self) -> str:
        constants = ", ".join(f"{constant.value:g}" for constant in self.profile.constants.values())
        return f"<{self.tensor_parallel_size} x {self.hardware.name}, {self.model.num_layers} layers, {constants}>"

    @property
    def deployment(self) -> Deployment:
        """As the policy is told."""
        return Deployment(self.model, self.hardware, self.tensor_parallel_size, self.cost, self.profile, self.role)


def linear_machine(
    block_bytes: float = 1.0,
    *,
    layers: int = 4,
    prefill: Sequence[float] = PREFILL,
    decode: Sequence[float] = DECODE,
    swap_s_per_block: float = SWAP_S_PER_BLOCK,
    gpu: str = "a100-80g",
    host: Host | None = None,
) -> Machine:
    """A tiny model with linear costs, so that times can be worked out by hand; `host` is the engine's own time."""
    model = tiny_model(layers)
    cost = LinearCost(prefill, decode, swap_s_per_block, block_bytes, model=model)
    cost.host = host
    profile = linear_profile("by hand", (*prefill, *decode, swap_s_per_block, 0.0), "tests")
    return Machine(model, cost, profile, load_hardware(gpu))


def roofline_machine(
    gpu: str, block_bytes: float, *, model: ModelSpec | None = None, tp: int = 1, engine: EngineProfile | None = None
) -> Machine:
    """A GPU with its shipped profile; `engine` adds its own time."""
    hardware = load_hardware(gpu)
    model, profile = model or tiny_model(), load_profile(None, hardware)
    cost = build_cost(model, hardware, profile, tp, block_bytes, engine=engine)
    return Machine(model, cost, profile, hardware, tp)


class CheckedEngine(Engine):
    """Recounts every block after every step: pools agree, Eq. 5 balances, statuses follow their table; counts seats.

    Questions are asked twice (`kvtwin.testing.questions`), unless they are compiled.
    """

    __slots__ = ("last", "statuses")

    def __init__(self, scheduler: Scheduler, predictor: LengthPredictor, on_end: Callable[[Seq], None]) -> None:
        super().__init__(scheduler, predictor, on_end)
        self.statuses: dict[Seq, Status] = {}
        self.last = (scheduler.gpu.num_blocks, 0, 0)
        if not is_compiled():
            # Methods of compiled classes cannot be replaced.
            ask_twice(scheduler)

    def add_request(self, request: Request) -> Seq:
        seq = super().add_request(request)
        self.statuses[seq] = seq.status
        return seq

    def offer(self, seq: Seq) -> None:
        super().offer(seq)
        self.statuses[seq] = seq.status

    def schedule(self, now_s: float) -> IterationPlan | None:
        plan = super().schedule(now_s)
        self._check_statuses()
        if plan is not None:
            # A sequence may have several chunks.
            computed = {*plan.decodes, *(chunk.seq for chunk in plan.chunks)}
            assert len(computed) <= self.scheduler.limits.max_num_seqs, plan
        return plan

    def transfer_done(self, move: Move) -> None:
        super().transfer_done(move)
        self._check_statuses()

    def _check_statuses(self) -> None:
        """Every change since the last look is one that `TRANSITIONS` has, or two of them within one step."""
        for seq, before in self.statuses.items():
            now = seq.status
            if now is not before:
                steps = TRANSITIONS[before]
                if not isinstance(seq, CallingSequence):
                    steps -= {Status.CALLING}
                assert now in steps or any(now in TRANSITIONS[between] for between in steps), (seq, before, now)
                self.statuses[seq] = now

    def commit(self, plan: IterationPlan, times: StepTimes) -> None:
        super().commit(plan, times)
        self._check()

    def commit_ahead(self, plan: IterationPlan, times: StepTimes) -> list[Seq]:
        ended = super().commit_ahead(plan, times)
        self._check()
        return ended

    def deliver(self, ended: list[Seq]) -> None:
        super().deliver(ended)
        self._check()

    def _check(self) -> None:
        self._check_statuses()
        check_pools(self.scheduler)
        pool, (free, released, allocated) = self.scheduler.gpu, self.last
        # Avail(t+1) = Avail(t) + Released(t) - Allocated(t)
        assert pool.free == free + (pool.num_released - released) - (pool.num_allocated - allocated)
        self.last = (pool.free, pool.num_released, pool.num_allocated)


def check_pools(scheduler: Scheduler) -> None:
    """AssertionError unless pools and batch say what a count sequence by sequence does."""
    batch = scheduler.batch
    assert batch.context_tokens == sum(batch.num_tokens_of(seq) for seq in batch.members)
    assert batch.blocks_needed(1) == sum(batch.needs_block(seq) for seq in batch.members)
    if isinstance(batch, WindowedBatch):
        read = [min(batch.window, batch.num_tokens_of(seq)) for seq in batch.members]
        assert batch.windowed == (sum(read), sum(tokens < batch.window for tokens in read))
        assert batch.ring_blocks_needed() == sum(
            batch.needs_block(seq) and batch.ring_grows(seq) for seq in batch.members
        )
    for hosted, cohort in batch.cohorts.items():
        members = [seq for seq, found in batch.cohort_of.items() if found is cohort]
        assert cohort.num_hosted == hosted
        assert cohort.size == len(members)
        assert cohort.num_cached_blocks(batch.step) == sum(map(batch.num_blocks_of, members))
        assert cohort.blocks_needed(batch.step) == sum(batch.needs_block(seq) for seq in members)
    gpu, host = scheduler.memory.recount()
    assert scheduler.gpu.num_blocks - scheduler.gpu.free == gpu
    assert scheduler.host.num_blocks - scheduler.host.free == host


def build_engine(
    policy: Policy,
    limit: Limits,
    machine: Machine,
    on_end: Callable[[Seq], None],
    *,
    checked: bool = True,
    gaps: GapCollector | None = None,
    seed: int = 0,
    kind: type[Engine] | None = None,
) -> Engine:
    """A small engine of a policy, which recounts itself if `checked`; or one of another `kind`."""
    kind = kind or (CheckedEngine if checked else Engine)
    scheduler = policy.scheduler(limit, gaps or GapCollector(), machine.deployment)
    return kind(scheduler, policy.length_predictor(seed), on_end)


@dataclass
class Outcome:
    """What a small run left."""

    scheduler: Scheduler
    instance: Instance
    lanes: Lanes
    log: RequestLog
    gaps: GapCollector
    ended: list[Seq] = field(default_factory=list)
    plans: list[tuple[IterationPlan, float, StepTimes]] = field(default_factory=list)
    tokens: dict[int, list[float]] = field(default_factory=dict)

    def by_id(self) -> dict[int, Seq]:
        """The sequences that ended, by their requests' ids."""
        return {seq.request.request_id: seq for seq in self.ended}


def simulate(
    policy: Policy,
    arrivals: Iterable[Request] | Arrivals,
    limit: Limits,
    *,
    machine: Machine | None = None,
    jump: bool = True,
    checked: bool = True,
    goodput: Goodput | None = None,
    record: bool = False,
    seed: int = 0,
    observe: Callable[[Scheduler], Observer] | None = None,
    most_plans: int = 1_000_000,
    kind: type[Engine] | None = None,
    stage_layers: tuple[int, ...] = (),
) -> Outcome:
    """Run a policy on the virtual clock with everything in reach; `kind` is of the engine.

    `stage_layers` are those of its stages, as many each unless they are said.

    `observe` makes, for the scheduler, what hears of every plan instead of `Outcome.plans`. AssertionError after
    `most_plans` plans: then requests preempt one another for ever.
    """
    machine = machine or linear_machine(limit.block_bytes)
    gaps, log, lanes = GapCollector(), RequestLog(goodput=goodput), Lanes(keep_intervals=True)
    ended: list[Seq] = []

    def end(seq: Seq) -> None:
        ended.append(seq)
        log.end(seq)

    engine = build_engine(policy, limit, machine, end, checked=checked, gaps=gaps, seed=seed, kind=kind)
    plans: list[tuple[IterationPlan, float, StepTimes]] = []
    tokens: dict[int, list[float]] = {}
    if record:
        engine.scheduler.record_tokens(tokens)
    observer = observe(engine.scheduler) if observe else lambda *facts: plans.append(facts)
    left = most_plans

    def watch(plan: IterationPlan, start_s: float, times: StepTimes) -> None:
        nonlocal left
        left -= 1
        assert left, f"{most_plans} plans and {len(ended)} requests ended: a request waits for ever"
        observer(plan, start_s, times)

    env = simpy.Environment()
    arrivals = arrivals if isinstance(arrivals, Arrivals) else Arrivals(arrivals)
    facts = {
        "block_bytes": limit.block_bytes,
        "hidden_bytes": machine.model.hidden_bytes_per_token_layer,
        "observer": watch,
    }
    if limit.stages > 1:
        instance: Instance = BatchQueue(
            env,
            engine,
            machine.cost,
            lanes,
            stage_layers=stage_layers or (1,) * limit.stages,
            hand_over_s_per_token=0.0,
            **facts,
        )
        serve = Cluster(env, [instance], arrivals, LeastLoaded()).serve
    else:
        layers = machine.model.num_layers
        instance = Instance(env, engine, machine.cost, arrivals, lanes, layers=layers, jump=jump, **facts)
        serve = instance.serve
    env.run(until=env.process(serve()))
    return Outcome(engine.scheduler, instance, lanes, log, gaps, ended, plans, tokens)
