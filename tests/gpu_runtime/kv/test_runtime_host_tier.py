"""KV of ended turns on the host changes no token: whatever is saved, given up, loaded layer by layer or lost."""

import random

import pytest
import test_runtime_prefix_ids as prefix_ids
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_mistakes import running_out
from runtime_turns import converse
from runtime_variants import RETAINED, TIERED, policy_of

from gpu_runtime.device import TorchDevice
from gpu_runtime.kv.copies import KVCopies
from gpu_runtime.kv.copy_engine import CopyEngine
from gpu_runtime.kv.replay.hosted_blocks import HostedBlocks
from gpu_runtime.layers.layer_pass import LayerPass
from gpu_runtime.model.decoder import Decoder
from kvtwin.testing import live, requests
from kvtwin.testing.live import ALIKE, SMALL, alike, tight_limits
from sim.engine.changes import Drop, Load, Move, Place, Store, Tier
from sim.errors import InvariantError, UserError
from traces.request import Request


def spread(rows, gap_s=0.02):
    """The requests, one after the other, of so many kinds that the GPU has given up one's blocks when it comes again.

    However fast they are served: what ends is saved while others come, or beside none.
    """
    return alike(requests(*((i * gap_s, prompt, output) for i, (_, prompt, output) in enumerate(rows))), kinds=6)


@pytest.mark.usefixtures("worthwhile")
@pytest.mark.parametrize(("variant", "chunked"), [(variant, i > 0) for i, variant in enumerate(TIERED)])
def test_tokens_are_those_of_each_request_alone(variant, chunked):
    policy, arrivals = policy_of(variant), spread(ALIKE)
    served = live.serve(policy, arrivals, tight_limits(policy, chunked=chunked, gpu=18, host=40))
    assert len(live.check_tokens(served, arrivals)) == len(arrivals)
    tier = served.counters.tiers["host"]
    assert min(tier.hit_tokens, tier.num_loads, tier.stored_blocks, tier.evicted_blocks) > 0
    # What the plans said was loaded is what the device has copied; each of the model's layers apart.
    assert tier.hit_tokens <= served.counters.prefix_hit_tokens + served.counters.prefix_rehit_tokens


ROWS = st.lists(st.tuples(st.just(0.0), st.integers(1, 30), st.integers(1, 24)), min_size=2, max_size=12)


@settings(max_examples=16, deadline=None)
@given(
    variant=st.sampled_from(TIERED),
    rows=ROWS, gap_s=st.sampled_from([0.0, 0.005, 0.02]), gpu=st.integers(17, 40), host=st.sampled_from([0, 5, 30]),
    seqs=st.sampled_from([2, 5]), chunked=st.booleans(), kinds=st.integers(1, 3), common=st.integers(1, 8),
    inline=st.booleans(),
)  # fmt: skip
def test_no_workload_finds_a_token_that_the_host_changes(
    variant, rows, gap_s, gpu, host, seqs, chunked, kinds, common, inline
):
    policy = policy_of(variant)
    arrivals = alike(requests(*((i * gap_s, *row[1:]) for i, row in enumerate(rows))), kinds, common)
    limit = tight_limits(policy, gpu=gpu, host=host, seqs=seqs, chunked=chunked)
    live.check_tokens(live.serve(policy, arrivals, limit, inline_copies=inline), arrivals)


@pytest.mark.usefixtures("worthwhile")
def test_a_layer_waits_for_its_own_blocks_alone(monkeypatch):
    """CachedAttention section 3.2.1: while layer l computes, the layers behind it may still be on their way."""
    order, right = [], KVCopies.wait_in_stream

    def by_layer(self, *copies):
        handles = started(self, *copies)
        assert len(handles) == SMALL.num_layers
        order.append(("start", handles))
        return handles

    def waits(self, seqs, handle):
        order.append(("wait", handle))
        return right(self, seqs, handle)

    started, before = KVCopies.start_by_layer, LayerPass._before_layer

    def enters(self, layer):
        before(self, layer)
        order.append(("compute", layer))

    monkeypatch.setattr(KVCopies, "start_by_layer", by_layer)
    monkeypatch.setattr(KVCopies, "wait_in_stream", waits)
    monkeypatch.setattr(LayerPass, "_before_layer", enters)
    policy, arrivals = policy_of(TIERED[0]), spread(ALIKE)
    live.serve(policy, arrivals, tight_limits(policy, gpu=18, host=40))
    starts = [i for i, (what, _) in enumerate(order) if what == "start"]
    assert starts
    for i in starts:
        handles = order[i][1]
        steps = [step for layer, handle in enumerate(handles) for step in (("wait", handle), ("compute", layer))]
        assert order[i + 1 : i + 1 + len(steps)] == steps


# -- conversations ---------------------------------------------------------------------------------------------------


def turns():
    """A conversation of two turns, 10 + 12 and 26 + 5 tokens in blocks of 4, and one that takes the GPU's blocks
    between them."""
    ids = tuple(range(50, 57))
    first = Request(0, 0.0, 10, 12, "s", ids[:3], 4, ids[3:6])
    other = Request(1, 0.05, 40, 20, "t", tuple(range(200, 210)), 4, ())
    return [first, other, Request(2, 0.6, 26, 5, "s", ids[:7], 4, ())]


@pytest.mark.usefixtures("worthwhile")
@pytest.mark.parametrize("variant", TIERED)
def test_the_next_turn_loads_what_was_really_said(variant):
    policy = policy_of(variant)
    held = converse(policy, tight_limits(policy, gpu=17, host=40), turns())
    assert held.asked[2][:22] == held.asked[0] + held.said[0]
    # 21 of the first turn's 22 tokens have KV: five blocks, of prompt and answer. The other has left one on the GPU
    # at most: it took 15 of 17 blocks.
    assert {seq.request.request_id: seq.num_cached_tokens for seq in held.ended}[2] == 20
    assert 12 <= held.engine.scheduler.counters.tiers["host"].hit_tokens <= 20
    # Of 59 tokens with KV the other has saved 14 blocks, the second turn of 30 the two that were new.
    assert held.device.memory.placement.hosted.num_blocks == 5 + 14 + 2


# -- failures ----------------------------------------------------------------------------------------------------------


def failing(monkeypatch, method, chance):
    """Copies of some kind go wrong now and then, and leave nonsense where they were to write."""
    dice, right, failed = random.Random(1), getattr(CopyEngine, method), []

    def sometimes(self, src_pool, src_ids, dst_pool, dst_ids, *rest):
        handle = right(self, src_pool, src_ids, dst_pool, dst_ids, *rest)
        if dice.random() < chance:
            handle.wait()
            for block in dst_ids:
                dst_pool.data[block].fill_(1e4)
            handle.finish(RuntimeError("the link is down"))
            failed.append(handle)
        return handle

    monkeypatch.setattr(CopyEngine, method, sometimes)
    return failed


def serve_unchecked(variant):
    """Serve so much that most of what comes again is on the host; plans do not know of copies that fail."""
    policy, arrivals = policy_of(variant), spread(ALIKE * 2)
    limit = tight_limits(policy, gpu=18, host=40 if variant in RETAINED else 60)
    return live.serve(policy, arrivals, limit, kind=TorchDevice), arrivals


@pytest.mark.usefixtures("worthwhile")
@pytest.mark.parametrize("variant", [TIERED[0], RETAINED[0]])
def test_what_could_not_be_saved_is_computed_again(variant, monkeypatch):
    failing(monkeypatch, "copy_blocks", 0.5)
    right, missed = HostedBlocks.load, []

    def load(self, load, ids):
        found = right(self, load, ids)
        missed.extend(found)
        return found

    monkeypatch.setattr(HostedBlocks, "load", load)
    served, arrivals = serve_unchecked(variant)
    monkeypatch.undo()
    assert missed
    assert len(live.check_tokens(served, arrivals)) == len(arrivals)


@pytest.mark.usefixtures("worthwhile")
@pytest.mark.parametrize("variant", [TIERED[0], RETAINED[0]])
def test_a_load_that_fails_ends_what_reads_it_and_nothing_else(variant, monkeypatch):
    failed = failing(monkeypatch, "copy_layer", 0.1)
    served, arrivals = serve_unchecked(variant)
    monkeypatch.undo()
    completed = live.check_tokens(served, arrivals)
    errors = [seq.error for seq in served.ended if seq.error]
    assert failed
    assert 0 < len(errors) < len(arrivals) == len(completed) + len(errors)
    assert all("the link is down" in error for error in errors)


def test_a_disk_below_the_host_is_refused_by_name():
    policy = policy_of("cachedattention:disk-space=1")
    with pytest.raises(UserError, match="disk-space"):
        live.serve(policy, [], tight_limits(policy))


# -- facts one by one --------------------------------------------------------------------------------------------------


class Facts(prefix_ids.Facts):
    """A placement of eight blocks on the GPU and four on the host."""

    def __init__(self):
        super().__init__(host=4)

    def save(self, name, places, keys, written=12):
        seq = self.seq(name)
        self.placement.prefixes.computed([(seq, 0, written)])
        self.replay(Store(seq, places, keys))
        first, end = places[0] * 4, (places[-1] + 1) * 4
        return self.placement.begin(Move(seq, (0,), first, end, Tier.GPU, Tier.HOST, len(places), 3, True))


@pytest.mark.usefixtures("worthwhile")
def test_what_ran_out_of_memory_is_not_kept_on_the_host():
    policy, arrivals = policy_of(TIERED[0]), spread(ALIKE * 2)
    with running_out(Decoder, "forward", 0.3):
        served = live.serve(policy, arrivals, tight_limits(policy, gpu=18, host=60), kind=TorchDevice)
    completed = live.check_tokens(served, arrivals)
    assert 0 < len(completed) < len(arrivals)
    assert served.counters.tiers["host"].num_loads > 0


@pytest.mark.parametrize(
    "changes",
    [lambda a: [Store(a, (0,), (70,)), Store(a, (1,), (70,))], lambda a: [Load(a, 0, (70,))], lambda a: [Drop((70,))]],
)
def test_facts_that_cannot_be_are_refused(changes):
    facts = Facts()
    a = facts.seq("a")
    facts.replay(Place(a, (0,), 3, 0))
    with pytest.raises(InvariantError, match=r"have blocks there|is not there"):
        facts.replay(*changes(a))
