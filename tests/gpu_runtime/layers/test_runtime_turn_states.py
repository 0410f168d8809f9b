"""HCache over turns, live: a turn's states stay on the host, the next turn's KV is made from them, no token changes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_mistakes import LESS_RESTORED, failing_copies, misled, running_out
from runtime_turns import converse
from runtime_variants import policy_of
from test_runtime_host_tier import ROWS, spread, turns
from test_runtime_saved_states import SPLIT, SPLITS, STATE, check_host_memory

from gpu_runtime.device import TorchDevice
from gpu_runtime.layers.saved_states import TurnStates
from gpu_runtime.model.decoder import Decoder, DecoderLayer
from kvtwin.testing import live, requests
from kvtwin.testing.live import ALIKE, BLOCK_SIZE, alike, tight_limits
from sim.cost.restoring import LayerSplit, state_share
from sim.engine.changes import Load, Restore, Store
from sim.errors import InvariantError
from sim.systems.hcache import saved_states
from sim.systems.hcache.saved_states import TieredStates

TURNS = "hcache:keeps=turns"
MIXES = [TURNS, "sarathi:memory=tiered-states", "vllm-v1:memory=tiered-states"]


def split_so(patch, split):
    """Layers are restored so, and restores are always worth it: what they take is not the question here."""
    share = state_share(split, BLOCK_SIZE, STATE)
    patch.setattr(saved_states, "split_of", lambda deployment, limits: (split, share, STATE))
    patch.setattr(TieredStates, "_restore_s", lambda self, places: 0.0)


def serve(patch, split=SPLIT, arrivals=None, variant=TURNS, **sizes):
    split_so(patch, split)
    options = {name: sizes.pop(name) for name in ("kind", "inline_copies") if name in sizes}
    policy = policy_of(variant)
    limit = tight_limits(policy, **{"gpu": 18, "host": 90, **sizes})
    return live.serve(policy, arrivals or spread(ALIKE), limit, **options)


def restores(served):
    return [change for plan, _, _ in served.plans for change in plan.changes if isinstance(change, Restore)]


@pytest.mark.parametrize(
    ("split", "chunked", "variant"), [(split, i % 2 > 0, MIXES[i % 3]) for i, split in enumerate(SPLITS)]
)
def test_tokens_are_those_of_each_request_alone(monkeypatch, split, chunked, variant):
    served = serve(monkeypatch, split, variant=variant, chunked=chunked)
    assert len(live.check_tokens(served, spread(ALIKE))) == len(ALIKE)
    tier, found = served.counters.tiers["host"], restores(served)
    assert min(tier.hit_tokens, tier.stored_blocks) > 0
    assert tier.num_loads >= len(found) > 0
    recomputed, hidden, _ = split
    if hidden:
        assert {(len(each.recomputed_groups), len(each.hidden_groups)) for each in found} == {(recomputed, hidden)}
    assert not any(plan.beside for plan, _, _ in served.plans)


@settings(max_examples=18, deadline=None)
@given(
    variant=st.sampled_from(MIXES),
    rows=ROWS, split=st.sampled_from([*SPLITS, SPLIT]), gap_s=st.sampled_from([0.0, 0.005, 0.02]),
    gpu=st.integers(17, 40), host=st.sampled_from([0, 40, 60, 90]), seqs=st.sampled_from([2, 5]), chunked=st.booleans(),
    kinds=st.integers(1, 3), common=st.integers(1, 8), inline=st.booleans(),
)  # fmt: skip
def test_no_workload_finds_a_token_that_a_split_changes(variant, rows, split, gap_s, kinds, common, inline, **sizes):
    arrivals = alike(requests(*((i * gap_s, *row[1:]) for i, row in enumerate(rows))), kinds, common)
    with pytest.MonkeyPatch.context() as patch:
        served = serve(patch, split, arrivals, variant, inline_copies=inline, **sizes)
    assert len(live.check_tokens(served, arrivals)) == len(arrivals)


@pytest.mark.parametrize(("variant", "split"), [*zip(MIXES, (SPLIT, SPLITS[1], SPLITS[4]), strict=True)])
def test_the_next_turn_is_made_from_what_was_really_said(monkeypatch, variant, split):
    split_so(monkeypatch, split)
    policy = policy_of(variant)
    held = converse(policy, tight_limits(policy, gpu=17, host=90), turns())
    assert held.asked[2][:22] == held.asked[0] + held.said[0]
    assert {seq.request.request_id: seq.num_cached_tokens for seq in held.ended}[2] == 20
    assert 12 <= held.engine.scheduler.counters.tiers["host"].hit_tokens <= 20
    # Five blocks of the first turn, 14 of the other's, two that were new in the second.
    placement = held.device.memory.placement
    assert placement.hosted.num_blocks == 5 + 14 + 2
    # Beside them the host has states of what the GPU holds alone, not more.
    assert placement.host.num_blocks - placement.host.num_free <= 17 + placement.hosted.num_blocks


@pytest.mark.parametrize("split", [SPLITS[1], SPLITS[5]], ids=str)
def test_states_take_the_host_memory_that_was_given(monkeypatch, split):
    check_host_memory(lambda kind: serve(monkeypatch, split, gpu=20, host=60, kind=kind))


# -- a wrong plan ------------------------------------------------------------------------------------------------------


def mistaken(monkeypatch, part, wrong):
    """Serve with a mistake in every plan that it fits; in how many."""
    return misled(lambda kind: serve(monkeypatch, kind=kind), part, wrong)


MISTAKES = LESS_RESTORED | {
    "what comes back is not said": ("changes", lambda c: None if isinstance(c, Load) else c),
    "nothing is kept": ("changes", lambda c: None if isinstance(c, Store) else c),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_plan_is_found_out(monkeypatch, mistake):
    with pytest.raises((InvariantError, KeyError)):
        mistaken(monkeypatch, *MISTAKES[mistake])


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [SPLIT, LayerSplit(0, 2, 2), LayerSplit(0, 0, 4)], ids=str)
def test_states_that_cannot_be_copied_are_computed_and_end_nothing(monkeypatch, split):
    arrivals = spread(ALIKE * 2)
    with failing_copies("copy_rows", 0.1):
        served = serve(monkeypatch, split, arrivals, kind=TorchDevice)
    assert len(live.check_tokens(served, arrivals)) == len(arrivals)
    assert served.device.memory.placement.states.lost
    assert restores(served)


def test_a_restore_for_which_there_is_no_memory_is_computed(monkeypatch):
    arrivals, failed, right = spread(ALIKE * 2), [], TurnStates.failed
    monkeypatch.setattr(TurnStates, "failed", lambda self, *why: failed.append(why) or right(self, *why))
    with running_out(DecoderLayer, "restore_kv", 0.3):
        served = serve(monkeypatch, arrivals=arrivals)
    assert len(live.check_tokens(served, arrivals)) == len(arrivals)
    assert failed and all("out of memory" in reason for _, reason in failed)


def test_what_ran_out_of_memory_is_no_sequence_s_state(monkeypatch):
    arrivals = spread(ALIKE * 2)
    with running_out(Decoder, "forward", 0.3):
        served = serve(monkeypatch, arrivals=arrivals, kind=TorchDevice)
    assert 0 < len(live.check_tokens(served, arrivals)) < len(arrivals)
    assert restores(served)
