"""eLLM live: uncached KV is computed again or copied in between the layers of every decode, and no token changes."""

import random
from itertools import repeat
from math import inf

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from runtime_mistakes import check_failures, failing_copies, misled, running_out
from runtime_variants import CONTIGUOUS, WORKLOADS, policy_of

from gpu_runtime import device_memory
from gpu_runtime.kv.block_ids import OutOfBlocks
from gpu_runtime.layers.uncached_tokens import RebuildingPass, UncachedTokens
from gpu_runtime.model.decoder import DecoderLayer
from kvtwin.testing import live, requests
from kvtwin.testing.live import BLOCK_SIZE, GROWING, CheckedDevice, small_decoder, tight_limits
from sim.engine.changes import Rebuilt, Uncache
from sim.errors import InvariantError
from sim.systems.ellm.batch_and_ratio import BatchAndRatio
from sim.systems.ellm.equations import CONFIGURATIONS
from sim.systems.ellm.solver import Batch

SOME = GROWING[:7]
LAYERS = 16
"""Of the decoder: more than the widest configuration has in scratch."""


def serve(monkeypatch, choices, rows=SOME, *, layers_per_block=2, blind=False, **sizes):
    """Serve with the first feasible configuration and the least ratio of those that `choices` gives, step by step.

    Where `blind`, they are chosen as if the host had room for everything.
    """
    kind, inline = sizes.pop("kind", CheckedDevice), sizes.pop("inline", True)

    def choose(self, lengths, budget_s, first):
        configurations, least = next(choices)
        self.room = self.token_wise.room._replace(least_ratio=least)
        if blind:
            self.room = self.room._replace(host_tokens=inf)
        batch = Batch(lengths, self.memory.block_size)
        found = (self._largest(batch, budget_s, first, configuration) for configuration in configurations)
        return next(filter(None, found), None)

    monkeypatch.setattr(BatchAndRatio, "_best", choose)
    # Not 0, so that it is chosen in every step.
    text = f"{CONTIGUOUS},layers-per-block={layers_per_block},tpot-slo-ms=1e8,least-uncached-ratio=1e-9"
    policy, decoder = policy_of(text), small_decoder(num_layers=LAYERS)
    limit = tight_limits(policy, **({"gpu": 20, "host": 200} | sizes))
    return live.serve(policy, requests(*rows), limit, kind=kind, inline_copies=inline, decoder=decoder)


def at_random(seed):
    """A configuration that often stays, and a least ratio that often is 0."""
    dice = random.Random(seed)
    configuration = CONFIGURATIONS[0]
    while True:
        if dice.random() < 0.3:
            configuration = dice.choice(CONFIGURATIONS)
        yield (configuration, *CONFIGURATIONS), dice.choice((0.0, 0.0, dice.random(), 1.0))


def records(served):
    return [record for plan, _, _ in served.plans for record in plan.streamed if isinstance(record, Rebuilt)]


@pytest.mark.parametrize(
    ("configuration", "least"), [(one, (0.0, 0.3, 1.0)[i % 3]) for i, one in enumerate(CONFIGURATIONS)]
)
def test_uncached_tokens_come_back_in_every_configuration(monkeypatch, configuration, least):
    served = serve(monkeypatch, repeat(((configuration,), least)))
    assert len(live.check_tokens(served, requests(*SOME))) == len(SOME)
    found = records(served)
    assert len(found) > 30
    assert {record.recomputed for record in found} == {tuple(range(configuration.recomputed_layers(LAYERS)))}
    hosted = -((LAYERS - configuration.recomputed_layers(LAYERS)) // -2)
    for record in found:
        assert record.num_read == sum(tokens // BLOCK_SIZE for _, tokens in record.tokens) * hosted


def test_those_that_compute_again_go_together_as_long_as_they_fit(monkeypatch):
    """As many tokens as a prompt may have; a sequence with more goes alone."""
    parts, together, most = [], RebuildingPass._together, 48
    most_again = max(CONFIGURATIONS, key=lambda one: one.recomputed_layers(LAYERS))

    def noted(self, members):
        parts.append([self._tokens[member.seq] for member in members])
        return together(self, members)

    class Small(UncachedTokens):
        def __init__(self, placement, copies, layer_group, budget):
            super().__init__(placement, copies, layer_group, most)

    monkeypatch.setattr(RebuildingPass, "_together", noted)
    monkeypatch.setattr(device_memory, "UncachedTokens", Small)
    served = serve(monkeypatch, repeat(((most_again,), 1.0)), SOME[:6])
    assert len(live.check_tokens(served, requests(*SOME[:6]))) == 6
    assert all(len(part) == 1 or sum(part) <= most for part in parts)
    assert any(len(part) > 1 for part in parts) and any(sum(part) == most for part in parts if len(part) > 1)
    passes = [[tokens for _, tokens in record.tokens] for record in records(served)]
    assert sum(map(len, passes)) == sum(map(len, parts))
    assert len(parts) > len([tokens for tokens in passes if tokens])


@pytest.mark.parametrize("seed", range(3))
def test_both_may_change_in_every_step(monkeypatch, seed):
    served = serve(monkeypatch, at_random(seed))
    assert len(live.check_tokens(served, requests(*SOME))) == len(SOME)
    found = records(served)
    assert len({record.recomputed for record in found}) > 1
    assert any(record.num_written for record in found)
    left = [change for plan, _, _ in served.plans for change in plan.changes if isinstance(change, Uncache)]
    assert any(change.num_blocks for change in left)
    # Some become cached again, all of them or a part.
    pairs = [pair for record in found for pair in zip(record.tokens, record.after, strict=True)]
    kept = [(tokens, after.num_tokens) for (_, tokens), after in pairs]
    assert any(tokens > after == 0 for tokens, after in kept)
    assert any(tokens > after > 0 for tokens, after in kept)


def test_what_the_host_has_no_room_for_is_computed_again(monkeypatch):
    served = serve(monkeypatch, at_random(0), host=14, blind=True)
    assert len(live.check_tokens(served, requests(*SOME))) == len(SOME)
    own = {configuration.recomputed_layers(LAYERS) for configuration in CONFIGURATIONS}
    assert any(len(record.recomputed) not in own for record in records(served))


@settings(max_examples=10, deadline=None)
@given(
    rows=WORKLOADS,
    seed=st.integers(0, 2**16),
    gpu=st.integers(17, 30),
    host=st.sampled_from([14, 30, 80]),
    seqs=st.sampled_from([2, 5]),
    inline=st.booleans(),
    layers_per_block=st.sampled_from([1, 2, 4, 16]),
    blind=st.booleans(),
)
def test_no_workload_finds_a_token_that_is_changed(rows, seed, **sizes):
    with pytest.MonkeyPatch.context() as patch:
        served = serve(patch, at_random(seed), rows, **sizes)
    live.check_tokens(served, requests(*rows))


# -- plans that are wrong, machines that fail -------------------------------------------------------------------------


def rebuilt(**changes):
    def change(record):
        return replace(record, **{name: value(record) for name, value in changes.items()})

    return "streamed", change


def uncached(**changes):
    def change(item):
        if not isinstance(item, Uncache) or not item.num_blocks:
            return item
        return replace(item, **{name: value(item) for name, value in changes.items()})

    return "changes", change


MISTAKES = {
    "a layer too few computes again": rebuilt(recomputed=lambda r: r.recomputed[:-1]),
    "too many layers compute again": rebuilt(recomputed=lambda r: tuple(range(len(r.recomputed) + 2))),
    "layers between copied ones compute again": rebuilt(recomputed=lambda r: tuple(range(0, 2 * len(r.recomputed), 2))),
    "fewer tokens come back": rebuilt(tokens=lambda r: tuple((seq, tokens - 1) for seq, tokens in r.tokens)),
    "no sequence's tokens come back": rebuilt(tokens=lambda r: ()),
    "a block too many is read": rebuilt(num_read=lambda r: r.num_read + 1),
    "a block too many is written": rebuilt(num_written=lambda r: r.num_written + 1),
    "all stay uncached": rebuilt(
        after=lambda r: tuple(replace(a, num_tokens=n) for a, (_, n) in zip(r.after, r.tokens, strict=True))
    ),
    "nothing comes back": ("streamed", lambda record: None),
    "a block too few leaves": uncached(num_blocks=lambda c: c.num_blocks - 1),
    "a layer group too few leaves": uncached(groups=lambda c: c.groups[1:]),
    "a block fewer is uncached": uncached(num_tokens=lambda c: c.num_tokens - BLOCK_SIZE),
    "there is no scratch": uncached(num_scratch=lambda c: 0),
    "nothing leaves": ("changes", lambda c: None if isinstance(c, Uncache) else c),
    "a block too few leaves behind a prompt": ("behind", lambda move: replace(move, num_blocks=move.num_blocks - 1)),
    "nothing leaves behind a prompt": ("behind", lambda move: None),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_plan_is_found_out(monkeypatch, mistake):
    with pytest.raises((InvariantError, KeyError, OutOfBlocks)):
        misled(lambda kind: serve(monkeypatch, at_random(1), kind=kind), *MISTAKES[mistake])


def test_copies_that_fail_end_those_whose_kv_they_carry(monkeypatch):
    with failing_copies("copy_blocks", 0.01):
        served = serve(monkeypatch, at_random(2), inline=False)
    check_failures(served, SOME, "the link is down")


def test_a_pass_that_does_not_fit_is_computed_in_parts(monkeypatch):
    right = DecoderLayer.attend

    def small_memory(self, hidden, *rest, **named):
        if len(hidden) > 60:
            raise torch.OutOfMemoryError("tried to allocate too much")
        return right(self, hidden, *rest, **named)

    monkeypatch.setattr(DecoderLayer, "attend", small_memory)
    served = serve(monkeypatch, repeat((CONFIGURATIONS[:1], 1.0)))
    assert len(live.check_tokens(served, requests(*SOME))) == len(SOME)


def test_memory_that_runs_out_between_the_layers_leaves_no_copy_behind(monkeypatch):
    with running_out(DecoderLayer, "restore_kv", 0.1):
        served = serve(monkeypatch, at_random(3), inline=False)
    check_failures(served, SOME, "out of memory")
