"""Copies that fail and memory that runs out end the sequences they touch, nobody else; the pools balance after."""

import random

import pytest

torch = pytest.importorskip("torch")

from runtime_live import DECODER, Served, expected_tokens  # noqa: E402

from gpu_runtime.kv.copy_engine import CopyEngine  # noqa: E402
from gpu_runtime.model.decoder import Decoder  # noqa: E402
from kvtwin.testing import limits, requests  # noqa: E402
from sim.engine.sequence import Status  # noqa: E402
from sim.scenario import parse_policy  # noqa: E402

ROWS = [(0.0, 5 + 7 * i % 23, 4 + 5 * i % 19) for i in range(14)]
VARIANTS = ["vllm-recompute", "vllm-swap", "layerkv", "layerkv:decode=stream,slo-aware=false"]


def serve(variant, **changes):
    sizes = {"gpu": 16, "host": 60, "max_model_len": 64, "seqs": 6, "tokens": 128, "block_size": 4} | changes
    return Served(parse_policy(variant, {})[1], requests(*ROWS), limits(**sizes))


def check(served):
    """Every request ended; those without an error have the right tokens; nothing is held any more."""
    assert sorted(seq.request.request_id for seq in served.ended) == list(range(len(ROWS)))
    failed = [seq for seq in served.ended if seq.error]
    for seq in served.ended:
        if not seq.error:
            assert seq.status is Status.FINISHED
            assert served.tokens[seq.request.request_id] == expected_tokens(seq.request)
    served.device.check()
    return failed


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("variant", VARIANTS[1:])
def test_a_failed_copy_ends_the_sequence_whose_blocks_it_moved(variant, chunked, monkeypatch):
    dice = random.Random(5)
    right = CopyEngine.copy_blocks

    def sometimes(self, src_pool, src_ids, dst_pool, dst_ids, direction, groups=None):
        handle = right(self, src_pool, src_ids, dst_pool, dst_ids, direction, groups)
        if dice.random() < 0.05:
            handle.wait()
            handle.finish(RuntimeError("the link is down"))
        return handle

    monkeypatch.setattr(CopyEngine, "copy_blocks", sometimes)
    served = serve(variant, chunked=chunked, tokens=16 if chunked else 128)
    monkeypatch.undo()
    failed = check(served)
    assert 0 < len(failed) < len(ROWS)
    assert all("the link is down" in seq.error for seq in failed)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_iteration_that_does_not_fit_is_computed_in_parts(variant, chunked, monkeypatch):
    """Whatever has more than eight tokens in one pass runs out of memory: prompts fail, batches of decodes do not."""
    right = Decoder.forward

    def small_memory(self, token_ids, *rest, **named):
        if len(token_ids) > 8:
            raise torch.OutOfMemoryError("tried to allocate too much")
        return right(self, token_ids, *rest, **named)

    monkeypatch.setattr(Decoder, "forward", small_memory)
    served = serve(variant, chunked=chunked, tokens=16 if chunked else 128)
    monkeypatch.undo()
    failed = {seq.request.request_id for seq in check(served)}
    too_long = {i for i, (_, prompt, _) in enumerate(ROWS) if prompt > (16 if chunked else 8)}
    assert failed >= too_long if not chunked else failed
    assert all("out of memory" in seq.error for seq in served.ended if seq.error)


def test_memory_that_runs_out_in_the_middle_of_a_pass_leaves_no_copy_behind(monkeypatch):
    """Half of the layers run, their KV is on its way to the host, then memory is gone; the second try succeeds."""
    dice = random.Random(1)
    layer = DECODER.layers[2]
    right = type(layer).forward

    def sometimes(self, *arguments):
        if self is layer and dice.random() < 0.2:
            raise torch.OutOfMemoryError("tried to allocate too much")
        return right(self, *arguments)

    monkeypatch.setattr(type(layer), "forward", sometimes)
    served = [serve(variant) for variant in VARIANTS]
    monkeypatch.undo()
    for run in served:
        assert len(check(run)) < len(ROWS)


@pytest.mark.parametrize("variant", ["vllm-swap", "layerkv"])
def test_a_full_host_pool_falls_back_to_what_vllm_does(variant):
    served = serve(variant, host=0)
    assert not check(served)
    if variant == "vllm-swap":
        assert served.counters.swap_space_exhausted > 0
