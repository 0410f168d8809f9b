"""Every decision of every system in small crowded engines.

Pools of a few blocks, ties in time, limits that are met exactly: here a boundary that moves by one shows. Each run is
a question: its plans, what became of each request, and every counter.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from math import isfinite

import msgspec
from corners import KINDS, corner
from pinned import L20, Answers, Table
from pinned_runs import VARIANTS
from test_conformance import MIXES
from test_conformance import VARIANTS as MORE

from kvtwin.testing import Machine, linear_machine, tiny_model
from kvtwin.testing.conformance import DECODES, Workload, hosts_of, limits_of
from kvtwin.testing.engines import PREFILL, limits, simulate
from sim.cost.forms import LinearCost, build_cost
from sim.cost.profile import read_profile
from sim.engine.engine import Engine
from sim.engine.limits import StateLimits, WindowLimits
from sim.engine.plan import SLOTS, IterationPlan, PrefillChunk, StepTimes
from sim.engine.scheduler import Scheduler
from sim.engine.sequence import Sequence, Status
from sim.kv.documents import DocumentTier
from sim.kv.offloading import Offloading
from sim.kv.on_disk import DiskTier
from sim.options.policies import parse_policy
from sim.specs.hardware import load_hardware
from sim.specs.kv_format import KVLayers
from sim.specs.models import load_model
from sim.systems import POLICIES
from sim.systems.base import Policy
from traces.request import Request

RUNS, RUNS_OF_PAIRS = 6, 3
"""Of each system, and of each in `PAIRS`."""
RUNS_OF = {"busy": 10, "left": 2, **dict.fromkeys(KINDS, 4)}
"""Of other kinds; `left`: some clients leave."""
WINDOWED = (
    "vllm-recompute", "vllm-swap", "sarathi", "sarathi:eviction=swap", "fastgen", "vllm-v1",
    "vllm-v1:async-scheduling=true", "vllm-v1:scheduling-policy=priority", "vllm-v1:watermark=0.1",
    "vllm-v1:long-prefill-token-threshold=20", "vllm-recompute:batching=sglang",
)  # fmt: skip
"""These also with layers that keep a window."""
DEEP = (
    "ellm:tpot-slo-ms=1000", "ellm:layers-per-block=2,tpot-slo-ms=100",
    "ellm:layers-per-block=8,equations=paper,fused=false",
    "ellm:layers-per-block=1,least-uncached-ratio=0.5,overlapped=false",
    "ellm:layer-order=contiguous,layers-per-block=2,tpot-slo-ms=100",
    "ellm:layer-order=contiguous,layers-per-block=1,least-uncached-ratio=0.5", "layerkv", "hcache", "kvpr",
)  # fmt: skip
"""These with a model of 40 layers: on one of four it seldom pays to leave tokens uncached."""
BUSY = (
    "adaptive:ttft-slo-ms=400,tpot-slo-ms=26,async-scheduling=true",
    "adaptive:predictor=oracle,ttft-slo-ms=1500,tpot-slo-ms=45",
    "adaptive:predictor=none,ttft-slo-ms=800,tpot-slo-ms=32,patience-s=3,async-scheduling=true",
    "layerkv:tpot-slo-ms=30",
    "layerkv:tpot-slo-ms=50,drop-irrecoverable=false,decode=stream",
    "layerkv:slo-aware=false,horizon-steps=24,threshold=0.1",
    "layerkv:decode=stream,slo-aware=false",
    "layerkv:equations=paper,predictor=bucket,horizon-steps=5",
)
"""These also with more requests, for a while, than they can serve in time."""
STATEFUL = (
    "vllm-v1", "vllm-v1:async-scheduling=true", "vllm-v1:scheduling-policy=priority", "vllm-v1:watermark=0.1",
    "vllm-v1:long-prefill-token-threshold=20",
)  # fmt: skip
"""These also with layers that keep a state."""
TIERS = (
    "hcache", "hcache:keeps=turns", "kvpr", "pensieve", "pensieve:swap-out-threshold=0.6", "cachedattention",
    "cachedattention:disk-space=0.003,disk-latency-us=1000,disk-block-us=3000",
    "cachedattention:disk-space=0.001,disk-block-us=20000", "cachedattention:disk-space=0.002,look-ahead=false",
    "vllm-v1:memory=tiered,disk-space=0.002,disk-block-us=1000,async-scheduling=true",
    "vllm-v1:cpu-chunks=40,store-s-per-block=0.05", "vllm-v1:cpu-chunks=9,store-s-per-block=0.02,load-s-per-block=1e-4",
    "vllm-v1:cpu-chunks=20,blocks-per-chunk=2,offload-outputs=true,store-s-per-block=0.05,async-scheduling=true",
    "vllm-v1:cpu-chunks=30,eviction-policy=arc,store-s-per-block=0.1,scheduling-policy=priority",
)  # fmt: skip
"""These also at each of the `corners`: where copies are slow, they meet what computes."""
PAIRS = {
    "layerkv": (
        "order=triage order=lpm order=dfs-weight order=prefix-groups order=priority batching=request-level "
        "admission=memory memory=hosted-layers eviction=recompute"
    ),
    "vllm-swap": "memory=prefix-groups order=dfs-weight order=prefix-groups order=lpm memory=radix",
    "hcache": "order=triage batching=request-level order=mlfq admission=slack",
    "kvpr": (
        "batching=iteration-level order=priority order=mlfq order=triage order=lpm order=dfs-weight "
        "order=prefix-groups batching=request-level batching=sarathi batching=fastgen admission=memory "
        "eviction=recompute"
    ),
    "orca": "order=triage memory=saved-states order=priority order=lpm order=dfs-weight order=prefix-groups",
    "fastserve": "memory=radix memory=prefix-groups admission=watermark",
    "radix": "batching=fastgen order=priority batching=request-level memory=chunks",
    "batchllm": "batching=sarathi batching=request-level batching=fastgen batching=sglang",
    "vllm-v1": "memory=tiered-states order=mlfq order=triage",
    "ellm": "order=prefix-groups batching=request-level memory=retained",
    "pensieve": "order=mlfq",
}
"""Parts beside others with which no system above has them."""


def names() -> list[str]:
    """Presets, their options, and mixes."""
    more = (f"{name}:{options}" for name, variants in VARIANTS.items() for options in variants)
    pairs = (f"{name}:{part}" for name, parts in PAIRS.items() for part in parts.split())
    return [*dict.fromkeys((*POLICIES, *MORE, *MIXES, *more)), *(f"{name} windowed" for name in WINDOWED),
            *(f"{name} deep" for name in DEEP), *(f"{name} busy" for name in BUSY), *pairs,
            *(f"{name} stateful" for name in STATEFUL), *(f"{name} {kind}" for name in TIERS for kind in KINDS),
            *(f"{name} left" for name in dict.fromkeys((*POLICIES, *MORE, *MIXES, *TIERS)))]  # fmt: skip


def runs_of(name: str) -> int:
    """How many are pinned of a system."""
    system, _, part = name.partition(":")
    return RUNS_OF_PAIRS if part in PAIRS.get(system, "").split() else RUNS_OF.get(name.partition(" ")[2], RUNS)


def requests_of(rng: random.Random, length: int, block: int) -> list[Request]:
    """Turns of a few conversations that begin alike, and requests that stand alone; some at the same time."""
    found: list[Request] = []
    now_s, said = 0.0, [0] * 4
    gaps_s = rng.choice(((0.0,), (0.0, 0.0, 0.001, 0.02, 0.1, 0.4), (0.0, 0.01, 0.03)))
    for i in range(rng.choice((16, 30, 45))):
        now_s += rng.choice(gaps_s)
        who, asked, answered = rng.randrange(6), rng.randint(1, length // 4), rng.randint(1, length // 5)
        priority = rng.choice((0, 0, 1))
        if who > 3:
            found.append(Request(i, now_s, asked, answered, priority=priority))
            continue
        prompt = said[who] + asked if said[who] + asked + answered <= length else asked
        said[who] = prompt + answered
        ids = tuple((who + 1) * 1000 + place if place else 7 for place in range(-(-said[who] // block)))
        named = -(-prompt // block)
        talk = f"talk {who}"
        found.append(Request(i, now_s, prompt, answered, talk, ids[:named], block, ids[named:], priority))
    return found


def machine_of(rng: random.Random, policy: Policy, block_bytes: float, layers: int = 4) -> Machine:
    """Mostly linear in all; else a small model on a card."""
    if rng.random() < 0.3 and layers == 4:
        model, hardware, profile = tiny_model(), load_hardware("l20"), read_profile(L20)
        return Machine(model, build_cost(model, hardware, profile, 1, block_bytes), profile, hardware)
    return linear_machine(
        block_bytes, layers=layers, decode=rng.choice(DECODES), host=rng.choice(hosts_of(policy)),
        swap_s_per_block=rng.choice((1e-4, 3e-3, 0.05)),
    )  # fmt: skip


def with_windows(rng: random.Random, work: Workload, policy: Policy) -> Workload:
    """The same where layers keep a window; only vLLM v1 caches their prefixes."""
    limit, tokens, full = work.limits, rng.choice((1, 7, 20, 60)), rng.choice((0, 1, 2))
    groups, blocks = rng.randint(1, 3), -(-tokens // limit.block_size)
    layers = KVLayers(num_layers=full, num_stored=full), KVLayers(num_layers=2, num_stored=2, window=tokens)
    model = msgspec.structs.replace(tiny_model(full + 2), kv_layers=layers if full else layers[1:])
    cost = LinearCost(PREFILL, rng.choice(DECODES), 3e-4, limit.block_bytes, model=model)
    plain = linear_machine(limit.block_bytes)
    limit = replace(
        limit,
        num_gpu_blocks=limit.num_gpu_blocks * (2 * full + groups) // 6 + blocks,
        window=WindowLimits(tokens, full, groups, blocks),
        enable_prefix_caching=limit.enable_prefix_caching and policy.has_hybrid_manager,
    )
    return Workload(work.arrivals, limit, Machine(model, cost, plain.profile, plain.hardware))


def with_states(work: Workload, place: int) -> Workload:
    """Where layers that keep a window would, the same number and perhaps one more keep a state."""
    assert work.limits.window is not None
    full, windowed = work.limits.window.num_full, work.limits.window.num_window
    limit = replace(
        work.limits, window=None, states=StateLimits(max(1, full), windowed + place % 3 // 2, place % 4 < 2)
    )
    return Workload(work.arrivals, limit, work.machine)


class Leaving(Engine):
    """An engine some of whose clients leave before a step, or say which token is the last."""

    __slots__ = ("alive", "dice")

    def add_request(self, request: Request) -> Sequence:
        seq = super().add_request(request)
        if not hasattr(self, "dice"):
            self.alive, self.dice = [], random.Random(request.prompt_tokens)
        self.alive.append(seq)
        return seq

    def schedule(self, now_s: float) -> IterationPlan | None:
        if getattr(self, "alive", ()) and self.dice.random() < 0.2:
            seq = self.dice.choice(self.alive)
            if self.dice.random() < 0.7:
                self.cancel(seq)
            elif self.scheduler.num_generated_of(seq) < seq.output_tokens:
                self.truncate(seq, self.scheduler.num_generated_of(seq) + 1)
            self.alive = [seq for seq in self.alive if seq.status not in (Status.FINISHED, Status.IGNORED)]
        return super().schedule(now_s)


def busy(policy: Policy, place: int) -> Workload:
    """Short requests and long ones, half of them in bursts, and a lull.

    In two runs everything happens at multiples of 10 ms, so that much is due exactly then; in two the contexts are long
    and the card computes tiles of rows, so that prompts may go alone.
    """
    rng = random.Random(f"busy {place}")
    is_tied, is_long = place in (6, 7), place in (8, 9)
    found: list[Request] = []
    now_s, gap_s, times = 0.0, rng.choice((0.06, 0.1, 0.16)), 8 if is_long else 1
    for i in range(130):
        now_s += 12.0 if i == 100 else 0.0 if rng.random() < 0.3 else rng.expovariate(1.0 / gap_s)
        asked = times * (rng.randint(400, 1500) if rng.random() < 0.1 else rng.randint(8, 200))
        answered = rng.randint(150, 500) if rng.random() < 0.2 else rng.randint(1, 80)
        first = rng.choice((7, 8, 0, 0))
        ids = tuple(range(first, first + -(-asked // 16))) if first else ()
        found.append(Request(i, round(now_s, 1) if is_tied else now_s, asked, answered, "", ids, 16 if ids else 0))
    block_bytes, length = 16 * 131072.0, 2048 * times
    blocks, host = times * rng.choice((130, 170, 300)), rng.choice((20, 100, 1000))
    limit = limits(blocks, host, max_model_len=length, block_bytes=block_bytes)
    limit = limits_of(policy, limit, rng.choice((10, 24, 256)), rng.choice((256, 512, 2048)))
    limit = replace(limit, enable_prefix_caching=policy.can_cache_prefixes and place % 2 == 0)
    link_s = rng.choice((3e-4, 3e-3, 0.05))
    if is_long:
        model, hardware = load_model("llama-3.1-8b"), load_hardware("l20")
        profile = read_profile(L20)
        return Workload(found, limit, Machine(model, build_cost(model, hardware, profile, 1, block_bytes), profile,
                                              hardware))  # fmt: skip
    if is_tied:
        return Workload(found, limit, linear_machine(block_bytes, prefill=(0.02, 0.0, 0.0), decode=(0.02, 0.0, 0.0),
                                                     swap_s_per_block=0.01))  # fmt: skip
    return Workload(found, limit, linear_machine(block_bytes, swap_s_per_block=link_s))


def workload(policy: Policy, place: int, kind: str = "") -> Workload:
    """The `place`-th of a kind or plain; the same for all systems but for what their limits refuse."""
    if kind == "busy":
        return busy(policy, place)
    if kind in KINDS:
        return corner(kind, policy, place)
    rng = random.Random(f"schedules {place}")
    block, length = rng.choice((4, 16)), rng.choice((64, 256))
    blocks = length // block * rng.randint(10, 40) // 16
    host = rng.choice((0, length // 32, length // 8, 1000)) * 16 // block
    limit = limits(blocks, host, block_size=block, max_model_len=length, block_bytes=65536.0 * block)
    seqs = rng.choice((1, 3, 8, 256))
    limit = limits_of(policy, limit, seqs, rng.choice((None, max(seqs, 16), max(seqs, 64))))
    arrivals = requests_of(rng, length, block)
    if policy.can_cache_prefixes and place % 2:
        limit = replace(limit, enable_prefix_caching=True)
    work = Workload(arrivals, limit, machine_of(rng, policy, limit.block_bytes, 40 if kind == "deep" else 4))
    if kind in ("windowed", "stateful"):
        work = with_windows(rng, work, policy)
    return with_states(work, place) if kind == "stateful" else work


RARE = ("drafts", "taken")
"""Fields of plans that are told where they say something."""


def teller() -> Callable[[object], object]:
    """Makes plain data of a plan: sequences are their requests' numbers, other objects numbered as they come."""
    known: dict[int, tuple[int, object]] = {}

    def told(value: object) -> object:
        match value:
            case None | int() | str():
                return value
            case tuple() | list():
                return [told(item) for item in value]
            case Sequence():
                return value.request.request_id
            case Enum():
                return value.name
            case float():
                return f"{value:.7g}" if isfinite(value) and abs(value) > 1e-9 else "0" if isfinite(value) else "inf"
            case PrefillChunk():
                return told((value.seq, value.num_new, value.num_cached, value.origin))
            case StepTimes():
                times_s = value.first_end_s, value.second_s, value.slope_s, value.end_s
                return told((value.iterations, *times_s, value.tokens))
            case msgspec.Struct() | IterationPlan():
                fields = SLOTS if isinstance(value, IterationPlan) else value.__struct_fields__
                given = [(field, getattr(value, field)) for field in fields]
                return [told(item) for field, item in given if field not in RARE or item is not None]
            case set() | frozenset():
                return sorted(map(str, map(told, value)))
            case dict():
                return [[told(key), told(item)] for key, item in value.items()]
            case _ if hasattr(value, "__iter__"):
                return [told(item) for item in value]  # pyright: ignore[reportGeneralTypeIssues]
            case _:
                # Kept, so that no other object has its id.
                return f"#{known.setdefault(id(value), (len(known), value))[0]}"

    return told


def answer(policy: Policy, place: int, kind: str = "") -> list[str]:
    """Of a run."""
    work, told, plans = workload(policy, place, kind), teller(), list[str]()

    def watch(scheduler: Scheduler) -> Callable[[IterationPlan, float, StepTimes], None]:
        # What no device has behind the GPU is told to none.
        if place % 2 and not isinstance(scheduler.memory.backing, DiskTier | DocumentTier | Offloading):
            scheduler.memory.tell_blocks()
        return lambda plan, start_s, times: plans.append(repr(told((start_s, times, plan))))

    outcome = simulate(
        policy, work.arrivals, work.limits, machine=work.machine, checked=False, observe=watch, most_plans=20_000,
        jump=kind != "left", kind=Leaving if kind == "left" else None,
    )  # fmt: skip
    ends = [
        (number, seq.first_scheduled_s, seq.first_token_s, seq.finish_s, seq.num_preemptions, seq.status)
        for number, seq in outcome.by_id().items()
    ]
    counters = msgspec.structs.asdict(outcome.scheduler.counters).items()
    return [*plans, *(repr(told(end)) for end in ends), *(f"{name} {told(value)!r}" for name, value in counters)]


def ask(name: str) -> Answers:
    """Run by run."""
    text, _, kind = name.partition(" ")
    policy = parse_policy(text, {})[1]
    return {str(place): answer(policy, place, kind) for place in range(runs_of(name))}


TABLES = {"engines": Table(names(), ask)}
