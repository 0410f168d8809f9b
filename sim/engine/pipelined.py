"""`PipelinedScheduler`: one scheduler of a pipeline, several of whose plans are in flight (vLLM v1's batch queue).

A sequence is in at most one batch whose tokens are not known when the next is scheduled: scheduled ahead, it decodes
every so many steps as there are stages; else once its token has come.
"""

from collections import deque
from typing import TYPE_CHECKING

from sim.engine.limits import Deployment, Limits
from sim.engine.plan import IterationPlan, StepTimes
from sim.engine.scheduler import Parts, Scheduler
from sim.engine.sequence import Sequence

if TYPE_CHECKING:
    from sim.engine.itl import GapCollector


def sampling(plan: IterationPlan) -> set[Sequence]:
    """Sequences that sample in a step: those that decode, and those whose prompts end."""
    ending = (chunk.seq for chunk in plan.chunks if chunk.num_cached + chunk.num_new == chunk.seq.num_tokens)
    return {*plan.decodes, *ending}


class PipelinedScheduler(Scheduler):
    """Keeps of every plan in flight which sequences it computes."""

    __slots__ = ("flights",)

    def __init__(self, parts: Parts, limits: Limits, gaps: "GapCollector", deployment: Deployment) -> None:
        super().__init__(parts, limits, gaps, deployment)
        self.flights: deque[tuple[dict[Sequence, int], set[Sequence]]] = deque()
        """Of each plan in flight, the oldest first: tokens of sequences that it computes, and which of these sample."""

    def commit_ahead(self, plan: IterationPlan, times: StepTimes) -> list[Sequence]:
        tokens = dict.fromkeys(plan.decodes, 1) | {chunk.seq: chunk.num_new for chunk in plan.chunks}
        self.flights.append((tokens, sampling(plan)))
        ended = super().commit_ahead(plan, times)
        self._find_landed()
        return ended

    def deliver(self, ended: list[Sequence]) -> None:
        self.flights.popleft()
        super().deliver(ended)
        self._find_landed()

    def _find_landed(self) -> None:
        self.landed = set(self.batch.members).difference(*(samples for _, samples in self.flights))

    def num_unknown(self, seq: Sequence) -> int:
        # In series all that a batch feeds was known when it was scheduled.
        return super().num_unknown(seq) if self.batching.schedules_ahead else 0

    def tokens_in_flight(self, seq: Sequence) -> int:
        """Tokens of `seq` that plans in flight compute."""
        return sum(tokens.get(seq, 0) for tokens, _ in self.flights)

    def is_flying(self, seq: Sequence) -> bool:
        """Whether a plan in flight computes tokens of `seq`."""
        return any(seq in tokens for tokens, _ in self.flights)
