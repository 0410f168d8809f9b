"""vLLM 0.5.5's own scheduler, decision for decision.

`cases/` holds workloads made to be nasty, what each covers, and its answers (`vllm055_oracle.py`); two more lie in the
folder `../shared/oracle` of some checkouts. Where vLLM aborts for lack of swap space, the decisions until then count.
"""

import csv
import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import simpy

from kvtwin.testing import build_engine, linear_machine
from sim.clock.arrivals import Arrivals
from sim.clock.instance import Instance
from sim.cost.pricing import Lanes
from sim.engine.limits import Limits
from sim.engine.plan import IterationPlan, Origin, StepTimes
from sim.engine.scheduler import Scheduler
from sim.engine.sequence import Sequence, Status
from sim.systems.vllm055 import VllmRecompute, VllmSwap
from traces.request import Request

TOLERANCE_S = 1e-6
CASES = sorted((Path(__file__).parent / "cases").glob("*.json.gz"))
SHARED = Path(__file__).parents[3] / "shared" / "oracle"
SHARED_CASES = ["mixed.recompute", "mixed.swap", "mixed.chunked", "steady_long.recompute", "steady_long.swap"]


@dataclass
class Case:
    """A workload, vLLM's options, and its answers."""

    limits: Limits
    swap: bool
    cost: list[float]
    swap_s_per_block: float
    rows: list[tuple[float, int, int]]
    decisions: list[list[Any]]
    first: list[float | None]
    finish: list[float | None]
    ignored: list[bool]
    preemptions: int
    iterations: int
    aborted_at: float | None = None


def make_limits(args: dict[str, Any], budget: int | None) -> Limits:
    if budget is None:
        budget = 512 if args["chunked"] else max(args["max_model_len"], 2048)
    return Limits(
        args["blocks"], args["cpu_blocks"], args["block_size"], 1.0, args["max_model_len"], args["max_num_seqs"],
        budget, args["chunked"],
    )  # fmt: skip


def read_case(path: Path) -> Case:
    data = json.loads(gzip.decompress(path.read_bytes()))
    args, answers = data["args"], data["requests"]
    return Case(
        limits=make_limits(args, args["max_num_batched_tokens"]),
        swap=args["mode"] == "swap",
        cost=args["cost"],
        swap_s_per_block=args["swap_s_per_block"],
        rows=[tuple(row) for row in data["workload"]],
        decisions=data["decisions"],
        first=answers["first"],
        finish=answers["finish"],
        ignored=[at is not None for at in answers["ignored_at"]],
        preemptions=data["preemptions"],
        iterations=data["iterations"],
        aborted_at=data["aborted_at"],
    )


def read_shared(name: str) -> Case:
    data = json.loads((SHARED / f"{name}.json").read_text())
    args = data["args"]
    with (SHARED / f"{name.split('.')[0]}.csv").open(newline="") as file:
        rows = [(float(r["arrival_s"]), int(r["prompt_tokens"]), int(r["output_tokens"])) for r in csv.DictReader(file)]
    answers = [data["requests"][str(i)] for i in range(len(rows))]
    return Case(
        limits=make_limits(args, args["max_batched"]),
        swap=args["mode"] == "swap",
        cost=[float(word) for word in args["cost"].split(",")],
        swap_s_per_block=args["swap_s_per_block"],
        rows=rows,
        decisions=data["decisions"],
        first=[answer["first"] for answer in answers],
        finish=[None if answer["finish"] == "ignored" else answer["finish"] for answer in answers],
        ignored=[answer["finish"] == "ignored" for answer in answers],
        preemptions=data["preemptions"],
        iterations=data["iterations"],
    )


@dataclass
class Replay:
    ended: dict[int, Sequence]
    decisions: list[tuple[float, list[int], int]]
    scheduler: Scheduler
    iterations: int
    preemptions: list[int]
    """Up to each decision."""


def replay(case: Case, *, jump: bool) -> Replay:
    machine = linear_machine(
        layers=1, prefill=case.cost[:3], decode=case.cost[3:], swap_s_per_block=case.swap_s_per_block
    )
    ended: dict[int, Sequence] = {}
    decisions: list[tuple[float, list[int], int]] = []
    preemptions: list[int] = []

    def observe(plan: IterationPlan, now_s: float, times: StepTimes) -> None:
        chunks = sorted(plan.chunks, key=lambda chunk: chunk.origin is not Origin.ADMITTED)
        order = [chunk.seq for chunk in chunks] + list(plan.decodes)
        decisions.append((now_s, [seq.request.request_id for seq in order], len(chunks)))
        preemptions.append(engine.scheduler.counters.preemptions)

    env = simpy.Environment()
    policy = VllmSwap() if case.swap else VllmRecompute()
    engine = build_engine(policy, case.limits, machine, lambda seq: ended.update({seq.request.request_id: seq}))
    arrivals = Arrivals(Request(i, *row) for i, row in enumerate(case.rows))
    instance = Instance(
        env, engine, machine.cost, arrivals, Lanes(), layers=1, block_bytes=1.0, jump=jump, observer=observe
    )
    env.run(until=env.process(instance.serve()))
    return Replay(ended, decisions, engine.scheduler, instance.iterations, preemptions)


def check(case: Case) -> None:
    stepped = replay(case, jump=False)
    # After vLLM has aborted we go on.
    ours = stepped.decisions if case.aborted_at is None else stepped.decisions[: case.iterations]
    for (clock, ids, prefills), (now_s, our_ids, our_prefills) in zip(case.decisions, ours, strict=True):
        assert now_s == pytest.approx(clock, abs=TOLERANCE_S)
        assert (our_ids, our_prefills) == (ids, prefills), f"at {clock} s"
    if case.aborted_at is not None:
        # The preemption that finds no swap space counts in vLLM.
        assert stepped.preemptions[case.iterations - 1] == case.preemptions - 1
    for run in (stepped, replay(case, jump=True)):
        check_ends(case, run)


def check_ends(case: Case, run: Replay) -> None:
    assert sorted(run.ended) == list(range(len(case.rows)))
    for i, seq in run.ended.items():
        if case.ignored[i]:
            assert seq.status is Status.IGNORED, i
        elif case.finish[i] is not None:
            assert seq.status is Status.FINISHED, i
            assert seq.finish_s == pytest.approx(case.finish[i], abs=TOLERANCE_S), i
        if case.first[i] is not None:
            assert seq.first_token_s == pytest.approx(case.first[i], abs=TOLERANCE_S), i
    if case.aborted_at is None:
        assert run.scheduler.counters.preemptions == case.preemptions
        assert run.iterations == case.iterations
    else:
        reached_s = case.aborted_at + TOLERANCE_S
        finished = {i for i, seq in run.ended.items() if seq.status is Status.FINISHED and seq.finish_s <= reached_s}
        assert finished == {i for i, finish_s in enumerate(case.finish) if finish_s is not None}
        started = {i for i, seq in run.ended.items() if 0.0 < seq.first_token_s <= reached_s}
        assert started == {i for i, first_s in enumerate(case.first) if first_s is not None}
        # vLLM leaks the host blocks of what it ignores at swap-in; there it may run out where we do not.
        assert run.scheduler.counters.swap_space_exhausted > 0 or any(case.ignored)


@pytest.mark.parametrize("path", CASES, ids=[path.name.removesuffix(".json.gz") for path in CASES])
def test_same_decisions_and_times_on_nasty_workloads(path: Path) -> None:
    check(read_case(path))


@pytest.mark.parametrize("name", SHARED_CASES)
def test_same_decisions_and_times_on_the_reference_workloads(name: str) -> None:
    if not SHARED.is_dir():
        pytest.skip(f"no reference answers at {SHARED}")
    check(read_shared(name))


def test_there_are_cases_of_every_kind() -> None:
    cases = [read_case(path) for path in CASES]
    assert {(case.swap, case.limits.enable_chunked_prefill) for case in cases} == {
        (False, False), (False, True), (True, False), (True, True),
    }  # fmt: skip
    assert any(case.aborted_at is not None for case in cases)
    assert sum(case.preemptions for case in cases) > 1000
