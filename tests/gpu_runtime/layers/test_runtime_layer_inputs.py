"""KVPR live: inputs of layers are saved beside KV, a part of every decode's KV is made from them, no token changes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from runtime_mistakes import check_failures, failing_copies, misled, running_out
from runtime_variants import WORKLOADS, policy_of

from gpu_runtime.model.decoder import Decoder, DecoderLayer
from kvtwin.testing import live, requests
from kvtwin.testing.live import BLOCK_SIZE, GROWING, ROWS, SMALL, CheckedDevice, tight_limits
from sim.engine.changes import Projected
from sim.errors import InvariantError
from sim.systems.kvpr.partial_recompute import BlockSeconds

SHARE = SMALL.hidden_size / (2 * SMALL.kv_size)
WAYS = {
    "a part": BlockSeconds(0.5, 1.0, 1.0, SHARE),
    "nearly all": BlockSeconds(0.5, 0.001, 1.0, SHARE),
    "few": BlockSeconds(0.5, 9.0, 1.0, SHARE),
    "none": BlockSeconds(1.0, 1.0, 1.0, SHARE),
}
"""What a block's inputs, projection and KV take."""


def serve(monkeypatch, way, rows=GROWING, **sizes):
    """Serve where a block's inputs, projection and KV take so long."""
    kind, inline = sizes.pop("kind", CheckedDevice), sizes.pop("inline", False)
    monkeypatch.setattr(BlockSeconds, "of", lambda b: WAYS[way])
    policy = policy_of(sizes.pop("policy", "kvpr"))
    limit = tight_limits(policy, **({"gpu": 20, "host": 200} | sizes))
    return live.serve(policy, requests(*rows), limit, kind=kind, inline_copies=inline)


def projections(served):
    return [record for plan, _, _ in served.plans for record in plan.streamed if isinstance(record, Projected)]


@pytest.mark.parametrize(("way", "chunked"), [(way, i % 2 > 0) for i, way in enumerate(WAYS)])
def test_part_of_the_kv_is_made_from_inputs(monkeypatch, way, chunked):
    served = serve(monkeypatch, way, chunked=chunked)
    assert len(live.check_tokens(served, requests(*GROWING))) == len(GROWING)
    found = projections(served)
    projected = sum(record.num_groups * record.num_tokens // BLOCK_SIZE for record in found)
    read = sum(record.num_read for record in found)
    assert read + projected > 1000
    assert {
        "a part": 0.3 < projected / (read + projected) < 0.6,
        "nearly all": projected > 9 * read,
        "few": 0 < projected < 0.2 * read,
        "none": projected == 0,
    }[way]
    assert all(bool(record.num_inputs) == (way != "none") for record in found)


@settings(max_examples=15, deadline=None)
@given(
    rows=WORKLOADS,
    way=st.sampled_from(sorted(WAYS)),
    gpu=st.integers(17, 30),
    host=st.sampled_from([30, 80]),
    chunked=st.booleans(),
    seqs=st.sampled_from([2, 5]),
    inline=st.booleans(),
    policy=st.sampled_from(["kvpr", "kvpr:batching=sarathi"]),
)
def test_no_workload_finds_a_token_that_projections_change(rows, way, **sizes):
    with pytest.MonkeyPatch.context() as patch:
        served = serve(patch, way, rows, **sizes)
    live.check_tokens(served, requests(*rows))


def mistaken(monkeypatch, changed):
    """Serve with a mistake in the records of every plan; in how many."""

    def wrong(record):
        return changed(record) if isinstance(record, Projected) else record

    return misled(lambda kind: serve(monkeypatch, "a part", kind=kind), "streamed", wrong)


MISTAKES = {
    "a block too few is read": lambda record: replace(record, num_read=record.num_read - 1),
    "more is projected than is left out": lambda record: replace(record, num_tokens=record.num_tokens + BLOCK_SIZE),
    "less is projected than is left out": lambda record: replace(record, num_tokens=0),
    "a block too many is written": lambda record: replace(record, num_written=record.num_written + 1),
    "the inputs are forgotten": lambda record: replace(record, num_inputs=0),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_plan_is_found_out(monkeypatch, mistake):
    with pytest.raises(InvariantError):
        mistaken(monkeypatch, MISTAKES[mistake])


def test_copies_of_inputs_that_fail_end_those_whose_inputs_they_are(monkeypatch):
    with failing_copies("copy_rows", 0.002):
        served = serve(monkeypatch, "a part", ROWS)
    check_failures(served, ROWS, "the link is down")


def test_a_pass_that_does_not_fit_is_computed_in_parts(monkeypatch):
    right = Decoder.forward

    def small_memory(self, token_ids, *rest, **named):
        if len(token_ids) > 2 and len(token_ids) < 12:
            raise torch.OutOfMemoryError("tried to allocate too much")
        return right(self, token_ids, *rest, **named)

    monkeypatch.setattr(Decoder, "forward", small_memory)
    served = serve(monkeypatch, "a part")
    monkeypatch.undo()
    assert len(live.check_tokens(served, requests(*GROWING))) == len(GROWING)


def test_memory_that_runs_out_between_the_layers_leaves_no_copy_behind(monkeypatch):
    with running_out(DecoderLayer, "restore_kv", 0.05):
        served = serve(monkeypatch, "a part")
    check_failures(served, GROWING, "out of memory")
