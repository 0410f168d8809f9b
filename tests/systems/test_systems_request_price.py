"""What a request still takes: formulas by hand, and lengths from predictions alone."""

import pytest

from kvtwin.testing import limits, linear_machine
from sim.engine.sequence import Sequence
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
