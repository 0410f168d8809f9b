"""Restores and streams as pipelines: numbers by hand, recurrences layer by layer, and HCache's published model."""

from math import ceil, inf

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtwin.testing import linear_machine
from sim.clock.arrivals import TIE_S
from sim.cost.forms import LinearCost
from sim.cost.lanes import Lane, pipelined_s, restored_s, streamed_s
from sim.cost.model import LayerTimes
from sim.cost.pricing import Lanes, Pricer
from sim.cost.profile import load_profile
from sim.cost.roofline import RooflineCost, projection_flops
from sim.engine.changes import Gathered, Move, Projected, Restore, Streamed, Tier
from sim.engine.layers import offloaded_layers, retained_layers
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence
from sim.specs.hardware import load_hardware
from sim.specs.models import load_model
from traces.request import Request

seconds = st.floats(0.0, 2.0, allow_nan=False)


def sequence(tokens: int) -> Sequence:
    return Sequence(Request(0, 0.0, tokens, 1))


# -- restores ------------------------------------------------------------------------------------------------------


def test_a_restore_by_hand() -> None:
    """Two layers computed again (3 s), three from hidden states (2 s over PCIe, 1 s to project), one copied (4 s).

    Copies end at 0, 0, 2, 4, 6, 10; computations at 3, 6, then 7, 8, 9, and the last layer with its copy, at 10.
    """
    classes = [LayerTimes(2, 3.0, 0.0, 0.0), LayerTimes(3, 1.0, 2.0, 0.0), LayerTimes(1, 0.0, 4.0, 0.0)]
    assert restored_s(classes) == pytest.approx(10.0)
    # Without the recomputed layers everything waits for the copies: 2, 4, 6, 10.
    assert restored_s(classes[1:]) == pytest.approx(10.0)
    # With slower projections (5 s) they are what is waited for: 6 + 15.
    assert restored_s([classes[0], LayerTimes(3, 5.0, 2.0, 0.0), classes[2]]) == pytest.approx(21.0)
    assert restored_s([]) == restored_s([LayerTimes(0, 1.0, 1.0, 0.0)]) == 0.0


@given(st.lists(st.tuples(st.integers(0, 6), seconds, seconds), max_size=5))
def test_a_restore_is_the_layer_recurrence(classes: list[tuple[int, float, float]]) -> None:
    """A layer is computed after the one before it and once its copy has come; copies follow one another."""
    copied = computed = 0.0
    for count, compute_s, copy_s in classes:
        for _ in range(count):
            copied += copy_s
            computed = max(computed, copied) + compute_s
    found = restored_s([LayerTimes(count, compute_s, copy_s, 0.0) for count, compute_s, copy_s in classes])
    assert found == pytest.approx(max(copied, computed), rel=1e-12, abs=1e-12)


def test_a_mixed_restore_comes_before_the_computation() -> None:
    """Four layers of the tiny model, a group each; 32 tokens, 2 blocks a group. By hand:

    - a KV block of 4 ms (1/4 of a whole one's bytes at 16 ms a whole one): 8 ms for the one KV layer;
    - hidden states of 32 tokens at 0.5 bytes of a whole block's 64, at 0.25 ms a byte: 4 ms a layer;
    - projection: 1 ms a prompt token for all layers, of which one layer's keys and values are 2 * 2 h^2 of the
      model's linear FLOPs; recomputation: 32 ms of a quarter, 8 ms.
    """
    on = linear_machine(64.0, prefill=(0.0, 0.001, 0.0), decode=(0.02, 0.0, 0.0), swap_s_per_block=0.016)
    lanes = Lanes(keep_intervals=True)
    pricer = Pricer(on.cost, lanes, lambda *_: None, layers=4, num_groups=4, block_bytes=64.0, hidden_bytes=0.5)
    plan = IterationPlan()
    plan.num_decodes, plan.decode_context_tokens = 1, 33
    plan.mixed_restores = (Restore(sequence(32), 32, (1, 2), (3,), (0,), 2),)
    assert plan.has_swaps
    project_s = 0.032 * projection_flops(on.model) / on.model.linear_flops_per_token
    # Recomputed until 8 ms. Hidden states come at 4 and 8: projected one after the other from 8 on, while the KV comes
    # from 8 to 16.
    assert project_s < 0.004
    times = pricer.step(plan, 1.0)
    assert times.end_s == pytest.approx(1.0 + 0.016 + 0.020, abs=1e-12)
    assert lanes.h2d.busy_s == pytest.approx(0.016)
    assert lanes.compute.busy_s == pytest.approx(0.008 + 2 * project_s + 0.020)
    # Nothing copied in whole: two layers from hidden states, two computed again.
    plan.mixed_restores = (Restore(sequence(32), 32, (2, 3), (), (0, 1), 0),)
    times = pricer.step(plan, 2.0)
    assert times.end_s == pytest.approx(2.0 + 0.016 + 2 * project_s + 0.020, abs=1e-12)


def test_inputs_are_projected_in_each_layer_of_each_group() -> None:
    """Four layers in two groups: 32 tokens' inputs come in 4 ms a layer, the first before four projections."""
    on = linear_machine(64.0, prefill=(0.0, 0.001, 0.0), decode=(0.02, 0.0, 0.0), swap_s_per_block=0.016)
    pricer = Pricer(on.cost, Lanes(), lambda *_: None, layers=4, num_groups=2, block_bytes=64.0, hidden_bytes=0.5)
    plan = IterationPlan()
    plan.num_decodes, plan.decode_context_tokens = 1, 33
    plan.streamed = (Projected(2, 0, 0, 32, 0),)
    project_s = 0.032 * projection_flops(on.model) / on.model.linear_flops_per_token
    assert pricer.step(plan, 1.0).end_s == pytest.approx(1.0 + 0.004 + 0.020 + 4 * project_s, abs=1e-12)


def llama_on_l20(block_size: int) -> tuple[RooflineCost, Pricer]:
    model, hardware = load_model("llama-2-7b"), load_hardware("l20")
    # The published partition is that of projections at 0.70 of the peak.
    profile = load_profile(None, hardware)
    flops = msgspec.structs.replace(profile.constants["flops_per_s"], value=0.70 * hardware.fp16_flops_per_s)
    profile = msgspec.structs.replace(profile, constants={**profile.constants, "flops_per_s": flops})
    cost = RooflineCost(model, hardware, profile, 1)
    block_bytes = block_size * 32 * model.kv_bytes_per_token_layer(1)
    hidden_bytes = model.hidden_size * 2
    pricer = Pricer(
        cost, Lanes(), lambda *_: None, layers=32, num_groups=32, block_bytes=block_bytes, hidden_bytes=hidden_bytes
    )
    return cost, pricer


def restore_s(pricer: Pricer, hidden: int, recomputed: int = 0, blocks: int = 1) -> float:
    """2,048 tokens in `blocks` blocks a layer; what is neither projected nor recomputed of 32 layers is copied."""
    groups, kv = tuple(range(32)), 32 - hidden - recomputed
    plan = IterationPlan()
    plan.mixed_restores = (
        Restore(
            sequence(2048), 2048, groups[recomputed : recomputed + hidden], groups[32 - kv :], groups[:recomputed],
            blocks * kv,
        ),
    )  # fmt: skip
    start_s = pricer.lanes.h2d.free_s
    return pricer.step(plan, start_s).end_s - start_s


def test_hcache_on_an_l20_as_published() -> None:
    """Llama-2-7B, 2,048 tokens: 18 layers from hidden states and 14 copied take 31.7 ms, all KV copied 43.1 ms.

    2 * 4096 * 2 bytes a token-layer of KV are 33.6 MB a layer, 1.342 ms at 25 GB/s; hidden states are half of that. So
    32 layers are 42.95 ms, 9 + 14 of them 30.87: asking for a layer's keys and values takes 4.6 us, less than moving.
    """
    cost, pricer = llama_on_l20(block_size=2048)
    assert restore_s(pricer, 0) == pytest.approx(32 * 33_554_432 / 25e9)
    assert restore_s(pricer, 0) == pytest.approx(43.1e-3, abs=0.2e-3)
    assert restore_s(pricer, 18) == pytest.approx(23 * 33_554_432 / 25e9)
    assert restore_s(pricer, 18) == pytest.approx(31.7e-3, rel=0.03)
    assert restore_s(pricer, 0, 32) == pytest.approx(32 * cost.recompute_s(2048))
    assert min(range(33), key=lambda hidden: restore_s(pricer, hidden)) == 18
    # HCache's bubble-free partition says the same.
    copy_kv_s, copy_hidden_s, project_s = 33_554_432 / 25e9, 33_554_432 / 50e9, cost.project_s(2048)
    assert project_s > copy_hidden_s
    assert ceil(32 * copy_kv_s / (copy_kv_s + project_s - copy_hidden_s)) in (18, 19)


def test_a_restore_from_small_blocks_pays_for_every_piece() -> None:
    """4,096 pieces a layer, keys and values of a token each: asking for them takes 9.4 ms, moving them 1.3."""
    _, pricer = llama_on_l20(block_size=2048)
    _, paged = llama_on_l20(block_size=1)
    assert restore_s(pricer, 0) == pytest.approx(32 * 33_554_432 / 25e9)
    assert restore_s(paged, 0, blocks=2048) == pytest.approx(32 * 4096 * 2.3e-6)


# -- streams -------------------------------------------------------------------------------------------------------


def by_layers(compute_s: float, layers: int, read_s: float, written_s: float, wait_s: float) -> float:
    """Three lanes, one after the other for each layer: copy in, compute, copy out."""
    read, computed, written = wait_s, 0.0, 0.0
    for _ in range(layers):
        read += read_s / layers
        computed = max(computed, read) + compute_s / layers
        written = max(written, computed) + written_s / layers
    return written


@given(st.integers(1, 80), st.floats(0.01, 2), seconds, seconds, st.one_of(seconds, st.floats(-2, 0)))
def test_a_stream_is_the_layer_recurrence(
    layers: int, compute_s: float, read_s: float, written_s: float, wait_s: float
) -> None:
    expected = by_layers(compute_s, layers, read_s, written_s, wait_s)
    assert streamed_s(compute_s, layers, read_s, written_s, wait_s) == pytest.approx(expected, rel=1e-9)


def streaming(num_read: int, num_written: int, max_steps: int, context: int, decodes: int = 3) -> IterationPlan:
    plan = IterationPlan()
    plan.num_decodes, plan.decode_context_tokens, plan.max_steps = decodes, context, max_steps
    plan.streamed = (Streamed(1, num_read, num_written),)
    return plan


def priced(decode: tuple[float, float, float], block_s: float) -> tuple[Pricer, Lanes]:
    """Four layers in four groups; a pool block takes `block_s`."""
    on = linear_machine(4.0, decode=decode, swap_s_per_block=4 * block_s)
    lanes = Lanes(keep_intervals=True)
    return Pricer(on.cost, lanes, lambda *_: None, layers=4, num_groups=4, block_bytes=4.0), lanes


def stepped(pricer: Pricer, plan: IterationPlan, now_s: float) -> list[float]:
    """When iterations end that are priced one by one, contexts growing by a token each."""
    ends = []
    for i in range(plan.max_steps):
        one = streaming(
            plan.streamed[0].num_read, plan.streamed[0].num_written, 1,
            plan.decode_context_tokens + i * plan.num_decodes, plan.num_decodes,
        )  # fmt: skip
        now_s = pricer.step(one, now_s).end_s
        ends.append(now_s)
    return ends


def ends_of(first_end_s: float, second_s: float, slope_s: float, iterations: int) -> list[float]:
    ends = [first_end_s]
    for i in range(iterations - 1):
        ends.append(ends[-1] + second_s + i * slope_s)
    return ends


@pytest.mark.parametrize(("after", "end_s"), [(0, 1.8), (1, 1.9), (2, 2.4)], ids=["no copy", "the first", "both"])
def test_what_a_computation_loads_begins_after_some_of_the_copies_that_it_waits_for(after: int, end_s: float) -> None:
    """Four layers compute in 0.8 s, once two copies of 0.5 s have ended; their KV comes in 1.2 s.

    From 0 s on a layer has it each 0.3 s: no layer waits. From 0.5 s the last has it at 1.7 s, from 1 s at 2.2 s, and
    computes for 0.2 s more.
    """
    on, ends = linear_machine(4.0, decode=(0.8, 0.0, 0.0)), {}
    pricer = Pricer(
        on.cost, Lanes(), lambda end_s, move: ends.__setitem__(move, end_s), layers=4, num_groups=4, block_bytes=4.0,
        ends_at=lambda moves: max((ends[move] for move in moves), default=0.0),
    )  # fmt: skip
    plan = streaming(0, 0, 1, 0, 1)
    plan.beside = plan.awaited = tuple(
        Move(sequence(1), (0,), place, place + 1, Tier.GPU, Tier.HOST, 1, 0, True, 0.5) for place in (0, 1)
    )
    plan.streamed = (Gathered(1, 3, 0, 0.4, after),)
    assert pricer.step(plan, 0.0).end_s == pytest.approx(end_s)


def test_a_streamed_run_stops_where_computing_becomes_longer_than_copying() -> None:
    """Decodes take 20, 23, 26, ... ms (1 ms a token of three contexts); 25 ms of copies in, 2 out.

    While copying is longer an iteration takes a layer of each, and 3/4 of the copies in more: 20/4 + 27/4 + 18.75 =
    30.5 ms, then 0.75 ms more. The third computes for longer: 26/4 + 27/4 + 19.5 = 32.75 ms, then 3 ms more each.
    """
    pricer, _ = priced((0.0, 0.0, 0.001), 0.001)
    times = pricer.run(streaming(25, 2, 10, 20), 0.0, inf)
    assert times.iterations == times.tokens == 2
    assert times.first_end_s == pytest.approx(0.0305)
    assert times.second_s == pytest.approx(0.03125)
    assert times.end_s == pytest.approx(0.06175)
    times = pricer.run(streaming(25, 2, 8, 26), 1.0, inf)
    assert times.iterations == 8
    assert times.first_end_s == pytest.approx(1.03275)
    assert (times.second_s, times.slope_s) == pytest.approx((0.03575, 0.003))
    assert times.end_s == pytest.approx(1.0 + 8 * 0.03275 + 28 * 0.003)


@given(
    base=st.floats(0.001, 0.05),
    per_token=st.sampled_from([0.0, 1e-5, 1e-3]),
    block_s=st.sampled_from([1e-4, 1e-3, 5e-3]),
    num_read=st.integers(1, 40),
    num_written=st.integers(0, 40),
    steps=st.integers(1, 30),
    context=st.integers(1, 50),
    share=st.floats(0.0, 1.2),
)
@example(base=0.03125, per_token=0.0, block_s=1e-3, num_read=1, num_written=0, steps=2, context=1, share=0.5)
def test_a_streamed_jump_is_its_iterations_one_by_one(
    base: float,
    per_token: float,
    block_s: float,
    num_read: int,
    num_written: int,
    steps: int,
    context: int,
    share: float,
) -> None:
    """Jumped as often as it takes, over breakpoints and cuts; and an iteration is the recurrence over its layers."""
    decode = (base, 0.0, per_token)
    plan = streaming(num_read, num_written, steps, context)
    ends = stepped(priced(decode, block_s)[0], plan, 1.0)
    compute_s = base + per_token * context
    assert ends[0] - 1.0 == pytest.approx(by_layers(compute_s, 4, num_read * block_s, num_written * block_s, 0.0))
    pricer, lanes = priced(decode, block_s)
    until_s = 1.0 + share * (ends[-1] - 1.0)
    found: list[float] = []
    now_s, left = 1.0, steps
    while left:
        done = steps - left
        rest = streaming(num_read, num_written, left, context + 3 * done)
        # As the drivers ask: sums of floats differ by less, and an end may be that time itself.
        times = pricer.run(rest, now_s, until_s - TIE_S if now_s < until_s else inf)
        run = ends_of(times.first_end_s, times.second_s, times.slope_s, times.iterations)
        assert run[-1] == pytest.approx(times.end_s, rel=1e-12)
        if now_s < until_s:
            # Nothing ends at or after that time but the last.
            assert all(end_s < until_s for end_s in run[:-1])
        found.extend(run)
        now_s, left = times.end_s, left - times.iterations
    assert found == pytest.approx(ends, rel=1e-9)
    assert lanes.h2d.busy_s == pytest.approx(steps * num_read * block_s)
    assert lanes.d2h.busy_s == pytest.approx(steps * num_written * block_s)
    assert lanes.compute.busy_s == pytest.approx(sum(base + per_token * (context + 3 * i) for i in range(steps)))


# -- all-reduces on the PCIe lane ------------------------------------------------------------------------------------


class SharingCost(LinearCost):
    """A prompt token takes 10 ms, of which 2 are its ten all-reduces; a MiB takes 10 ms."""

    def __init__(self) -> None:
        super().__init__((0.0, 0.01, 0.0), (0.0, 0.0, 0.0), 0.04, 4 << 20)
        self.all_reduce_on_pcie, self.num_all_reduces = True, 10

    def all_reduce_s(self, num_tokens: int) -> float:
        return 0.002 * num_tokens


def sharing(**options: float) -> tuple[Pricer, Lanes, list[float]]:
    """Four layers in four groups, of which a block is a MiB; the ends of copies."""
    lanes, ends = Lanes(), []
    pricer = Pricer(
        SharingCost(), lanes, lambda end_s, _: ends.append(end_s), layers=4, num_groups=4, block_bytes=4 << 20,
        **options,
    )  # fmt: skip
    return pricer, lanes, ends


def hundred_tokens(blocks_behind: int = 0, blocks_beside: int = 0, decodes: int = 0) -> IterationPlan:
    """A prompt of 100 tokens; so many blocks of each of its four layers leave behind it, and others beside it."""
    plan, seq = IterationPlan(), sequence(100)
    plan.prefill_tokens, plan.num_decodes = 100, decodes
    if blocks_behind:
        plan.behind = (Move(seq, (0, 1, 2, 3), 0, 100, Tier.GPU, Tier.HOST, 4 * blocks_behind, 0, True),)
        plan.behind_groups, plan.behind_blocks = 4, 4 * blocks_behind
    if blocks_beside:
        plan.beside = (Move(seq, (0,), 0, 100, Tier.GPU, Tier.HOST, blocks_beside, 0, True),)
    return plan


def test_a_pass_waits_for_half_a_unit_of_a_mib_and_its_copies_for_all_reduces() -> None:
    """1 s, of which all-reduces take 0.2: copies take 1 / 0.8 as long. Eight MiB take 0.08 s, so that 0.8 all-reduces
    meet a unit, and wait 5 ms. A layer takes 0.251 s, its copy 0.025: the last ends 0.226 s before the pass's."""
    pricer, lanes, ends = sharing()
    assert pricer.step(hundred_tokens(blocks_behind=2), 1.0).end_s == pytest.approx(2.004, rel=1e-12)
    assert lanes.d2h.busy_s == pytest.approx(0.1, rel=1e-12)
    assert [lanes.d2h.free_s] == ends == [pytest.approx(2.004 - 0.251 + 0.025, rel=1e-12)]


def test_every_all_reduce_waits_where_copies_take_longer_than_the_pass() -> None:
    """320 MiB take 3.2 s, 4 beside all-reduces: 1.05 s of computing, a layer 0.2625, a copy 1. Layers end at 0.2625
    and 0.525; the third, once the first copy has left its buffer at 1.2625, at 1.525, the fourth at 2.525."""
    pricer, lanes, ends = sharing()
    assert pricer.step(hundred_tokens(blocks_behind=80), 1.0).end_s == pytest.approx(3.525, rel=1e-12)
    assert [lanes.d2h.free_s] == ends == [pytest.approx(1.0 + 0.2625 + 4.0, rel=1e-12)]


@pytest.mark.parametrize("streamed", [None, (2, 0), (1, 1)])
def test_tokens_of_decodes_are_all_reduced_too_and_copies_of_every_kind_share(streamed: tuple[int, int] | None) -> None:
    """125 tokens of all-reduces take 0.25 s: copies take 4/3. Two MiB take 20 ms: 0.2 all-reduces wait, 5 ms each.

    Streamed, the first of four layers waits for its quarter of what is read, and of what is written the last quarter
    shows: of 26.67 ms either way.
    """
    pricer, lanes, ends = sharing()
    plan = hundred_tokens(blocks_beside=0 if streamed else 2, decodes=25)
    if streamed:
        plan.streamed = (Streamed(1, *streamed),)
    more_s = 0.02 * 4 / 3 / 4 if streamed else 0.0
    assert pricer.step(plan, 1.0).end_s == pytest.approx(2.001 + more_s, rel=1e-12)
    read, written = streamed or (0, 2)
    busy_s = [lane.busy_s * 3 / 4 for lane in (lanes.h2d, lanes.d2h)]
    assert busy_s == pytest.approx([0.01 * read, 0.01 * written], rel=1e-12)
    assert ends == ([] if streamed else [pytest.approx(1.0 + 0.02 * 4 / 3, rel=1e-12)])


def test_less_than_a_unit_is_waited_for_as_long_as_it_takes() -> None:
    """One of four quarters of a MiB: 2.5 ms, of which all-reduces meet 1/400 of ten, and wait 1.25 ms."""
    lanes = Lanes()
    pricer = Pricer(SharingCost(), lanes, lambda *_: None, layers=4, num_groups=4, block_bytes=1 << 20)
    end_s = pricer.step(hundred_tokens(blocks_beside=1), 1.0).end_s
    assert end_s == pytest.approx(2.0 + 10 * 0.0025 * 0.00125, rel=1e-12)


def test_four_of_eight_layers_are_the_odd_ones() -> None:
    """LayerKV section 3.1.2."""
    assert retained_layers(8, 4) == (1, 3, 5, 7)
    assert offloaded_layers(8, 4) == (0, 2, 4, 6)


@given(st.integers(1, 80).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))))
def test_retained_layers_are_distinct_and_evenly_spread(sizes: tuple[int, int]) -> None:
    layers, kept = sizes
    retained = retained_layers(layers, kept)
    assert sorted(set(retained)) == list(retained)
    assert sorted((*retained, *offloaded_layers(layers, kept))) == list(range(layers))
    gaps = {after - before for before, after in zip((-1, *retained), retained, strict=False)}
    assert not gaps or max(gaps) - min(gaps) <= 1


def by_recurrence(compute: float, layers: int, copied: int, copy: float, wait: float, buffers: int) -> float:
    """Layer by layer: an offloaded layer waits for the copy `buffers` places before it."""
    off = offloaded_layers(layers, layers - copied)
    now, free, ends = 0.0, wait, []
    for layer in range(layers):
        if layer in off:
            k = len(ends)
            if k >= buffers:
                now = max(now, ends[k - buffers])
            now += compute / layers
            free = max(now, free) + copy
            ends.append(free)
        else:
            now += compute / layers
    return now


@given(
    st.integers(1, 80).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))),
    st.floats(0, 0.2), st.floats(0, 2), st.integers(1, 4),
)  # fmt: skip
def test_offload_behind_prefill_is_the_layer_recurrence(
    sizes: tuple[int, int], copy: float, wait: float, buffers: int
) -> None:
    layers, copied = sizes
    expected = by_recurrence(1.0, layers, copied, copy, wait, buffers)
    assert pipelined_s(1.0, layers, copied, copy, wait, buffers) == pytest.approx(expected, rel=1e-9)


def test_a_lane_serves_in_turn_and_counts_its_busy_time() -> None:
    lane = Lane("x", keep_intervals=True)
    assert lane.reserve(1.0, 2.0, "a") == 3.0
    assert lane.reserve(2.0, 1.0, "b") == 4.0
    assert lane.reserve(9.0, 0.5, "c") == 9.5
    assert lane.busy_s == 3.5
    assert lane.intervals is not None
    assert [(i.start_s, i.end_s) for i in lane.intervals] == [(1.0, 3.0), (3.0, 4.0), (9.0, 9.5)]
