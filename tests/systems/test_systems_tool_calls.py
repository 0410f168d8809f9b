"""Requests that call tools: when their tokens come, what becomes of their KV, whose time it is. All worked by hand."""

import pytest

from kvtwin.testing import limits, linear_machine, requests, simulate
from sim.errors import UserError
from sim.options.policies import parse_policy
from sim.results.goodput import Goodput
from sim.results.metrics import RequestLog
from traces.request import ToolCall

BLOCK_S = 0.01
"""To copy a block. A prompt of n tokens takes 10 + n ms, a decode iteration 20 ms; blocks are of 16 tokens."""


def run(text, *rows, calls=(), block_s=BLOCK_S, host=100):
    """The first request calls tools."""
    limit = limits(100, host, block_size=16, tokens=128, chunked=True)
    machine = linear_machine(
        limit.block_bytes, prefill=(0.01, 0.001, 0.0), decode=(0.02, 0.0, 0.0), swap_s_per_block=block_s
    )
    first, *others = requests(*rows)
    return simulate(parse_policy(text, {})[1], [first._replace(calls=calls), *others], limit, machine=machine)


ALONE = (0.0, 32, 4)
"""Tokens at 42 and 62 ms; then a tool works for 1 s and returns 16. The last token before it was never fed."""
ONE_CALL = (ToolCall(2, 1.0, 16),)


@pytest.mark.parametrize(
    ("text", "third_s"),
    [
        # 1 + 16 tokens.
        ("infercept:tool-kv=preserve", 1.062 + 0.027),
        # 34 + 16.
        ("infercept:tool-kv=discard", 1.062 + 0.060),
        # 33 tokens are 3 blocks, which come back first.
        ("infercept:tool-kv=swap", 1.062 + 0.030 + 0.027),
        # After the time to live as if discarded, within it as if preserved; a tie is the answer's.
        ("infercept:tool-kv=ttl,tool-ttl-s=0.9", 1.062 + 0.060),
        ("sarathi:stage=tool-calls,tool-kv=ttl,tool-ttl-s=1", 1.062 + 0.027),
        ("vllm-v1:stage=tool-calls", 1.062 + 0.060),
        ("vllm-v1:stage=tool-calls,tool-kv=preserve", 1.062 + 0.027),
        ("sarathi:stage=tool-calls,tool-kv=swap", 1.062 + 0.030 + 0.027),
    ],
)
def test_after_a_call_the_answer_is_a_prompt_behind_what_is_kept(text, third_s):
    (seq,) = run(text, ALONE, calls=ONE_CALL).ended
    assert seq.first_token_s == pytest.approx(0.042)
    assert seq.finish_s == pytest.approx(third_s + 0.02)
    assert (seq.num_generated, seq.num_tokens) == (4, 32 + 4 + 16)


def test_what_a_tool_takes_is_not_the_engines_time():
    """1.089 s after 0.062 is a gap of 27 ms; TPOT is (20 + 27 + 20) / 3 ms, and an SLO of 130 ms end to end is met."""
    outcome = run("infercept:tool-kv=preserve", ALONE, calls=ONE_CALL)
    gaps = outcome.gaps.statistics((50.0,))
    assert gaps is not None and gaps.mean == pytest.approx(0.067 / 3)
    log = RequestLog(goodput=Goodput(tpot_s=0.023, e2el_s=0.130))
    log.end(outcome.ended[0])
    assert log.tpot_s[0] == pytest.approx(0.067 / 3)
    assert log.e2el_s[0] == pytest.approx(1.109)
    assert log.good == 1


@pytest.mark.parametrize(
    ("tool_s", "block_s", "way"),
    [
        # Preserving wastes 34 x T, discarding 0.044 x 34 / 2 + (0.044 - 0.020) x 66 = 2.332: equal at 68.6 ms.
        (0.068, BLOCK_S, "preserve"),
        (0.069, BLOCK_S, "discard"),
        # 3 blocks out in 21 ms are not hidden behind 20 ms, and 2 x 0.021 x 66 = 2.772 is more; in 19.5 ms they are.
        (1.0, 0.007, "discard"),
        (1.0, 0.0065, "swap"),
        (0.068, 0.0065, "swap"),
    ],
)
def test_the_way_that_wastes_least_is_taken(tool_s, block_s, way):
    """34 tokens beside one request of 66."""
    outcome = run("infercept", ALONE, (0.0, 64, 100), calls=(ToolCall(2, tool_s, 16),), block_s=block_s)
    assert outcome.scheduler.counters.policy == {"tool_calls": 1, f"tool_calls_{way}": 1}


@pytest.mark.parametrize(("tool_s", "discarded"), [(0.05, 0), (1.0, 1)])
def test_where_durations_are_unknown_kv_stays_until_that_has_wasted_as_much(tool_s, discarded):
    text = "infercept:known-durations=false"
    outcome = run(text, ALONE, (0.0, 64, 100), calls=(ToolCall(2, tool_s, 16),))
    assert outcome.by_id()[0].num_preemptions == discarded


@pytest.mark.parametrize(("ttl_s", "starts_s"), [(0.3, 0.362), (0.5, 0.509)])
def test_blocks_are_free_from_when_the_time_to_live_ends(ttl_s, starts_s):
    """Another prompt needs 5 of 6 blocks while 3 are kept: until 62 ms + 0.3 s, or until the call of 0.4 s has ended
    and its request, 27 + 20 ms later. Nothing runs meanwhile: the engine wakes by itself, or at the tool's answer."""
    limit = limits(6, 0, block_size=16, tokens=128, chunked=True)
    machine = linear_machine(1.0, prefill=(0.01, 0.001, 0.0), decode=(0.02, 0.0, 0.0))
    rows = requests(ALONE, (0.05, 80, 1))
    arrivals = [rows[0]._replace(calls=(ToolCall(2, 0.4, 16),)), rows[1]]
    text = f"sarathi:stage=tool-calls,tool-kv=ttl,tool-ttl-s={ttl_s}"
    outcome = simulate(parse_policy(text, {})[1], arrivals, limit, machine=machine)
    assert outcome.by_id()[1].first_scheduled_s == pytest.approx(starts_s, abs=1e-6)
    assert outcome.scheduler.counters.policy.get("tool_calls_expired", 0) == (ttl_s < 0.4)


@pytest.mark.parametrize("value", ["", ",tool-ttl-s=0", ",tool-ttl-s=-1"])
def test_a_time_to_live_must_be_said(value):
    with pytest.raises(UserError, match=r"tool-kv=ttl: needs tool-ttl-s=S"):
        run(f"vllm-v1:stage=tool-calls,tool-kv=ttl{value}", ALONE, calls=ONE_CALL)


def test_a_stage_without_a_place_for_it_is_told_so():
    with pytest.raises(UserError, match=r"request 0: .* stage=direct .*:stage=tool-calls"):
        run("vllm-v1", ALONE, calls=ONE_CALL)


def test_an_idle_engine_wakes_when_the_tool_answers_and_lacks_no_memory():
    """It used to take a copy that never was to wake one, and all that was parked was said to lack memory."""
    outcome = run("infercept:tool-kv=preserve", ALONE, calls=ONE_CALL)
    assert outcome.lanes.h2d.busy_s == outcome.lanes.d2h.busy_s == 0.0
    assert outcome.scheduler.stage.waits_for is None
