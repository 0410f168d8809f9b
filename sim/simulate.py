"""From a scenario to a finished run: traffic, limits, engine, clock, results. What `kvtwin run` calls."""

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field, replace

import simpy

from sim.clock.arrivals import Arrivals
from sim.clock.driver import Instance
from sim.cost.forms import build_cost
from sim.cost.model import CostModel
from sim.cost.profile import Profile, load_profile
from sim.engine.limits import Limits, Role, WindowLimits
from sim.errors import UserError
from sim.interrupts import interrupts_call
from sim.results.metrics import Goodput, TableSink
from sim.runs import EngineParts, Keep, Run, build_engine, build_engines
from sim.scenario import Scenario
from sim.specs.hardware import HardwareSpec, load_hardware
from sim.specs.kv_format import KVGroups, hybrid_groups, kv_dtype
from sim.specs.memory import kv_cache_blocks
from sim.specs.models import ModelSpec, load_model
from sim.systems.base import Asked, Policy
from sim.systems.mixing import HAND_OVER
from sim.traffic import arrivals_of
from traces.errors import TraceError
from traces.request import Request

__all__ = ["Keep", "Run", "Setup", "build_engine", "build_run", "execute", "prepare"]

GIB = 1 << 30
BYTES_PER_S_IN_GBPS = 1e9 / 8
DTYPE_BYTES = {"half": 2.0, "float16": 2.0, "bfloat16": 2.0, "float32": 4.0}


@dataclass(frozen=True)
class Setup:
    """What a scenario resolves to for one policy."""

    scenario: Scenario
    policy: Policy
    label: str
    model: ModelSpec
    hardware: HardwareSpec
    profile: Profile
    limits: Limits
    cost: CostModel
    tp: int
    """GPUs of an engine."""
    role: Role = "both"
    decode: "Setup | None" = None
    """Of the engines that decode, where others prefill."""
    warnings: list[str] = field(default_factory=list)


def prepare(scenario: Scenario, label: str, policy: Policy) -> Setup:
    """Resolve names, size the pools as vLLM does and check the limits against each other."""
    stage = policy.names["stage"]
    if policy.schedules_ahead and (scenario.num_engines > 1 or scenario.max_concurrency or scenario.closed_sessions):
        raise UserError(
            "--async-scheduling: goes with one engine and requests that arrive by themselves; leave it out, or "
            "--replicas, pools, --max-concurrency and --closed-sessions"
        )
    if scenario.prefill_replicas is None:
        if stage == HAND_OVER:
            raise UserError(
                f"--policy {policy.name}: hands sequences over from engines that prefill to others; give "
                "--prefill-replicas, --decode-replicas and --link-gbps"
            )
        return _prepare(scenario, scenario, label, policy, "both")
    if stage != HAND_OVER:
        raise UserError(
            f"--prefill-replicas {scenario.prefill_replicas}: {label} decodes where it prefills (stage={stage}) and "
            "cannot hand over; take distserve, or a policy that takes stage=hand-over"
        )
    prefill, decode = (
        _prepare(scenario, scenario.of_pool(role), label, policy, role) for role in ("prefill", "decode")
    )
    return replace(prefill, decode=decode, warnings=list(dict.fromkeys((*prefill.warnings, *decode.warnings))))


def _prepare(asked_for: Scenario, scenario: Scenario, label: str, policy: Policy, role: Role) -> Setup:
    warnings: list[str] = []
    model = load_model(scenario.model)
    if scenario.dtype != "auto":
        model = model.with_dtype(DTYPE_BYTES[scenario.dtype])
    hardware = load_hardware(scenario.gpu)
    profile = load_profile(scenario.profile, hardware)
    if scenario.kv_cache_dtype != "auto":
        model = model.with_kv_dtype(kv_dtype(scenario.kv_cache_dtype, hardware))
        if profile.form == "linear":
            warnings.append(
                f"--kv-cache-dtype: times of profile {profile.name} are those of the KV it was measured with"
            )
    max_model_len = scenario.max_model_len or model.max_position_embeddings
    if max_model_len > model.max_position_embeddings:
        warnings.append(
            f"--max-model-len {max_model_len} is beyond the {model.max_position_embeddings} positions of {model.name}"
        )
    asked = Asked(
        max_model_len,
        scenario.max_num_seqs,
        scenario.max_num_batched_tokens,
        scenario.enable_chunked_prefill,
        hardware.name,
        hardware.memory_bytes,
    )
    engine = policy.engine_limits(asked)
    warnings += engine.warnings
    Goodput.parse(list(scenario.goodput))
    swap_space = scenario.swap_space
    if swap_space is None:
        # By default a policy takes at most half of the host's memory.
        swap_space = min(policy.default_swap_space_gib, hardware.host_memory_bytes / GIB / scenario.tp / 2)
    groups, window = _window(scenario, model, policy)
    pool = kv_cache_blocks(
        model,
        hardware,
        tensor_parallel_size=scenario.tp,
        gpu_memory_utilization=scenario.gpu_memory_utilization,
        block_size=scenario.block_size,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_seqs=engine.max_num_seqs,
        swap_space_bytes_per_gpu=swap_space * GIB,
        num_gpu_blocks_override=scenario.num_gpu_blocks_override,
        groups=groups,
    )
    host_blocks = scenario.num_cpu_blocks_override
    limits = Limits(
        num_gpu_blocks=pool.num_gpu_blocks - policy.num_null_blocks,
        num_cpu_blocks=pool.num_cpu_blocks if host_blocks is None else host_blocks,
        block_size=scenario.block_size,
        block_bytes=pool.block_bytes,
        max_model_len=max_model_len,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        enable_chunked_prefill=engine.enable_chunked_prefill,
        enable_prefix_caching=_prefix_caching(scenario, model, policy, window, warnings),
        window=window,
    )
    cost = build_cost(model, hardware, profile, scenario.tp, pool.block_bytes, scenario.cost_form)
    return Setup(asked_for, policy, label, model, hardware, profile, limits, cost, scenario.tp, role, warnings=warnings)


def _window(scenario: Scenario, model: ModelSpec, policy: Policy) -> tuple[KVGroups | None, WindowLimits | None]:
    """How blocks are cut by layers with and without a window, and what the engine must know of it.

    Memory has rings where it is paged and whole sequences are evicted; else it keeps everything for every layer.
    """
    kv = model.kv_format(scenario.tp)
    if kv.window is None:
        return None, None
    has_rings = policy.names["memory"] == "paged" and policy.names["eviction"] in ("recompute", "swap")
    if kv.num_full_stored and scenario.disable_hybrid_kv_cache_manager:
        has_rings = False
    if not has_rings:
        return None, WindowLimits(kv.window)
    groups = hybrid_groups(kv)
    blocks = -(-kv.window // scenario.block_size)
    return groups, WindowLimits(kv.window, groups.num_full, groups.num_window, blocks)


def _prefix_caching(
    scenario: Scenario, model: ModelSpec, policy: Policy, window: WindowLimits | None, warnings: list[str]
) -> bool:
    """Whether prefixes are cached; UserError where that was asked for and cannot be."""
    cached = policy.prefix_caching(scenario.enable_prefix_caching)
    if not cached or window is None or window.blocks is None:
        return cached
    remedy = "--disable-hybrid-kv-cache-manager keeps whole prefixes"
    if scenario.enable_prefix_caching:
        raise UserError(f"--enable-prefix-caching: {model.name} has layers that keep a window only; {remedy}")
    warnings.append(f"prefixes are not cached: {model.name} has layers that keep a window only; {remedy}")
    return False


@dataclass(kw_only=True)
class SimulatedRun(Run):
    """A run on the virtual clock."""

    env: simpy.Environment
    serve: Callable[[], Generator[simpy.Event, None, None]]


NOTHING = Keep()


def build_run(
    setup: Setup,
    requests: Iterable[Request],
    *,
    table: TableSink | None = None,
    keep: Keep = NOTHING,
    jump: bool = True,
) -> SimulatedRun:
    """Put engines and what drives them together; `execute` sets it going."""
    env, scenario = simpy.Environment(), setup.scenario
    arrivals = arrivals_of(scenario, requests)
    if scenario.num_engines > 1:
        return _build_cluster(build_engines(setup, table, keep), env, arrivals, jump=jump)
    parts = build_engine(setup, table, keep)
    instance = Instance(
        env,
        parts.engine,
        setup.cost,
        arrivals,
        parts.lanes,
        layers=setup.model.num_layers,
        block_bytes=setup.limits.block_bytes,
        jump=jump,
        observer=parts.observer,
    )
    return SimulatedRun(engines=[parts], instances=[instance], env=env, serve=instance.serve)


def _build_cluster(
    engines: list[EngineParts], env: simpy.Environment, arrivals: Arrivals, *, jump: bool
) -> SimulatedRun:
    # Most runs have one engine, and need none of these.
    from sim.clock.cluster import Cluster  # noqa: PLC0415
    from sim.clock.hand_overs import HandOvers  # noqa: PLC0415
    from sim.clock.member import Member  # noqa: PLC0415
    from sim.topology import DEFAULT_ROUTER, ROUTERS  # noqa: PLC0415
    from sim.topology.routers import FewestWaitingTokens, LeastLoaded  # noqa: PLC0415

    scenario = engines[0].setup.scenario
    members = [
        Member(
            env,
            parts.engine,
            parts.setup.cost,
            parts.lanes,
            layers=parts.setup.model.num_layers,
            block_bytes=parts.setup.limits.block_bytes,
            jump=jump,
            observer=parts.observer,
            ended=arrivals.ended if arrivals.hears_ends else None,
        )
        for parts in engines
    ]
    prefills = scenario.prefill_replicas
    if prefills is None:
        router = ROUTERS[scenario.router or DEFAULT_ROUTER](scenario.seed)
        cluster = Cluster(env, members, arrivals, router)
    else:
        router = ROUTERS[scenario.router](scenario.seed) if scenario.router else FewestWaitingTokens()
        limits, model = engines[0].setup.limits, engines[0].setup.model
        hand_overs = HandOvers(
            members,
            range(prefills, len(members)),
            LeastLoaded(),
            bytes_per_s=(scenario.link_gbps or 0.0) * BYTES_PER_S_IN_GBPS,
            block_bytes=limits.block_size * model.kv_bytes_per_token(1),
            layers=model.num_layers,
        )
        for parts in engines:
            parts.prefilled_by = hand_overs.prefilled_by
        cluster = Cluster(env, members, arrivals, router, range(prefills), hand_overs)
    return SimulatedRun(engines=engines, instances=[*members], env=env, serve=cluster.serve)


def execute(run: SimulatedRun) -> SimulatedRun:
    """Run to the end.

    An interrupt (Ctrl-C, SIGTERM) or a trace that turns out bad half-way ends the run early; what is finished stays
    valid, and `interrupted` or `error` says so. The first interrupt waits for the end of an event, so that no request
    is counted by half.
    """
    serving, stop = run.env.process(run.serve()), run.env.event()
    try:
        with interrupts_call(stop.succeed):
            run.env.run(until=serving | stop)
        run.interrupted = not serving.triggered
    except KeyboardInterrupt:
        run.interrupted = True
    except TraceError as error:
        run.error = str(error)
    return run
