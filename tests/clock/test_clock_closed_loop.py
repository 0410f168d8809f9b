"""Closed loops: which request is sent when, worked out by hand; jumps change nothing; none is lost."""

import json

import pytest
from clock_small import FLAT
from hypothesis import given, settings
from hypothesis import strategies as st
from pretended import PretendedDevice

import kvtwin
from gpu_runtime.instance import LiveInstance
from kvtwin.testing import build_engine, limits, linear_machine, requests, simulate
from kvtwin.testing.conformance import TOLERANCE_S, hosts_of
from sim.clock.closed_loop import ClosedLoop
from sim.options.policies import parse_policy
from sim.systems.vllm055 import VllmRecompute
from traces.errors import TraceError
from traces.request import Request


def turns(*rows):
    """(session, arrival_s, output_tokens) rows as requests of ten prompt tokens."""
    return [Request(i, arrival_s, 10, output, session) for i, (session, arrival_s, output) in enumerate(rows)]


def sent(outcome):
    """Arrivals by request id."""
    return [outcome.by_id()[i].request.arrival_s for i in sorted(outcome.by_id())]


@pytest.mark.parametrize("jump", [True, False])
def test_the_next_request_is_sent_when_one_ends_or_at_its_own_arrival(jump):
    # The first takes 0.1 + 9 x 0.1 s. The second waits for it, then takes 0.2 s; the third comes later than that.
    rows = requests((0.0, 10, 10), (0.25, 10, 2), (1.5, 10, 1))
    outcome = simulate(VllmRecompute(), ClosedLoop(rows, 1), limits(), machine=linear_machine(**FLAT), jump=jump)
    assert sent(outcome) == pytest.approx([0.0, 1.0, 1.5])
    assert [outcome.by_id()[i].finish_s for i in range(3)] == pytest.approx([1.0, 1.2, 1.6])
    assert all(seq.first_scheduled_s == pytest.approx(seq.request.arrival_s) for seq in outcome.ended)


def test_a_request_that_finds_a_free_place_is_sent_at_its_arrival_although_others_end_later():
    # Two places: while the first two run, an iteration of 0.1 s lasts from 0.9 to 1.0, at whose end both are done.
    rows = requests((0.0, 10, 9), (0.0, 10, 9), (0.95, 10, 1), (0.96, 10, 1))
    outcome = simulate(VllmRecompute(), ClosedLoop(rows, 3), limits(), machine=linear_machine(**FLAT))
    assert outcome.by_id()[0].finish_s == pytest.approx(0.9)
    assert sent(outcome) == pytest.approx([0.0, 0.0, 0.95, 0.96])


@pytest.mark.parametrize("jump", [True, False])
def test_a_turn_waits_for_the_answer_and_then_for_the_gap_of_the_trace(jump):
    # a's first answer comes at 0.5 s, thinking takes 0.3 s; b's turns are far apart already.
    rows = turns(("a", 0.0, 5), ("a", 0.3, 1), ("b", 1.0, 1), ("b", 3.0, 1))
    loop = ClosedLoop(rows, by_session=True)
    outcome = simulate(VllmRecompute(), loop, limits(), machine=linear_machine(**FLAT), jump=jump)
    assert sent(outcome) == pytest.approx([0.0, 0.8, 1.0, 1.1 + 2.0])


def test_sessions_share_the_places_of_a_bounded_loop_in_the_order_in_which_turns_are_ready():
    # One place. a's second turn is ready at 0.2 + 0.1 s, b's first at 0.1; b goes first and takes 0.4 s.
    rows = turns(("a", 0.0, 2), ("a", 0.1, 1), ("b", 0.1, 4))
    outcome = simulate(VllmRecompute(), ClosedLoop(rows, 1, by_session=True), limits(), machine=linear_machine(**FLAT))
    assert sent(outcome) == pytest.approx([0.0, 0.6, 0.2])


def test_what_is_due_together_is_sent_in_its_order():
    """Turns that are ready go before those that arrive at the same time; what is due at that time is sent."""
    rows = turns(("a", 0.0, 1), ("a", 0.125, 1), ("a", 0.25, 1), ("b", 0.75, 1), ("c", 0.75, 1), ("d", 0.875, 1))
    loop, sent = ClosedLoop(rows, by_session=True, front_end_s=0.125), []

    def due(at_s):
        sent.clear()
        loop.deliver(at_s, sent.append)
        return [(request.request_id, request.arrival_s) for request in sent], loop.next_s

    assert loop.next_s == 0.0 and due(0.0) == ([(0, 0.0)], 0.125)
    # Both later turns of a are held, and the loop waits for b; a's answer is there at 0.625 s, front end included.
    assert due(0.5) == ([], 0.75)
    loop.ended(rows[0], 0.5)
    assert loop.next_s == 0.75
    assert due(0.75) == ([(1, 0.75), (3, 0.75), (4, 0.75)], 0.875)
    assert [request is rows[request.request_id] for request in sent] == [False, True, True]
    assert due(1.0) == ([(5, 0.875)], float("inf"))
    loop.ended(sent[0]._replace(session_id="a"), 1.0)
    assert due(1.25) == ([(2, 1.25)], float("inf"))


def test_places_are_taken_in_the_order_in_which_they_became_free():
    """Two places: the next goes when the first of them is free, or at its own arrival where one is."""
    rows, sent = requests((0.0, 10, 1), (0.0, 10, 1), (0.0, 10, 1), (0.25, 10, 1), (4.0, 10, 1)), []
    loop = ClosedLoop(rows, 2)
    loop.deliver(0.0, sent.append)
    assert [request.request_id for request in sent] == [0, 1] and loop.next_s == float("inf")
    loop.ended(rows[1], 2.0)
    loop.ended(rows[0], 1.0)
    assert loop.next_s == 1.0
    loop.deliver(3.0, sent.append)
    assert [request.arrival_s for request in sent] == [0.0, 0.0, 1.0, 2.0] and loop.next_s == float("inf")
    loop.ended(rows[2], 3.0)
    assert loop.next_s == 4.0


def test_an_ignored_request_gives_its_place_back():
    rows = requests((0.0, 10_000, 5), (0.0, 10, 1), (0.0, 10_000, 5), (0.0, 10, 1))
    outcome = simulate(VllmRecompute(), ClosedLoop(rows, 1), limits(), machine=linear_machine(**FLAT))
    assert [seq.request.request_id for seq in outcome.ended] == [0, 1, 2, 3]
    assert sent(outcome) == pytest.approx([0.0, 0.0, 0.1, 0.1])


def test_a_request_without_a_session_is_refused_in_a_loop_of_sessions():
    with pytest.raises(TraceError, match="--closed-sessions"):
        simulate(VllmRecompute(), ClosedLoop(requests((0.0, 10, 1)), by_session=True), limits())


ROWS = st.lists(
    st.tuples(st.sampled_from("abcd"), st.sampled_from([0.0, 0.0, 0.02, 0.5]), st.integers(1, 40)),
    min_size=1,
    max_size=25,
)


def drawn(rows):
    at_s, found = 0.0, []
    for session, gap_s, output in rows:
        at_s += gap_s
        found.append((session, at_s, output))
    return turns(*found)


AHEAD = "vllm-v1:async-scheduling=true"


@pytest.mark.parametrize("jump", [True, False])
@pytest.mark.parametrize(("policy", "ttft_s"), [("vllm-v1", 0.1), (AHEAD, 0.2)])
def test_scheduled_ahead_what_is_sent_at_an_end_misses_the_next_iteration(policy, ttft_s, jump):
    # The first ends at 1.0 s; scheduled ahead, the iteration that begins then was decided at 0.9 s.
    rows = requests((0.0, 10, 10), (0.0, 10, 30), (0.0, 10, 2))
    kind = parse_policy(policy, {})[1]
    machine = linear_machine(**FLAT)
    outcome = simulate(kind, ClosedLoop(rows, 2), limits(max_model_len=256), machine=machine, jump=jump)
    third = outcome.by_id()[2]
    assert third.request.arrival_s == pytest.approx(1.0)
    assert third.first_token_s - third.request.arrival_s == pytest.approx(ttft_s)


@pytest.mark.parametrize("policy", ["vllm-recompute", "vllm-swap", "layerkv", "sarathi", "fastserve", "vllm-v1", AHEAD])
@settings(max_examples=25, deadline=None)
@given(
    rows=ROWS, most=st.sampled_from([None, 1, 2, 5]), by_session=st.booleans(), gpu=st.integers(6, 20), data=st.data()
)
def test_jumping_changes_nothing_and_the_loop_is_kept(policy, rows, most, by_session, gpu, data):
    limit = limits(gpu, 40, max_model_len=256)
    kind, arrivals = parse_policy(policy, {})[1], drawn(rows)
    machine = linear_machine(limit.block_bytes, host=data.draw(st.sampled_from(hosts_of(kind))))
    loops = [ClosedLoop(arrivals, most, by_session=by_session) for _ in range(2)]
    one, other = (
        simulate(kind, loop, limit, machine=machine, jump=jump) for loop, jump in zip(loops, (True, False), strict=True)
    )
    assert sorted(one.by_id()) == sorted(other.by_id()) == list(range(len(rows)))
    for key, seq in one.by_id().items():
        assert seq.request.arrival_s == pytest.approx(other.by_id()[key].request.arrival_s, abs=TOLERANCE_S)
        assert seq.finish_s == pytest.approx(other.by_id()[key].finish_s, abs=TOLERANCE_S)
        assert seq.request.arrival_s >= arrivals[key].arrival_s
    done = [seq for seq in one.ended if seq.finish_s >= 0.0]
    for seq in done:
        at_s = seq.request.arrival_s
        if most is not None:
            assert sum(s.request.arrival_s <= at_s < s.finish_s for s in done) <= most
        if by_session:
            same = [s for s in done if s.request.session_id == seq.request.session_id]
            assert all(s.finish_s <= at_s for s in same if s.request.request_id < seq.request.request_id)


def test_the_real_clock_keeps_the_same_loop():
    rows, limit, machine = drawn([("a", 0.01, 20), ("b", 0.0, 7), ("a", 0.03, 9)] * 4), limits(20, 40), linear_machine()
    there = simulate(VllmRecompute(), ClosedLoop(rows, 2, by_session=True), limit, machine=machine, jump=False)
    ended, loop = [], ClosedLoop(rows, 2, by_session=True)
    engine = build_engine(VllmRecompute(), limit, machine, ended.append)
    LiveInstance(engine, PretendedDevice(machine, engine.scheduler), loop, ended=loop.ended).serve()
    assert {s.request.request_id: (s.request.arrival_s, s.finish_s) for s in ended} == {
        key: (s.request.arrival_s, s.finish_s) for key, s in there.by_id().items()
    }


def command(out, *words):
    return ["run", "--policy", "vllm-recompute", "--gpu", "l20", "--out", str(out), "--quiet", *words]


def test_the_result_says_when_requests_were_sent(tmp_path):
    words = ["--workload", "fixed", "--num-prompts", "6", "--input-len", "20", "--output-len", "5"]
    assert kvtwin.main(command(tmp_path, *words, "--request-rate", "inf", "--max-concurrency", "2")) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["scenario"]["max_concurrency"] == 2
    starts, ends = (
        result["start_times"],
        [a + b for a, b in zip(result["start_times"], result["latencies"], strict=True)],
    )
    assert starts[:2] == [0.0, 0.0]
    assert starts[2:] == pytest.approx(sorted(ends)[:4])
