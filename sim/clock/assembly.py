"""`build_cluster`: the engines of a run behind their router, with its pools, links and pipelines."""

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

from simpy.core import Environment

from sim.clock.arrivals import Arrivals
from sim.clock.autoscaled import AutoscaledCluster
from sim.clock.batch_queue import BatchQueue
from sim.clock.cluster import Cluster
from sim.clock.hand_overs import HandOvers
from sim.clock.lockstep import Lockstep, rank_class
from sim.clock.member import Member
from sim.clock.pipeline import Pipeline, VirtualEngine
from sim.clock.queued_ranks import QueuedLockstep, QueuedRank
from sim.cost.model import ACTIVATION_BYTES
from sim.cost.spread_experts import SpreadExpertsCost
from sim.engine.engine import Engine
from sim.engine.sequence import Sequence
from sim.parts.stage.hand_over_options import MixedPoolOptions
from sim.parts.stage.mixed import Mixed
from sim.parts.stage.nixl_options import NixlOptions
from sim.run.prepare import Setup
from sim.run.runs import EngineParts
from sim.systems.base import Policy
from sim.systems.builder import MEMPOOL, STORED
from sim.systems.mooncake.preset import ConductorOptions
from sim.systems.sglang.options import SglangOptions
from sim.topology import make_router
from sim.topology.autoscalers import (
    START_S,
    WEIGHTS_BYTES_PER_S,
    Autoscaler,
    DynamoOptions,
    DynamoPlanner,
    Hpa,
    HpaOptions,
    parse_autoscale,
)
from sim.topology.conditional import Conditional
from sim.topology.mixed_pool import MixedPools
from sim.topology.pipelines import to_pipelines
from sim.topology.ranks import ByLoad, InTurn, ToRanks
from sim.topology.routers import FewestWaitingTokens, LeastLoaded, PromptTrees, Router

BYTES_PER_S_IN_GBPS = 1e9 / 8


def build_cluster(engines: list[EngineParts], env: Environment, arrivals: Arrivals, *, jump: bool) -> Cluster:
    """The engines, put together on the virtual clock."""
    setup = engines[0].setup
    scenario = setup.scenario
    members = _members(engines, env, arrivals, jump=jump)
    if setup.decode is None:
        router = make_router(scenario.router, scenario.seed, scenario.router_weights)
        if ranks := scenario.data_parallel_size:
            return Cluster(env, members, arrivals, _to_ranks(setup, router, ranks))
        return Cluster(env, members, arrivals, to_pipelines(router, setup.num_schedulers))
    options = setup.policy.options(MixedPoolOptions)
    if options.mixed_pool:
        pools = mixed_pools(members, scenario.prefill_replicas or 0, options.max_pending_tokens)
        return Cluster(env, members, arrivals, pools, None, _hand_overs(engines, members, range(len(members)), pools))
    front = range((scenario.prefill_replicas or 0) * setup.num_schedulers)
    decoders = range(len(front), len(members))
    if setup.policy.names["memory"] == STORED:
        from sim.clock.conducted import Prices, conductor_of  # noqa: PLC0415 - one system has it

        rules = setup.policy.options(ConductorOptions)
        layers, s_per_token = setup.model.num_layers, setup.model.kv_bytes_per_token(1) / _link_bytes_per_s(setup)
        room = setup.decode.limits.num_gpu_blocks * setup.decode.limits.block_size
        prices = Prices(
            setup.cost, setup.decode.cost, setup.limits, room, layers=layers, s_per_token=s_per_token, members=members
        )
        decode_router: Router = LeastLoaded()
        router: Router = conductor_of(rules, prices, [members[i] for i in front], [members[i] for i in decoders])
    else:
        router, decode_router = routers_of(setup.policy)
        if scenario.router:
            router = make_router(scenario.router, scenario.seed, scenario.router_weights)
    local = setup.policy.options(NixlOptions).local_prefill_tokens
    if local:
        caching = setup.decode.limits.enable_prefix_caching
        router = Conditional(local, len(front), router, decode_router, caching=caching)
        front = range(len(members))
    hand_overs = _hand_overs(engines, members, decoders, to_pipelines(decode_router, setup.decode.num_schedulers))
    return Cluster(env, members, arrivals, to_pipelines(router, setup.num_schedulers), front, hand_overs)


def _to_ranks(setup: Setup, router: Router, ranks: int) -> Router:
    """vLLM's front end, or SGLang's controller."""
    if setup.policy.names["batching"] != "extend-first":
        return ToRanks(router, ranks)
    method = setup.policy.options(SglangOptions).load_balance_method
    if method == "round_robin":
        return InTurn(router, ranks)
    return ByLoad(router, ranks, by_tokens=method == "total_tokens")


def build_autoscaled(
    engines: list[EngineParts],
    env: Environment,
    arrivals: Arrivals,
    more: Callable[[], EngineParts],
    *,
    jump: bool,
) -> AutoscaledCluster:
    """Engines that come and go; `more` puts a further one together."""
    setup = engines[0].setup
    scenario, cost = setup.scenario, setup.cost
    options = parse_autoscale(scenario.autoscale or "")
    if isinstance(options, HpaOptions):
        autoscaler: Autoscaler = Hpa(options)
    else:
        assert isinstance(options, DynamoOptions)
        # What the rule asks is no part of the run: it notes nothing beyond the constants' range there.
        cost, budget = copy(cost), setup.limits.max_num_batched_tokens
        cost.beyond = {}
        s_per_token = cost.prefill_s(budget) / budget
        autoscaler = DynamoPlanner(
            options, lambda tokens: s_per_token * tokens, lambda n, tokens: cost.decode_steps(n, int(tokens))[0]
        )
    start_s = options.start_s
    if start_s is None:
        start_s = START_S + setup.model.weight_bytes(setup.tp) / WEIGHTS_BYTES_PER_S
    return AutoscaledCluster(
        env,
        _members(engines, env, arrivals, jump=jump),
        arrivals,
        make_router(scenario.router, scenario.seed),
        options=options,
        autoscaler=autoscaler,
        more=lambda: _members([more()], env, arrivals, jump=jump)[0],
        start_s=start_s,
    )


def routers_of(policy: Policy) -> tuple[Router, Router]:
    """What chooses the engine that prefills, and the one that decodes, where the user names no router."""
    if policy.names["memory"] == MEMPOOL:
        return PromptTrees(), PromptTrees()
    return FewestWaitingTokens(), LeastLoaded()


def _hand_overs(engines: list[EngineParts], members: list[Member], decoders: range, router: Router) -> HandOvers:
    """What goes from engine to engine over the links of the scenario, and which of `decoders` gets it."""
    setup = engines[0].setup
    hand_overs = HandOvers(
        members,
        decoders,
        router,
        bytes_per_s=_link_bytes_per_s(setup),
        block_bytes=setup.limits.block_size * setup.model.kv_bytes_per_token(1),
        layers=setup.model.num_layers,
        next_places={place: turns for place in decoders if (turns := turns_of(members[place]))},
        pools=router if isinstance(router, MixedPools) else None,
    )
    for parts in engines:
        parts.prefilled_by = hand_overs.prefilled_by
    return hand_overs


def _link_bytes_per_s(setup: Setup) -> float:
    return (setup.scenario.link_gbps or 0.0) * BYTES_PER_S_IN_GBPS


def mixed_pools(members: list[Member], num_prompt: int, max_pending_tokens: int) -> MixedPools:
    """Splitwise's scheduler over engines, the first `num_prompt` of which are the prompt pool's."""
    schedulers = [member.engine.scheduler for member in members]

    def count(place: int) -> None:
        schedulers[place].counters.policy["turned_mixed"] += 1

    room = [scheduler.limits.num_gpu_blocks * scheduler.limits.block_size for scheduler in schedulers]
    pools = MixedPools(num_prompt, room, max_pending_tokens, count)
    for place, (member, scheduler) in enumerate(zip(members, schedulers, strict=True)):
        assert isinstance(scheduler.stage, Mixed)
        scheduler.stage.keeps = partial(_decodes_at, pools, place)
        member.hears_ends(pools.ended)
    return pools


def _decodes_at(pools: MixedPools, place: int, seq: Sequence) -> bool:
    return pools.targets[seq.request.request_id] == place


def turns_of(member: Member) -> Callable[[float], int] | None:
    """Which engine of a pipeline goes on with a sequence, where its loop waits for what is pulled (DistServe)."""
    if isinstance(member, VirtualEngine) and member.engine.scheduler.stage.blocking:
        return member.pipeline.next_place
    return None


def _members(engines: list[EngineParts], env: Environment, arrivals: Arrivals, *, jump: bool) -> list[Member]:
    """Engines on the clock; of one with stages its virtual engines, which follow one another."""
    members: list[Member] = []
    pipeline: Pipeline | None = None
    lockstep: Lockstep | None = None
    ended = arrivals.ended if arrivals.hears_ends else None
    for place, parts in enumerate(engines):
        setup, args = parts.setup, (env, parts.engine, parts.setup.cost, parts.lanes)
        layers, block_bytes = setup.model.num_layers, setup.limits.block_bytes
        hidden_bytes = setup.model.hidden_bytes_per_token_layer
        if setup.experts is not None and setup.experts.ranks > 1:
            if lockstep is None or len(lockstep.ranks) == setup.experts.ranks:
                assert isinstance(setup.cost, SpreadExpertsCost)
                lockstep = QueuedLockstep(setup.cost, setup.pp) if setup.pp > 1 else Lockstep(setup.cost)
            if setup.pp > 1:
                kind, own = QueuedRank, _pipelined(setup)
            else:
                kind, own = rank_class(ahead=parts.engine.schedules_ahead), {"layers": layers}
            member = kind(
                *args, lockstep=lockstep, place=place, block_bytes=block_bytes, hidden_bytes=hidden_bytes,
                observer=parts.observer, ended=ended, **own,
            )  # fmt: skip
        elif setup.limits.stages > 1:
            member = BatchQueue(
                *args, block_bytes=block_bytes, hidden_bytes=hidden_bytes, observer=parts.observer, ended=ended,
                **_pipelined(setup),
            )  # fmt: skip
        elif setup.pp == 1:
            member = member_class(parts.engine)(
                *args,
                layers=layers,
                block_bytes=block_bytes,
                hidden_bytes=hidden_bytes,
                jump=jump,
                observer=parts.observer,
                ended=ended,
            )
        else:
            if pipeline is None or len(pipeline.engines) == setup.pp:
                pipeline = Pipeline(setup.cost, setup.pp, _hand_over_s_per_token(setup))
            member = VirtualEngine(
                *args, pipeline=pipeline, place=place, layers=layers, block_bytes=block_bytes,
                hidden_bytes=hidden_bytes, observer=parts.observer, ended=ended,
            )  # fmt: skip
        members.append(member)
    return members


def member_class(engine: Engine) -> type[Member]:
    """What drives an engine among several."""
    if not engine.schedules_ahead:
        return Member
    from sim.clock.ahead import AheadMember  # noqa: PLC0415 - one system schedules ahead

    return AheadMember


def _pipelined(setup: Setup) -> dict[str, Any]:
    """What an engine with a queue of batches is told of its stages."""
    return {"stage_layers": setup.stage_layers, "hand_over_s_per_token": _hand_over_s_per_token(setup)}


def _hand_over_s_per_token(setup: Setup) -> float:
    """A token's hidden state from a stage to the next: over NVLink, or PCIe where there is none."""
    bytes_per_s = setup.hardware.nvlink_bytes_per_s or setup.hardware.pcie_bytes_per_s
    return setup.model.hidden_size * ACTIVATION_BYTES / bytes_per_s
