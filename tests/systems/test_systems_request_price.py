"""What a request still takes: formulas by hand, lengths from predictions alone; swapped or computed again, by price."""

from types import SimpleNamespace

import numpy as np
import pytest

from kvtwin.testing import build_engine, check_pools, limits, linear_machine, requests, simulate
from sim.engine.changes import Direction
from sim.engine.sequence import Sequence
from sim.systems.adaptive.mechanism import Mechanism
from sim.systems.adaptive.preset import Adaptive
from sim.systems.adaptive.request_price import LengthHistory, RequestPrice
from traces.request import Request


def price_of(**changes) -> RequestPrice:
    return RequestPrice(linear_machine().cost, limits(gpu=100, seqs=8, **changes))


def iterations(price: RequestPrice, num_tokens: int, context: int) -> float:
    """Of a full batch: what is left of a price without what tokens take themselves, over an iteration's fixed time."""
    own_s = num_tokens * (6e-7 * (context + num_tokens / 2) + 2e-5)
    return (price.decodes_s(num_tokens, context) - own_s) / 0.02


def test_decodes_share_an_iteration_by_seat_or_by_blocks():
    """An iteration costs 20 ms, 20 us a sequence and 0.6 us a token of its context."""
    price = price_of()
    # Ten tokens from 20: mean context 25, (25/16 + 1/2) of 100 blocks are less than one of 8 seats.
    each_s = 0.02 / 8 + 6e-7 * 25 + 2e-5
    assert price.decodes_s(10, 20) == pytest.approx(10 * each_s, rel=1e-3)
    # From 800: mean 805, 50.8 blocks of 100.
    each_s = 0.02 * (805 / 16 + 0.5) / 100 + 6e-7 * 805 + 2e-5
    assert price.decodes_s(10, 800) == pytest.approx(10 * each_s, rel=1e-3)


def test_decodes_share_an_iteration_by_time_where_tpot_is_short():
    """Iterations of 21 ms leave 1 ms to decodes: at 0.503 ms each, mean context 805, there is room for two."""
    price = price_of()
    price.keep_pace(0.021)
    added_s = 6e-7 * 805 + 2e-5
    assert iterations(price, 10, 800) == pytest.approx(10 * max(added_s / 0.001, (805 / 16 + 0.5) / 100), rel=1e-2)
    assert iterations(price, 10, 800) == pytest.approx(10 * 0.508, rel=1e-2)
    price.keep_pace(0.0205)
    assert iterations(price, 10, 800) == pytest.approx(10 * added_s / 0.0005, rel=1e-2)
    assert price.most_decodes(0.0205, 805) == pytest.approx(0.0005 / added_s, rel=1e-2)
    # With prompts of 1 ms beside each token, twice as long as itself, fewer decode together.
    assert price.most_decodes(0.0205, 805, prompt_s=0.001) == pytest.approx(0.0005 / (added_s + 0.001), rel=1e-2)
    # Weights take longer than that: time is no limit, none can be in time.
    price.keep_pace(0.02)
    assert iterations(price, 10, 800) == pytest.approx(10 * 0.508, rel=1e-2)
    assert price.most_decodes(0.02, 805) == float("inf")
    # With a second for each there is room for all.
    price.keep_pace(1.0)
    assert iterations(price, 10, 20) == pytest.approx(10 / 8, rel=1e-3)


def test_prompts_cost_tokens_and_their_square():
    machine = linear_machine(prefill=(0.0, 4e-5, 2e-9))
    price = RequestPrice(machine.cost, limits())
    assert price.prefill_s(1000) == pytest.approx(1000 * 4e-5 + 1000**2 * 2e-9)


def test_prompts_pay_for_the_weights_where_time_limits_the_batch():
    """Of iterations of 25 ms 20 ms are spent anyway: a second of prompts takes what 200 leave, which are 5 s."""
    price = price_of()
    assert price.prompt_work_s(1.0) == 1.0
    price.keep_pace(0.025, is_limit=True)
    assert price.prompt_work_s(1.0) == pytest.approx(5.0, rel=1e-2)
    by_room, by_time = price.iterations_by_limit(10, 800, 1.0)
    assert by_room == pytest.approx(10 * (805 / 16 + 0.5) / 100)
    assert by_time == pytest.approx((10 * (6e-7 * 805 + 2e-5) + 1.0) / 0.005, rel=1e-2)
    price.keep_pace(0.025)
    assert price.prompt_work_s(1.0) == 1.0


def test_what_is_left_is_the_mean_of_what_longer_outputs_had():
    history = LengthHistory()
    assert history.left_after(0) == 256
    for length in (10, 20, 40, 90):
        history.add(length)
    assert history.left_after(0) == pytest.approx(40)
    assert history.left_after(20) == pytest.approx((20 + 70) / 2)
    assert history.left_after(100) == pytest.approx(25)


def test_at_least_a_token_is_left():
    """Before anything has ended 256 are expected of each; later a quarter more of what outlives all."""
    history = LengthHistory()
    for generated, left in ((255, 1), (256, 1), (254, 2), (300, 1)):
        assert history.left_after(generated) == left
    history.add(4)
    for generated, left in ((3, 1), (4, 1), (2, 2), (5, 1.25), (100, 25)):
        assert history.left_after(generated) == left
    for _ in range(1000):
        history.add(10)
    # The first of 1001 is forgotten.
    assert history.left_after(3) == 7


@pytest.mark.parametrize(
    ("lower", "median", "generated", "left"),
    [
        (300, 300, 290, 10),
        (257, 384, 368, 16),
        (257, 384, 369, 64),
        (257, 384, 367, 17),
        (1, 40, 32, 16),
        (257, 384, 100, 284),
        (257, 384, 380, 64),
        (1, 8, 40, 16),
        (300, 300, 400, 1),
    ],
    ids=[
        "exact",
        "16 left",
        "fewer left",
        "more left",
        "few generated",
        "class",
        "class nearly spent",
        "class long spent",
        "exact, and wrong",
    ],
)
def test_predictions_are_trusted_as_long_as_they_can_be(lower, median, generated, left):
    seq = Sequence(Request(0, 0.0, 10, 10**6))
    seq.predicted_lower_tokens, seq.predicted_median_tokens = lower, median
    assert price_of().tokens_left(seq, generated) == left


def test_nothing_gets_more_than_the_context_has_room_for():
    """A context of 100 tokens, 90 of them the prompt: ten in all, whatever the predictor says, if there is one."""
    price = RequestPrice(linear_machine().cost, limits(), longest=100)
    seq = Sequence(Request(0, 0.0, 90, 10**6))
    for lower, median in ((300, 300), (257, 384), (1, 0)):
        seq.predicted_lower_tokens, seq.predicted_median_tokens = lower, median
        assert [price.tokens_left(seq, n) for n in (0, 4, 20)] == [10, 6, 1]
    seq.predicted_lower_tokens = seq.predicted_median_tokens = 7
    assert price.tokens_left(seq, 0) == 7


def test_an_iteration_is_taken_apart_exactly():
    """20 ms, 20 us a sequence and 0.6 us a token of its context, which is one."""
    price = price_of()
    assert price.context_s == pytest.approx(6e-7, rel=1e-9)
    assert price.decode_s == pytest.approx(2e-5 + 6e-7, rel=1e-9)
    assert price.step_s == pytest.approx(0.02, rel=1e-9)


FAST, SLOW = 3e-4, 1.0
"""Links, s a block, over which none and all are computed again."""


def mechanism(blocks_per_s: float, *, by_price: bool = True) -> Mechanism:
    """A pool of 300 blocks of 1 MiB; a token of a prompt takes 1 ms."""
    cost = SimpleNamespace(
        copy_s=lambda size, pieces, way: size / (1 << 20) / blocks_per_s, num_copies=lambda blocks, layers: blocks
    )
    price = SimpleNamespace(prefill_s=lambda tokens: tokens / 1000)
    return Mechanism(cost, limits(300, block_bytes=1 << 20), price, by_price=by_price)  # type: ignore[arg-type]


def test_a_swap_costs_the_blocks_that_it_holds_while_it_waits_and_copies():
    """30 of 300 blocks at 10 a second, iterations of 1 s: three pieces, gone after 1, 2 and 3 s; 3 s back."""
    ours = mechanism(10.0)
    assert ours.num_pieces(30, 1.0) == 3
    assert ours.swap_s(30, 0, 1.0) == pytest.approx((2.0 + 3.0) * 0.1)
    assert ours.swap_s(30, 20, 1.0) == pytest.approx((2.0 + 2.0 + 3.0) * 0.1)
    assert ours.recompute_s(480, 30) == pytest.approx(0.48 * 1.1)


def test_no_more_pieces_than_blocks_and_one_at_least():
    ours = mechanism(10.0)
    assert [ours.num_pieces(30, s) for s in (3.0, 2.9, 1e-3)] == [1, 2, 30]
    assert ours.num_pieces(1, 1e9) == 1


@pytest.mark.parametrize(
    ("blocks_per_s", "num_ahead", "again"),
    # A piece a block: 31 / 60 of the copy out and all of the copy back, 91 / r seconds in all of 91 / 60 x 30.
    # 480 tokens cost 0.528 s, a tenth of the blocks for 5.28 s: 45.5 / r = 5.28 where r = 8.617.
    [(8.62, 0, False), (8.61, 0, True), (10.0, 7, False), (10.0, 8, True)],
)
def test_the_choice_turns_where_the_prices_cross(blocks_per_s, num_ahead, again):
    assert mechanism(blocks_per_s).recomputes(480, 30, num_ahead, 0.1) is again
    assert not mechanism(blocks_per_s, by_price=False).recomputes(480, 30, num_ahead, 0.1)


def test_late_it_is_computed_again_where_that_is_sooner_than_the_copy():
    """30 blocks at 10 a second against 1 ms a token; what is always to be swapped is swapped here, too."""
    assert [mechanism(10.0).recomputes_late(tokens, 30) for tokens in (2999, 3000)] == [True, False]
    assert not mechanism(10.0, by_price=False).recomputes_late(1, 30)


def test_blocks_of_each_piece_are_free_when_its_copy_has_ended():
    """Seven blocks in three pieces: two, two and three."""
    scheduler = build_engine(Adaptive(), limits(gpu=20), linear_machine(), lambda seq: None).scheduler
    memory, seq = scheduler.memory, Sequence(requests((0.0, 100, 50))[0])
    memory.take(seq, 100)
    scheduler.eviction.away[seq] = None
    memory.send_out(seq, 3)
    moves = scheduler.beside
    assert [(m.first_token, m.end_token, m.num_freed) for m in moves] == [(0, 32, 2), (32, 64, 2), (64, 112, 3)]
    for move, free, releasing in zip(moves, (15, 17, 20), (5, 3, 0), strict=True):
        assert seq in memory.copies_of
        memory.transfer_done(move)
        assert (memory.gpu.free, memory.releasing, memory.host.free) == (free, releasing, 993)
        check_pools(scheduler)
    assert not memory.copies_of


def crowd(count: int = 120) -> list:
    """More than 60 blocks can serve, most of it short and some ten times as long."""
    rng = np.random.default_rng(5)
    lengths = np.where(rng.random(count) < 0.2, rng.integers(200, 400, count), rng.integers(10, 60, count))
    times = np.cumsum(rng.exponential(0.09, count))
    return requests(*((float(t), int(rng.integers(20, 120)), int(n)) for t, n in zip(times, lengths, strict=True)))


@pytest.mark.parametrize(
    ("swap_s_per_block", "host", "choice"),
    [(FAST, 40, "price"), (0.01, 1000, "price"), (SLOW, 1000, "price"), (FAST, 1000, "swap"), (0.04, 40, "swap")],
)
def test_the_links_rate_says_what_is_swapped_and_no_block_is_lost(swap_s_per_block, host, choice):
    """Engines that recount themselves; stepped and jumped alike."""
    room = limits(gpu=60, host=host, tokens=512, chunked=True)
    machine = linear_machine(swap_s_per_block=swap_s_per_block)
    policy = Adaptive(mechanism=choice, predictor="oracle")
    jumped, stepped = (
        simulate(policy, crowd(), room, machine=machine, jump=jump, checked=jump) for jump in (True, False)
    )
    assert jumped.scheduler.counters == stepped.scheduler.counters
    assert len(jumped.ended) == 120
    assert jumped.scheduler.gpu.free == 60 and jumped.scheduler.host.free == host
    tally = jumped.scheduler.counters.policy
    if choice == "swap" or swap_s_per_block == FAST:
        assert tally["parked_sequences"] > 0 and not tally["recomputed_sequences"]
    if choice == "price" and swap_s_per_block == SLOW:
        assert tally["recomputed_sequences"] > 0 and not tally["parked_sequences"]
    if choice == "swap":
        out = [[m.seq for m in plan.beside if m.direction is Direction.D2H] for plan, _, _ in jumped.plans]
        assert any(len(seqs) > len(set(seqs)) for seqs in out) is (swap_s_per_block != FAST)


def test_what_returns_takes_its_blocks_when_the_link_is_about_to_be_free():
    """No copy back waits for others longer than an iteration, 0.1 s of which are far more than any takes."""
    room = limits(gpu=60, host=1000, tokens=512, chunked=True)
    outcome = simulate(Adaptive(mechanism="swap"), crowd(), room, machine=linear_machine(swap_s_per_block=0.04))
    copies = iter(outcome.lanes.h2d.intervals)
    waits = []
    for plan, start_s, _ in outcome.plans:
        for move in plan.beside:
            if move.direction is Direction.H2D:
                waits.append(next(copies).start_s - start_s)
    assert len(waits) > 10
    assert max(waits) < 0.1
