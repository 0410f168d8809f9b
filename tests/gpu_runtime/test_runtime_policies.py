"""No policy changes a token: whatever is evicted, offloaded, streamed or recomputed, outputs are the dense model's."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from hypothesis import HealthCheck, assume, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from runtime_variants import STREAM, VARIANTS, policy_of  # noqa: E402

from kvtwin.testing import build_engine, linear_machine, live, requests  # noqa: E402
from kvtwin.testing.live import GROWING, ROWS, tight_limits  # noqa: E402
from sim.engine.changes import Direction, Restore  # noqa: E402
from sim.engine.sequence import Status  # noqa: E402
from sim.errors import UserError  # noqa: E402
from sim.parts.catalogue import CATALOGUE, KINDS, MEMORIES  # noqa: E402


def check(variant, rows, *, chunked=False, inline=False, limit=None, options=None, **sizes):
    """Serve requests; plans must be what was executed, and tokens those of each request alone."""
    policy, arrivals = policy_of(variant), requests(*rows)
    limit = limit or tight_limits(policy, chunked=chunked, **sizes)
    served = live.serve(policy, arrivals, limit, inline_copies=inline, **(options or {}))
    completed = live.check_tokens(served, arrivals)
    assert completed == [seq for seq in served.ended if seq.status is Status.FINISHED]
    return served, completed


@pytest.mark.parametrize("variant", VARIANTS)
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
def test_who_leaves_goes_in_pieces_or_is_computed_again_where_that_costs_less(mechanism, swapped):
    """Told of a link on which a block takes an iteration."""
    policy, arrivals = policy_of(f"adaptive:tpot-slo-ms=5000,mechanism={mechanism}"), requests(*GROWING)
    machine = linear_machine(layers=4, swap_s_per_block=0.02)
    served = live.serve(policy, arrivals, tight_limits(policy, gpu=24, chunked=True), machine=machine)
    assert len(live.check_tokens(served, arrivals)) == len(arrivals)
    tally = served.counters.policy
    assert bool(tally["parked_sequences"]) is swapped and bool(tally["recomputed_sequences"]) is not swapped
    assert any(len(plan.beside) > 1 for plan, _, _ in served.plans) is swapped


@pytest.mark.parametrize("variant", ["vllm-recompute", "vllm-swap"])
def test_a_small_pool_preempts(variant):
    served, completed = check(variant, ROWS)
    assert len(completed) == len(ROWS)
    assert served.counters.preemptions > 3


WORKLOADS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.0, 0.01, 0.02]), st.integers(1, 40), st.integers(1, 24)), min_size=1, max_size=12
).map(sorted)


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=12, deadline=None)
@given(
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


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    parts=st.tuples(*(st.sampled_from(list(CATALOGUE[kind])) for kind in KINDS)), rows=WORKLOADS, chunked=st.booleans()
)
def test_nor_does_any_mix_of_parts(parts, rows, chunked):
    mix = "vllm-recompute:" + ",".join(f"{kind}={name}" for kind, name in zip(KINDS, parts, strict=True))
    memory = dict(zip(KINDS, parts, strict=True))["memory"]
    # On a device nothing keeps prefixes on the host yet.
    assume(MEMORIES[memory].runs_live)
    mix += ",layer-order=contiguous" * (memory == "token-wise")
    assume(builds(mix, chunked))
    check(mix, rows, chunked=chunked, gpu=17, host=20, seqs=3)


def test_host_blocks_given_up_in_a_step_serve_those_offloaded_in_it():
    # Found by hypothesis: who was offloaded came before who was preempted, and the host pool seemed too small.
    rows = [(0.0, 9, 15), (0.0, 9, 24), (0.0, 13, 13), (0.0, 14, 11), (0.0, 21, 7), (0.0, 25, 24), (0.01, 13, 6)]
    rows += [(0.01, 27, 15), (0.01, 29, 8), (0.02, 1, 20), (0.02, 10, 11), (0.02, 12, 2)]
    check(STREAM, rows, gpu=17, host=5, seqs=5, chunked=True)


def test_a_system_is_held_to_what_contends(monkeypatch):
    """Memory, seats and chunks, copies beside the computation and in its thread; prompts that begin alike."""
    served, hits = [], SimpleNamespace(prefix_hit_tokens=1)

    def serve(policy, arrivals, limit, **options):
        pools = limit.num_gpu_blocks, limit.num_cpu_blocks, limit.block_size, limit.max_model_len
        in_chunks = limit.max_num_batched_tokens == 16
        served.append((arrivals, *pools, limit.max_num_seqs, in_chunks, limit.enable_prefix_caching, options))
        return SimpleNamespace(counters=hits)

    monkeypatch.setattr(live, "serve", serve)
    monkeypatch.setattr(live, "check_tokens", lambda served, arrivals: list(arrivals))
    live.check(policy_of("vllm-v1"))
    plain, growing, named = (requests(*rows) for rows in (live.ROWS, live.GROWING, live.ALIKE))
    shared = [(live.alike(named), gpu, 60, 4, 64, 6) for gpu in (16, 16, 60)]
    assert served[:3] == [(*one, chunked, True, {}) for one, chunked in zip(shared, (False, True, False), strict=True)]
    assert served[3:] == [
        (rows, 16, 60, 4, 64, seqs, chunked, False, {"inline_copies": inline})
        for rows, chunked, seqs, inline in (
            (plain, False, 6, False),
            (plain, True, 2, False),
            (plain, True, 6, True),
            (growing, False, 2, True),
            (growing, True, 6, False),
        )
    ]
    hits.prefix_hit_tokens = 0
    with pytest.raises(AssertionError):
        live.check(policy_of("vllm-v1"))


def test_prompts_of_a_kind_begin_with_the_same_blocks():
    """Of 9 tokens in blocks of 4 the third is partly filled; three blocks are common, or fewer where told."""
    rows = requests((0.0, 9, 1), (0.0, 16, 1), (0.0, 9, 1), (0.0, 20, 1))
    assert [request.hash_ids for request in live.alike(rows)] == [
        (0, 1, 2), (100, 101, 102, 2003), (200, 201, 202), (0, 1, 2, 4003, 4004),
    ]  # fmt: skip
    assert [request.hash_ids for request in live.alike(rows, 2, 1)] == [
        (0, 1001, 1002), (100, 2001, 2002, 2003), (0, 3001, 3002), (100, 4001, 4002, 4003, 4004),
    ]  # fmt: skip
    assert {request.hash_block_tokens for request in live.alike(rows)} == {4}
