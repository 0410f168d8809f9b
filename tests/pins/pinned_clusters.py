"""What small crowded clusters do: pools that prefill and decode, replicas behind routers, stages of pipelines.

The workloads are those of `pinned_engines`. Each run is a question: every plan, every request's times and where it
ended, every lane's intervals and every counter.
"""

import random
from dataclasses import replace

import msgspec
from clusters import ClusterOutcome, simulate_pools, simulate_replicas
from pinned import Answers, Table
from pinned_engines import machine_of, requests_of, teller

from kvtwin.testing import Machine, limits
from kvtwin.testing.conformance import limits_of
from sim.clock.closed_loop import ClosedLoop
from sim.clock.instance import Observer
from sim.engine.limits import Limits
from sim.options.policies import parse_policy
from sim.run.prepare import PIPELINED_BATCHINGS
from sim.systems.base import Policy
from sim.topology import ROUTERS
from traces.request import Request

RUNS = 8
"""Of each kind of cluster."""
V1 = "vllm-v1:stage=hand-over"
POOLS = (
    "distserve", "distserve:blocking-pull=false", "distserve:waiting-share=0.2", "distserve:layer-wise=true",
    "distserve:eviction=recompute", "vllm-recompute:stage=hand-over", "sarathi:stage=hand-over,eviction=swap",
    "splitwise", "splitwise:layer-wise=false", "splitwise:mixed-pool=true,max-pending-tokens=60",
    "memserve:caching=prefill", "memserve:caching=both", "memserve:caching=return",
    "mooncake", "mooncake:blocking-pull=true,balancing-threshold=1.1",
    "mooncake:rejection=early,ttft-slo-ms=60,tbt-slo-ms=24",
    "mooncake:rejection=predicted,predicted-decode-s=0.4,ttft-slo-ms=100,tbt-slo-ms=24",
    V1, f"{V1},async-scheduling=true", f"{V1},async-scheduling=true,blocking-pull=true",
    f"{V1},async-scheduling=true,layer-wise=true", f"{V1},memory=stored,async-scheduling=true",
    "vllm-v1:stage=nixl,async-scheduling=true", "vllm-v1:stage=nixl,local-prefill-tokens=40",
)  # fmt: skip
"""Engines that prefill and engines that decode."""
REPLICAS = (
    "vllm-recompute", "vllm-swap", "sarathi", "layerkv", "vllm-v1:async-scheduling=true", "radix", "adaptive",
)  # fmt: skip
"""Behind each router, with a pipeline's stages in some runs."""
COPYING = (
    "vllm-v1:async-scheduling=true,cpu-chunks=20,offload-outputs=true,store-s-per-block=0.01 least-loaded",
    "vllm-v1:cpu-chunks=9,store-s-per-block=0.02,load-s-per-block=0.005 round-robin", "cachedattention least-loaded",
)  # fmt: skip
"""Replicas whose computations wait for copies."""


def names() -> list[str]:
    """Kinds of clusters: a system's pools, or replicas of one behind a router."""
    return [*POOLS, *(f"{policy} {router}" for policy in REPLICAS for router in ROUTERS), *COPYING]


def with_ids(request: Request, named: int) -> Request:
    """Those that stand alone share nothing."""
    if request.hash_ids:
        return request
    ids = tuple(10**6 * (request.request_id + 1) + i for i in range(-(-request.prompt_tokens // named)))
    return request._replace(hash_ids=ids, hash_block_tokens=named)


def crowd(rng: random.Random, policy: Policy, place: int) -> tuple[list[Request], Limits, Machine]:
    """Requests, the limits of each engine, and what it runs on."""
    block, length = (1 if policy.name == "radix" else rng.choice((4, 16))), rng.choice((64, 256))
    limit = limits(
        length // block * rng.randint(10, 30) // 16, rng.choice((0, length // 8, 1000)) * 16 // block,
        block_size=block, max_model_len=length, block_bytes=65536.0 * block,
    )  # fmt: skip
    seqs = rng.choice((2, 6, 256))
    limit = limits_of(policy, limit, seqs, rng.choice((None, max(seqs, 16), max(seqs, 64))))
    named = 16 if block == 1 else block
    arrivals = [with_ids(request, named) for request in requests_of(rng, length, named)]
    cached = policy.can_cache_prefixes and (place % 2 or policy.name in ("memserve", "mooncake", "radix"))
    return arrivals, replace(limit, enable_prefix_caching=bool(cached)), machine_of(rng, policy, limit.block_bytes)


def looped(arrivals: list[Request], place: int) -> ClosedLoop:
    """Clients that wait for one another; in two runs of ten turns for the answers before."""
    if place % 6 != 5 and place != 8:
        return ClosedLoop(arrivals, max_concurrency=5)
    named = [it if it.session_id else it._replace(session_id=f"alone {it.request_id}") for it in arrivals]
    return ClosedLoop(named, None if place == 5 else 3, by_session=True, front_end_s=1 / 128)


def has_stages(policy: Policy) -> bool:
    """Whether its engines may be pipelines."""
    names = policy.names
    plain = names["memory"] in ("paged", "reserved") and names["eviction"] in ("recompute", "swap")
    return plain and names["batching"] in PIPELINED_BATCHINGS


def run(name: str, place: int, observer: Observer) -> ClusterOutcome:
    """The `place`-th of a kind; in every third run clients wait for one another, in two of them for their answers."""
    text, _, router = name.partition(" ")
    policy, rng = parse_policy(text, {})[1], random.Random(f"clusters {place}")
    arrivals, limit, machine = crowd(rng, policy, place)
    source = looped(arrivals, place) if place % 3 == 2 else arrivals
    stages = rng.choice((1, 1, 2)), rng.choice((1, 2))
    if not has_stages(policy) or "mixed-pool" in text:
        stages = 1, 1
    if router:
        policies = [policy] * rng.choice((2, 3))
        found = ROUTERS[router](place)
        return simulate_replicas(
            policies, found, source, limit, machine=machine, checked=False, stages=stages[0], observer=observer
        )
    return simulate_pools(
        policy, source, limit, prefill=rng.choice((1, 2)), decode=rng.choice((1, 2, 3)),
        bytes_per_s=rng.choice((1e6, 2e7, 1e9)), machine=machine, checked=False, stages=stages,
        observer=observer,
    )  # fmt: skip


def answer(name: str, place: int) -> list[str]:
    """Of a run."""
    told, plans = teller(), list[str]()
    outcome = run(name, place, lambda plan, start_s, times: plans.append(repr(told((start_s, times, plan)))))
    for member in outcome.members:
        assert member.num_in_flight == member.tokens_in_flight == member.num_waiting == 0
    ends = [
        (number, seq.first_scheduled_s, seq.first_token_s, seq.finish_s, seq.num_preemptions, seq.status, seq.error)
        for number, seq in sorted(outcome.by_id().items())
    ]
    engines = [
        line
        for member in outcome.members
        for line in (
            *((lane.name, lane.busy_s, lane.intervals) for lane in lanes_of(member)),
            (member.iterations, msgspec.structs.asdict(member.engine.scheduler.counters)),
        )
    ]
    return [*plans, *(repr(told(line)) for line in (*ends, sorted(outcome.places().items()), *engines))]


def lanes_of(member):
    lanes = member.lanes
    return lanes.compute, lanes.h2d, lanes.d2h, *(lanes.links[name] for name in sorted(lanes.links))


def ask(name: str) -> Answers:
    """Run by run."""
    return {str(place): answer(name, place) for place in range(RUNS)}


TABLES = {"clusters": Table(names(), ask)}
