"""No policy changes a token: whatever is evicted, offloaded, streamed or recomputed, outputs are the dense model's."""

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from runtime_variants import LIVE, STREAM, VARIANTS, WORKLOADS, policy_of

from kvtwin.testing import build_engine, linear_machine, live, requests
from kvtwin.testing.live import GROWING, ROWS, tight_limits
from sim.engine.changes import Direction, Restore
from sim.engine.sequence import Status
from sim.errors import UserError
from sim.parts.catalogue import CATALOGUE, KINDS, MEMORIES


def check(variant, rows, *, chunked=False, inline=False, limit=None, options=None, **sizes):
    """Serve requests; plans must be what was executed, and tokens those of each request alone."""
    policy, arrivals = policy_of(variant), requests(*rows)
    limit = limit or tight_limits(policy, chunked=chunked, **sizes)
    served = live.serve(policy, arrivals, limit, inline_copies=inline, **(options or {}))
    completed = live.check_tokens(served, arrivals)
    assert completed == [seq for seq in served.ended if seq.status is Status.FINISHED]
    return served, completed


@pytest.mark.parametrize("variant", LIVE)
def test_every_system_passes_what_systems_outside_are_held_to(variant):
    live.check(policy_of(variant))


WAYS = {
    "before": lambda plan: plan.swapped_out_blocks,
    "restored": lambda plan: any(isinstance(change, Restore) for change in plan.changes),
    "out": lambda plan: any(move.direction is Direction.D2H for move in plan.beside),
    "in": lambda plan: any(move.direction is Direction.H2D for move in plan.beside),
    "behind": lambda plan: plan.behind,
    "parts": lambda plan: any(not move.is_reported for move in plan.behind),
    "read": lambda plan: any(streamed.num_read for streamed in plan.streamed),
    "written": lambda plan: any(streamed.num_written for streamed in plan.streamed),
}


@pytest.mark.parametrize(
    ("variant", "rows", "sizes", "ways"),
    [
        ("vllm-swap", ROWS, {}, {"before", "restored"}),
        ("fastserve", ROWS, {"seqs": 2}, {"before", "out", "in"}),
        ("layerkv", ROWS, {}, {"in", "behind"}),
        ("layerkv", ROWS, {"chunked": True}, {"in", "behind", "parts", "read"}),
        ("layerkv", GROWING, {"gpu": 20, "seqs": 4}, {"out", "in"}),
        ("layerkv", GROWING, {}, {"before", "in"}),
        (STREAM, ROWS, {}, {"behind", "read", "written"}),
    ],
)
def test_small_pools_move_kv_in_every_way_that_a_system_has(variant, rows, sizes, ways):
    served, completed = check(variant, rows, **sizes)
    assert len(completed) == len(rows)
    assert {way for way, shows in WAYS.items() if any(shows(plan) for plan, _, _ in served.plans)} >= ways


@pytest.mark.parametrize(("mechanism", "swapped"), [("swap", True), ("price", False)])
def test_what_leaves_goes_in_pieces_or_is_computed_again_where_that_costs_less(mechanism, swapped):
    """Told of a link on which a block takes an iteration."""
    policy, arrivals = policy_of(f"adaptive:tpot-slo-ms=5000,mechanism={mechanism}"), requests(*GROWING)
    machine = linear_machine(layers=4, swap_s_per_block=0.02)
    served = live.serve(policy, arrivals, tight_limits(policy, gpu=24, chunked=True), machine=machine)
    assert len(live.check_tokens(served, arrivals)) == len(arrivals)
    tally = served.counters.policy
    assert bool(tally["parked_sequences"]) is swapped and bool(tally["recomputed_sequences"]) is not swapped
    assert any(len(plan.beside) > 1 for plan, _, _ in served.plans) is swapped


@settings(max_examples=30, deadline=None)
@given(
    variant=st.sampled_from(VARIANTS),
    rows=WORKLOADS,
    gpu=st.integers(17, 30),
    host=st.sampled_from([0, 5, 80]),
    chunked=st.booleans(),
    seqs=st.sampled_from([2, 5]),
    inline=st.booleans(),
)
def test_no_workload_finds_a_token_that_a_policy_changes(variant, rows, gpu, host, chunked, seqs, inline):
    check(variant, rows, chunked=chunked, inline=inline, gpu=gpu, host=host, seqs=seqs)


def builds(mix, chunked):
    """Whether these parts go together, with prompts in chunks or whole."""
    try:
        policy = policy_of(mix)
        build_engine(policy, tight_limits(policy, chunked=chunked), linear_machine(), lambda seq: None)
    except UserError:
        return False
    return True


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    parts=st.tuples(*(st.sampled_from(list(CATALOGUE[kind])) for kind in KINDS)), rows=WORKLOADS, chunked=st.booleans()
)
def test_nor_does_any_mix_of_parts(parts, rows, chunked):
    mix = "vllm-recompute:" + ",".join(f"{kind}={name}" for kind, name in zip(KINDS, parts, strict=True))
    name = dict(zip(KINDS, parts, strict=True))["memory"]
    memory = MEMORIES[name]
    # What of a memory no device executes it says itself; of eLLM's an option is enough.
    assume(name == "token-wise" or not memory.unexecutable)
    mix += ",layer-order=contiguous" * (name == "token-wise")
    assume(builds(mix, chunked))
    check(mix, rows, chunked=chunked, gpu=17, host=20, seqs=3)


def test_host_blocks_given_up_in_a_step_serve_those_offloaded_in_it():
    # Found by hypothesis: the offloaded came before the preempted, and the host pool seemed too small.
    rows = [(0.0, 9, 15), (0.0, 9, 24), (0.0, 13, 13), (0.0, 14, 11), (0.0, 21, 7), (0.0, 25, 24), (0.01, 13, 6)]
    rows += [(0.01, 27, 15), (0.01, 29, 8), (0.02, 1, 20), (0.02, 10, 11), (0.02, 12, 2)]
    check(STREAM, rows, gpu=17, host=5, seqs=5, chunked=True)
