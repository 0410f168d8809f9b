"""Iterations scheduled while the one before runs: vLLM's async scheduling on the real clock."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pretended import pretend
from runtime_small import GRAPHED, Warm
from runtime_variants import WORKLOADS, policy_of
from test_runtime_two_clocks import WORKLOADS as ARRIVALS
from test_runtime_two_clocks import Shown, named_alike

from kvtwin.testing import build_engine, limits, linear_machine, live, requests, simulate
from kvtwin.testing.conformance import limits_of
from kvtwin.testing.live import ALIKE, GROWING, ROWS, CheckedDevice, alike, tight_limits

AHEAD = policy_of("vllm-v1").with_async_scheduling(True)


@settings(max_examples=25, deadline=None)
@given(rows=ARRIVALS, gpu=st.integers(20, 60), chunked=st.booleans(), cached=st.booleans())
def test_both_clocks_schedule_ahead_alike(rows, gpu, chunked, cached):
    """Decisions, their times, and what follows for requests: first tokens, ends, gaps between tokens."""
    limit = limits_of(AHEAD, limits(gpu, 200, max_model_len=512), 8, 64 if chunked else None)
    limit = replace(limit, enable_prefix_caching=cached)
    machine, there = linear_machine(limit.block_bytes), Shown()
    arrivals = named_alike(rows)
    simulated = simulate(AHEAD, arrivals, limit, machine=machine, jump=False, observe=lambda scheduler: there.observe)
    ended, here = [], Shown()
    engine = build_engine(AHEAD, limit, machine, ended.append)
    heard = engine.scheduler.gaps
    pretend(engine, arrivals, machine, here.observe)
    assert [decision for decision, _ in here] == [decision for decision, _ in there]
    for (_, here_s), (_, there_s) in zip(here, there, strict=True):
        assert here_s == pytest.approx(there_s, abs=1e-7)
    found = [(s.request.request_id, s.status, s.error) for s in ended]
    assert found == [(s.request.request_id, s.status, s.error) for s in simulated.ended]
    for ours, theirs in zip(ended, simulated.ended, strict=True):
        assert ours.first_token_s == pytest.approx(theirs.first_token_s, abs=1e-7)
        assert ours.finish_s == pytest.approx(theirs.finish_s, abs=1e-7)
    gaps = [of.statistics((50.0, 99.0)) for of in (heard, simulated.scheduler.gaps)]
    if gaps[1] is not None:
        assert gaps[0].count == gaps[1].count
        assert (gaps[0].mean, gaps[0].std) == pytest.approx((gaps[1].mean, gaps[1].std), abs=1e-7)


class Late(CheckedDevice):
    """Counts the iterations that are launched before the tokens of the one before are known."""

    flying, overlaps = 0, 0

    def launch(self, plan):
        super().launch(plan)
        self.flying += 1
        self.overlaps += self.flying == 2

    def collect(self):
        self.flying -= 1
        return super().collect()


@pytest.mark.parametrize("graphs", [{}, GRAPHED])
@settings(max_examples=15, deadline=None)
@given(rows=WORKLOADS, gpu=st.integers(17, 40), chunked=st.booleans(), cached=st.booleans())
def test_every_request_has_the_tokens_that_it_has_alone(graphs, rows, gpu, chunked, cached):
    arrivals = alike(requests(*rows))
    limit = replace(tight_limits(AHEAD, chunked=chunked, gpu=gpu), enable_prefix_caching=cached)

    served = live.serve(AHEAD, arrivals, limit, kind=Warm, **graphs)
    assert len(live.check_tokens(served, arrivals)) == len(rows)


@pytest.mark.parametrize("rows", [ROWS, GROWING, ALIKE])
def test_iterations_are_launched_before_the_tokens_that_they_read_are_known(rows):
    arrivals = requests(*rows)
    served = live.serve(AHEAD, arrivals, tight_limits(AHEAD, gpu=24), kind=Late)
    assert len(live.check_tokens(served, arrivals)) == len(rows)
    assert served.device.overlaps > len(served.plans) // 2
