"""Copies that fail, memory that runs out, clients that leave: those touched end, no others; the pools balance after."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pretended import pretend
from runtime_mistakes import check_failures, failing_copies
from runtime_variants import CONTIGUOUS, COPYING, RETAINED, TIERED, VARIANTS, policy_of

from gpu_runtime.model.decoder import Decoder
from kvtwin.testing import CheckedEngine, limits, linear_machine, live, requests
from kvtwin.testing.conformance import limits_of
from kvtwin.testing.live import ROWS, small_decoder, tight_limits
from sim.engine.itl import GapCollector
from sim.engine.sequence import Status


def serve(variant, **sizes):
    policy = policy_of(variant)
    return live.serve(policy, requests(*ROWS), tight_limits(policy, **sizes))


def check(served):
    """Every request ended, those without an error with the right tokens; returns the failed."""
    completed = live.check_tokens(served, requests(*ROWS))
    failed = [seq for seq in served.ended if seq.error]
    assert len(completed) + len(failed) == len(ROWS)
    return failed


@pytest.mark.parametrize(("variant", "chunked"), [*zip(COPYING, (False, True, True, False), strict=True)])
def test_a_failed_copy_ends_the_sequence_whose_blocks_it_moved(variant, chunked):
    with failing_copies("copy_blocks", 0.05):
        served = serve(variant, chunked=chunked)
    failed = check_failures(served, ROWS, "the link is down")
    assert len(failed) < len(ROWS)


OF_EACH_KIND = [*COPYING, TIERED[0], RETAINED[0], CONTIGUOUS, "hcache", "kvpr"]
"""Systems that move KV in the ways there are: a device hears of no other difference."""


@pytest.mark.parametrize(("variant", "chunked"), [(variant, i % 2 > 0) for i, variant in enumerate(OF_EACH_KIND)])
def test_an_iteration_that_does_not_fit_is_computed_in_parts(variant, chunked, monkeypatch):
    """Whatever has more than eight tokens in one pass runs out of memory: prompts fail, batches of decodes do not."""
    right = Decoder.forward

    def small_memory(self, token_ids, *rest, **named):
        if len(token_ids) > 8:
            raise torch.OutOfMemoryError("tried to allocate too much")
        return right(self, token_ids, *rest, **named)

    monkeypatch.setattr(Decoder, "forward", small_memory)
    served = serve(variant, chunked=chunked)
    monkeypatch.undo()
    failed = {seq.request.request_id for seq in check(served)}
    too_long = {i for i, (_, prompt, _) in enumerate(ROWS) if prompt > (16 if chunked else 8)}
    assert failed >= too_long if not chunked else failed
    assert all("out of memory" in seq.error for seq in served.ended if seq.error)


def test_memory_that_runs_out_in_the_middle_of_a_pass_leaves_no_copy_behind(monkeypatch):
    """Half of the layers run, their KV is on its way to the host, then memory is gone; the second try succeeds."""
    dice = random.Random(1)
    layer = small_decoder().layers[2]
    right = type(layer).forward

    def sometimes(self, *arguments, **named):
        if self is layer and dice.random() < 0.2:
            raise torch.OutOfMemoryError("tried to allocate too much")
        return right(self, *arguments, **named)

    monkeypatch.setattr(type(layer), "forward", sometimes)
    served = [serve(variant) for variant in OF_EACH_KIND]
    monkeypatch.undo()
    for run in served:
        assert len(check(run)) < len(ROWS)


@pytest.mark.parametrize("variant", COPYING)
def test_a_full_host_pool_falls_back_to_what_vllm_does(variant):
    served = serve(variant, host=0)
    assert not check(served)
    if variant == "vllm-swap":
        assert served.counters.swap_space_exhausted > 0


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
@settings(max_examples=8, deadline=None)
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
