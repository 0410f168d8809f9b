"""Where requests' time goes, and which limit binds when: sums over iterations that cost no work per request.

An iteration of d seconds is d seconds of every request in it, whatever they are doing there. Requests in the batch and
not in the iteration have waited for others, as have those that were admitted while the one before ran. What it lasts
longer than its computation is the engine's own time first, up to what that took, then waiting for copies. What is left
of a request's latency it spent in no batch.
"""

from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType

from sim.cost.pricing import Lanes
from sim.engine.plan import IterationPlan, StepTimes
from sim.results.sections import LatencyParts

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler
    from sim.results.metrics import RequestLog

LIMITS = ("memory", "seats", "tokens", "slo", "policy", "copies", "engine", "compute")
"""What binds an iteration. While requests wait, what keeps the next from starting: KV memory (also while a sequence's
KV is away), `max_num_seqs`, `max_num_batched_tokens`, SLO-aware admission, or another rule of the policy. Else what the
iteration waits for: copies, the engine's own processes, computation."""
LIMIT_NAMES = {
    "memory": "KV memory",
    "seats": "no seat left (max-num-seqs)",
    "tokens": "no token budget left (max-num-batched-tokens)",
    "slo": "others' SLOs",
    "policy": "the policy's rules",
}
"""What keeps a request from starting, for people."""
SHARED = LIMITS.index("copies")
"""From here on an iteration's time is shared between limits."""


class TimeUse:
    """Running totals of one engine: request-seconds by what they were spent on, seconds by the limit that bound."""

    def __init__(self, scheduler: "Scheduler", lanes: Lanes) -> None:
        self._scheduler, self._lanes = scheduler, lanes
        self.prefill_s = self.decode_s = self.recompute_s = 0.0
        self.copies_s = self.engine_s = self.passed_s = 0.0
        self.bound_s = [0.0] * len(LIMITS)
        self._compute_s = self._host_s = 0.0
        self._num_preemptions = 0
        self.limit: str | None = None
        """What keeps a request from starting since the last iteration; None where none waits."""

    def observe(self, plan: IterationPlan, start_s: float, times: StepTimes) -> None:
        """`plan` was carried out, and is yet to be committed."""
        scheduler, lanes = self._scheduler, self._lanes
        seconds = times.end_s - start_s
        compute_s, host_s = lanes.compute.busy_s - self._compute_s, lanes.host.busy_s - self._host_s
        self._compute_s, self._host_s = lanes.compute.busy_s, lanes.host.busy_s
        computing_s = min(compute_s, seconds)
        engine_s = min(host_s, seconds - computing_s)
        copies_s = seconds - computing_s - engine_s
        num_again = continued = 0
        # A prompt may be computed in several pieces at once.
        prefilled = {chunk.seq for chunk in plan.chunks}
        partials = scheduler.batching.partials
        ahead = scheduler.batching.schedules_ahead
        for seq in prefilled:
            num_again += seq.num_preemptions > 0
            continued += seq in partials
            if ahead and not seq.num_preemptions and seq not in partials:
                # Admitted while the iteration before ran.
                self.passed_s += start_s - seq.first_scheduled_s
        num_chunks = len(prefilled)
        self.decode_s += plan.num_decodes * computing_s
        self.recompute_s += num_again * computing_s
        self.prefill_s += (num_chunks - num_again) * computing_s
        self.engine_s += (plan.num_decodes + num_chunks) * engine_s
        self.copies_s += (plan.num_decodes + num_chunks) * copies_s
        passed = len(scheduler.batch) - plan.num_decodes + len(partials) - continued
        self.passed_s += passed * seconds
        self.limit = limit = self._limit(plan)
        if limit is not None:
            self.bound_s[LIMITS.index(limit)] += seconds
            return
        for i, share_s in enumerate((copies_s, engine_s, computing_s), start=SHARED):
            self.bound_s[i] += share_s

    def _limit(self, plan: IterationPlan) -> str | None:
        """What keeps a request from starting; None where none waits."""
        scheduler, limits = self._scheduler, self._scheduler.limits
        preemptions, self._num_preemptions = self._num_preemptions, scheduler.counters.preemptions
        parked = scheduler.stage.waits_for
        away = scheduler.eviction.num_out or parked == "memory"
        if not scheduler.order.waiting:
            return "memory" if away else "seats" if parked == "seat" else None
        if scheduler.num_running - scheduler.stage.num_calling >= limits.max_num_seqs:
            return "seats"
        head, room = scheduler.order.head(), limits.max_num_batched_tokens - plan.prefill_tokens
        if scheduler.batching.splits_prompts:
            drafted = sum((plan.drafts or {}).values())
            if plan.num_decodes + plan.num_single_chunks + drafted >= room:
                return "tokens"
        elif plan.chunks and head.num_tokens > room:
            return "tokens"
        if scheduler.admission.refused_for_slo:
            return "slo"
        if away or preemptions < scheduler.counters.preemptions:
            return "memory"
        return "policy" if scheduler.memory.fits(head, scheduler.admission.keep_free) else "memory"


def latency_parts(used: list[TimeUse], log: "RequestLog", *, split: bool) -> LatencyParts | UnsetType:
    """The parts of the mean latency of requests that have all completed or never run; else they would not add up.

    `split` says whether the lanes tell waiting within an iteration from computing.
    """
    if not log.completed or log.num_broken_off:
        return UNSET
    sums = [sum(getattr(one, name) for one in used) for name in ("prefill_s", "decode_s", "recompute_s", "passed_s")]
    copies_s, engine_s = (sum(getattr(one, name) for one in used) for name in ("copies_s", "engine_s"))
    total_s, queue_s, tool_s = sum(log.e2el_s), sum(log.queue_s), log.tool_s
    away_s = total_s - queue_s - copies_s - engine_s - tool_s - sum(sums)
    prefill_s, decode_s, recompute_s, passed_s = (s / log.completed for s in sums)
    return LatencyParts(
        queue_s=queue_s / log.completed,
        prefill_s=prefill_s,
        decode_s=decode_s,
        recompute_s=recompute_s,
        copies_s=copies_s / log.completed if split else None,
        engine_s=engine_s / log.completed if split else None,
        passed_s=passed_s,
        preempted_s=away_s / log.completed,
        tool_s=tool_s / log.completed if tool_s else UNSET,
    )
