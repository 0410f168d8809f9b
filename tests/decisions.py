"""LayerKV's decisions as plain data, iteration by iteration, and contended workloads that need all of them."""

import random
from dataclasses import dataclass
from typing import Any

import msgspec
from pinned import L20, T4

from kvtwin.testing import Machine, Outcome, limits, linear_machine, requests, simulate, tiny_model
from sim.clock.instance import Observer
from sim.cost.forms import build_cost
from sim.cost.profile import Profile, read_profile
from sim.engine.limits import Limits
from sim.engine.plan import IterationPlan, StepTimes
from sim.engine.scheduler import Scheduler
from sim.options.policies import parse_policy
from sim.specs.hardware import load_hardware
from sim.specs.models import load_model


@dataclass(frozen=True)
class Case:
    """A workload and a deployment, small enough to compare every decision and tight enough to need all of them."""

    name: str
    policy: str
    limits: Limits
    rate: float
    prompt: tuple[int, int]
    output: tuple[int, int]
    layers: int = 4
    cost: str = "linear"
    count: int = 40

    def rows(self) -> list[tuple[float, int, int]]:
        rng = random.Random(f"kvtwin {self.name}")
        rows, now = [], 0.0
        for _ in range(self.count):
            now += 0.0 if rng.random() < 0.3 else rng.expovariate(self.rate)
            rows.append((now, rng.randint(*self.prompt), rng.randint(*self.output)))
        return rows

    def machine(self) -> Machine:
        if self.cost in ("linear", "steep"):
            # Steep: iterations grow so much with the context that Eq. 1 turns on which one it looks at.
            decode = (0.02, 2e-5, 6e-6 if self.cost == "linear" else 2e-5)
            return linear_machine(
                self.limits.block_bytes, layers=self.layers, prefill=(0.005, 2e-4, 2e-8), decode=decode,
                swap_s_per_block=2e-3,
            )  # fmt: skip
        name, _, tp = self.cost.partition("/")
        model = load_model("yi-34b-200k") if tp else tiny_model(self.layers)
        # Constants of their own: what is pinned must not move with the shipped profiles.
        profile = _with_host_in_layers(read_profile(L20 if name == "l20" else T4), model.num_layers)
        hardware, group, block_bytes = load_hardware(name), int(tp or 1), self.limits.block_bytes
        return Machine(model, build_cost(model, hardware, profile, group, block_bytes), profile, hardware, group)


def _with_host_in_layers(profile: Profile, num_layers: int) -> Profile:
    """The decisions were pinned with 5 ms of an engine in every iteration, which prices now leave to its profile."""
    constants = dict(profile.constants)
    layer, step = constants["layer_overhead_s"], constants.pop("step_overhead_s")
    constants["layer_overhead_s"] = msgspec.structs.replace(layer, value=layer.value + step.value / num_layers)
    return msgspec.structs.replace(profile, constants=constants)


def _limits(gpu: int, host: int, *, layers: int = 4, **more: Any) -> Limits:
    return limits(gpu, host, max_model_len=512, block_bytes=16.0 * layers * 1024, **more)


CASES = [
    Case("slack", "layerkv:tpot-slo-ms=30", _limits(60, 400, seqs=16), 8.0, (20, 200), (5, 60)),
    *(
        Case(f"slack-turns-{k}", f"layerkv:tpot-slo-ms={slo}", _limits(80, 900, seqs=24), rate, (20, 200), (30, 160),
             cost="steep")
        for k, slo, rate in ((4, 30, 2.0), (0, 40, 4.0), (3, 50, 4.0), (5, 80, 2.0))
    ),
    Case("slack-keep-late", "layerkv:tpot-slo-ms=26,drop-irrecoverable=false", _limits(50, 400, seqs=16), 6.0,
         (20, 200), (5, 60)),
    Case("slack-classes", "layerkv:tpot-slo-ms=32,predictor=bucket,predictor-accuracy=0.6", _limits(60, 400, seqs=16),
         8.0, (20, 200), (5, 90)),
    Case("slack-unknown", "layerkv:tpot-slo-ms=28,predictor=none", _limits(60, 400, seqs=16), 8.0, (20, 200), (5, 60)),
    Case("forecast", "layerkv:slo-aware=false,horizon-steps=24,threshold=0.1", _limits(48, 400, seqs=16), 12.0,
         (10, 150), (20, 90)),
    Case("forecast-paper", "layerkv:equations=paper,predictor=bucket,horizon-steps=5", _limits(48, 400, seqs=12), 12.0,
         (10, 150), (20, 90)),
    Case("full-host", "layerkv:slo-aware=false", _limits(40, 20, seqs=16), 12.0, (10, 150), (10, 60)),
    Case("growing", "layerkv:slo-aware=false,horizon-steps=1,threshold=0", _limits(24, 60, seqs=12), 20.0,
         (4, 40), (40, 120)),
    Case("stream", "layerkv:decode=stream,tpot-slo-ms=90", _limits(40, 200, seqs=16), 10.0, (10, 150), (10, 60)),
    Case("stream-free", "layerkv:decode=stream,slo-aware=false", _limits(36, 40, seqs=10), 10.0, (10, 150), (10, 60)),
    Case("chunked", "layerkv:tpot-slo-ms=60", _limits(40, 300, seqs=12, tokens=64, chunked=True), 10.0,
         (10, 200), (10, 60)),
    Case("chunked-stream", "layerkv:decode=stream", _limits(36, 100, seqs=12, tokens=48, chunked=True), 10.0,
         (10, 200), (10, 60)),
    Case("odd-blocks", "layerkv:horizon-steps=6", _limits(60, 80, seqs=9, block_size=7), 10.0, (10, 150), (10, 60)),
    Case("slow-link", "layerkv:tpot-slo-ms=50", limits(40, 400, max_model_len=512, seqs=16, block_bytes=8e6), 40.0,
         (20, 300), (10, 60), layers=8, cost="t4"),
    Case("shared-link", "layerkv", limits(60, 900, max_model_len=512, seqs=16, block_bytes=16 * 122880.0), 10.0,
         (20, 400), (10, 60), layers=60, cost="l20/2"),
]  # fmt: skip


def moved(plan: IterationPlan, scheduler: Scheduler) -> list[Any]:
    """What the plan copies: whole blocks before it, copies beside it, layers behind prefills, layers streamed in."""
    unit, unit_bytes = scheduler.memory.unit, scheduler.limits.block_bytes / scheduler.memory.num_groups
    return [
        plan.swapped_out_blocks // unit,
        plan.swapped_in_blocks // unit,
        sorted(
            [m.seq.request.request_id, m.direction.value, len(m.groups), m.num_blocks * unit_bytes] for m in plan.beside
        ),
        sorted([m.seq.request.request_id, len(m.groups)] for m in plan.behind if m.is_reported),
        plan.behind_groups,
        plan.behind_blocks * unit_bytes,
        sum(streamed.num_read for streamed in plan.streamed) * unit_bytes,
    ]


def run(case: Case) -> tuple[Outcome, list[Any]]:
    """Every iteration as [start, prefilled, what decodes (None: as before), what moves]."""
    policy = parse_policy(case.policy, {})[1]
    steps: list[Any] = []

    def watch(scheduler: Scheduler) -> Observer:
        known: list[int] = []

        def observe(plan: IterationPlan, start_s: float, times: StepTimes) -> None:
            nonlocal known
            decoding = [seq.request.request_id for seq in plan.decodes]
            chunks = [[c.seq.request.request_id, c.num_new, c.num_cached] for c in plan.chunks]
            steps.append([start_s, chunks, None if decoding == known else decoding, moved(plan, scheduler)])
            known = decoding

        return observe

    outcome = simulate(policy, requests(*case.rows()), case.limits, machine=case.machine(), jump=False, observe=watch)
    return outcome, steps


def answer(case: Case) -> dict[str, Any]:
    """The iterations, what became of each request, and the counters."""
    outcome, steps = run(case)
    ended = outcome.by_id()
    requests_ = [
        [s.first_scheduled_s, s.first_token_s, s.finish_s, s.num_preemptions, s.status.value]
        for _, s in sorted(ended.items())
    ]
    counters = outcome.scheduler.counters
    return {
        "steps": steps,
        "requests": requests_,
        "preemptions": counters.preemptions,
        "policy": dict(sorted(counters.policy.items())),
    }
