"""Copies that fail and memory that runs out end the sequences they touch, no others; the pools balance after."""

import random

import pytest
import torch
from runtime_mistakes import check_failures, failing_copies
from runtime_variants import CONTIGUOUS, COPYING, RETAINED, TIERED, VARIANTS, policy_of

from gpu_runtime.model.decoder import Decoder
from kvtwin.testing import live, requests
from kvtwin.testing.live import ROWS, small_decoder, tight_limits


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


@pytest.mark.parametrize(("variant", "chunked"), [(variant, i % 2 > 0) for i, variant in enumerate(VARIANTS)])
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
    served = [serve(variant) for variant in (*COPYING, *TIERED, *RETAINED, CONTIGUOUS, "hcache", "kvpr")]
    monkeypatch.undo()
    for run in served:
        assert len(check(run)) < len(ROWS)


@pytest.mark.parametrize("variant", COPYING)
def test_a_full_host_pool_falls_back_to_what_vllm_does(variant):
    served = serve(variant, host=0)
    assert not check(served)
    if variant == "vllm-swap":
        assert served.counters.swap_space_exhausted > 0
