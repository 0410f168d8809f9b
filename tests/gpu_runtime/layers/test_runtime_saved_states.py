"""HCache live: states leave behind every layer, KV comes back from them in three ways, and no token changes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from runtime_mistakes import LESS_RESTORED, check_failures, failing_copies, misled, running_out
from runtime_variants import WORKLOADS, policy_of

from gpu_runtime.model.decoder import DecoderLayer
from kvtwin.testing import live, requests
from kvtwin.testing.live import BLOCK_SIZE, GROWING, ROWS, SMALL, CheckedDevice, tight_limits
from sim.cost.restoring import LayerSplit, StateBytes, state_share
from sim.engine.changes import Move, Restore, Save
from sim.errors import InvariantError
from sim.systems.hcache import saved_states

STATE = StateBytes(SMALL.hidden_size * 4.0, BLOCK_SIZE * 2 * SMALL.kv_size * 4.0)
"""Bytes of the small decoder's hidden state of a token, and of a block of KV of a layer."""
SPLITS = [LayerSplit(*split) for split in ((0, 4, 0), (2, 2, 0), (1, 3, 0), (0, 2, 2), (0, 1, 3), (0, 0, 4))]
SPLIT = LayerSplit(1, 2, 1)


def serve(monkeypatch, split, rows=GROWING, **sizes):
    """Serve where layers are split so."""
    kind, inline = sizes.pop("kind", CheckedDevice), sizes.pop("inline", False)
    share = state_share(split, BLOCK_SIZE, STATE)
    monkeypatch.setattr(saved_states, "split_of", lambda deployment, limits: (split, share, STATE))
    policy = policy_of(sizes.pop("policy", "hcache"))
    return live.serve(policy, requests(*rows), tight_limits(policy, **sizes), kind=kind, inline_copies=inline)


def restores(served):
    return [change for plan, _, _ in served.plans for change in plan.changes if isinstance(change, Restore)]


@pytest.mark.parametrize(("split", "chunked"), [(split, i % 2 > 0) for i, split in enumerate(SPLITS)])
def test_victims_come_back_from_their_states(monkeypatch, split, chunked):
    served = serve(monkeypatch, split, gpu=20, chunked=chunked)
    assert len(live.check_tokens(served, requests(*GROWING))) == len(GROWING)
    found = restores(served)
    assert len(found) > 3
    recomputed, hidden, copied = split
    for restore in found if hidden else ():
        assert len(restore.recomputed_groups) == recomputed
        assert len(restore.hidden_groups) == hidden
        assert len(restore.kv_groups) == copied
    assert all(move.num_blocks == 0 for plan, _, _ in served.plans for move in plan.changes if isinstance(move, Move))


@pytest.mark.parametrize("split", [SPLITS[0], SPLITS[3]], ids=str)
def test_a_full_host_lets_some_run_unsaved(monkeypatch, split):
    served = serve(monkeypatch, split, gpu=24, host=12)
    assert len(live.check_tokens(served, requests(*GROWING))) == len(GROWING)
    assert served.counters.policy["unsaved"] > 0


@settings(max_examples=15, deadline=None)
@given(
    rows=WORKLOADS,
    split=st.sampled_from(SPLITS),
    gpu=st.integers(17, 30),
    host=st.sampled_from([0, 9, 80]),
    chunked=st.booleans(),
    seqs=st.sampled_from([2, 5]),
    inline=st.booleans(),
    policy=st.sampled_from(["hcache", "hcache:eviction=recompute", "hcache:batching=sarathi"]),
)
def test_no_workload_finds_a_token_that_a_split_changes(rows, split, **sizes):
    with pytest.MonkeyPatch.context() as patch:
        served = serve(patch, split, rows, **sizes)
    assert len(live.check_tokens(served, requests(*rows))) == len(rows)


def check_host_memory(serve):
    """States take what the policy counts, in whole blocks, and nothing when the device is closed; 60 blocks."""
    sizes = []

    class Measured(CheckedDevice):
        def close(self):
            states = self.memory.states
            sizes.append(states._inputs.data.nbytes + states._kv.data.nbytes)
            super().close()
            sizes.append(states._inputs.data.nbytes + states._kv.data.nbytes)

    serve(Measured)
    block = SMALL.num_layers * STATE.kv_block
    assert 59 * block < sizes[0] <= 60 * block and sizes[1] == 0


@pytest.mark.parametrize("split", [SPLITS[1], SPLITS[5]], ids=str)
def test_states_take_the_host_memory_that_the_policy_counts(monkeypatch, split):
    check_host_memory(lambda kind: serve(monkeypatch, split, gpu=40, host=60, kind=kind))


def mistaken(monkeypatch, part, wrong):
    """Serve with a mistake in every plan that it fits; in how many."""
    return misled(lambda kind: serve(monkeypatch, SPLIT, gpu=20, kind=kind), part, wrong)


MISTAKES = LESS_RESTORED | {
    "a layer too many is computed again": (
        "changes", lambda c: replace(c, recomputed_groups=(1,)) if isinstance(c, Restore) else c,
    ),
    "nothing comes back": ("changes", lambda c: None if isinstance(c, Restore) else c),
    "nothing is saved": ("changes", lambda c: None if isinstance(c, Save) else c),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_plan_is_found_out(monkeypatch, mistake):
    with pytest.raises((InvariantError, KeyError)):
        mistaken(monkeypatch, *MISTAKES[mistake])


def test_copies_of_states_that_fail_end_those_whose_states_they_are(monkeypatch):
    with failing_copies("copy_rows", 0.01):
        served = serve(monkeypatch, SPLIT, ROWS)
    check_failures(served, ROWS, "the link is down")


def test_a_restore_that_runs_out_of_memory_ends_its_sequence_alone(monkeypatch):
    with running_out(DecoderLayer, "restore_kv", 0.1):
        served = serve(monkeypatch, SPLIT, gpu=20)
    check_failures(served, GROWING, "out of memory")
