"""eLLM's solver: exact against brute force and SLSQP, and what the printed Eq. 5 is worth."""

from itertools import pairwise

import numpy as np
import pytest
from ellm_slsqp import solve
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.specs.models import load_model
from sim.systems.ellm.equations import (
    CONFIGURATIONS,
    Configuration,
    StepCosts,
    corrected_times,
    paper_times,
    thread_loss,
    threads_for_recomputation,
)
from sim.systems.ellm.solver import Batch, Memory, best, feasible_ratios, least_bubble, least_ratios

MODEL = load_model("llama-2-13b")
A100_FLOPS = 312e12
PRINTED = paper_times(MODEL, A100_FLOPS)
CORRECTED = corrected_times(
    MODEL, flops_per_s=0.7 * A100_FLOPS, bytes_per_s=1.5e12, h2d_bytes_per_s=25e9, fixed_s=0.006
)
SCRATCH = tuple(c.scratch_layers / MODEL.num_layers for c in CONFIGURATIONS)
FIRST = Configuration(3, 2)


def memory(gpu_tokens: float, **more: object) -> Memory:
    return Memory(gpu_tokens, SCRATCH)._replace(**more)


# -- equations by hand -------------------------------------------------------------------------------------------------


def test_printed_equations_are_what_the_paper_prints():
    h, layers, vocab = 5120, 40, 32000
    lengths, r = [100, 300], 0.25
    again = sum(24 * h * h * layers * s * r + 4 * h * layers * s * s * r * r + 2 * h * vocab * s * r for s in lengths)
    decode = sum(24 * h * h * layers + 4 * h * layers * (s + 1) + 2 * h * vocab * s for s in lengths)
    batch = Batch(lengths)
    found = PRINTED.step_s(batch.seqs[1:], batch.tokens[1:], batch.squares[1:], np.array([r]))
    np.testing.assert_allclose(found, (again + decode) / A100_FLOPS)


def test_corrected_equations_are_worked_out_by_hand():
    tokens, squares, r = 1000.0, 500_000.0, 0.4
    linear, pair, head = MODEL.linear_flops_per_token, 4 * 40 * 5120, 2 * 5120 * 32000
    again = 0.5 * (linear * r * tokens + pair / 2 * r * r * squares) / (0.7 * A100_FLOPS)
    compute = (2 * (linear + head) + pair * tokens) / (0.7 * A100_FLOPS)
    read = (linear + head + 819_200 * tokens) / 1.5e12
    copied = 0.5 * 819_200 * r * tokens / 25e9
    sums = (np.array(2.0), np.array(tokens), np.array(squares), np.array(r), (0.5, 0.5))
    assert CORRECTED.step_s(*sums) == pytest.approx(0.006 + max(compute + again, read, copied))
    assert CORRECTED.step_s(*sums, fused=False) == pytest.approx(0.006 + max(max(compute, read) + again, copied))
    assert CORRECTED.step_s(*sums, overlapped=False) == pytest.approx(0.006 + max(compute + again, read) + copied)


def test_there_are_six_configurations_and_the_largest_needs_the_first_scratch():
    assert len(CONFIGURATIONS) == 6
    assert max(c.scratch_layers for c in CONFIGURATIONS) == 10
    # 13B has 40 layers: 8 windows of (3, 2), 10 of (3, 1), 13 of (1, 2) and one layer more.
    assert FIRST.recomputed_layers(40) == 16
    assert Configuration(3, 1).recomputed_layers(40) == 10
    assert Configuration(1, 2).recomputed_layers(40) == 27
    for c in CONFIGURATIONS:
        assert c.recomputed_layers(40) == sum(map(c.is_recomputed, range(40)))


@given(st.floats(1.0, 1e15), st.floats(1.0, 1e15))
def test_threads_are_whole_warps_and_either_kernel_keeps_one(recompute: float, decode: float):
    threads = threads_for_recomputation(recompute, decode)
    assert threads % 32 == 0
    assert 32 <= threads <= 992
    assert thread_loss(recompute, decode, threads / 1024) >= 1.0 - 1e-12


def test_threads_by_hand():
    assert threads_for_recomputation(3.0, 1.0) == 768
    assert threads_for_recomputation(1.0, 1.0) == 512 == threads_for_recomputation(0.0, 0.0)
    assert thread_loss(3.0, 1.0, 768 / 1024) == 1.0
    # 1000 to 1: 31 of 32 warps recompute what 1000 of 1001 parts are, and the last has what would take a 31st of that.
    assert threads_for_recomputation(1000.0, 1.0) == 992
    assert thread_loss(1000.0, 1.0, 31 / 32) == pytest.approx(1000 / 1001 / (31 / 32))
    # Half of the threads for three quarters of the work.
    assert thread_loss(3.0, 1.0, 0.5) == 1.5
    # 100 of 1,024 threads are nearest to three warps.
    assert threads_for_recomputation(100.0, 924.0) == 96


def test_eq_6_to_9_are_as_printed_or_as_they_should_be():
    """13B, 300 of 800 tokens in two sequences uncached, configuration (3, 2)."""
    h, layers, vocab, c = 5120, 40, 32000, Configuration(3, 2)
    tokens, squares, r = 800.0, 400.0**2 + 400.0**2, 0.375
    swap = PRINTED._replace(swap_s=2e-5)
    eq6 = 2e-5 * 300 * 3 / 40
    eq7 = ((24 * h * h * 300 + 4 * h * squares * r * r) * 2 / layers + 2 * 300 * h * vocab) / A100_FLOPS
    assert swap.bubble(tokens, squares, r, c) == pytest.approx(layers * abs(eq6 - eq7))
    # Logits decide: 2 x 32,000 a token, ten times 24 x 5,120 x 2 / 40.
    volumes = PRINTED.volumes(2, 800, 300, 45_000, c)
    k1 = 24 * h * h * 2 * 300 + 4 * h * 2 * 45_000 + 2 * h * vocab * 300
    k2 = 24 * h * h * 5 * 2 + 4 * h * 5 * 802 + 2 * h * vocab * 800
    assert volumes == pytest.approx((layers * k1 / A100_FLOPS, layers * k2 / A100_FLOPS))
    # Corrected: l2 layers of what all 40 take, no logits but one a decode.
    linear, pair, flops = MODEL.linear_flops_per_token, 4 * 40 * h, 0.7 * A100_FLOPS
    eq7 = (linear * 300 + pair / 2 * squares * r * r) * 2 / 40 / flops
    assert CORRECTED.bubble(tokens, squares, r, c) == pytest.approx(40 * abs(819_200 / 25e9 * 300 * 3 / 40 - eq7))
    k1, k2 = CORRECTED.volumes(2, 800, 300, 45_000, c)
    assert k1 == pytest.approx(2 * (linear * 300 + pair / 2 * 45_000) / flops)
    assert k2 == pytest.approx(5 * (2 * (linear + 2 * h * vocab) + pair * 800) / flops)
    # What either allots: all warps but one, or 20 of 32, which makes the kernel half as long again.
    assert threads_for_recomputation(k1, k2) == 992
    assert threads_for_recomputation(*volumes) == 640
    assert thread_loss(k1, k2, 640 / 1024) == pytest.approx(1.57, abs=0.01)


def test_the_least_bubble_is_between_the_extremes():
    times = StepCosts(0.0, 0.0, 1e-4, 0.0, swap_s=1e-4)
    # As dear to copy as to compute: as many layers either way, and the first such is chosen.
    assert CONFIGURATIONS[least_bubble(times, 100.0, 0.0, 0.5, CONFIGURATIONS)] == (1, 1)
    assert CONFIGURATIONS[least_bubble(times._replace(swap_s=1e-6), 100.0, 0.0, 0.5, CONFIGURATIONS)] == (3, 1)
    assert CONFIGURATIONS[least_bubble(times._replace(swap_s=1e-2), 100.0, 0.0, 0.5, CONFIGURATIONS)] == (1, 2)


# -- exactness ---------------------------------------------------------------------------------------------------------

instances = st.tuples(
    st.lists(st.integers(1, 4000), min_size=1, max_size=30),
    st.floats(0.05, 1.3),
    st.sampled_from([0.02, 0.05, 0.5, 5.0]),
    st.sampled_from([1, 16]),
    st.sampled_from([PRINTED, CORRECTED]),
    st.booleans(),
    st.booleans(),
)


def brute(times, lengths, block, room, budget_s, configurations, step):
    """The least T/b over every b, configuration and r of a fine grid that memory allows."""
    least = np.inf
    for b in range(1, len(lengths) + 1):
        first = np.array(lengths[:b], float)
        for place, c in enumerate(configurations):
            for r in np.append(np.arange(0.0, 1.0, step), 1.0):
                scratch, lost = room.scratch[place], room.lost_tokens
                kept = (np.ceil(first / block) * block).sum()
                grown = b * first.max() if room.by_longest else first.sum()
                if r > 0.0:
                    kept += scratch * r * grown - r * first.sum()
                    kept += lost * b * (1 + scratch)
                hosted = (1 - c.recomputed_share) * r * first.sum()
                if r > 0.0:
                    hosted += lost * b * max(1 - other.recomputed_share for other in configurations)
                if kept > room.gpu_tokens * (1 + 1e-12) or hosted > room.host_tokens:
                    continue
                sums = (np.array(float(b)), np.array(first.sum()), np.array((first**2).sum()), np.array(r))
                seconds = times.step_s(*sums, (1 - c.recomputed_share, c.recomputed_share))
                if seconds <= budget_s:
                    least = min(least, float(seconds) / b)
    return least


@given(instances)
@settings(max_examples=80, deadline=None)
def test_nothing_that_brute_force_tries_is_better(instance):
    lengths, share, budget_s, block, times, by_longest, host = instance
    lost = block if block > 1 else 0
    lengths, step = lengths[:8], 1 / 64
    room = memory(share * sum(lengths), lost_tokens=lost, by_longest=by_longest)
    if host:
        room = room._replace(host_tokens=0.1 * sum(lengths))
    found = best(times, Batch(lengths, block), room, budget_s)
    least = brute(times, lengths, block, room, budget_s, CONFIGURATIONS, step)
    if found is None:
        assert least == np.inf
        return
    assert found.s_per_token <= least * (1 + 1e-9)
    # The answer is feasible itself, and a hair less of r is not.
    ratios = least_ratios(Batch(lengths, block), room)[CONFIGURATIONS.index(found.configuration)]
    assert found.ratio == ratios[found.batch_size - 1]
    assert 0.0 <= found.ratio <= 1.0
    assert found.step_s <= budget_s
    if found.ratio > 0.0:
        copied = (1 - found.configuration.recomputed_share) * found.ratio * sum(lengths[: found.batch_size])
        # Of a block each on its way back three layers of four are on the host, whatever the configuration.
        assert copied + 0.75 * lost * found.batch_size <= room.host_tokens * (1 + 1e-12)


@given(instances, st.integers(1, 30), st.sampled_from([0.0, 0.1]), st.booleans())
@settings(max_examples=150, deadline=None)
def test_sizes_that_are_not_looked_at_hold_nothing_better(instance, first, least_ratio, largest):
    """As if every configuration were priced for every size."""
    lengths, share, budget_s, block, times, by_longest, host = instance
    room = memory(share * sum(lengths), lost_tokens=block - 1, by_longest=by_longest, least_ratio=least_ratio)
    if host:
        room = room._replace(host_tokens=0.1 * sum(lengths))
    batch, again = Batch(lengths, block), np.array([[c.recomputed_share] for c in CONFIGURATIONS])
    ratios, feasible = feasible_ratios(batch, room)
    step_s = times.step_s(batch.seqs, batch.tokens, batch.squares, np.where(feasible, ratios, 0.0), (1 - again, again))
    feasible &= (step_s <= budget_s) & (batch.seqs >= first)
    found = best(times, batch, room, budget_s, least=first, largest=largest)
    if found is None or not feasible.any():
        assert found is None and not feasible.any()
        return
    if largest:
        size = int(np.flatnonzero(feasible.any(axis=0))[-1])
        assert found.batch_size == size + 1
        assert found.step_s == step_s[feasible[:, size], size].min()
    else:
        assert found.s_per_token == (step_s / batch.seqs)[feasible].min()


@given(instances, st.integers(1, 30), st.floats(0.0, 1.0))
@settings(max_examples=150, deadline=None)
def test_slsqp_is_never_better(instance, b, r):
    lengths, share, budget_s, block, times, by_longest, host = instance
    lost = block if block > 1 else 0
    scratch = SCRATCH[CONFIGURATIONS.index(FIRST)]
    room = Memory(share * sum(lengths), (scratch,), lost_tokens=lost, by_longest=by_longest)
    if host:
        room = room._replace(host_tokens=0.1 * sum(lengths))
    batch, paper = Batch(lengths, block), times is PRINTED
    start = (min(b, len(lengths)), r)
    other = solve(times, batch, room, budget_s, start, configuration=FIRST, all_recomputed=paper)
    found = best(times, batch, room, budget_s, configurations=(FIRST,), all_recomputed=paper)
    if other is not None:
        assert found is not None
        assert found.s_per_token <= other.s_per_token * (1 + 1e-9)


@pytest.mark.parametrize(("host_tokens", "fits"), [(23.34, True), (23.33, False)])
def test_the_host_keeps_a_block_that_is_on_its_way_back(host_tokens: float, fits: bool):
    """160 tokens, room for 150, scratch of a tenth: r = (160 + 16 x 1.1 - 150) / (160 - 16) = 27.6 / 144.

    Half of the layers of r x 160 tokens and of a block more are copied: 15.333 + 8.
    """
    room = Memory(150.0, (0.1,), host_tokens=host_tokens, lost_tokens=16)
    found = best(CORRECTED, Batch([160], 16), room, np.inf, configurations=(Configuration(1, 1),))
    assert (found is not None) is fits
    if found is not None:
        assert found.ratio == pytest.approx(27.6 / 144)


@pytest.mark.parametrize(("least", "ratio"), [(0.05, 27.6 / 144), (0.25, 0.25)])
def test_a_least_ratio_is_no_more_than_that(least: float, ratio: float):
    """160 tokens where 150 have room, as above."""
    room = Memory(150.0, (0.1,), lost_tokens=16, least_ratio=least)
    found = best(CORRECTED, Batch([160], 16), room, np.inf, configurations=(Configuration(1, 1),))
    assert found is not None
    assert found.ratio == pytest.approx(ratio)
    # Whole sequences have room for all their tokens, but not for scratch and half-filled blocks beside them.
    tight = best(CORRECTED, Batch([144], 16), room, np.inf, configurations=(Configuration(1, 1),))
    assert tight is not None
    assert tight.ratio == pytest.approx(max(least, (144 + 17.6 - 150) / (144 * 0.9)))


def test_slsqp_copies_what_is_not_recomputed():
    """Configuration (3, 2) recomputes two fifths; the link is slow, so that the copies of the rest take longest."""
    times = CORRECTED._replace(swap_s=1e-3)
    batch, room = Batch([700]), Memory(500.0, (SCRATCH[CONFIGURATIONS.index(FIRST)],))
    found = solve(times, batch, room, 10.0, (1.0, 0.6), configuration=FIRST)
    assert found is not None and found.ratio > 0.25
    copied = 0.6 * found.ratio * 700
    assert found.step_s == pytest.approx(CORRECTED.fixed_s + copied * 1e-3)
    for share, fits in ((1.001, True), (0.999, False)):
        held = solve(times, batch, room._replace(host_tokens=share * copied), 10.0, (1.0, 0.6), configuration=FIRST)
        assert (held is not None) is fits


@given(st.lists(st.integers(1, 4000), min_size=2, max_size=40), st.floats(0.1, 1.0), st.sampled_from([1, 16]))
def test_less_memory_never_needs_a_smaller_share_uncached(lengths, share, block):
    batch = Batch(lengths, block)
    rooms = [memory(part * share * sum(lengths), lost_tokens=block - 1) for part in (1.0, 0.8, 0.5)]
    for more, less in pairwise(rooms):
        assert (least_ratios(batch, less) >= least_ratios(batch, more)).all()


# -- what the printed equations are worth ------------------------------------------------------------------------------


def test_printed_eq_5_leaves_everything_cached_and_b_to_the_start():
    """T/b has no cost of a step: for equal lengths b does not matter, and every uncached token only costs."""
    batch, room = Batch([500] * 60), Memory(53_000.0, (SCRATCH[CONFIGURATIONS.index(FIRST)],))
    found = [
        solve(PRINTED, batch, room, 5.0, (start, 0.5), configuration=FIRST, all_recomputed=True)
        for start in (5.0, 20.0, 40.0)
    ]
    choices = [choice for choice in found if choice is not None]
    assert len(choices) == 3
    assert all(choice.ratio < 0.002 for choice in choices)
    values = [choice.s_per_token for choice in choices]
    assert max(values) < min(values) * 1.005
    sizes = [choice.batch_size for choice in choices]
    assert max(sizes) - min(sizes) >= 10
    exact = best(PRINTED, batch, room, 5.0, configurations=(FIRST,), all_recomputed=True)
    assert exact is not None
    assert exact.ratio == 0.0


@pytest.mark.parametrize("lengths", [[895] * 255, [20_000] * 30])
def test_on_an_a100_uncached_tokens_buy_next_to_nothing_even_with_the_roofline(lengths: list[int]):
    """13B, 45,000 tokens of room: what does not fill a seat may be filled so, at less than 2 % gained."""
    batch = Batch(lengths)
    found, cached = best(CORRECTED, batch, memory(45_000.0), np.inf), 45_000 // lengths[0]
    assert found is not None
    assert found.batch_size <= cached + 1
    assert found.ratio < 0.02
    all_cached = best(CORRECTED, Batch(lengths[:cached]), memory(45_000.0), np.inf)
    assert all_cached is not None
    assert all_cached.ratio == 0.0
    assert found.s_per_token > 0.98 * all_cached.s_per_token


def test_where_links_are_fast_and_reading_the_weights_is_slow_some_tokens_are_left_uncached():
    times = CORRECTED._replace(weights_s=1.0, swap_s=1e-7, recompute_s=1e-7, square_s=0.0)
    found = best(times, Batch([1000] * 40), memory(20_000.0), np.inf)
    assert found is not None
    assert found.ratio > 0.0
    assert found.batch_size > 20
