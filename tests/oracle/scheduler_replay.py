"""A workload of the vLLM v1 oracle under any preset in the simulator, for what schedules for vLLM to compare with.

Prices are a GPU's, workloads are nasty and pools tiny. Nothing here needs vLLM.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtwin.testing import engines
from kvtwin.vllm.settings import EngineFacts, make_setup
from sim.engine.plan import IterationPlan, StepTimes
from sim.engine.scheduler import Scheduler
from sim.engine.sequence import FINISHED
from traces.request import Request

BLOCK = 16
FIRST_OWN_ID = 1 << 40
PLAIN = {
    "policy": "fcfs",
    "long_prefill": 0,
    "long_prefill_adaptive": False,
    "watermark": 0.0,
    "no_reserve_full_isl": False,
}
"""An oracle's options that `vllm-v1` alone has, as vLLM has them by default."""


@dataclass
class Served:
    """What came of a workload."""

    steps: list[tuple[float, list[tuple[int, int]], int]] = field(default_factory=list)
    """Of each iteration: its end, s; tokens by request; free blocks after it was scheduled."""
    host_free_s: list[float] = field(default_factory=list)
    """When the host was done with each, where vLLM's engine core schedules."""
    preempted: list[int] = field(default_factory=list)
    finish_s: dict[int, float] = field(default_factory=dict)

    def difference(self, other: "Served", mine: str, theirs: str) -> str:
        """The first one, in no order within an iteration; empty where there is none."""
        for number, (one, two) in enumerate(zip(self.steps, other.steps, strict=False)):
            if (one[0], sorted(one[1]), one[2]) != (two[0], sorted(two[1]), two[2]):
                return f"iteration {number}: {one} {mine}, {two} {theirs}"
        for name in ("finish_s", "preempted", "steps"):
            one, two = getattr(self, name), getattr(other, name)
            if name == "preempted":
                one, two = sorted(one), sorted(two)
            if name == "steps":
                one, two = len(one), len(two)
            if one != two:
                return f"{name}: {one} {mine}, {two} {theirs}"
        return ""


def facts_of(args: Mapping[str, Any]) -> EngineFacts:
    """Of an oracle's options."""
    return EngineFacts(
        model="",
        tensor_parallel_size=1,
        num_gpu_blocks=args["blocks"] - 1,
        block_size=BLOCK,
        max_model_len=args["max_model_len"],
        max_num_seqs=args["max_num_seqs"],
        max_num_batched_tokens=args["max_batched"],
        enable_chunked_prefill=True,
        enable_prefix_caching=not args["no_prefix_caching"],
        async_scheduling=args["async_scheduling"],
        options={
            "scheduling_policy": args["policy"],
            "long_prefill_token_threshold": args["long_prefill"],
            "long_prefill_token_threshold_adaptive": args["long_prefill_adaptive"],
            "watermark": args["watermark"],
            "scheduler_reserve_full_isl": not args["no_reserve_full_isl"],
        },
    )


def requests_of(rows: Iterable[Any], facts: EngineFacts) -> list[Request]:
    """An oracle's rows that vLLM's front end takes. All blocks of prompts have ids, as in vLLM all have hashes.

    None asks for more than its context holds, as only vLLM v1 ends it there.
    """
    taken = [row for row in rows if row[1] < facts.max_model_len]
    found = []
    for number, (arrival_s, prompt, output, ids, output_ids, priority, *_) in enumerate(taken):
        own = tuple(FIRST_OWN_ID + (number << 16) + i for i in range(-(-prompt // BLOCK)))
        whole = tuple(ids) + own[len(ids) :]
        after = tuple(output_ids) if len(ids) == len(whole) else ()
        most = min(output, facts.max_model_len - prompt)
        found.append(Request(number, arrival_s, prompt, most, "", whole, BLOCK, after, priority))
    return found


def tokens_of(request: Request) -> list[int]:
    """Token ids of a request, prompt and outputs."""
    ids = [*request.hash_ids, *request.output_hash_ids]
    length = request.prompt_tokens + request.output_tokens
    # Other than those of blocks that `requests_of` names.
    ids += [2 * FIRST_OWN_ID + (request.request_id << 16) + i for i in range(len(ids), -(-length // BLOCK))]
    return [ident * BLOCK + j for ident in ids for j in range(BLOCK)][:length]


def simulated(requests: list[Request], facts: EngineFacts, told: Mapping[str, Any]) -> Served:
    """The workload in the simulator, iteration by iteration, with the setup that vLLM's scheduler has."""
    setup, found = make_setup(told, facts, None), Served()
    machine = engines.Machine(setup.model, setup.cost, setup.profile, setup.hardware, setup.tp)

    def observe(scheduler: Scheduler) -> Callable[[IterationPlan, float, StepTimes], None]:
        def hear(plan: IterationPlan, start_s: float, times: StepTimes) -> None:
            tokens = dict.fromkeys(plan.decodes, 1) | {chunk.seq: chunk.num_new for chunk in plan.chunks}
            entries = [(seq.request.request_id, count) for seq, count in tokens.items()]
            found.steps.append((times.end_s, entries, scheduler.gpu.free))

        return hear

    outcome = engines.simulate(
        setup.policy, requests, setup.limits, machine=machine, jump=False, checked=False, observe=observe
    )
    for seq in outcome.ended:
        assert seq.status is FINISHED, seq.error
        found.finish_s[seq.request.request_id] = seq.finish_s
        found.preempted += [seq.request.request_id] * seq.num_preemptions
    return found
