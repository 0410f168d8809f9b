"""What a run did, iteration by iteration, as it was decided; and a machine on which that is easy to work out."""

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from kvtwin.testing import Machine, Outcome, linear_machine, requests, simulate
from kvtwin.testing.conformance import Workload
from sim.engine.limits import Limits
from sim.engine.plan import IterationPlan, StepTimes
from sim.engine.scheduler import Scheduler
from sim.systems.base import Policy
from traces.request import Request

Rows = Iterable[tuple[float, int, int]]


def machine(swap_s_per_block: float = 0.001) -> Machine:
    """Every iteration takes 20 ms and 1 ms for each token that it computes; a block takes 1 ms over PCIe."""
    affine = (0.02, 0.001, 0.0)
    return linear_machine(prefill=affine, decode=affine, swap_s_per_block=swap_s_per_block)


class Step(NamedTuple):
    """One plan: what takes a token, what computes how many prompt tokens (by request id), and what stood around it."""

    start_s: float
    end_s: float
    decodes: tuple[int, ...]
    chunks: dict[int, int]
    num_members: int
    """Sequences in the decode batch."""
    num_waiting: int
    """Requests that wait after the plan was made."""
    used_blocks: int

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(self.chunks.values())


def steps_of(policy: Policy, arrivals: list[Request], limit: Limits, on: Machine) -> tuple[list[Step], Outcome]:
    """A run, one iteration at a time."""
    steps: list[Step] = []

    def observe(scheduler: Scheduler):
        def note(plan: IterationPlan, start_s: float, times: StepTimes) -> None:
            steps.append(
                Step(
                    start_s,
                    times.end_s,
                    tuple(seq.request.request_id for seq in plan.decodes),
                    {chunk.seq.request.request_id: chunk.num_new for chunk in plan.chunks},
                    len(scheduler.batch.members),
                    scheduler.num_waiting,
                    scheduler.gpu.num_blocks - scheduler.gpu.free,
                )
            )

        return note

    outcome = simulate(policy, arrivals, limit, machine=on, jump=False, observe=observe, record=True)
    return steps, outcome


def by_hand(policy: Policy, rows: Rows, limit: Limits) -> tuple[list[Step], Outcome]:
    """A run of a worked example."""
    return steps_of(policy, requests(*rows), limit, machine())


def over(policy: Policy, workload: Workload) -> tuple[list[Step], Outcome]:
    """A run of a random workload."""
    return steps_of(policy, workload.arrivals, workload.limits, workload.machine)


def work(steps: Iterable[Step]) -> list[tuple[tuple[int, ...], dict[int, int]]]:
    """What decodes and what computes how much of its prompt, iteration by iteration."""
    return [(step.decodes, step.chunks) for step in steps]


def token_times(outcome: Outcome) -> dict[str, list[float]]:
    """First token and end of every request, by id."""
    ended = sorted(outcome.by_id().items())
    return {"first": [seq.first_token_s for _, seq in ended], "finish": [seq.finish_s for _, seq in ended]}


def longest_gap_s(outcome: Outcome, request_id: int) -> float:
    """The longest time between two tokens of a request."""
    times = outcome.tokens[request_id]
    return max(after - before for before, after in pairwise(times))
