"""Every preset, and mixes that no paper combined, keep to `kvtwin.testing.conformance`; broken parts do not pass it."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from kvtwin.testing import conformance, linear_machine, requests
from kvtwin.testing.engines import limits
from sim.engine.itl import GapCollector
from sim.engine.limits import Deployment, Limits
from sim.engine.plan import IterationPlan
from sim.engine.scheduler import Parts
from sim.engine.sequence import Sequence
from sim.errors import UserError
from sim.kv.paged import PagedMemory
from sim.options.policies import parse_policy
from sim.parts.batching.prefill_first import PrefillFirst
from sim.parts.catalogue import CATALOGUE
from sim.parts.eviction.recompute import Recompute
from sim.parts.eviction.swap import Swap
from sim.parts.order.fcfs import Fcfs
from sim.systems import POLICIES
from sim.systems.base import Policy
from sim.systems.layerkv.layer_blocks import LayerBlocks
from sim.systems.layerkv.preset import LayerKV, LayerKVOptions
from sim.systems.layerkv.promote import Promote
from sim.systems.layerkv.slack import SlackAdmission
from sim.systems.vllm055 import VllmRecompute, VllmSwap

VARIANTS = [
    "layerkv:slo-aware=false",
    "layerkv:tpot-slo-ms=30",
    "layerkv:decode=stream",
    "layerkv:decode=stream,slo-aware=false",
    "layerkv:equations=paper,predictor=bucket",
    "layerkv:predictor=none,drop-irrecoverable=false,tpot-slo-ms=40",
    "layerkv:horizon-steps=40,threshold=0.2",
    "vllm-v1:scheduling-policy=priority,long-prefill-token-threshold=8",
    "vllm-v1:async-scheduling=true",
    "vllm-v1:spec-method=ngram,spec-tokens=3,acceptance-rate=0.8",
    "vllm-v1:spec-method=eagle,spec-tokens=2,acceptance-rate=0.5,scheduling-policy=priority,watermark=0.1",
    "hcache:keeps=turns",
    "ellm:layers-per-block=1,tpot-slo-ms=40",
    "ellm:equations=paper,fused=false",
    "fastserve:quantum-ms=40,starvation-s=0.2,starvation-check=7",
    "vllm-v1:scheduling-policy=priority",
    "vllm-v1:long-prefill-token-threshold=20",
    "vllm-v1:long-prefill-token-threshold=7,long-prefill-token-threshold-adaptive=true,scheduling-policy=priority",
    "vllm-v1:watermark=0.1,scheduler-reserve-full-isl=false",
    "vllm-v1:cpu-chunks=50",
    "vllm-v1:cpu-chunks=5,blocks-per-chunk=2,offload-outputs=true,store-s-per-block=0.1",
    "vllm-v1:cpu-chunks=20,eviction-policy=arc,store-threshold=2,scheduling-policy=priority",
    "radix:schedule-policy=dfs-weight",
    "radix:schedule-policy=fcfs,max-new-tokens=100",
    "radix:lpm-longest=3",
    "sglang:schedule-policy=lpm,enable-hierarchical-cache=true,hicache-write-policy=write_back,max-new-tokens=40",
    "sglang:enable-mixed-chunk=true,schedule-conservativeness=0.1",
    "sglang:disable-overlap-schedule=true,max-new-tokens=100,schedule-conservativeness=0,schedule-policy=dfs-weight",
    "sglang:enable-priority-scheduling=true,schedule-policy=lof,schedule-conservativeness=0",
    "adaptive:ttft-slo-ms=300,tpot-slo-ms=30",
    "adaptive:predictor=none,ttft-slo-ms=1000,tpot-slo-ms=50,patience-s=0.7",
    "adaptive:predictor=oracle,ttft-slo-ms=100,tpot-slo-ms=25",
]
MIXES = [
    "layerkv:order=mlfq",
    "sarathi:stage=tool-calls,tool-kv=swap",
    "vllm-v1:stage=tool-calls",
    "vllm-v1:stage=tool-calls,tool-kv=ttl,tool-ttl-s=0.05",
    "vllm-v1:stage=tool-calls,tool-kv=preserve,async-scheduling=true",
    "layerkv:batching=sarathi",
    "layerkv:batching=fastgen,order=mlfq",
    "layerkv:decode=stream,slo-aware=false,batching=sarathi",
    "layerkv:batching=iteration-level",
    "vllm-swap:memory=reserved",
    "orca:memory=paged,admission=token-wise,tpot-slo-ms=30",
    "orca:memory=paged,eviction=swap,admission=token-wise,tpot-slo-ms=30",
    "orca:eviction=swap",
    "orca:memory=paged,eviction=swap",
    "fastserve:memory=reserved",
    "fastserve:eviction=recompute",
    "fastserve:admission=slack,tpot-slo-ms=30",
    "sarathi:eviction=swap",
    "sarathi:order=mlfq",
    "sarathi:admission=slack,tpot-slo-ms=40",
    "fastgen:eviction=swap",
    "fastertransformer:memory=paged",
    "sarathi:batching=unified",
    "vllm-recompute:order=priority",
    "vllm-v1:order=shortest-prefill",
    "vllm-swap:memory=kept-copies",
    "vllm-recompute:batching=sglang",
    "sarathi:memory=radix,order=lpm",
    "vllm-v1:order=lpm",
    "cachedattention:order=lpm",
    "vllm-v1:order=prefix-groups",
    "batchllm:memory=paged",
    "vllm-v1:memory=radix",
    "vllm-v1:memory=chunks,async-scheduling=true",
    "fastserve:eviction=recompute,memory=chunks",
    "sarathi:memory=tiered",
    "sarathi:memory=retained,swap-out-threshold=0.5",
    "vllm-v1:memory=tiered",
    "vllm-v1:memory=tiered,async-scheduling=true",
    "pensieve:order=lpm",
    "pensieve:order=prefix-groups",
    "batchllm:memory=saved-states,order=fcfs",
    "vllm-v1:stage=nixl",
    "vllm-v1:memory=tiered,disk-space=5e-8,disk-block-us=100,async-scheduling=true",
]


NUM_DRAWN = 40


def drawn_mixes(seed: int) -> list[Policy]:
    """Systems with two to six parts drawn anew that can be assembled, with and without a cache."""
    rng, found = Random(seed), dict[str, Policy]()
    while len(found) < NUM_DRAWN:
        system, kinds = rng.choice([*POLICIES]), rng.sample([*CATALOGUE], rng.choice((2, 3, 4, 6)))
        text = f"{system}:{','.join(f'{kind}={rng.choice([*CATALOGUE[kind]])}' for kind in kinds)}"
        _, policy = parse_policy(text, {})
        try:
            limit = conformance.limits_of(policy, limits(max_model_len=256), 8, 64)
            for caches in {False, policy.can_cache_prefixes}:
                policy.scheduler(
                    replace(limit, enable_prefix_caching=caches), GapCollector(), linear_machine().deployment
                )
        except UserError:
            continue
        found[text] = policy
    return [*found.values()]


def test_what_can_be_assembled_works() -> None:
    """That it is assembled is all that a mix is told: no list of mixes would have been tried."""
    for policy in drawn_mixes(7):
        try:
            conformance.check(policy, examples=3, shrink=False)
        except Exception as error:
            error.add_note(f"{policy.name} of {policy.names}")
            raise


@pytest.mark.parametrize("text", [*POLICIES, *VARIANTS, *MIXES])
def test_the_system_keeps_to_what_every_system_must(text: str) -> None:
    conformance.check(parse_policy(text, {})[1], examples=40 if text in POLICIES else 20)


def test_every_part_is_in_some_system_or_mix() -> None:
    seen = {kind: set() for kind in CATALOGUE}
    for text in (*POLICIES, *VARIANTS, *MIXES):
        for kind, name in parse_policy(text, {})[1].names.items():
            seen[kind].add(name)
    assert seen == {kind: set(parts) for kind, parts in CATALOGUE.items()}


# -- one broken part of each kind ------------------------------------------------------------------------------------


class LastComeFirstServed(Fcfs):
    """Says that no request can overtake a refused head, and lets all do so."""

    def add(self, seq: Sequence) -> None:
        self._queue.appendleft(seq)


class LeakyMemory(PagedMemory):
    """Forgets the blocks that a decode begins."""

    def append(self, seq: Sequence) -> None:
        pass

    def grow(self, batch) -> None:
        pass


class TimelessSlack(SlackAdmission):
    """Says that slack, which changes with time, lasts."""

    def repeats(self, plan: IterationPlan, steps: int) -> int:
        return steps


class LosingSwap(Swap):
    """Swaps out and never brings back."""

    def bring_back(self, plan: IterationPlan, budget: int, num_seqs: int) -> None:
        pass

    def unblock(self) -> bool:
        return False


class HastyStage(Promote):
    """Lets sequences decode without the layers that are on the host."""

    def enter(self, seq: Sequence, *, first: bool = False) -> None:
        self.scheduler.join(seq, first=first)


class EagerBatching(PrefillFirst):
    """Jumps as if no sequence were swapped out."""

    def fill(self, plan: IterationPlan, now_s: float) -> None:
        super().fill(plan, now_s)
        if plan.num_decodes and not plan.chunks and not plan.has_swaps:
            plan.max_steps = self.batch.steps_to_finish()
            plan.cut_on_arrival = False


def slack_without_time(limits: Limits, sound: Parts) -> Parts:
    assert isinstance(sound.admission, SlackAdmission)
    options = LayerKVOptions(tpot_slo_ms=30.0, drop_irrecoverable=True)
    broken = TimelessSlack(limits.num_gpu_blocks, sound.admission.prefill_s, options)
    return replace(sound, admission=broken)


def hasty(limits: Limits, sound: Parts) -> Parts:
    assert isinstance(sound.memory, LayerBlocks)
    return replace(sound, stage=HastyStage(sound.memory), eviction=Recompute())


def broken(system: type[Policy], change: Callable[[Limits, Parts], Parts], **options: float) -> Policy:
    """A preset with other parts than its own."""

    class Broken(system):
        def parts(self, limits: Limits, deployment: Deployment) -> Parts:
            return change(limits, super().parts(limits, deployment))

    return Broken(**options)


BROKEN = {
    "order": broken(VllmRecompute, lambda limits, sound: replace(sound, order=LastComeFirstServed())),
    "memory": broken(VllmRecompute, lambda limits, sound: replace(sound, memory=LeakyMemory(limits))),
    "eviction": broken(VllmSwap, lambda limits, sound: replace(sound, eviction=LosingSwap())),
    "stage": broken(LayerKV, hasty),
    "batching": broken(VllmSwap, lambda limits, sound: replace(sound, batching=EagerBatching())),
}


@pytest.mark.parametrize("part", BROKEN)
def test_a_broken_part_is_caught(part: str) -> None:
    with pytest.raises(Exception):  # noqa: B017 - whichever check finds it first
        conformance.check(BROKEN[part], examples=500, shrink=False)


class Hoarding(PagedMemory):
    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.released: list[Sequence] = []

    def release(self, seq: Sequence) -> None:
        self.released.append(seq)
        super().release(seq)


def test_a_part_that_forgets_nothing_is_caught() -> None:
    with pytest.raises(AssertionError, match="80 of 80 sequences that ended are still held"):
        conformance.check(
            broken(VllmRecompute, lambda limits, sound: replace(sound, memory=Hoarding(limits))), examples=1
        )


def test_a_broken_admission_is_caught() -> None:
    """Random workloads seldom turn on slack that changes within a jump: here iterations grow with the context."""
    admission = broken(LayerKV, slack_without_time, tpot_slo_ms=30.0)
    limit = limits(80, 900, max_model_len=512, block_bytes=16.0 * 4 * 1024, seqs=24)
    machine = linear_machine(limit.block_bytes, prefill=(0.005, 2e-4, 2e-8), decode=(0.02, 2e-5, 2e-5))
    caught = 0
    for seed in range(4):
        dice, now_s, rows = Random(seed), 0.0, []
        for _ in range(40):
            now_s += 0.0 if dice.random() < 0.3 else dice.expovariate(3.0)
            rows.append((now_s, dice.randint(20, 200), dice.randint(30, 160)))
        workload = conformance.Workload(requests(*rows), limit, machine)
        conformance.check_jumps(LayerKV(tpot_slo_ms=30.0), workload)
        try:
            conformance.check_jumps(admission, workload)
        except AssertionError:
            caught += 1
    assert caught
