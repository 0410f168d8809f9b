"""Chunks of conversations on GPU and host (Pensieve) change no token: whatever is hit with gaps, dropped or lost."""

import pytest
import test_runtime_prefix_ids as prefix_ids
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_mistakes import misled
from runtime_turns import converse
from runtime_variants import RETAINED, policy_of
from test_runtime_host_tier import ROWS, spread, turns

from gpu_runtime.kv.block_ids import OutOfBlocks
from kvtwin.testing import live, requests
from kvtwin.testing.live import ALIKE, alike, tight_limits
from sim.engine.changes import Drop, Evict, Hit, Keep, Load, Move, Place, Release, Store, Tier
from sim.errors import InvariantError
from sim.kv.index.retained_chunks import ChunkStore


def serve(variant, arrivals, **sizes):
    options = {name: sizes.pop(name) for name in ("kind", "inline_copies") if name in sizes}
    policy = policy_of(variant)
    # Room for most of what comes again: however fast requests are served, some of it is hit and some given up.
    return live.serve(policy, arrivals, tight_limits(policy, **{"gpu": 18, "host": 40, **sizes}), **options)


@pytest.mark.usefixtures("worthwhile")
@pytest.mark.parametrize(("variant", "chunked"), [*zip(RETAINED, (False, True, True), strict=True)])
def test_tokens_are_those_of_each_request_alone(variant, chunked):
    """The beginning of a conversation is dropped first: gaps are computed between what is hit."""
    arrivals = spread(ALIKE * 2)
    served = serve(variant, arrivals, chunked=chunked)
    assert len(live.check_tokens(served, arrivals)) == len(arrivals)
    tier = served.counters.tiers["host"]
    assert min(tier.hit_tokens, tier.num_loads, tier.stored_blocks, tier.evicted_blocks) > 0
    assert served.counters.policy["refilled_tokens"] > 0
    assert any(len({chunk.seq for chunk in plan.chunks}) < len(plan.chunks) for plan, _, _ in served.plans)


@settings(max_examples=16, deadline=None)
@given(
    variant=st.sampled_from(RETAINED),
    rows=ROWS, gap_s=st.sampled_from([0.0, 0.005, 0.02]), gpu=st.integers(17, 40), host=st.sampled_from([0, 2, 5, 30]),
    seqs=st.sampled_from([2, 5]), chunked=st.booleans(), kinds=st.integers(1, 3), common=st.integers(1, 8),
    inline=st.booleans(),
)  # fmt: skip
def test_no_workload_finds_a_token_that_a_chunk_changes(variant, rows, gap_s, kinds, common, inline, **sizes):
    arrivals = alike(requests(*((i * gap_s, *row[1:]) for i, row in enumerate(rows))), kinds, common)
    served = serve(variant, arrivals, inline_copies=inline, **sizes)
    assert len(live.check_tokens(served, arrivals)) == len(arrivals)


@pytest.mark.usefixtures("worthwhile")
@pytest.mark.parametrize("variant", RETAINED)
def test_the_next_turn_hits_what_was_really_said(variant):
    policy = policy_of(variant)
    held = converse(policy, tight_limits(policy, gpu=17, host=40), turns())
    assert held.asked[2][:22] == held.asked[0] + held.said[0]
    # All five blocks with KV of the first turn: on the GPU, on the host, or partly dropped.
    cached = {seq.request.request_id: seq.num_cached_tokens for seq in held.ended}[2]
    tier = held.engine.scheduler.counters.tiers["host"]
    assert 0 < tier.hit_tokens <= cached <= 20
    memory, store = held.device.memory, held.engine.scheduler.memory.store
    on_host = [chunk.key for chunk in store.chunks.values() if chunk.on_host]
    assert memory.placement.hosted.num_blocks == len(on_host) > 0
    # Nothing but these is left of the host's blocks, and on the GPU nothing but what is cached.
    assert memory.placement.host.num_blocks - memory.placement.host.num_free == len(on_host)
    assert memory.placement.cached.num_blocks == sum(chunk.on_gpu for chunk in store.chunks.values())


# -- a wrong plan ------------------------------------------------------------------------------------------------------

MISTAKES = {
    "a hit is not said": lambda c: None if isinstance(c, Hit) else c,
    "what comes back is not said": lambda c: None if isinstance(c, Load) else c,
    "what stays is not said": lambda c: None if isinstance(c, Keep) else c,
    "what is given up is not said": lambda c: None if isinstance(c, Evict) else c,
    "what leaves for the host is not said": lambda c: None if isinstance(c, Store) else c,
    "what is given up there is not said": lambda c: None if isinstance(c, Drop) else c,
}


@pytest.mark.usefixtures("worthwhile")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_plan_is_found_out(mistake):
    def check(kind):
        live.check_tokens(serve(RETAINED[0], spread(ALIKE * 2), kind=kind), spread(ALIKE * 2))

    # Whose hit is not said may have as many blocks, and wrong tokens.
    with pytest.raises((AssertionError, InvariantError, OutOfBlocks)):
        misled(check, "changes", MISTAKES[mistake])


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("worthwhile")
def test_copies_of_what_has_to_give_way_are_waited_for(monkeypatch):
    """To take the block of a chunk on its way to the host would overwrite what is copied."""
    lost, right = [], ChunkStore._leave_gpu

    def leave(self, chunk):
        lost.extend([chunk] if chunk.is_leaving else [])
        right(self, chunk)

    monkeypatch.setattr(ChunkStore, "_leave_gpu", leave)
    arrivals = spread(ALIKE * 3, gap_s=0.0)
    served = serve(RETAINED[0], arrivals, gpu=17, host=60, seqs=3)
    assert lost
    assert len(live.check_tokens(served, arrivals)) == len(arrivals)


# -- facts one by one --------------------------------------------------------------------------------------------------


class Facts(prefix_ids.Facts):
    """A placement of eight blocks on the GPU and four on the host, of which a conversation's four chunks have seven."""

    def __init__(self):
        super().__init__(host=4)
        self.a, self.b = (self.seq(name) for name in "ab")
        self.replay(Place(self.a, (0,), 4, 0))
        self.placement.prefixes.computed([(self.a, 0, 16)])
        self.own = list(self.placement.held[self.a].gpu[0])
        self.replay(*(Keep(self.a, i, 1, f"chunk {i}") for i in range(4)), Release(self.a))

    def save(self, *places):
        runs = tuple(f"chunk {i}" for i in places)
        self.replay(Store(self.a, places, tuple(70 + i for i in places), runs))
        return Move(self.a, (0,), 4 * places[0], 4 * places[-1] + 4, Tier.GPU, Tier.HOST, len(places), 0, True)
