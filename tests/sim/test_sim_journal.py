"""Phases of requests as an iteration's plan and the scheduler's groups say."""

from types import SimpleNamespace
from typing import Any, cast

from kvtwin.testing.engines import requests
from sim.engine.plan import IterationPlan, Origin, PrefillChunk, StepTimes
from sim.engine.sequence import Sequence, Status
from sim.results.journal import Journal


def run(*steps):
    """The phases of one engine's requests: of each iteration the decodes, prompts that are partly computed, chunks."""
    scheduler = SimpleNamespace(
        batch=SimpleNamespace(), batching=SimpleNamespace(), num_waiting=0, admission=SimpleNamespace(reason=""),
        gpu=SimpleNamespace(free=9), memory=SimpleNamespace(unit=1),
    )  # fmt: skip
    journal = Journal(cast("Any", scheduler), cast("Any", SimpleNamespace(limit=None)))
    for place, (members, partials, chunks) in enumerate(steps):
        scheduler.batch.members, scheduler.batching.partials = dict.fromkeys(members), dict.fromkeys(partials)
        plan = IterationPlan(chunks=[PrefillChunk(seq, 4, 0, Origin.CONTINUED) for seq in chunks])
        journal.observe(plan, float(place), StepTimes(1, place + 0.5, 0.5, 0.0, place + 0.5, 1))
    return dict(journal.phases)


def test_a_prompt_that_waits_an_iteration_for_its_next_chunk_stays_in_its_phase():
    first, second = (Sequence(request) for request in requests((0.0, 30, 9), (0.0, 30, 9)))
    second.num_preemptions = 1
    for seq in (first, second):
        seq.status = Status.RUNNING
    found = run(
        ((), (), (first, second)),
        ((), (first, second), (first,)),
        ((first,), (second,), ()),
        ((first,), (second,), (second,)),
        ((first, second), (), ()),
    )
    assert found == {
        first.request.request_id: [(0.0, "prefill"), (2.0, "decode")],
        second.request.request_id: [(0.0, "recompute"), (4.0, "decode")],
    }
