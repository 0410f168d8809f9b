"""Two clocks, one decision: the engine on SimPy and on the real clock with a device that only pretends."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pretended import pretend
from runtime_variants import VARIANTS, policy_of

from kvtwin.testing import build_engine, limits, linear_machine, requests, roofline_machine, simulate
from kvtwin.testing.conformance import calling, limits_of
from sim.engine.plan import IterationPlan, StepTimes
from sim.engine.sequence import Sequence


def named(fields):
    """A chunk, change or copy, with its kind and with requests' ids for sequences, which differ between two runs."""
    each = fields if isinstance(fields, tuple) else msgspec.structs.astuple(fields)
    values = [field.request.request_id if isinstance(field, Sequence) else field for field in each]
    return type(fields).__name__, *values


def shown(plan: IterationPlan, start_s: float, times: StepTimes):
    """A decision in full, with its times: what each sequence computes, and what moves."""
    chunks = [(chunk.seq, chunk.num_new, chunk.num_cached, chunk.origin) for chunk in plan.chunks]
    parts = (chunks, plan.changes, plan.beside, plan.behind, plan.streamed, plan.mixed_restores)
    sums = (
        plan.num_decodes, plan.decode_context_tokens, plan.prefill_tokens, plan.prefill_pairs, plan.swapped_out_blocks,
        plan.swapped_in_blocks, plan.behind_groups, plan.behind_blocks,
    )  # fmt: skip
    decodes = [seq.request.request_id for seq in plan.decodes]
    return ([[named(item) for item in part] for part in parts], decodes, sums), (start_s, times.end_s)


class Shown(list):
    """What was decided, read before it is committed."""

    def observe(self, *facts):
        self.append(shown(*facts))


def live(policy, arrivals, limit, machine):
    """The same run on the real clock."""
    ended, plans = [], Shown()
    pretend(build_engine(policy, limit, machine, ended.append), arrivals, machine, plans.observe)
    return plans, ended


WORKLOADS = st.lists(
    st.tuples(
        st.one_of(st.just(0.0), st.floats(0.0, 3.0), st.sampled_from([0.5, 1.0, 1.5])),
        st.integers(1, 200),
        st.integers(1, 60),
    ),
    min_size=1,
    max_size=25,
).map(lambda rows: sorted(rows, key=lambda row: row[0]))


def named_alike(rows):
    """Requests of which a third each begin alike, with names for their answers, too."""
    found = []
    for request in requests(*rows):
        number, tokens = request.request_id, request.prompt_tokens + request.output_tokens
        ids = tuple(number % 3 * 100 + i if i < 5 else (number + 1) * 1000 + i for i in range(-(-tokens // 16)))
        first = -(-request.prompt_tokens // 16)
        found.append(request._replace(hash_ids=ids[:first], hash_block_tokens=16, output_hash_ids=ids[first:]))
    return found


@pytest.mark.parametrize("variant", ["vllm-v1", "vllm-recompute", "sarathi", "hcache:keeps=turns"])
@settings(max_examples=25, deadline=None)
@given(rows=WORKLOADS, gpu=st.integers(20, 60), chunked=st.booleans())
def test_so_they_do_where_prefixes_are_cached(variant, rows, gpu, chunked):
    policy = policy_of(variant)
    limit = limits_of(policy, limits(gpu, 200, max_model_len=512), 8, 64 if chunked else None)
    limit = replace(limit, enable_prefix_caching=True)
    check(policy, named_alike(rows), limit, linear_machine(limit.block_bytes))


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=25, deadline=None)
@given(rows=WORKLOADS, gpu=st.integers(20, 60), host=st.integers(0, 200), chunked=st.booleans(), priced=st.booleans())
def test_both_clocks_take_the_same_decisions_at_the_same_times(variant, rows, gpu, host, chunked, priced):
    policy = policy_of(variant)
    limit = limits_of(policy, limits(gpu, host, max_model_len=512), 8, 64 if chunked else None)
    machine = roofline_machine("a100-80g", limit.block_bytes) if priced else linear_machine(limit.block_bytes)
    check(policy, requests(*rows), limit, machine)


def check(policy, arrivals, limit, machine):
    arrivals = calling(policy, arrivals)
    there = Shown()
    simulated = simulate(policy, arrivals, limit, machine=machine, jump=False, observe=lambda scheduler: there.observe)
    plans, ended = live(policy, arrivals, limit, machine)
    assert [decision for decision, _ in plans] == [decision for decision, _ in there]
    for (_, here_s), (_, there_s) in zip(plans, there, strict=True):
        assert here_s == pytest.approx(there_s, abs=1e-7)
    assert [(s.request.request_id, s.status, s.error) for s in ended] == [
        (s.request.request_id, s.status, s.error) for s in simulated.ended
    ]
    for here, there in zip(ended, simulated.ended, strict=True):
        assert here.first_token_s == pytest.approx(there.first_token_s, abs=1e-7)
        assert here.finish_s == pytest.approx(there.finish_s, abs=1e-7)
