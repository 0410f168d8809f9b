"""Requests that end early, by a stop token or because their client left: pools balance, no request is lost."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pretended import pretend
from runtime_variants import VARIANTS, policy_of

from kvtwin.testing import CheckedEngine, limits, linear_machine, requests
from kvtwin.testing.conformance import limits_of
from sim.engine.itl import GapCollector
from sim.engine.sequence import Status


class Leaving(CheckedEngine):
    """An engine some of whose requests end early, between two steps."""

    __slots__ = ("alive", "dice", "left")

    def add_request(self, request):
        seq = super().add_request(request)
        self.alive.append(seq)
        return seq

    def commit(self, plan, times):
        if self.alive and self.dice.random() < 0.4:
            seq = self.dice.choice(self.alive)
            if self.dice.random() < 0.5:
                self.cancel(seq)
            elif self.scheduler.num_generated_of(seq) < seq.output_tokens and seq.status is not Status.IGNORED:
                self.truncate(seq, self.scheduler.num_generated_of(seq) + 1)
            self.left.add(seq.request.request_id)
        super().commit(plan, times)
        self.alive = [s for s in self.alive if s.status not in (Status.FINISHED, Status.IGNORED)]


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=15, deadline=None)
@given(
    rows=st.lists(st.tuples(st.floats(0.0, 2.0), st.integers(1, 150), st.integers(1, 60)), min_size=1, max_size=20),
    gpu=st.integers(20, 50),
    host=st.integers(0, 100),
    chunked=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_requests_that_end_early_leave_nothing_behind(variant, rows, gpu, host, chunked, seed):
    policy = policy_of(variant)
    limit = limits_of(policy, limits(gpu, host, max_model_len=512), 8, 64 if chunked else None)
    machine = linear_machine(limit.block_bytes)
    scheduler = policy.scheduler(limit, GapCollector(), machine.deployment)
    ended = []
    engine = Leaving(scheduler, policy.length_predictor(0), ended.append)
    engine.alive, engine.dice, engine.left = [], random.Random(seed), set()
    pretend(engine, requests(*sorted(rows)), machine)
    assert sorted(s.request.request_id for s in ended) == list(range(len(rows)))
    assert scheduler.gpu.free == scheduler.gpu.num_blocks
    assert scheduler.host.free == scheduler.host.num_blocks
    for seq in ended:
        if seq.status is Status.FINISHED:
            assert seq.num_generated == seq.output_tokens <= seq.request.output_tokens
            assert seq.request.request_id in engine.left or seq.num_generated == seq.request.output_tokens
