"""Checks of `kvtwin.testing` fail where one thing is wrong and let rounding pass; draws are what engines may meet."""

from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import conversations
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtwin.testing import CheckedEngine, build_engine, conformance, limits, linear_machine, requests, simulate
from sim.engine.engine import Engine
from sim.engine.limits import Limits
from sim.engine.sequence import Status
from sim.options.policies import parse_policy
from sim.systems.vllm055 import VllmRecompute
from traces.hash_ids import hashes_fit, output_hashes_fit
from traces.request import Request

Change = Callable[[Any], object]


class ASequence(SimpleNamespace):
    """Its prompt has ten tokens."""

    @property
    def num_tokens(self) -> int:
        return 10 + self.num_generated


def a_sequence(number: int = 0, **more: Any) -> SimpleNamespace:
    """It came at 1 s, got in at 2 s, and has three tokens: at 3, 3.5 and 4.5 s."""
    facts = {"request": requests((1.0, 10, 3))[0]._replace(request_id=number), "status": Status.FINISHED}
    facts |= {"num_generated": 3, "first_scheduled_s": 2.0, "first_token_s": 3.0, "finish_s": 4.5, "num_blocks": 0}
    return ASequence(**facts | more)


def an_outcome() -> SimpleNamespace:
    """Of two requests, one of which was ignored."""
    spans = [SimpleNamespace(start_s=start_s, end_s=end_s) for start_s, end_s in ((2.0, 3.0), (3.0, 4.5))]
    lanes = SimpleNamespace(**{name: SimpleNamespace(intervals=deepcopy(spans)) for name in ("compute", "d2h", "h2d")})
    pools = {name: SimpleNamespace(free=7, num_blocks=7) for name in ("gpu", "host")}
    batching = SimpleNamespace(max_new_tokens=lambda seq: 2)
    scheduler = SimpleNamespace(
        has_unfinished=False, num_running=0, num_swapped=0, num_waiting=0, batching=batching, **pools
    )
    # Of gaps of 0.5 and 1 s: the mean and the median are 0.75, each is 0.25 from it, and 99 % of the way is 0.995.
    found = SimpleNamespace(exact=True, count=2, mean=0.75, std=0.25, percentiles={50.0: 0.75, 99.0: 0.995})
    gaps = SimpleNamespace(found=found)
    gaps.statistics = lambda percentiles: gaps.found if percentiles == (50.0, 99.0) else None
    ended = [a_sequence(), a_sequence(1, status=Status.IGNORED, num_generated=0)]
    return SimpleNamespace(scheduler=scheduler, lanes=lanes, ended=ended, gaps=gaps, tokens={0: [3.0, 3.5, 4.5]})


WORKLOAD = conformance.Workload(
    [request._replace(request_id=i) for i, request in enumerate(requests((1.0, 10, 3), (1.0, 10, 3)))],
    limits(gpu=7, host=7, block_size=4, max_model_len=12),
    linear_machine(1.0),
)


def put(place: str, value: Any) -> Change:
    """Set what a path of attributes and numbers leads to; a function changes what is there."""

    def change(outcome: Any) -> None:
        *parents, last = place.split(".")
        for part in parents:
            outcome = outcome[int(part)] if part.isdigit() else getattr(outcome, part)
        if last.isdigit():
            outcome[int(last)] = value(outcome[int(last)]) if callable(value) else value
        else:
            setattr(outcome, last, value(getattr(outcome, last)) if callable(value) else value)

    return change


WRONG_ENDS = {
    "one did not end": put("ended", lambda ended: ended[:1]),
    "one ended twice": put("ended", lambda ended: [*ended, ended[0]]),
    "a sequence is left": put("scheduler.has_unfinished", True),
    "one runs": put("scheduler.num_running", 1),
    "one is swapped": put("scheduler.num_swapped", 1),
    "one waits": put("scheduler.num_waiting", 1),
    "a block of the GPU is held": put("scheduler.gpu.free", 6),
    "a block of the host is held": put("scheduler.host.free", 6),
    "a block too many is free": put("scheduler.gpu.free", 8),
    "one ended with blocks": put("ended.0.num_blocks", 1),
    "a token is missing": put("ended.0.num_generated", 1),
    "a token too many": put("ended.0.num_generated", 4),
    "in before it came": put("ended.0.first_scheduled_s", 1.0 - 2e-9),
    "a token before it was in": put("ended.0.first_token_s", 1.9),
    "ended before its first token": put("ended.0.finish_s", 2.9),
    "neither finished nor ignored": put("ended.1.status", Status.RUNNING),
    "it computes two at once": put("lanes.compute.intervals.1.start_s", 3.0 - 2e-9),
    "two leave at once": put("lanes.d2h.intervals.1.start_s", 3.0 - 2e-9),
    "two return at once": put("lanes.h2d.intervals.1.start_s", 3.0 - 2e-9),
}
RIGHT_ENDS = {
    "as it is": put("scheduler.num_waiting", 0),
    # 12 tokens are the longest context, 10 of which are the prompt.
    "cut at the longest context": put("ended.0.num_generated", 2),
    "in when it came": put("ended.0.first_scheduled_s", 1.0 - 5e-10),
    "a token at once": put("ended.0.first_token_s", 2.0),
    "ended with its first token": put("ended.0.finish_s", 3.0),
    "rounding": put("lanes.compute.intervals.1.start_s", 3.0 - 5e-10),
    "a pause": put("lanes.compute.intervals.1.start_s", 4.0),
}


@pytest.mark.parametrize("what", RIGHT_ENDS)
def test_ends_that_are_right(what: str) -> None:
    outcome = an_outcome()
    RIGHT_ENDS[what](outcome)
    conformance.check_ends(outcome, WORKLOAD)  # type: ignore[arg-type]


@pytest.mark.parametrize("what", WRONG_ENDS)
def test_ends_that_are_wrong(what: str) -> None:
    outcome = an_outcome()
    WRONG_ENDS[what](outcome)
    with pytest.raises(AssertionError):
        conformance.check_ends(outcome, WORKLOAD)  # type: ignore[arg-type]


WRONG_GAPS = {
    "a token too few": put("ended.0.num_generated", 4),
    "the first came at another time": put("ended.0.first_token_s", 3.0 + 1e-12),
    "the last came later": put("ended.0.finish_s", 4.5 + 2e-9),
    "the last came earlier": put("ended.0.finish_s", 4.5 - 2e-9),
    "no statistics": put("gaps.found", None),
    "not exact": put("gaps.found.exact", False),
    "a gap too many": put("gaps.found.count", 3),
    "the mean": put("gaps.found.mean", 0.75 * (1 + 3e-9)),
    "the spread": put("gaps.found.std", 0.25 * (1 + 3e-6)),
    "the median": put("gaps.found.percentiles", {50.0: 0.75 + 4e-9, 99.0: 0.995}),
    "the tail": put("gaps.found.percentiles", {50.0: 0.75, 99.0: 0.995 - 4e-9}),
    "gaps of none": put("tokens", {0: [3.0]}),
}
RIGHT_GAPS = {
    "as it is": put("gaps.found.count", 2),
    "the last, rounded": put("ended.0.finish_s", 4.5 - 5e-10),
    "the mean, rounded": put("gaps.found.mean", 0.75 * (1 + 5e-10)),
    "the spread, rounded": put("gaps.found.std", 0.25 * (1 + 5e-7)),
    "the median, rounded": put("gaps.found.percentiles", {50.0: 0.75 + 5e-10, 99.0: 0.995}),
}


@pytest.mark.parametrize("what", RIGHT_GAPS)
def test_gaps_that_are_right(what: str) -> None:
    outcome = an_outcome()
    RIGHT_GAPS[what](outcome)
    conformance.check_gaps(outcome)  # type: ignore[arg-type]


@pytest.mark.parametrize("what", WRONG_GAPS)
def test_gaps_that_are_wrong(what: str) -> None:
    outcome = an_outcome()
    WRONG_GAPS[what](outcome)
    with pytest.raises(AssertionError):
        conformance.check_gaps(outcome)  # type: ignore[arg-type]


def test_requests_of_a_token_have_no_gaps() -> None:
    outcome = an_outcome()
    outcome.ended = [a_sequence(num_generated=1, finish_s=3.0)]
    outcome.tokens, outcome.gaps.found = {0: [3.0]}, None
    conformance.check_gaps(outcome)  # type: ignore[arg-type]


JUMPS: dict[str, tuple[Change, bool]] = {
    "as it is": (put("instance.iterations", 5), True),
    "the first token, rounded": (put("ended.0.first_token_s", 3.0 + 0.9e-7), True),
    "the first token": (put("ended.0.first_token_s", 3.0 + 1.1e-7), False),
    "the end, rounded": (put("ended.0.finish_s", 4.5 - 0.9e-7), True),
    "the end": (put("ended.0.finish_s", 4.5 - 1.1e-7), False),
    "the status": (put("ended.0.status", Status.IGNORED), False),
    "the iterations": (put("instance.iterations", 6), False),
    "the counters": (put("scheduler.counters", {"preemptions": 1}), False),
}


@pytest.mark.parametrize("what", JUMPS)
def test_jumps_change_nothing_but_rounding(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    change, is_right = JUMPS[what]
    asked: list[tuple[bool, bool]] = []

    def run(policy: object, workload: object, *, jump: bool, checked: bool) -> SimpleNamespace:
        asked.append((jump, checked))
        outcome = SimpleNamespace(
            ended=[a_sequence()],
            instance=SimpleNamespace(iterations=5),
            scheduler=SimpleNamespace(counters={"preemptions": 0}),
        )
        if not jump:
            change(outcome)
        outcome.by_id = lambda: {seq.request.request_id: seq for seq in outcome.ended}
        return outcome

    monkeypatch.setattr(conformance, "run", run)
    if is_right:
        conformance.check_jumps(None, WORKLOAD)  # type: ignore[arg-type]
    else:
        with pytest.raises(AssertionError):
            conformance.check_jumps(None, WORKLOAD)  # type: ignore[arg-type]
    assert asked == [(True, False), (False, False)]


# -- an engine that recounts itself ------------------------------------------------------------------------------------

LOOKS: dict[str, tuple[Any, ...]] = {
    "schedule": (0.0,), "transfer_done": (None,), "commit": (None, None), "commit_ahead": (None, None),
    "deliver": ([],),
}  # fmt: skip
"""What an engine is told, after which it looks at itself."""


def a_checked_engine(monkeypatch: pytest.MonkeyPatch) -> CheckedEngine:
    """It hears of one request, and does nothing else."""
    for name in LOOKS:
        monkeypatch.setattr(Engine, name, lambda self, *facts: None)
    engine = build_engine(VllmRecompute(), limits(gpu=7), linear_machine(), lambda seq: None)
    assert isinstance(engine, CheckedEngine)
    return engine


@pytest.mark.parametrize("look", LOOKS)
def test_a_status_that_may_not_follow_is_seen_at_once(monkeypatch: pytest.MonkeyPatch, look: str) -> None:
    engine = a_checked_engine(monkeypatch)
    seqs = [engine.add_request(request) for request in requests((0.0, 16, 3), (0.0, 16, 3))]
    getattr(engine, look)(*LOOKS[look])
    # Of the first as of the last that came; none is on its way back that has not been away.
    for seq in seqs:
        seq.status = Status.PROMOTING
        with pytest.raises(AssertionError, match="PROMOTING"):
            getattr(engine, look)(*LOOKS[look])
        seq.status = Status.WAITING
    getattr(engine, look)(*LOOKS[look])


@pytest.mark.parametrize("look", ["commit", "commit_ahead", "deliver"])
def test_blocks_are_released_and_allocated_as_often_as_the_pool_says(
    monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    """Eq. 5, from the first look on and between looks."""
    for looks in (0, 1):
        for name, wrong in (("num_released", 1), ("num_allocated", 1), ("num_released", -1), ("num_allocated", -1)):
            engine = a_checked_engine(monkeypatch)
            pool = engine.scheduler.gpu
            pool.allocate(3)
            pool.release(3)
            for _ in range(looks):
                getattr(engine, look)(*LOOKS[look])
            setattr(pool, name, getattr(pool, name) + wrong)
            with pytest.raises(AssertionError):
                getattr(engine, look)(*LOOKS[look])
    # A block that is taken, and that no sequence has, balances.
    lost = a_checked_engine(monkeypatch)
    lost.scheduler.gpu.allocate(1)
    with pytest.raises(AssertionError):
        getattr(lost, look)(*LOOKS[look])
    # Released and allocated as often as each other is right.
    pool.num_released, pool.num_allocated = 9, 9
    getattr(engine, look)(*LOOKS[look])
    assert engine.last == (7, 9, 9)


def test_a_run_of_too_many_plans_is_stopped() -> None:
    """A prompt and three tokens more are four plans; the last that is allowed is not reached."""
    rows, limit = requests((0.0, 16, 4)), limits(gpu=7)
    assert len(simulate(VllmRecompute(), rows, limit, jump=False, most_plans=5).plans) == 4
    with pytest.raises(AssertionError, match="4 plans and 0 requests ended: a request waits for ever"):
        simulate(VllmRecompute(), rows, limit, jump=False, most_plans=4)


POLICIES = st.sampled_from(["vllm-v1", "vllm-recompute", "fastertransformer"]).map(
    lambda text: parse_policy(text, {})[1]
)


def check_that_they_may_be(arrivals: list[Request], limit: Limits) -> None:
    """In order, within the context, with names for the blocks that they have; a budget for every seat."""
    assert [request.request_id for request in arrivals] == list(range(len(arrivals)))
    assert [request.arrival_s for request in arrivals] == sorted(request.arrival_s for request in arrivals)
    assert limit.max_num_batched_tokens >= limit.max_num_seqs
    for request in arrivals:
        prompt, output, block = request.prompt_tokens, request.output_tokens, request.hash_block_tokens
        assert prompt > 0 < output
        assert hashes_fit(prompt, request.hash_ids, block)
        assert output_hashes_fit(prompt, output, request.hash_ids, block, request.output_hash_ids)


@given(st.data(), POLICIES)
def test_crowds(data, policy):
    workload = conformance.draw_workload(data.draw, policy)
    check_that_they_may_be(workload.arrivals, workload.limits)


@given(st.data(), POLICIES)
def test_talks_repeat_what_was_said(data, policy):
    """Until the context is full: then one begins anew."""
    workload, said = conversations.draw_conversations(data.draw, policy), dict[str, Request]()
    check_that_they_may_be(workload.arrivals, workload.limits)
    for request in workload.arrivals:
        assert request.prompt_tokens + request.output_tokens <= workload.limits.max_model_len
        before = said.get(request.session_id)
        if before is not None and request.prompt_tokens > (told := before.prompt_tokens + before.output_tokens):
            full = told // 16
            assert request.hash_ids[:full] == (*before.hash_ids, *before.output_hash_ids)[:full]
        said[request.session_id] = request


@given(conformance.bursts)
def test_bursts_are_of_long_requests_at_once_and_short_ones_behind_them(rows):
    long = [row for row in rows if row[1] >= 60]
    assert rows[: len(long)] == long and 3 <= len(long) <= 10 and 3 <= len(rows) - len(long) <= 12
    assert all(row[0] == 0.0 for row in long)
