"""Drafts on a device: tokens are those of each request alone, and both clocks decide alike on what was accepted."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_variants import WORKLOADS, policy_of

from gpu_runtime.tokens.drafts import Drafts, PromptLookup
from kvtwin.testing import live, requests, simulate
from kvtwin.testing.live import GROWING, CheckedDevice, alike, tight_limits
from sim.engine.acceptance import Acceptance
from sim.engine.sequence import Sequence, Status


class Noting(CheckedDevice):
    """Notes how many drafts behind how many generated tokens of a request were accepted."""

    accepted: dict[tuple[int, int], int]

    def collect(self):
        had = {seq: self.scheduler.num_generated_of(seq) for seq in self._plan.decodes}
        end_s = super().collect()
        self.accepted |= {(s.request.request_id, n): (self._plan.taken or {})[s] - 1 for s, n in had.items()}
        return end_s


class Told(Acceptance):
    """What was noted."""

    def __init__(self, accepted):
        self._accepted = accepted

    def num_accepted(self, seq, num_generated, num_drafted):
        return self._accepted[seq.request.request_id, num_generated]


def shown(plan):
    """What is computed, drafted and taken, by request."""
    drafts = {seq.request.request_id: count for seq, count in plan.drafts.items()}
    chunks = [(chunk.seq.request.request_id, chunk.num_cached, chunk.num_new) for chunk in plan.chunks]
    return [(seq.request.request_id, plan.taken[seq]) for seq in plan.decodes], drafts, chunks


def check(rows, *, tokens=3, caches=False, **sizes):
    """Serve requests that all arrive at once, and simulate them; returns what was served."""
    policy = policy_of(f"vllm-v1:spec-method=ngram,spec-tokens={tokens}")
    arrivals = requests(*((0.0, *row[1:]) for row in rows))
    arrivals = alike(arrivals) if caches else arrivals
    limit = replace(tight_limits(policy, chunked=True, **sizes), enable_prefix_caching=caches)
    Noting.accepted = {}
    served = live.serve(policy, arrivals, limit, kind=Noting)
    completed = live.check_tokens(served, arrivals)
    assert completed == [seq for seq in served.ended if seq.status is Status.FINISHED]
    if not caches:
        # There blocks of answers are named by what these are, which a simulation cannot know.
        plans = []

        def watch(scheduler):
            scheduler.stage.acceptance = Told(Noting.accepted)
            return lambda plan, start_s, times: plans.append(shown(plan))

        simulate(policy, arrivals, limit, observe=watch)
        assert plans == [shown(plan) for plan, _, _ in served.plans]
    return served


@pytest.mark.parametrize(("caches", "gpu"), [(False, 60), (False, 24), (True, 24)])
def test_drafts_are_accepted_where_the_model_repeats_itself_and_members_advance_unevenly(caches, gpu):
    """Enough of them to be evidence: under pools so small that sequences are preempted, and with shared prefixes."""
    rows = [(0.0, prompt, output + 20) for _, prompt, output in GROWING]
    served = check(rows, caches=caches, gpu=gpu, max_model_len=128)
    tally = served.counters.policy
    assert 20 < tally["accepted_tokens"] < tally["drafted_tokens"]
    assert any(len(set((plan.taken or {}).values())) > 1 for plan, _, _ in served.plans)
    assert bool(served.counters.preemptions) is (gpu == 24)


@settings(max_examples=30, deadline=None)
@given(
    rows=WORKLOADS,
    gpu=st.integers(17, 30),
    seqs=st.sampled_from([2, 5]),
    tokens=st.sampled_from([1, 3, 8]),
    caches=st.booleans(),
)
def test_no_workload_finds_a_token_that_drafts_change(rows, gpu, seqs, tokens, caches):
    check(rows, gpu=gpu, seqs=seqs, tokens=tokens, caches=caches)


def test_a_request_that_stops_at_a_token_has_none_that_was_accepted_behind_it():
    """A stop token among accepted drafts: the others are dropped, and blocks are given back."""
    policy, arrivals = policy_of("vllm-v1:spec-method=ngram,spec-tokens=8"), requests((0.0, 9, 60))
    limit = tight_limits(policy, chunked=True, max_model_len=128, gpu=40)
    whole = live.serve(policy, arrivals, limit)
    ends = {}
    count = 0
    for plan, _, _ in whole.plans:
        taken = sum((plan.taken or {}).values()) + (not plan.taken)
        if taken > 2:
            ends[count + 2] = taken
        count += taken
    assert ends

    class Stopping(CheckedDevice):
        stop_at = min(ends)

        def _hear(self, seq, token, is_computed):
            super()._hear(seq, token, is_computed)
            had = len(self.tokens.of(seq)) - seq.request.prompt_tokens
            if had == self.stop_at:
                self.scheduler.truncate(seq, had)

    served = live.serve(policy, arrivals, limit, kind=Stopping)
    assert served.tokens[0] == whole.tokens[0][: Stopping.stop_at]


def test_what_followed_the_last_five_tokens_where_they_stood_first_is_drafted():
    """vLLM's `ngram` by default: 3 4 5 6 7 stood twice before, and 8 9 followed first; 1 is in no such place."""
    lookup, tokens = PromptLookup(), [1, 2, 3, 4, 5, 6, 7, 8, 9, 3, 4, 5, 6, 7, 1, 3, 4, 5, 6]
    assert not lookup.draft(tokens, 3)
    assert lookup.draft([*tokens, 7], 2) == [8, 9]
    assert lookup.draft([*tokens, 7], 99) == [8, 9, 3, 4, 5, 6, 7, 1, 3, 4, 5, 6, 7]
    assert not PromptLookup().draft([1, 1, 1, 1, 1], 3)


def test_rows_without_a_draft_are_not_accepted_though_the_model_chooses_their_token():
    """Two drafts of three rows; the third holds token 0, as the model chooses it."""
    drafts, seq = Drafts(2), Sequence(requests((0.0, 9, 9))[0])
    drafts.draft(seq, [1, 2, 3, 4, 5, 0, 0, 9, 1, 2, 3, 4, 5])
    assert drafts.take(seq, 3) == [0, 0, 0]
    assert drafts.accepted(seq, [0, 0, 0, 7]) == [0, 0, 0]
    assert drafts.take(seq, 2) == [0, 0]
    assert drafts.accepted(seq, [0, 0, 0]) == [0]
