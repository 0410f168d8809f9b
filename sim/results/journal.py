"""What an engine did and why, iteration by iteration, and what became of each request: for timelines."""

from collections import defaultdict
from typing import NamedTuple

from sim.engine.plan import IterationPlan, Origin, StepTimes
from sim.engine.scheduler import Scheduler
from sim.engine.sequence import Sequence, Status
from sim.results.time_use import TimeUse

AWAY = {Status.WAITING: "preempted", Status.SWAPPED: "swapped out", Status.PARKED: "parked", Status.CALLING: "tool"}
"""What a request is called that has been scheduled and is in no batch, by its status."""
DECODE, PREFILL, RECOMPUTE = "decode", "prefill", "recompute"


class Step(NamedTuple):
    """One iteration, or a jump of like ones."""

    start_s: float
    end_s: float
    iterations: int
    kind: str
    num_decodes: int
    context_tokens: int
    """Contexts of the sequences that decode, in all, at the first iteration."""
    prefill_tokens: int
    num_prefills: int
    admitted: tuple[int, ...]
    """Request ids of those admitted, or admitted again."""
    num_waiting: int
    """Requests that wait on after it was decided."""
    limit: str | None
    """What keeps the next of them from starting (`LIMITS`)."""
    reason: str
    """What admission hung on, as its part tells."""
    free_blocks: float
    """Whole KV blocks free on the GPU."""


class Journal:
    """Keeps steps, and the phases of each request as (begin in s, name)."""

    def __init__(self, scheduler: Scheduler, time_use: TimeUse) -> None:
        self._scheduler, self._time_use = scheduler, time_use
        self.steps: list[Step] = []
        self.phases: dict[int, list[tuple[float, str]]] = defaultdict(list)
        self._inside: dict[Sequence, str] = {}
        self._away: dict[Sequence, str] = {}
        self._end_s = 0.0

    def observe(self, plan: IterationPlan, start_s: float, times: StepTimes) -> None:
        """`plan` was carried out, and is yet to be committed; the time use has seen it."""
        scheduler = self._scheduler
        admitted = tuple(chunk.seq.request.request_id for chunk in plan.chunks if chunk.origin is not Origin.CONTINUED)
        self.steps.append(
            Step(
                start_s, times.end_s, times.iterations, plan.kind, plan.num_decodes, plan.decode_context_tokens,
                plan.prefill_tokens, len(plan.chunks), admitted, scheduler.num_waiting, self._time_use.limit,
                scheduler.admission.reason, scheduler.gpu.free / scheduler.memory.unit,
            )
        )  # fmt: skip
        self._follow(plan, start_s)
        self._end_s = times.end_s

    def _follow(self, plan: IterationPlan, start_s: float) -> None:
        """Note which phase each sequence is in from here on."""
        scheduler = self._scheduler
        now: dict[Sequence, str] = dict.fromkeys(scheduler.batch.members, DECODE)
        now.update((seq, self._inside.get(seq, PREFILL)) for seq in scheduler.batching.partials)
        for chunk in plan.chunks:
            now[chunk.seq] = RECOMPUTE if chunk.seq.num_preemptions else PREFILL
        for seq, phase in now.items():
            if self._inside.get(seq) != phase:
                self.phases[seq.request.request_id].append((start_s, phase))
        for seq in self._inside.keys() - now.keys():
            if seq.status in AWAY or seq.status is Status.PROMOTING:
                self._away[seq] = ""
        for seq, was in list(self._away.items()):
            if seq.status in (Status.FINISHED, Status.IGNORED, Status.HANDED_OVER):
                del self._away[seq]
            elif (name := AWAY.get(seq.status, was or "coming back")) != was:
                # It left when the iteration before ended, unless this one's decisions took it out.
                begin_s = self._end_s if not was and seq.status is not Status.WAITING else start_s
                self.phases[seq.request.request_id].append((begin_s, name))
                self._away[seq] = name
        self._inside = now
